"""An update of the critic: the order of passes and optimizer steps. The passes may be computed in one process or in several.

`PassCritic` is the part of a critic that is the same for both, as `PassLearner` (policy_update.py) is for learners. Knows nothing
of models, devices or ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from turnwise.training.background import Passes, StopFlag, run_cancellable
from turnwise.training.critic import CriticStats
from turnwise.training.packing import MicroBatch
from turnwise.training.value_batch import StateBatch, StatePlaces, ValueBatch, ValueTargets
from turnwise.training.value_forward import ValueForward
from turnwise.training.value_loss import value_loss

__all__ = ["CriticSums", "PassCritic", "critic_loss"]


@dataclass(frozen=True, slots=True)
class CriticSums:
    """Loss and metrics of one micro-batch, or of several added up."""

    loss: float = 0.0
    clipped: int = 0
    states: int = 0

    def __add__(self, other: CriticSums) -> CriticSums:
        return CriticSums(self.loss + other.loss, self.clipped + other.clipped, self.states + other.states)


class PassCritic(Passes[MicroBatch[ValueTargets], CriticSums]):
    """The methods of a `Critic` that run passes through its model. The passes themselves are abstract; they block."""

    @abstractmethod
    def measure(
        self, micro_batches: Sequence[MicroBatch[StatePlaces]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> list[torch.Tensor]:
        """The values [N] of the states of each micro-batch, without gradients. The list is shorter if `stop` is set."""

    async def values(self, batch: StateBatch, *, on_micro_batch: Callable[[], None] = lambda: None) -> list[float]:
        """See `Critic.values`. Computed in a thread."""
        return await run_cancellable(
            lambda stop: batch.in_order(self.measure(batch.micro_batches, on_micro_batch, stop))
        )

    async def update(
        self,
        batches: Sequence[ValueBatch],
        *,
        lr: float,
        epochs: int = 1,
        cancellable: bool = True,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> CriticStats:
        """See `Critic.update`. Gradients are computed in a thread; the weights change in the event loop's own thread."""
        sums, norms = await self.take_steps(
            [batch.micro_batches for batch in batches], on_micro_batch, on_first_step, lr, epochs, cancellable
        )
        if not sums:
            return CriticStats()
        states = sum(total.states for total in sums)
        return CriticStats(
            loss=sum(total.loss for total in sums) / len(sums),
            grad_norm=sum(norms) / len(norms),
            clip_fraction=sum(total.clipped for total in sums) / max(states, 1),
        )


def critic_loss(
    forward: ValueForward, micro: MicroBatch[ValueTargets], *, clip: float | None
) -> tuple[torch.Tensor, Callable[[], CriticSums]]:
    """The loss of a micro-batch, and a function that computes its metrics."""
    targets, value_N = micro.targets, forward.values(micro)
    loss_N = value_loss(value_N, targets.old_value_N, targets.return_N, clip=clip)
    loss = (loss_N * targets.weight_N).sum()

    def metrics() -> CriticSums:
        unclipped_N = value_loss(value_N, targets.old_value_N, targets.return_N)
        return CriticSums(float(loss), int((loss_N > unclipped_N).sum()), len(loss_N))

    return loss, metrics
