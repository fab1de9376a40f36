"""A run on its way, whatever is learnt in it: how far it is, what it leaves behind, and how it ends where somebody stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from turnwise.metrics import drift
from turnwise.record import RunDirectory
from turnwise.rollout.renderer import Renderer
from turnwise.training.checkpoint import Checkpoints
from turnwise.training.policy import Policy
from turnwise.types import Trajectory

__all__ = ["Underway"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Underway:
    """What training and fine-tuning have in common."""

    directory: RunDirectory
    renderer: Renderer
    policy: Policy
    checkpoints: Checkpoints
    step: int = 0
    """Steps that are finished."""
    saved: int = 0
    """Steps that the newest checkpoint holds."""
    whole: bool = True
    """Whether the weights are those after `step` steps, and not on the way to the next."""
    drift_told: bool = False
    """Whether the sanity check has been heard of: once is enough, the metrics go on counting."""
    notes: list[str] = field(default_factory=list)

    def place(self) -> dict[str, int]:
        """How far in the data it is: what a checkpoint remembers beside the step."""
        raise NotImplementedError

    def save(self) -> None:
        """Leave a checkpoint behind. Raises RunError if it cannot be written."""
        state = {
            "step": self.step,
            **self.place(),
            "lengths": self.directory.lengths(),
            "policy": self.policy.state(),
        }
        tokenizer, processor = self.renderer.tokenizer, self.renderer.vision
        self.checkpoints.save(self.step, model=self.policy.model, tokenizer=tokenizer, state=state, processor=processor)
        self.saved = self.step

    def tell_drift(self, trajectories: Sequence[Trajectory]) -> None:
        """Say once in a run that the tokens are not what the template writes."""
        if not self.drift_told and (told := drift(trajectories)) is not None:
            self.drift_told = True
            _log.warning("step %d: %s", self.step, told)

    @contextlib.asynccontextmanager
    async def going_on_later(self) -> AsyncIterator[None]:
        """On Ctrl-C, leave a checkpoint of the last finished step behind."""
        try:
            yield
        except asyncio.CancelledError:
            if self.whole and self.step > self.saved:
                self.save()
            raise
