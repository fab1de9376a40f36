"""Which tokens of an update have a policy loss, and which have a further divergence: by their entropies, or by their covariances.

- `top_entropy_quantile`: only the tokens with the largest entropies ("Beyond the 80/20 rule", arXiv 2506.01939).
- `clip_cov_ratio`: all but a few tokens whose covariance is between two bounds (Clip-Cov, arXiv 2505.22617).
- `kl_cov_ratio`: the tokens with the largest covariances have a divergence in their loss (KL-Cov, the same paper).

The covariance of a token is `(A - mean A) (logprob - mean logprob)`: its mean over all tokens predicts how the next step changes
the entropy. Entropies and log-probabilities are those of the weights before the first optimizer step, which the learner computes.
All means, thresholds and numbers of tokens are those of all batches of an update together, with the tokens of trajectories that
have no gradient. Invariant: neither the order of sequences, nor their division into batches, micro-batches and ranks, nor the
merging of equal segments changes a choice. Pure functions of targets; does not know models.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from turnwise.options.algorithm import LossSection
from turnwise.training.losses import Targets

__all__ = ["MeasuredTokens", "Selected", "select_tokens", "top_share"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTokens:
    """The targets of a micro-batch before the first optimizer step."""

    targets: Targets
    value_NK: torch.Tensor
    """The learner's own log-probability of each token; behind it the entropy of the distribution that the token was drawn from,
    if something needs it. On the CPU."""
    sources: Mapping[int, Sequence[tuple[str, int]]]
    """`Batch.sources`: a token is known by its segment and its place there, however it is packed."""


@dataclass(frozen=True, slots=True)
class Selected:
    """What is chosen in an update."""

    targets: list[Targets]
    """The targets of each micro-batch, with `policy_share_N` and `divergence_share_N`."""
    metrics: dict[str, float]
    """By their names in metrics.jsonl."""


def select_tokens(parts: Sequence[MeasuredTokens], options: LossSection) -> Selected:
    """Choose among the tokens of all micro-batches of an update.

    Example: four tokens with the entropies 0.1 2.0 0.3 0.2 and `top_entropy_quantile` 0.25 have the policy shares 0 1 0 0.
    """
    count_N = _joined([part.targets.counts for part in parts])
    policy_N = torch.ones_like(count_N)
    metrics: dict[str, float] = {}
    if options.top_entropy_quantile < 1.0:
        entropy_N = _joined([part.value_NK[:, 1] for part in parts])
        total = int(count_N.sum())
        # as the tokens above the linearly interpolated quantile; 1e-9: 0.8 * 10 must not be rounded up to 9
        least = total - math.ceil((1.0 - options.top_entropy_quantile) * (total - 1) - 1e-9)
        threshold = _largest(entropy_N, count_N, least)
        policy_N = torch.where(entropy_N >= threshold - _rounding(threshold), policy_N, 0.0)
        metrics["selection/entropy_threshold"] = threshold
    divergence_N: torch.Tensor | None = None
    if options.selects_by_covariance:
        covariance_N = _covariances(parts, count_N)
        metrics["selection/covariance"] = float((covariance_N * count_N).sum() / count_N.sum())
        if options.clip_cov_ratio > 0:
            between_N = (covariance_N > options.clip_cov_low) & (covariance_N < options.clip_cov_high)
            number = _number_of(options.clip_cov_ratio, count_N)
            policy_N = policy_N * (1.0 - _at_random(parts, between_N, number) / count_N)
        if options.kl_cov_ratio > 0:
            divergence_N = top_share(covariance_N, count_N, _number_of(options.kl_cov_ratio, count_N))
            metrics["selection/with_divergence"] = float((divergence_N * count_N).sum() / count_N.sum())
    metrics["selection/without_loss"] = float(((1.0 - policy_N) * count_N).sum() / count_N.sum())
    sizes = [len(part.value_NK) for part in parts]
    of_policy = policy_N.split(sizes)
    of_divergence = [None] * len(parts) if divergence_N is None else divergence_N.split(sizes)
    return Selected(
        [
            replace(
                part.targets,
                policy_share_N=_like(policy, part.targets),
                divergence_share_N=None if divergence is None else _like(divergence, part.targets),
            )
            for part, policy, divergence in zip(parts, of_policy, of_divergence, strict=True)
        ],
        metrics,
    )


def top_share(value_N: torch.Tensor, count_N: torch.Tensor, number: int) -> torch.Tensor:
    """The share of each token that is among the `number` tokens with the largest values. Token n stands for `count_N[n]` tokens;
    tokens with the same value at the border have the same share, so that their order does not matter.

    Example: values 3 1 1 0, each token once, number 2: 1 1/2 1/2 0.
    """
    border = _largest(value_N, count_N, number)
    above_N = value_N > border + _rounding(border)
    at_N = ~above_N & (value_N >= border - _rounding(border))
    left = number - float(count_N[above_N].sum())
    share = min(1.0, left / float(count_N[at_N].sum()))
    return torch.where(above_N, 1.0, torch.where(at_N, share, 0.0)).to(count_N.dtype)


def _rounding(border: float) -> float:
    """Tokens that differ from the border by no more are at the border: the first tokens of a group have one distribution, whose
    entropy rounds in another way in each packing."""
    return 1e-5 * (1.0 + abs(border))


def _largest(value_N: torch.Tensor, count_N: torch.Tensor, number: int) -> float:
    """The value of the token with this place, counted from 1, in the order from the largest value."""
    order_N = value_N.argsort(descending=True)
    until_N = count_N[order_N].cumsum(0)
    place = int(torch.searchsorted(until_N, torch.tensor(float(number), dtype=until_N.dtype)))
    return float(value_N[order_N[min(place, len(order_N) - 1)]])


def _covariances(parts: Sequence[MeasuredTokens], count_N: torch.Tensor) -> torch.Tensor:
    """`(A - mean A) (logprob - mean logprob)` of each token."""
    advantage_N, logprob_N = (
        _joined([part.targets.advantage_N for part in parts]),
        _joined([part.value_NK[:, 0] for part in parts]),
    )
    total = count_N.sum()
    away = [value_N - (value_N * count_N).sum() / total for value_N in (advantage_N, logprob_N)]
    return away[0] * away[1]


def _number_of(ratio: float, count_N: torch.Tensor) -> int:
    """So many tokens as the ratio says, rounded down, and at least one."""
    return max(int(ratio * float(count_N.sum()) + 1e-9), 1)


def _at_random(parts: Sequence[MeasuredTokens], candidate_N: torch.Tensor, number: int) -> torch.Tensor:
    """How often each token is among `number` tokens that are chosen at random from the candidates. An equal segment is a further
    candidate.

    The random number of a token is a hash of its segment and its place in it: the choice is the same in each packing, and when
    the step is computed again.
    """
    drawn: list[np.ndarray] = []
    places: list[np.ndarray] = []
    start = 0
    for part in parts:
        sequence_N = part.targets.sequence_N.cpu().numpy()
        ends = [*(np.flatnonzero(np.diff(sequence_N)) + 1).tolist(), len(sequence_N)]
        first = 0
        for end in ends:
            for source in part.sources[int(sequence_N[first])]:
                drawn.append(_hashes(source, end - first))
                places.append(np.arange(start + first, start + end))
            first = end
        start += len(sequence_N)
    drawn_M, place_M = np.concatenate(drawn), np.concatenate(places)
    among_M = candidate_N.numpy()[place_M]
    drawn_M, place_M = drawn_M[among_M], place_M[among_M]
    chosen = place_M[np.argsort(drawn_M, kind="stable")[:number]]
    return torch.from_numpy(np.bincount(chosen, minlength=start).astype(np.float64))


def _hashes(source: tuple[str, int], count: int) -> np.ndarray:
    """A number for each of the first places of a segment, uint64 [count]."""
    digest = hashlib.blake2b(f"{source[1]}/{source[0]}".encode(), digest_size=8).digest()
    # splitmix64, of which each place is a further number
    steps = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = np.uint64(int.from_bytes(digest, "little")) + steps
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def _joined(columns: Sequence[torch.Tensor]) -> torch.Tensor:
    """The columns of all micro-batches, one after the other, in float64 on the CPU."""
    return torch.cat([column.detach().double().cpu() for column in columns])


def _like(share_N: torch.Tensor, targets: Targets) -> torch.Tensor:
    return share_N.to(targets.weight_N.device, targets.weight_N.dtype)
