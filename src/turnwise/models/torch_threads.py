"""Chooses the number of torch threads for a step: 1 is fastest beside busy processes, all threads are fastest on an idle machine.

A small model starts with one thread, a large model with all: its first steps are long, and a run may have few of them. So a
large model also tries the other number later.
Knows only the clock. The previous number is restored after every step, so the trainer in the same process is not affected.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["TorchThreads"]

TRIAL_STEPS = 3
"""Consecutive steps with the other number of threads, compared with as many steps before them."""
FIRST_PAUSE, PAUSE, MAX_PAUSE = 2, 32, 2048
"""Steps between two trials: few before the first trial of a small model, then twice as many after each lost trial, because a
lost trial costs time."""


@dataclass(slots=True)
class _Trial:
    """For work of about the same size: the best number of threads so far, and the state of the current trial."""

    best: int
    pause: int
    steps: int = 0
    fastest: float = float("inf")
    """Seconds for each row or token: the fastest of the last steps with the best number."""
    fastest_other: float = float("inf")
    """The same with the other number."""


class TorchThreads:
    """Sets torch's number of threads for a step. `number` is fixed; 0 starts with 1 thread, or with all if the model is `large`,
    and tries the other number regularly."""

    def __init__(self, number: int, *, large: bool) -> None:
        self._max_threads = torch.get_num_threads()
        self._number = number
        self._first = (self._max_threads, PAUSE) if large else (1, FIRST_PAUSE)
        self._trials: dict[tuple[str, int], _Trial] = {}

    @contextmanager
    def during(self, work: str, size: int) -> Iterator[None]:
        """A step of the kind `work` over `size` rows or tokens. Only steps of about the same size are compared."""
        before = torch.get_num_threads()
        trial = self._trials.setdefault((work, size.bit_length()), _Trial(*self._first))
        in_trial = not self._number and self._max_threads > 1 and trial.steps >= trial.pause
        torch.set_num_threads(self._number or (self._other(trial) if in_trial else trial.best))
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(before)
            self._record(trial, in_trial, (time.perf_counter() - start) / max(size, 1))

    def _other(self, trial: _Trial) -> int:
        return self._max_threads if trial.best == 1 else 1

    def _record(self, trial: _Trial, in_trial: bool, seconds: float) -> None:
        """Record the seconds for each row or token, and decide the trial if it is over."""
        trial.steps += 1
        if not in_trial:
            # only the last steps before the trial count: the machine may have been less busy before
            trial.fastest = seconds if trial.steps <= trial.pause - TRIAL_STEPS else min(trial.fastest, seconds)
            return
        trial.fastest_other = min(trial.fastest_other, seconds)
        lost = trial.fastest_other > 1.5 * trial.fastest
        if lost or trial.steps >= trial.pause + TRIAL_STEPS:
            won = trial.fastest_other < 0.95 * trial.fastest
            trial.best = self._other(trial) if won else trial.best
            trial.pause = PAUSE if won else min(max(PAUSE, 2 * trial.pause), MAX_PAUSE)
            trial.steps, trial.fastest, trial.fastest_other = 0, float("inf"), float("inf")
