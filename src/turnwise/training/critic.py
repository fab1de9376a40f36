"""The critic: the part of a run that owns the weights of the value model and changes them.

`Critic` is the protocol that training and checkpoints use. `LocalCritic` (local_critic.py) is the implementation in this process.
This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from turnwise.training.learner import PackingRequirements

if TYPE_CHECKING:
    from turnwise.training.value_batch import StateBatch, ValueBatch

__all__ = ["Critic", "CriticStats"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """Statistics of one call of `Critic.update`. `loss` and `grad_norm` are means over the optimizer steps."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    clip_fraction: float = 0.0
    """Share of the states whose loss is larger by value clipping, over all optimizer steps."""


def _nothing() -> None:
    pass


class Critic(Protocol):
    """Owns the weights of the value model and changes them. Its methods are called from one event loop, one at a time."""

    @property
    def requirements(self) -> PackingRequirements:
        """What batches must look like. It does not change during a run."""
        ...

    async def values(self, batch: StateBatch, *, on_micro_batch: Callable[[], None] = _nothing) -> list[float]:
        """The value of each state of the batch: the expected sum of the later rewards. Changes nothing."""
        ...

    async def update(
        self,
        batches: Sequence[ValueBatch],
        *,
        lr: float,
        epochs: int = 1,
        cancellable: bool = True,
        on_micro_batch: Callable[[], None] = _nothing,
        on_first_step: Callable[[], None] = _nothing,
    ) -> CriticStats:
        """Take one optimizer step for each batch, `epochs` times over.

        If `cancellable` is true and the call is cancelled before the first optimizer step, the weights are unchanged. Otherwise
        a cancellation takes effect after the last optimizer step. The callbacks are those of `Learner.update`.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write the value model into a directory: the model, or only its adapter if it has one, and the value head."""
        ...

    def state(self) -> dict[str, Any]:
        """What must be saved besides the model to resume exactly: the state of the optimizer."""
        ...

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        """Resume from what `state` returned, or from the directory that `save_shards` of any number of ranks has written. The
        weights are loaded with the model."""
        ...

    def save_shards(self, folder: Path) -> None:
        """Write what `state` leaves out, because it is divided among several ranks. A critic in one process writes nothing."""
        ...

    def base_fingerprint(self) -> str | None:
        """SHA-256 of the frozen weights of a value model with an adapter; None if all its weights are trained."""
        ...
