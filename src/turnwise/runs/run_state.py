"""A run on its way, whatever is learned in it: how far it is, what it leaves behind, and how it ends where somebody stops it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.chat.renderer import Renderer
from turnwise.errors import RunError
from turnwise.record.metrics import template_mismatches
from turnwise.record.run_directory import RunDirectory
from turnwise.runs.resuming import OpenedRun
from turnwise.terminal.activity import Activity
from turnwise.training.checkpoint import Checkpoints, PendingCheckpoint
from turnwise.training.learner import Learner
from turnwise.types import Trajectory

__all__ = ["RunState", "checkpoint_due"]

_SHARE = 0.03
"""Of a run's time that checkpoints may take where the recipe does not say how often they are written."""

_log = logging.getLogger(__name__)


def checkpoint_due(step: int, *, every: int | None, since: float, cost: float | None) -> bool:
    """Whether a checkpoint of a finished step is written.

    `every` are the steps between checkpoints. None: one is written after the first step (`cost` None), and then when `since`,
    the seconds since the last, is so long that its `cost`, also in seconds, is at most 3 % of the time.
    """
    if every is not None:
        return step % every == 0
    return cost is None or cost <= _SHARE * (since + cost)


@dataclass(slots=True, kw_only=True)
class RunState:
    """What training and fine-tuning have in common."""

    opened: OpenedRun
    renderer: Renderer
    learner: Learner
    step: int = 0
    """Steps that are finished."""
    saved: int = 0
    """Steps that the newest checkpoint holds."""
    evaluated: int = -1
    """Steps after which the last evaluation was; it is not repeated when the run is resumed there."""
    consistent: bool = True
    """Whether the weights and the record are those after `step` steps, and not on the way to the next."""
    mismatch_reported: bool = False
    """Whether the sanity check has been reported: once is enough, the metrics go on counting."""
    notes: list[str] = field(default_factory=list)
    activity: Activity = field(default_factory=Activity)
    _cost: float | None = field(default=None, init=False)
    """Seconds that the last checkpoint took."""
    _saved_at: float = field(default_factory=time.monotonic, init=False)

    def __post_init__(self) -> None:
        if self.opened.saved is not None:
            self._cost = self.opened.saved.about["seconds"]

    @property
    def directory(self) -> RunDirectory:
        """Where the run is written down."""
        return self.opened.directory

    @property
    def checkpoints(self) -> Checkpoints:
        """Those of the run."""
        return self.opened.checkpoints

    def data_position(self) -> dict[str, int]:
        """How far in the data it is: what a checkpoint remembers beside the step."""
        return {"evaluated": self.evaluated}

    def begin_update(self) -> None:
        """The first optimizer step of a step follows: from here on until the step's end, nothing can be saved."""
        self.consistent = False

    def finish_step(
        self, metrics: dict[str, Any], trajectories: Sequence[Trajectory], *, began: float, last: bool
    ) -> None:
        """Write down a step that `began` at that `time.perf_counter`, with a checkpoint if it is time for one.

        The step's line is written between the checkpoint's large files and its last one: so it tells what they took, and the
        checkpoint covers it. Raises RunError if something cannot be written; then the step is in no checkpoint.
        """
        self.consistent = False
        started = time.perf_counter()
        since = time.monotonic() - self._saved_at
        every = self.opened.config.checkpoint.every
        due = last or checkpoint_due(self.step + 1, every=every, since=since, cost=self._cost)
        unfinished = self._write(self.step + 1) if due else None
        now = time.perf_counter()
        metrics["seconds/checkpoint"] = round(now - started, 4) if due else 0.0
        metrics["seconds/step"] = round(now - began, 4)
        self.directory.write_step(metrics, trajectories)
        self.step += 1
        self.advance_data()
        self.consistent = True
        if unfinished is not None:
            self._finish(unfinished, now - started)

    def advance_data(self) -> None:
        """Count what the step that is finished has used of the data."""

    def save(self) -> None:
        """Leave a checkpoint behind. Raises RunError if it cannot be written."""
        started = time.perf_counter()
        unfinished = self._write(self.step)
        self._finish(unfinished, time.perf_counter() - started)

    def _write(self, step: int) -> PendingCheckpoint:
        self.activity.part(step, "writing a checkpoint")
        return self.checkpoints.write(
            step,
            save_model=self.learner.save,
            tokenizer=self.renderer.tokenizer,
            state={"policy": self.learner.state()},
            processor=self.renderer.vision,
        )

    def _finish(self, unfinished: PendingCheckpoint, seconds: float) -> None:
        self.checkpoints.finish(unfinished, self.opened.about(self.data_position(), seconds))
        self.directory.note_checkpoint(unfinished.step)
        self.saved, self._cost, self._saved_at = unfinished.step, seconds, time.monotonic()

    def stopped_text(self, again: str) -> str:
        """How far a stopped run is, its newest checkpoint, and the command that resumes it (`again`). Two lines.

        Reads attributes only, so it may be called from a signal handler.
        """
        if self.saved:
            lost = f", which steps {self.saved + 1} to {self.step} are not in" if self.saved < self.step else ""
            there = f"the newest checkpoint is that of step {self.saved}{lost}: {self.checkpoints.newest}"
        else:
            there = "there is no checkpoint yet"
        return f"stopped after step {self.step}; {there}\ngo on with: {again}"

    def warn_template_mismatch(self, trajectories: Sequence[Trajectory]) -> None:
        """Say once in a run that the tokens are not what the template writes."""
        if not self.mismatch_reported and (told := template_mismatches(trajectories)) is not None:
            self.mismatch_reported = True
            _log.warning("step %d: %s", self.step + 1, told)

    @contextlib.asynccontextmanager
    async def checkpoint_on_exit(self) -> AsyncIterator[None]:
        """However the run ends, leave a checkpoint of the last finished step behind, and the directory to others.

        Only KeyboardInterrupt, which is to end it at once, leaves none.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:  # somebody stops it, or something is wrong that a person can put right
            if self.consistent and self.step > self.saved:
                try:
                    self.save()
                except RunError as error:
                    _log.error("%s", error)
            raise
        finally:
            self.directory.release()
