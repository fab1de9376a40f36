"""Losses of the policy: targets in, one number for each target token out; with the KL divergence and all other terms.

A policy loss is a pure function `(logprob_N, targets, options) -> LossTerms`. To add one, write the section of its options, and
the function with its line in `LOSSES`. That of a recipe is called by `own`.
In all formulas, `r = exp(logprob - old_logprob)` is the probability ratio of a token, `A` its advantage, and `sg` stops the
gradient. `old_logprob` is the engine's log-probability of the token (`behaviour_logprob_N`), or the trainer's own before the
first optimizer step (`proximal_logprob_N`): with rollout correction, and for the tokens that the present weights sampled
(`with_own_ratios`). Invariant: the ratio of the latter is 1 before the first optimizer step, so in an update on its own samples
with one optimizer step the engine's log-probabilities do not enter the loss.

Knows columns with an entry for each of the N target tokens of a micro-batch. Does not know packing, models or ranks. How tokens
are averaged is decided by the batch (`Targets.weight_N`), not here. Each function names its paper; the estimators of the KL
divergence are those of Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.models.transfer import Move
from turnwise.options.algorithm import (
    Cispo,
    CorrectionSection,
    Gmpo,
    Gspo,
    LossSection,
    Nll,
    OwnLoss,
    PpoClip,
    Reinforce,
    Sapo,
)
from turnwise.options.teacher import TeacherSection
from turnwise.training.divergence import Distributions, Rows, ScoredTokens, TeacherComparison
from turnwise.user_code.algorithms import Needs, declared_needs, own_function

# Input and output of a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The target tokens of a micro-batch: all columns have one entry for each of N tokens.

    All target tokens of a sequence are in the same micro-batch, in their order, so a loss may combine them.

    Example: two completions `a b` and `c` of one turn each, `c` from an older version of the weights::

        token_N = a b c    sequence_N = 0 0 1    turn_N = 0 0 0    version_N = 7 7 6
    """

    token_N: torch.Tensor
    """The sampled token."""
    sequence_N: torch.Tensor
    """Number of the sequence (segment) that the token is in; unique in the batch, over all its micro-batches."""
    turn_N: torch.Tensor
    """Index of the turn that sampled the token, in its trajectory."""
    version_N: torch.Tensor
    """Version of the weights that sampled the token."""
    copies_N: torch.Tensor | None = None
    """The number of segments that the token's sequence stands for, because their tokens and advantages are equal. None: 1.
    `weight_N` is already the sum over them."""
    behaviour_logprob_N: torch.Tensor
    """Log-probability of the token under the policy that sampled it, as the engine reported it; 0 where `known_N` is false."""
    known_N: torch.Tensor
    """Whether the engine reported `behaviour_logprob_N` of the distribution sampled from. Where it did not, the learner
    computes it before the first optimizer step."""
    proximal_logprob_N: torch.Tensor | None = None
    """Log-probability of the token under the weights before the first optimizer step. None if nothing needs it."""
    correction_N: torch.Tensor | None = None
    """Factor of the token's policy loss (rollout correction). None: 1."""
    policy_share_N: torch.Tensor | None = None
    """Share of the token's equal segments in which it has a policy loss, where tokens are selected (`selection.py`). None: 1."""
    divergence_share_N: torch.Tensor | None = None
    """The same of the divergence from `old_logprobs` (`loss.kl_cov_ratio`). None: 0."""
    old_is_proximal: bool = False
    """Whether the ratios of the loss are those to `proximal_logprob_N`, and not to `behaviour_logprob_N`."""
    first_step: bool = False
    """Whether the pass is that before the first optimizer step, without rollout correction: where the present weights have
    sampled (`fresh_tokens`), the ratios of the loss are then 1, however engine and trainer round."""
    version: int | None = None
    """Version of the weights that are trained; None where the targets have no versions."""
    teacher_logprob_N: torch.Tensor | None = None
    """The teacher's log-probability of the token, where teachers score before the update. None: there are no scores."""
    teacher_ids_NK: torch.Tensor | None = None
    """The K tokens that the teacher finds most likely, the most likely first."""
    teacher_top_logprob_NK: torch.Tensor | None = None
    """Their log-probabilities."""
    teacher_share_NT: torch.Tensor | None = None
    """The share of each local teacher in what is learnt at the token, where their distributions are compared in the update. The
    shares of a token add up to 1."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    """Factor of the token in the loss, above 0. The weights add up to one over the batch, unless the normalizer is `constant`."""
    value_N: torch.Tensor | None = None
    """The critic's estimate for the state before the token, or before its turn. None without a critic."""
    reference_logprob_N: torch.Tensor | None = None
    """Log-probability of the token under the reference model, for a loss that declares it. None otherwise."""
    entropy_N: torch.Tensor | None = None
    """Entropy of the distribution that the token was drawn from, under the present weights and with a gradient, for a loss that
    declares it. None otherwise."""

    @property
    def old_logprobs(self) -> torch.Tensor:
        """The log-probabilities in the denominator of the loss's probability ratios."""
        return (
            self.proximal_logprob_N
            if self.old_is_proximal and self.proximal_logprob_N is not None
            else self.behaviour_logprob_N
        )

    @property
    def counts(self) -> torch.Tensor:
        """How often each token counts in metrics and means over all segments of the batch. Float32, shape [N]."""
        return torch.ones_like(self.weight_N) if self.copies_N is None else self.copies_N.to(self.weight_N.dtype)

    def with_correction(self, correction_N: torch.Tensor, factor: float) -> Targets:
        """With importance weights, and the weights of the average multiplied by `factor`."""
        return replace(self, correction_N=correction_N, weight_N=self.weight_N * factor)

    def select(self, keep_N: torch.Tensor) -> Targets:
        """The targets for which `keep_N` is true."""
        return replace(self, **{name: column[keep_N] for name, column in self._columns().items()})

    def _columns(self) -> dict[str, torch.Tensor]:
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        return replace(self, **{name: move(column) for name, column in self._columns().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss returns. Only `loss_N` has a gradient; the others are metrics."""

    loss_N: torch.Tensor
    """To be minimised, averaged by `Targets.weight_N`."""
    kl_N: torch.Tensor
    """Estimate of the KL divergence that is reported: from the reference model, or from the policy that sampled."""
    clipped: torch.Tensor
    """How many tokens have a probability ratio outside the bounds of the loss, by `Targets.counts`. Shape []."""
    max_deviation: torch.Tensor
    """Largest `|ratio - 1|` of the tokens with a reported log-probability. Shape []."""


Objective = Callable[[torch.Tensor, Targets], LossTerms]
"""`(logprob_N, targets) -> terms`: a loss without the terms for reference model and entropy."""


# KL divergence: estimates from tokens that one of the two policies sampled


def kl_k3(logprob_N: torch.Tensor, other_logprob_N: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || other) from tokens that the policy sampled: `exp(d) - d - 1`, `d = other - logprob`.

    Unbiased for on-policy tokens, never negative.
    """
    difference_N = other_logprob_N - logprob_N
    return difference_N.exp() - difference_N - 1.0


def kl_estimate(
    logprob_N: torch.Tensor,
    other_logprob_N: torch.Tensor,
    estimator: Literal["k1", "k2", "k3", "k3_corrected"],
    old_logprob_N: torch.Tensor,
) -> torch.Tensor:
    """An estimate of KL(policy || other) for each token, with `d = logprob - other`:

    - `k1`: `d`. Its expected gradient is 0 for on-policy tokens, so that it only adds noise to a loss.
    - `k2`: `d^2 / 2`. Its expected gradient is that of the KL divergence.
    - `k3`: `exp(-d) + d - 1`. An unbiased value; its expected gradient is that of KL(other || policy).
    - `k3_corrected`: k3 times `exp(logprob - old)`, the ratio to the policy that sampled: value and gradient are unbiased also
      for off-policy tokens. DeepSeek-V3.2, arXiv 2512.02556.
    """
    difference_N = logprob_N - other_logprob_N
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    k3_N = kl_k3(logprob_N, other_logprob_N)
    return k3_N if estimator == "k3" else k3_N * (logprob_N - old_logprob_N).exp()


def kl_numbers(
    logprobs: Sequence[float], other_logprobs: Sequence[float], estimator: Literal["k1", "k2", "k3"]
) -> list[float]:
    """`kl_estimate` for lists of log-probabilities, in float64."""
    logprob_N, other_logprob_N = (torch.tensor(values, dtype=torch.float64) for values in (logprobs, other_logprobs))
    return kl_estimate(logprob_N, other_logprob_N, estimator, logprob_N).tolist()


# Policy losses


def ppo_clip(logprob_N: torch.Tensor, targets: Targets, options: PpoClip) -> LossTerms:
    """Clipped surrogate: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; for A < 0 at most `-dual_clip A`.

    Papers: PPO, arXiv 1707.06347; unequal bounds from DAPO, arXiv 2503.14476; `dual_clip` from arXiv 1912.09729.
    """
    ratio_N = _ratio(logprob_N, targets)
    loss_N = _clipped_surrogate(ratio_N, targets.advantage_N, options)
    outside_N = _outside(ratio_N, options)
    if options.dual_clip is not None:
        negative_N = targets.advantage_N < 0
        loss_N = torch.where(negative_N, torch.minimum(loss_N, -options.dual_clip * targets.advantage_N), loss_N)
        outside_N = outside_N | (negative_N & (ratio_N > options.dual_clip))
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=outside_N)


def gspo(logprob_N: torch.Tensor, targets: Targets, options: Gspo) -> LossTerms:
    """Clipped surrogate with one ratio `s` for all tokens of a sequence, the geometric mean of their ratios.

    `-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)` with `s_t = sg(s) exp(logprob) / sg(exp(logprob))`. This is the form
    GSPO-token, in which tokens may have different advantages. If they are equal, its gradient is that of GSPO. `level="turn"`
    has a ratio for the tokens of each turn instead.

    Paper: GSPO, arXiv 2507.18071.
    """
    with torch.no_grad():
        log_ratio_N = logprob_N - targets.old_logprobs
        mean_N = mean_of_groups(log_ratio_N, groups_of(targets, options.level))
    ratio_N = (mean_N + logprob_N - logprob_N.detach()).exp()
    loss_N = _clipped_surrogate(ratio_N, targets.advantage_N, options)
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=_outside(ratio_N, options))


def gmpo(logprob_N: torch.Tensor, targets: Targets, options: Gmpo) -> LossTerms:
    """The geometric mean of the clipped ratios of a sequence, times the advantage: `-s A`, `s = exp(mean of c)`.

    `c = min(log r, log_clip_high)` for tokens with A > 0, and `max(log r, -log_clip_low)` with A < 0. The loss of a token is
    `-s_t A` with `s_t = sg(s) exp(c) / sg(exp(c))`, in which tokens may have different advantages. If they are equal, the mean
    over the sequence has the value and the gradient of the paper's objective. `level="turn"` combines the tokens of each turn
    instead.

    Example: ratios 2 and 1/2, A = 1, log_clip_high = log 1.5: the second token has the gradient of `-sqrt(1.5 * 0.5) A log p`,
    and the first, which is clipped, has none.

    Paper: GMPO, arXiv 2507.20673.
    """
    log_ratio_N = logprob_N - targets.old_logprobs
    high_N, low_N = log_ratio_N.clamp(max=options.log_clip_high), log_ratio_N.clamp(min=-options.log_clip_low)
    clipped_N = torch.where(targets.advantage_N > 0, high_N, torch.where(targets.advantage_N < 0, low_N, log_ratio_N))
    mean_N = mean_of_groups(clipped_N.detach(), groups_of(targets, options.level))
    loss_N = -(mean_N + clipped_N - clipped_N.detach()).exp() * targets.advantage_N
    outside_N = (log_ratio_N < -options.log_clip_low) | (log_ratio_N > options.log_clip_high)
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=outside_N)


def cispo(logprob_N: torch.Tensor, targets: Targets, options: Cispo) -> LossTerms:
    """REINFORCE with clipped importance weights: `-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob`.

    Paper: MiniMax-M1, arXiv 2506.13585.
    """
    with torch.no_grad():
        ratio_N = _ratio(logprob_N, targets)
        weight_N = ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    loss_N = -weight_N * targets.advantage_N * logprob_N
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=_outside(ratio_N, options))


def sapo(logprob_N: torch.Tensor, targets: Targets, options: Sapo) -> LossTerms:
    """Soft gate: `-4 / tau * sigmoid(tau (r - 1)) A`, where `tau` is `tau_positive` for A > 0, else `tau_negative`.

    Paper: SAPO, arXiv 2511.20347. No token counts as clipped.
    """
    ratio_N = _ratio(logprob_N, targets)
    tau_N = torch.where(targets.advantage_N > 0, options.tau_positive, options.tau_negative)
    loss_N = -4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * targets.advantage_N
    return _terms(logprob_N, targets, loss_N=loss_N)


def reinforce(logprob_N: torch.Tensor, targets: Targets, options: Reinforce) -> LossTerms:
    """`-A logprob`: the policy gradient of tokens that the present policy sampled.

    Paper: Williams 1992, "Simple statistical gradient-following algorithms". GPG (arXiv 2504.02546) uses it with a group
    baseline.
    """
    loss_N = -targets.advantage_N * logprob_N
    return _terms(logprob_N, targets, loss_N=loss_N)


def nll(logprob_N: torch.Tensor, targets: Targets, options: Nll) -> LossTerms:
    """Negative log-likelihood of tokens that were written by others: `-logprob`, the cross-entropy with the token itself."""
    nothing = logprob_N.new_zeros(())
    return LossTerms(loss_N=-logprob_N, kl_N=torch.zeros_like(targets.weight_N), clipped=nothing, max_deviation=nothing)


def mean_of_groups(value_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """The mean of each group, for each of its tokens. `group_N` numbers the groups from 0."""
    # there are at most as many groups as tokens: a GPU's host would wait for their number
    sum_G = torch.zeros_like(value_N).index_add_(0, group_N, value_N)
    count_G = torch.zeros_like(value_N).index_add_(0, group_N, torch.ones_like(value_N))
    return (sum_G / count_G)[group_N]


def groups_of(targets: Targets, level: Literal["sequence", "turn"]) -> torch.Tensor:
    """A number for each sequence, or for each turn in a sequence, counted from 0 in the order of the targets. The targets of a
    sequence follow one another, and those of a turn."""
    begins_N = torch.zeros_like(targets.sequence_N)
    columns = (targets.sequence_N,) if level == "sequence" else (targets.sequence_N, targets.turn_N)
    for column_N in columns:
        begins_N[1:] |= column_N[1:] != column_N[:-1]
    return begins_N.cumsum(0)


def fresh_tokens(targets: Targets) -> torch.Tensor:
    """Whether the present weights sampled the token and all others of its turn. Bool, shape [N].

    In a turn that runs while the weights change, the later tokens have the present version, but the keys and values of the
    earlier tokens are from older weights. The ratio of such tokens is not 1.
    """
    if targets.version is None or not len(targets.token_N):
        return torch.zeros_like(targets.known_N)
    turn_N = groups_of(targets, "turn")
    older_G = torch.zeros_like(turn_N).index_add_(0, turn_N, (targets.version_N != targets.version).long())
    return older_G[turn_N] == 0


def with_own_ratios(targets: Targets, logprob_N: torch.Tensor) -> Targets:
    """The targets with ratios to `logprob_N`, the learner's own log-probabilities before the first optimizer step, for the tokens
    that the present weights sampled; the other ratios are still those to the engine's log-probabilities.

    Both would be the same if engine and trainer rounded alike. In bfloat16 they do not, and the ratio would be noise that is
    clipped.
    """
    own_N = torch.where(fresh_tokens(targets), logprob_N.detach(), targets.behaviour_logprob_N)
    return replace(targets, proximal_logprob_N=own_N, old_is_proximal=True)


def _ratio(logprob_N: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (logprob_N - targets.old_logprobs).exp()


def _clipped_surrogate(ratio_N: torch.Tensor, advantage_N: torch.Tensor, bounds: PpoClip | Gspo) -> torch.Tensor:
    clipped_N = ratio_N.clamp(1.0 - bounds.clip_low, 1.0 + bounds.clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def _outside(ratio_N: torch.Tensor, bounds: PpoClip | Gspo | Cispo) -> torch.Tensor:
    return (ratio_N < 1.0 - bounds.clip_low) | (ratio_N > 1.0 + bounds.clip_high)


def _terms(
    logprob_N: torch.Tensor, targets: Targets, *, loss_N: torch.Tensor, outside_N: torch.Tensor | None = None
) -> LossTerms:
    """The loss with the metrics that all policy losses have. `outside_N`: whether the ratio is outside the bounds of the loss."""
    with torch.no_grad():
        # a NaN would be lost when Python's `max` compares micro-batches, so it counts as infinite
        deviation_N = ((logprob_N - targets.behaviour_logprob_N).exp() - 1.0).abs().nan_to_num(nan=torch.inf)
        return LossTerms(
            loss_N=loss_N,
            kl_N=kl_k3(logprob_N.detach(), targets.behaviour_logprob_N),
            clipped=logprob_N.new_zeros(()) if outside_N is None else (targets.counts * outside_N).sum(),
            max_deviation=torch.where(targets.known_N, deviation_N, 0.0).amax(),
        )


def own(logprob_N: torch.Tensor, targets: Targets, options: OwnLoss) -> LossTerms:
    """The loss of the function of a recipe, `loss: file.py:function`: `(logprob_N, targets) -> loss_N`.

    Raises ConfigError if the function raises, or returns something else than a finite number for each token, computed from
    `logprob_N`.
    """
    function = own_function(options.use, options.arguments, key="loss", given=("logprob_N", "targets"))
    try:
        with boundary("loss"):
            loss_N = function(logprob_N, targets)
    except Failed as failed:
        raise ConfigError(
            f"loss: {options.use} raised {failed.failure.message}\n{failed.failure.traceback}"
        ) from failed
    problem = _problem_of_own(loss_N, logprob_N)
    if problem is not None:
        raise ConfigError(f"loss: {options.use} returned {problem}")
    return _terms(logprob_N, targets, loss_N=loss_N)


def _problem_of_own(loss_N: Any, logprob_N: torch.Tensor) -> str | None:
    """What is wrong with the result of a function, after `returned`."""
    expected = f"a tensor with a number for each of the {len(logprob_N)} tokens of logprob_N"
    if loss_N is None:
        return f"None in place of {expected}: is a `return` missing?"
    if not isinstance(loss_N, torch.Tensor):
        return f"{type(loss_N).__name__} in place of {expected}"
    if loss_N.shape != logprob_N.shape:
        mean = "; return no mean or sum: loss.normalizer sets how tokens are averaged" if loss_N.numel() == 1 else ""
        return f"a tensor of shape {list(loss_N.shape)} in place of {expected}{mean}"
    if not loss_N.dtype.is_floating_point:
        return f"a tensor of {loss_N.dtype} in place of {expected}"
    if logprob_N.requires_grad and not loss_N.requires_grad:
        return (
            "a tensor without a gradient: it must be computed from logprob_N, and not from logprob_N.detach(), under "
            "torch.no_grad() or from a copy such as torch.tensor(...)"
        )
    finite_N = loss_N.detach().isfinite()
    # where the model's own numbers are not finite, that is not the fault of the loss, and is reported elsewhere
    if not bool(finite_N.all()) and bool(logprob_N.detach().isfinite().all()):
        token = int((~finite_N).nonzero()[0])
        return f"{float(loss_N.detach()[token])} for token {token} of {len(loss_N)}; a loss must be a finite number"
    return None


LOSSES: Mapping[type[LossSection], Callable[[torch.Tensor, Targets, Any], LossTerms]] = {
    PpoClip: ppo_clip,
    Gspo: gspo,
    Gmpo: gmpo,
    Cispo: cispo,
    Sapo: sapo,
    Reinforce: reinforce,
    OwnLoss: own,
    Nll: nll,
}
"""The function of each loss, by the class of its options."""


# The loss with all its terms


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An objective of the selected tokens, plus `kl_coef` times the KL divergence from the reference model, minus `entropy_coef`
    times the entropy, plus `teacher.coef` times the divergence from the teacher (with `teacher.signal: divergence`)."""

    objective: Objective
    needs_behaviour_logprobs: bool
    """Whether the objective uses `Targets.behaviour_logprob_N`."""
    options: LossSection = LossSection()
    """The coefficients of the further terms."""
    needs: Needs = Needs(zero_advantages=False)
    """What the objective needs besides log-probabilities and advantages."""
    correction: CorrectionSection = CorrectionSection()
    teacher: TeacherSection = TeacherSection()

    @property
    def corrects(self) -> bool:
        """Whether there is rollout correction."""
        return self.correction.action is not None

    @property
    def selects(self) -> bool:
        """Whether tokens are selected."""
        return self.options.top_entropy_quantile < 1.0 or self.options.selects_by_covariance

    @property
    def measures_all(self) -> bool:
        """Whether the learner's own log-probabilities of all tokens must be known before the first optimizer step."""
        return self.corrects or self.selects

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log-probabilities of the reference model."""
        return self.options.kl_coef > 0 or self.needs.reference

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy of each target's distribution."""
        return self.options.entropy_coef != 0.0 or self.needs.entropy

    @property
    def needs_zero_advantages(self) -> bool:
        """Whether tokens with advantage 0 have a gradient."""
        options = self.options
        of_terms = options.kl_coef > 0 or options.entropy_coef != 0.0 or options.router_aux_loss_coef > 0
        of_terms = of_terms or options.kl_cov_ratio > 0
        return of_terms or self.needs.zero_advantages or self.teacher.loss_coef > 0

    def comparison(self, targets: Targets, rows: Sequence[Rows]) -> TeacherComparison | None:
        """What a pass compares with the teacher; None without a teacher. `rows`: the distributions of the local teachers, where
        they have not scored the tokens before."""
        kind = self.teacher.divergence if self.teacher.loss_coef > 0 else None
        ids_NK, top_NK, logprob_N = targets.teacher_ids_NK, targets.teacher_top_logprob_NK, targets.teacher_logprob_N
        if logprob_N is not None and ids_NK is not None and top_NK is not None:
            return ScoredTokens(
                logprob_N=logprob_N, ids_NK=ids_NK, top_logprob_NK=top_NK, kind=kind, beta=self.teacher.beta
            )
        shares_NT = targets.teacher_share_NT
        if kind is None or shares_NT is None or not rows:
            return None
        pairs = list(zip(shares_NT.unbind(dim=1), rows, strict=True))
        return Distributions(teachers=pairs, kind=kind, beta=self.teacher.beta)

    def __call__(
        self,
        logprob_N: torch.Tensor,
        targets: Targets,
        *,
        reference_logprob_N: torch.Tensor | None = None,
        entropy_N: torch.Tensor | None = None,
        divergence_N: torch.Tensor | None = None,
    ) -> LossTerms:
        if self.needs.reference or self.needs.entropy:
            columns = {
                "reference_logprob_N": reference_logprob_N if self.needs.reference else None,
                "entropy_N": entropy_N if self.needs.entropy else None,
            }
            targets = replace(targets, **columns)
        terms = self.objective(logprob_N, targets)
        if targets.policy_share_N is not None:
            terms = replace(terms, loss_N=terms.loss_N * targets.policy_share_N)
        if targets.divergence_share_N is not None:
            divergence = self.options.kl_cov_coef * (logprob_N - targets.old_logprobs).abs()
            terms = replace(terms, loss_N=terms.loss_N + targets.divergence_share_N * divergence)
        if targets.correction_N is not None:
            terms = replace(terms, loss_N=terms.loss_N * targets.correction_N)
        delta = self.correction.off_policy_sequence_mask_delta
        if delta is not None:
            terms = replace(terms, loss_N=terms.loss_N * off_policy_sequence_mask(logprob_N, targets, delta))
        if reference_logprob_N is not None:
            kl_N = kl_estimate(logprob_N, reference_logprob_N, self.options.kl_estimator, targets.old_logprobs)
            terms = replace(terms, kl_N=kl_N.detach())
            if self.options.kl_coef > 0:
                terms = replace(terms, loss_N=terms.loss_N + self.options.kl_coef * kl_N)
        if entropy_N is not None and self.options.entropy_coef != 0.0:
            terms = replace(terms, loss_N=terms.loss_N - self.options.entropy_coef * entropy_N)
        if divergence_N is not None:
            terms = replace(terms, loss_N=terms.loss_N + self.teacher.loss_coef * divergence_N)
        return terms


@torch.no_grad()
def off_policy_sequence_mask(logprob_N: torch.Tensor, targets: Targets, delta: float) -> torch.Tensor:
    """0 for tokens with a negative advantage in sequences that the present policy finds unlikely, else 1. Shape [N].

    A sequence is unlikely if the mean of `behaviour_logprob - logprob` over its tokens is above `delta`. DeepSeek-V3.2, arXiv
    2512.02556. The denominators of the average do not change.
    """
    divergence_N = mean_of_groups(targets.behaviour_logprob_N - logprob_N, groups_of(targets, "sequence"))
    return torch.where((targets.advantage_N < 0) & (divergence_N > delta), 0.0, 1.0)


def make_loss(
    options: LossSection,
    correction: CorrectionSection = CorrectionSection(),
    teacher: TeacherSection = TeacherSection(),
) -> Loss:
    """The loss of the sections `loss`, `correction` and `teacher` of a recipe. Raises ConfigError if a function of the
    user cannot be imported."""
    function = LOSSES[type(options)]
    needs = Needs(zero_advantages=False)
    if isinstance(options, OwnLoss):
        needs = declared_needs(options.use, key="loss")
    return Loss(
        objective=lambda logprob_N, targets: function(logprob_N, targets, options),
        needs_behaviour_logprobs=not isinstance(options, Nll),
        options=options,
        needs=needs,
        correction=correction,
        teacher=teacher,
    )
