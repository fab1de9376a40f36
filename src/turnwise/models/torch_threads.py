"""How many torch threads a step gets: one is best beside busy neighbours, all of them when alone.

It knows nothing but the clock. The caller's own number is put back after every step, so a trainer in the same process does
not notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["TorchThreads", "use_deterministic_algorithms"]

TRIAL = 3
"""Steps in a row with the other number of threads, and how many before it are compared with them."""
FIRST_PAUSE, PAUSE, LONGEST_PAUSE = 2, 32, 2048
"""Steps between two trials: few before the first, then doubled whenever the other number is slower, because a lost trial
is expensive."""


@dataclass(slots=True)
class _Trial:
    """Work of about one size: which number of threads has won, and how the trial of the other one goes."""

    best: int = 1
    steps: int = 0
    pause: int = FIRST_PAUSE
    quickest: float = float("inf")
    """The quickest of the last few steps with the best number."""
    quickest_other: float = float("inf")


def use_deterministic_algorithms() -> None:
    """Make torch deterministic in this process: deterministic algorithms, and one thread."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


class TorchThreads:
    """Sets torch's number of threads for a piece of work. A fixed `number` is never changed; 0 starts with one, and now
    and then tries all."""

    def __init__(self, number: int) -> None:
        self._most = torch.get_num_threads()
        self._number = number
        self._trials: dict[tuple[str, int], _Trial] = {}

    @contextmanager
    def during(self, work: str, size: int) -> Iterator[None]:
        """A piece of `work` over `size` rows or tokens; only work of about the same size is compared."""
        before = torch.get_num_threads()
        trial = self._trials.setdefault((work, size.bit_length()), _Trial())
        trying = not self._number and self._most > 1 and trial.steps >= trial.pause
        torch.set_num_threads(self._number or (self._other(trial) if trying else trial.best))
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(before)
            self._note(trial, trying, (time.perf_counter() - start) / max(size, 1))

    def _other(self, trial: _Trial) -> int:
        return self._most if trial.best == 1 else 1

    def _note(self, trial: _Trial, trying: bool, seconds: float) -> None:
        """Seconds for each row or token."""
        trial.steps += 1
        if not trying:
            # an older step may have been alone where the newer ones are not
            trial.quickest = seconds if trial.steps <= trial.pause - TRIAL else min(trial.quickest, seconds)
            return
        trial.quickest_other = min(trial.quickest_other, seconds)
        lost = trial.quickest_other > 1.5 * trial.quickest
        if lost or trial.steps >= trial.pause + TRIAL:
            won = trial.quickest_other < 0.95 * trial.quickest
            trial.best = self._other(trial) if won else trial.best
            trial.pause = PAUSE if won else min(max(PAUSE, 2 * trial.pause), LONGEST_PAUSE)
            trial.steps, trial.quickest, trial.quickest_other = 0, float("inf"), float("inf")
