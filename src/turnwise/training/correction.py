"""Rollout correction: importance weights for the difference between the policy that sampled and the policy that is trained.

`r = exp(proximal - behaviour)` is the ratio of a token: the probability that the trained weights give it before the first
optimizer step (proximal), by the probability with which it was sampled (behaviour). Pure functions of targets; the learner
computes the proximal log-probabilities. TIS: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL
training"; sequence ratios and rejection: Liu et al. 2025, "When speed kills stability"; IcePop: Ling team 2025, arXiv 2510.18855.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from turnwise.options.algorithm import CorrectionSection, RejectionSection
from turnwise.training.losses import Targets, groups_of, mean_of_groups

__all__ = ["Corrected", "CorrectionSums", "correct", "correction_weights", "kept_tokens"]

_LOG_BOUND = 20.0
"""Logarithms of ratios are clamped to +-20, so that no ratio overflows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSums:
    """Sums over the tokens and sequences of a batch, before rejection. Sums of several batches are added with `+`.

    Each segment counts, also where equal segments are one sequence of the batch (`Targets.copies_N`). Tokens without a usable
    log-probability of the engine count in `unknown` and in nothing else.
    """

    tokens: int = 0
    unknown: int = 0
    sequences: int = 0
    k1: float = 0.0
    """Of `behaviour - proximal`."""
    k3: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    sequence_ratio_squared: float = 0.0
    """Of the squared product of a sequence's ratios."""
    perplexity_ratio: float = 0.0
    """Of `exp(mean of behaviour - proximal)` of a sequence: perplexity of the trained policy by that of the sampling policy."""
    weight: float = 0.0
    weight_squared: float = 0.0
    clipped: int = 0
    """Tokens whose ratio at the chosen level is outside the bounds."""
    rejected: int = 0
    by_turn: Mapping[int, tuple[int, float, float]] = field(default_factory=dict)
    """For each turn index: tokens, sum of k1, sum of k3."""

    def __add__(self, other: CorrectionSums) -> CorrectionSums:
        names = [name for name in self.__dataclass_fields__ if name != "by_turn"]
        turns = self.by_turn.keys() | other.by_turn.keys()
        nothing = (0, 0.0, 0.0)
        pairs = {turn: (self.by_turn.get(turn, nothing), other.by_turn.get(turn, nothing)) for turn in turns}
        return CorrectionSums(
            **{name: getattr(self, name) + getattr(other, name) for name in names},
            by_turn={
                turn: (one[0] + two[0], one[1] + two[1], one[2] + two[2]) for turn, (one, two) in sorted(pairs.items())
            },
        )

    def metrics(self) -> dict[str, float]:
        """The metrics of a training step (docs/metrics.md). Empty if no token was compared."""
        all_tokens = self.tokens + self.unknown
        if not all_tokens:
            return {}
        metrics = {
            "correction/unknown": self.unknown / all_tokens,
            "correction/clip_fraction": self.clipped / all_tokens,
            "correction/rejected": self.rejected / all_tokens,
        }
        if not self.tokens:
            return metrics
        tokens, sequences = self.tokens, max(self.sequences, 1)
        metrics |= {
            "correction/k1": self.k1 / tokens,
            "correction/k3": self.k3 / tokens,
            "correction/ppl_ratio": self.perplexity_ratio / sequences,
            "correction/chi2_token": self.ratio_squared / tokens - 1,
            "correction/chi2_sequence": self.sequence_ratio_squared / sequences - 1,
            "correction/weight": self.weight / tokens,
            "correction/ess": self.weight**2 / (tokens * self.weight_squared) if self.weight_squared else 0.0,
        }
        for turn, (count, k1, k3) in self.by_turn.items():
            metrics |= {f"correction/k1/turn_{turn}": k1 / count, f"correction/k3/turn_{turn}": k3 / count}
        return metrics


@dataclass(frozen=True, slots=True)
class Corrected:
    """What the correction makes of the targets of a batch."""

    targets: list[Targets]
    """With `correction_N`, and with weights that are scaled up where tokens were rejected."""
    kept: list[torch.Tensor]
    """For each micro-batch, whether a token is kept. Bool, shape [N]."""
    sums: CorrectionSums


def correct(targets: Sequence[Targets], options: CorrectionSection, *, rescale: bool = True) -> Corrected:
    """The importance weight of each token of a batch, and which tokens are rejected.

    `targets` are those of the micro-batches, with `proximal_logprob_N`. Tokens without a log-probability of the engine must have
    the proximal log-probability as `behaviour_logprob_N`: their ratio is 1. If tokens are rejected, the weights of the others are
    scaled so that the sum over the batch is 1 again, unless `rescale` is false. The batch is complete: trajectories that
    have no gradient are in the means and in the metrics, too.
    """
    weights = [correction_weights(micro, options) for micro in targets]
    kept = [kept_tokens(micro, options) for micro in targets]
    if options.normalize_weights:
        weights = _normalized(weights, targets, kept, by_sequence=options.level != "token")
    # The weights of a batch have the sum 1 (not with `normalizer: constant`, where `rescale` is false). If tokens with a share of
    # 0.25 are rejected, 0.75 is left, and the factor is 4/3. The share is that of all micro-batches, so the division into
    # micro-batches does not change the result. If all tokens are rejected, nothing is left to scale, and the factor is 1.
    rejected = sum(float(micro.weight_N[~keep_N].sum()) for micro, keep_N in zip(targets, kept, strict=True))
    factor = 1.0 / (1.0 - rejected) if rescale and rejected < 1.0 else 1.0
    sums = CorrectionSums()
    corrected: list[Targets] = []
    for micro, weight_N, keep_N in zip(targets, weights, kept, strict=True):
        sums += _sums(micro, weight_N, keep_N, options)
        corrected.append(micro.with_correction(weight_N, factor))
    return Corrected(corrected, kept, sums)


def correction_weights(targets: Targets, options: CorrectionSection) -> torch.Tensor:
    """The importance weight of each token, without gradient. Shape [N].

    - `truncate`: `clamp(r, low, high)`
    - `mask`: `r` where `r <= high`, else 0
    - `icepop`: `r` where `low <= r <= high`, else 0
    - `reject`, `measure`: 1
    """
    tested_N = _ratio(targets, options.level)
    if options.action in ("reject", "measure"):
        return torch.ones_like(tested_N)
    if options.action == "truncate":
        return tested_N.clamp(min=options.low, max=math.inf if options.high is None else options.high)
    weight_N = tested_N if options.weight_level is None else _ratio(targets, options.weight_level)
    return torch.where(_inside(tested_N, options.low, options.high), weight_N, 0.0)


def kept_tokens(targets: Targets, options: CorrectionSection) -> torch.Tensor:
    """Whether each token stays in the batch: rejected tokens leave the loss and its average. Bool, shape [N]."""
    keep_N = torch.ones_like(targets.known_N)
    if options.action == "reject":
        keep_N &= _inside(_ratio(targets, options.level), options.low, options.high)
    if options.reject.level is not None:
        keep_N &= _passes(targets, options.reject)
    return keep_N


def _passes(targets: Targets, rule: RejectionSection) -> torch.Tensor:
    """Whether the divergence of a token or its sequence is inside the bounds; for k1 the bounds are ratios."""
    log_ratio_N = _log_ratio(targets)
    if rule.estimator == "k1":
        # each token's logarithm is bounded, but not the sum of a sequence
        value_N = _at_level(log_ratio_N, targets, rule.level).clamp(-_LOG_BOUND, _LOG_BOUND).exp()
        return _inside(value_N, rule.low, rule.high)
    token_N = log_ratio_N.square() / 2 if rule.estimator == "k2" else log_ratio_N.exp() - 1.0 - log_ratio_N
    return _at_level(token_N, targets, rule.level) <= rule.high


def _log_ratio(targets: Targets) -> torch.Tensor:
    if targets.proximal_logprob_N is None:
        raise ValueError("rollout correction needs Targets.proximal_logprob_N, which the learner computes")
    return (targets.proximal_logprob_N - targets.behaviour_logprob_N).clamp(-_LOG_BOUND, _LOG_BOUND)


def _ratio(targets: Targets, level: str) -> torch.Tensor:
    """The ratio at a level, for each token: of the token, the product of the sequence, or its geometric mean."""
    return _at_level(_log_ratio(targets), targets, level).clamp(-_LOG_BOUND, _LOG_BOUND).exp()


def _at_level(value_N: torch.Tensor, targets: Targets, level: str | None) -> torch.Tensor:
    """The value of the token, or the sum, the mean or the largest value of its sequence."""
    if level == "token":
        return value_N
    group_N = groups_of(targets, "sequence")
    if level == "geometric":
        return mean_of_groups(value_N, group_N)
    # a sequence is never divided among micro-batches, so the targets of one micro-batch have all of its tokens:
    # group_N = 0 0 1, value_N = 0.5 -0.2 0.1   sequence: 0.3 0.3 0.1   largest: 0.5 0.5 0.1
    groups = int(group_N.max()) + 1
    if level == "sequence":
        return value_N.new_zeros(groups).index_add_(0, group_N, value_N)[group_N]
    return value_N.new_zeros(groups).scatter_reduce_(0, group_N, value_N, "amax", include_self=False)[group_N]


def _inside(value_N: torch.Tensor, low: float | None, high: float | None) -> torch.Tensor:
    above_N = torch.ones_like(value_N, dtype=torch.bool) if low is None else value_N >= low
    return above_N if high is None else above_N & (value_N <= high)


def _normalized(
    weights: Sequence[torch.Tensor], targets: Sequence[Targets], kept: Sequence[torch.Tensor], *, by_sequence: bool
) -> list[torch.Tensor]:
    """Weights divided by their mean over the kept tokens, or over the segments with kept tokens."""
    total = count = 0.0
    for weight_N, micro, keep_N in zip(weights, targets, kept, strict=True):
        # Weights of sequences are equal for all tokens of a sequence, so each segment counts once, however long it is. Weights
        # 2 2 2 of one sequence and 1 of another: the mean is (2 + 1) / 2, from the shares 1/3 1/3 1/3 1, and not 7 / 4.
        share_N = micro.counts
        if by_sequence and bool(keep_N.any()):
            _, place_N, count_S = torch.unique(micro.sequence_N[keep_N], return_inverse=True, return_counts=True)
            share_N[keep_N] = share_N[keep_N] / count_S[place_N]
        total += float((weight_N * share_N)[keep_N].sum())
        count += float(share_N[keep_N].sum())
    mean = total / count if count else 1.0
    return [weight_N / mean if mean > 0 else weight_N for weight_N in weights]


def _sums(targets: Targets, weight_N: torch.Tensor, keep_N: torch.Tensor, options: CorrectionSection) -> CorrectionSums:
    known_N, count_N = targets.known_N, targets.counts.double()
    log_ratio_N = _log_ratio(targets).double()
    outside_N = ~_inside(_ratio(targets, options.level), options.low, options.high)
    log_ratio, count, turn = log_ratio_N[known_N], count_N[known_N], targets.turn_N[known_N]
    k3 = log_ratio.exp() - 1.0 - log_ratio
    weight = weight_N[known_N].double()
    _, place, length_S = torch.unique(targets.sequence_N[known_N], return_inverse=True, return_counts=True)
    sum_S = log_ratio.new_zeros(len(length_S)).index_add_(0, place, log_ratio)
    # all tokens of a sequence have the same count, the number of equal segments: the mean over its tokens is that number
    copies_S = count.new_zeros(len(length_S)).index_add_(0, place, count) / length_S
    by_turn = {
        int(index): (int(count[own].sum()), float(-(log_ratio * count)[own].sum()), float((k3 * count)[own].sum()))
        for index in turn.unique()
        for own in [turn == index]
    }
    return CorrectionSums(
        tokens=int(count.sum()),
        unknown=int(count_N[~known_N].sum()),
        sequences=round(float(copies_S.sum())),
        k1=float(-(log_ratio * count).sum()),
        k3=float((k3 * count).sum()),
        ratio=float((log_ratio.exp() * count).sum()),
        ratio_squared=float(((2 * log_ratio).exp() * count).sum()),
        sequence_ratio_squared=float(((2 * sum_S.clamp(-_LOG_BOUND, _LOG_BOUND)).exp() * copies_S).sum()),
        perplexity_ratio=float(((-sum_S / length_S).exp() * copies_S).sum()),
        weight=float((weight * count).sum()),
        weight_squared=float((weight.square() * count).sum()),
        clipped=0 if options.action == "measure" else int(count_N[outside_N].sum()),
        rejected=int(count_N[~keep_N].sum()),
        by_turn=by_turn,
    )
