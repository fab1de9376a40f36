"""Loss and metrics of optimizer steps, added up over micro-batches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.training.correction import CorrectionSums
from turnwise.training.learner import UpdateStats
from turnwise.training.policy_losses import fresh_tokens
from turnwise.training.targets import Targets

__all__ = ["TargetLogprobs", "UpdateSums", "fresh_deviation", "rounding_of_ratios", "update_stats"]


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """Loss and metrics of one micro-batch, or of several added up."""

    loss: float = 0.0
    kl: float = 0.0
    tokens: int = 0
    counted: float = 0.0
    """The tokens by `Targets.counts`, of which `clipped` are outside the bounds."""
    clipped: float = 0.0
    max_deviation: float = 0.0
    fresh_deviation: float = 0.0
    logprobs: tuple[TargetLogprobs, ...] = ()
    """The log-probabilities of each micro-batch."""

    def __add__(self, other: UpdateSums) -> UpdateSums:
        return UpdateSums(
            loss=self.loss + other.loss,
            kl=self.kl + other.kl,
            tokens=self.tokens + other.tokens,
            counted=self.counted + other.counted,
            clipped=self.clipped + other.clipped,
            max_deviation=max(self.max_deviation, other.max_deviation),
            fresh_deviation=max(self.fresh_deviation, other.fresh_deviation),
            logprobs=self.logprobs + other.logprobs,
        )


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The log-probabilities of the targets of a micro-batch, on the CPU."""

    sequence_N: np.ndarray
    """`Targets.sequence_N`."""
    logprob_N: np.ndarray

    @classmethod
    def of(cls, targets: Targets, logprob_N: torch.Tensor) -> TargetLogprobs:
        """Copies the log-probabilities from their device."""
        return cls(targets.sequence_N.cpu().numpy(), logprob_N.detach().float().cpu().numpy())

    def by_sequence(self) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each sequence, and the log-probabilities of its targets, which follow one another."""
        ends = [*(np.flatnonzero(np.diff(self.sequence_N)) + 1).tolist(), len(self.sequence_N)]
        start = 0
        for end in ends:
            if end > start:
                yield int(self.sequence_N[start]), self.logprob_N[start:end]
            start = end


def fresh_deviation(logprob_N: torch.Tensor, targets: Targets) -> float:
    """Largest `|ratio - 1|` of the tokens of turns that the present weights sampled completely; 0 without such turns."""
    fresh_N = targets.known_N & fresh_tokens(targets)
    if not fresh_N.any():
        return 0.0
    difference_N = (logprob_N.detach() - targets.behaviour_logprob_N)[fresh_N]
    return float((difference_N.exp() - 1.0).abs().nan_to_num(nan=torch.inf).amax())


def rounding_of_ratios(largest_logit: float) -> float:
    """The largest `|ratio - 1|` that rounding in bfloat16 explains, for logits of this size.

    bfloat16 rounds a number to 2^-8 of it at most. A log-probability is the difference of two such numbers, the logit of the
    token and (nearly) the largest logit, and a ratio compares two log-probabilities, those of the engine and of the trainer.
    Example: 0.75 for logits up to 36.
    """
    return math.expm1(min(4 * 2**-8 * largest_logit, 20.0))


def update_stats(
    sums: Sequence[UpdateSums],
    norms: Sequence[float],
    correction: CorrectionSums,
    logprobs: Sequence[Sequence[TargetLogprobs]],
) -> UpdateStats:
    """Statistics of several optimizer steps: one entry in `sums` and `norms` for each, and one in `logprobs` for each batch."""
    if not sums:
        return UpdateStats()
    counted = sum(step.counted for step in sums)
    return UpdateStats(
        loss=sum(step.loss for step in sums) / len(sums),
        kl=sum(step.kl for step in sums) / len(sums),
        grad_norm=sum(norms) / len(norms),
        max_deviation=sums[0].max_deviation,
        fresh_deviation=sums[0].fresh_deviation,
        clip_fraction=sum(step.clipped for step in sums) / max(counted, 1),
        tokens=sum(step.tokens for step in sums),
        steps=len(sums),
        correction=correction.metrics(),
        logprobs=[dict(itertools.chain.from_iterable(part.by_sequence() for part in batch)) for batch in logprobs],
    )
