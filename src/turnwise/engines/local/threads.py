"""How many torch threads a step gets: one is best beside busy neighbours, all of them when alone.

It knows nothing but the clock. The caller's own number is put back after every step, so a trainer in the same process does
not notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

__all__ = ["Threads"]

TRIAL = 4
"""Steps with each number of threads in a trial."""
PAUSE = 400
"""Steps between two trials: a trial with the wrong number costs a few steps out of so many."""


@dataclass(slots=True)
class _Trial:
    """One size of batch: what is being tried, and what won."""

    best: int
    steps: int = 0
    seconds: dict[int, list[float]] = field(default_factory=dict)


class Threads:
    """Sets torch's number of threads for a step. A fixed `number` is never changed; 0 tries one and all now and then."""

    def __init__(self, number: int) -> None:
        self._most = torch.get_num_threads()
        self._number = number
        self._trials: dict[int, _Trial] = {}

    @contextmanager
    def step(self, size: int) -> Iterator[None]:
        """A step over `size` rows."""
        before = torch.get_num_threads()
        trial = self._trial(size)
        number = self._number or self._next(trial)
        torch.set_num_threads(number)
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(before)
            if not self._number:
                self._note(trial, number, time.perf_counter() - start)

    def _trial(self, size: int) -> _Trial:
        """Batches of about the same size share a trial."""
        return self._trials.setdefault(size.bit_length(), _Trial(best=self._most))

    def _next(self, trial: _Trial) -> int:
        at = trial.steps % PAUSE
        if self._most == 1 or at >= 2 * TRIAL:
            return trial.best
        return 1 if at < TRIAL else self._most

    def _note(self, trial: _Trial, number: int, seconds: float) -> None:
        at = trial.steps % PAUSE
        trial.steps += 1
        if at == 0:
            trial.seconds = {}
        if at < 2 * TRIAL:
            trial.seconds.setdefault(number, []).append(seconds)
        if at == 2 * TRIAL - 1:
            # the quickest of each: a neighbour or a page fault makes some steps slow
            trial.best = min(trial.seconds, key=lambda each: sorted(trial.seconds[each])[1])
