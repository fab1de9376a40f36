"""How far an update moves the policy: the KL divergence on some of the conversations that it was trained on.

Needs two forward passes of these conversations, before and after the update. Knows trajectories and a learner.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.training.kl_reward import token_batch
from turnwise.training.learner import Learner
from turnwise.training.losses import kl_numbers
from turnwise.training.value_batch import StateBatch
from turnwise.types import Trajectory

__all__ = ["PolicyShift"]

_MEASURED = 16
"""The most conversations that are measured."""


@dataclass(frozen=True, slots=True)
class PolicyShift:
    """The measurement of an update: `begin` before it, `end` after it."""

    learner: Learner
    batch: StateBatch | None
    """The measured tokens; None if there are none."""
    before: Sequence[float]
    """Their log-probabilities before the update."""

    @classmethod
    async def begin(
        cls, learner: Learner, trajectories: Sequence[Trajectory], micro_batch_tokens: int | None
    ) -> PolicyShift:
        """Measure up to 16 of the conversations, in equal distances."""
        sampled = [one for one in trajectories if one.sampled_tokens]
        chosen = sampled[:: math.ceil(len(sampled) / _MEASURED) or 1]
        if not chosen:
            return cls(learner, None, ())
        batch = token_batch(learner, chosen, micro_batch_tokens)
        return cls(learner, batch, await learner.logprobs(batch))

    async def end(self) -> float:
        """KL(before || after), the mean over the measured tokens of the estimate k3, in nats. Not finite if a log-probability is
        not. The weights have changed, so a cancellation takes effect afterwards."""
        if self.batch is None:
            return 0.0
        after = await self.learner.logprobs(self.batch, cancellable=False)
        return statistics.fmean(kl_numbers(self.before, after, "k3"))
