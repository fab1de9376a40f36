"""Losses for policies: pure functions from log-probabilities and targets to one number for each target token.

In all formulas, `r = exp(logprob - old_logprob)` is the probability ratio of a token, `A` its advantage, and `sg` stops the
gradient. `old_logprob` is that of the policy that sampled, or with rollout correction that of the weights before the update.
The ratio of the tokens that the present weights sampled is 1 before the first optimizer step (`with_own_ratios`).
`loss.make_loss` chooses a function by name.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import torch

from turnwise.training.kl import kl_k3
from turnwise.training.targets import LossTerms, Targets

__all__ = [
    "cispo",
    "fresh_tokens",
    "groups_of",
    "gspo",
    "mean_of_groups",
    "nll",
    "ppo_clip",
    "reinforce",
    "sapo",
    "with_own_ratios",
]


def ppo_clip(
    logprob_N: torch.Tensor,
    targets: Targets,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = math.inf,
) -> LossTerms:
    """Clipped surrogate: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`; for A < 0 at most `-dual_clip A`.

    Papers: PPO, arXiv 1707.06347; unequal bounds from DAPO, arXiv 2503.14476; `dual_clip` from arXiv 1912.09729.
    """
    ratio_N = _ratio(logprob_N, targets)
    loss_N = _clipped_surrogate(ratio_N, targets.advantage_N, clip_low, clip_high)
    outside_N = _outside(ratio_N, clip_low, clip_high)
    if dual_clip < math.inf:
        negative_N = targets.advantage_N < 0
        loss_N = torch.where(negative_N, torch.minimum(loss_N, -dual_clip * targets.advantage_N), loss_N)
        outside_N = outside_N | (negative_N & (ratio_N > dual_clip))
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=outside_N)


def gspo(
    logprob_N: torch.Tensor,
    targets: Targets,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    level: Literal["sequence", "turn"] = "sequence",
) -> LossTerms:
    """Clipped surrogate with one ratio `s` for all tokens of a sequence, the geometric mean of their ratios.

    `-min(s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A)` with `s_t = sg(s) exp(logprob) / sg(exp(logprob))`. This is the form
    GSPO-token, in which tokens may have different advantages. If they are equal, its gradient is that of GSPO. `level="turn"`
    has a ratio for the tokens of each turn instead.

    Paper: GSPO, arXiv 2507.18071.
    """
    with torch.no_grad():
        log_ratio_N = logprob_N - targets.old_logprobs
        mean_N = mean_of_groups(log_ratio_N, groups_of(targets, level))
    ratio_N = (mean_N + logprob_N - logprob_N.detach()).exp()
    loss_N = _clipped_surrogate(ratio_N, targets.advantage_N, clip_low, clip_high)
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=_outside(ratio_N, clip_low, clip_high))


def cispo(logprob_N: torch.Tensor, targets: Targets, *, clip_low: float = 1.0, clip_high: float = 4.0) -> LossTerms:
    """REINFORCE with clipped importance weights: `-sg(clip(r, 1 - clip_low, 1 + clip_high)) A logprob`.

    Paper: MiniMax-M1, arXiv 2506.13585.
    """
    with torch.no_grad():
        ratio_N = _ratio(logprob_N, targets)
        weight_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -weight_N * targets.advantage_N * logprob_N
    return _terms(logprob_N, targets, loss_N=loss_N, outside_N=_outside(ratio_N, clip_low, clip_high))


def sapo(
    logprob_N: torch.Tensor, targets: Targets, *, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossTerms:
    """Soft gate: `-4 / tau * sigmoid(tau (r - 1)) A`, where `tau` is `tau_positive` for A > 0, else `tau_negative`.

    Paper: SAPO, arXiv 2511.20347. No token counts as clipped.
    """
    ratio_N = _ratio(logprob_N, targets)
    tau_N = torch.where(targets.advantage_N > 0, tau_positive, tau_negative)
    loss_N = -4.0 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1.0)) * targets.advantage_N
    return _terms(logprob_N, targets, loss_N=loss_N)


def reinforce(logprob_N: torch.Tensor, targets: Targets) -> LossTerms:
    """`-A logprob`: the policy gradient of tokens that the present policy sampled.

    Paper: Williams 1992, "Simple statistical gradient-following algorithms". GPG (arXiv 2504.02546) uses it with a group
    baseline.
    """
    loss_N = -targets.advantage_N * logprob_N
    return _terms(logprob_N, targets, loss_N=loss_N)


def nll(logprob_N: torch.Tensor, targets: Targets) -> LossTerms:
    """Negative log-likelihood of tokens that were written by others: `-logprob`, the cross-entropy with the token itself."""
    nothing = logprob_N.new_zeros(())
    return LossTerms(loss_N=-logprob_N, kl_N=torch.zeros_like(targets.weight_N), clipped=nothing, max_deviation=nothing)


def mean_of_groups(value_N: torch.Tensor, group_N: torch.Tensor) -> torch.Tensor:
    """The mean of each group, for each of its tokens. `group_N` numbers the groups from 0."""
    groups = int(group_N.max()) + 1
    sum_G = value_N.new_zeros(groups).index_add_(0, group_N, value_N)
    count_G = value_N.new_zeros(groups).index_add_(0, group_N, torch.ones_like(value_N))
    return (sum_G / count_G)[group_N]


def groups_of(targets: Targets, level: Literal["sequence", "turn"]) -> torch.Tensor:
    """A number for each sequence, or for each turn in a sequence, counted from 0."""
    number_N = targets.sequence_N
    if level == "turn":
        number_N = number_N * (targets.turn_N.max() + 1) + targets.turn_N
    return torch.unique(number_N, return_inverse=True)[1]


def fresh_tokens(targets: Targets) -> torch.Tensor:
    """Whether the present weights sampled the token and all others of its turn. Bool, shape [N].

    In a turn that runs while the weights change, the later tokens have the present version, but the keys and values of the
    earlier tokens are from older weights. The ratio of such tokens is not 1.
    """
    if targets.version is None or not len(targets.token_N):
        return torch.zeros_like(targets.known_N)
    turn_N = groups_of(targets, "turn")
    older_G = torch.zeros(int(turn_N.max()) + 1, dtype=torch.bool, device=turn_N.device)
    older_G[turn_N[targets.version_N != targets.version]] = True
    return ~older_G[turn_N]


def with_own_ratios(targets: Targets, logprob_N: torch.Tensor) -> Targets:
    """The targets with ratios to `logprob_N`, the learner's own log-probabilities before the first optimizer step, for the tokens
    that the present weights sampled; the other ratios are still those to the engine's log-probabilities.

    Both would be the same if engine and trainer rounded alike. In bfloat16 they do not, and the ratio would be noise that is
    clipped.
    """
    own_N = torch.where(fresh_tokens(targets), logprob_N.detach(), targets.behaviour_logprob_N)
    return replace(targets, proximal_logprob_N=own_N, decoupled=True)


def _ratio(logprob_N: torch.Tensor, targets: Targets) -> torch.Tensor:
    return (logprob_N - targets.old_logprobs).exp()


def _clipped_surrogate(
    ratio_N: torch.Tensor, advantage_N: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def _outside(ratio_N: torch.Tensor, clip_low: float, clip_high: float) -> torch.Tensor:
    return (ratio_N < 1.0 - clip_low) | (ratio_N > 1.0 + clip_high)


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
            clipped=logprob_N.new_zeros(()) if outside_N is None else targets.counts[outside_N].sum(),
            max_deviation=torch.where(targets.known_N, deviation_N, 0.0).amax(),
        )
