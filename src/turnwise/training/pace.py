"""How long the layers of each rank compute, without waiting for other ranks, and which rank is slower than the others.

All ranks of a training take as long as the slowest, because layers are gathered from all of them. So the time of a pass does not
say which rank is slow; the time between gathering a layer and its result does. Ranks that compute a micro-batch together wait
for each other inside of layers: of these, all are as slow as the slowest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Pace:
    """What a rank has computed in an update."""

    place: str
    """Its machine."""
    tokens: int = 0
    """Tokens of its micro-batches."""
    seconds: float = 0.0
    """In the forward passes of its layers."""

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.place, self.tokens + other.tokens, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class SlowestRank:
    """The rank that all others wait for."""

    rank: int
    place: str
    times: float
    """How many times as long as the median rank its layers compute, in all and for each token: the smaller of both. So neither a
    rank with more tokens nor one with small micro-batches is slow."""

    @classmethod
    def of(cls, updates: Iterable[Sequence[Pace]]) -> SlowestRank | None:
        """The slowest rank over several updates, each with the paces of all ranks; None if less than two ranks have computed."""
        totals: list[Pace] = []
        for paces in updates:
            totals = [total + pace for total, pace in zip(totals, paces, strict=True)] if totals else list(paces)
        busy = [(rank, pace) for rank, pace in enumerate(totals) if pace.tokens and pace.seconds]
        if len(busy) < 2:
            return None
        # of two ranks, the faster one is the median
        seconds = statistics.median_low(pace.seconds for _, pace in busy)
        of_token = statistics.median_low(pace.seconds / pace.tokens for _, pace in busy)
        times = [min(pace.seconds / seconds, pace.seconds / pace.tokens / of_token) for _, pace in busy]
        slowest = max(range(len(busy)), key=lambda index: times[index])
        rank, pace = busy[slowest]
        return cls(rank, pace.place, times[slowest])


class LayerClock:
    """Measures the forward passes of `layers`, which `fully_shard` has divided before: between its hooks, which gather the
    weights and free them. Forward passes again for gradient checkpointing count, too."""

    def __init__(self, layers: Sequence[torch.nn.Module], place: str) -> None:
        self._place = place
        self._running = False
        self._pace = Pace(place)
        self._began: Any = None
        self._spans: list[tuple[Any, Any]] = []
        for layer in layers:
            layer.register_forward_pre_hook(lambda module, inputs: self._begin(inputs))
            layer.register_forward_hook(lambda module, inputs, output: self._end(), prepend=True)

    @contextmanager
    def running(self, tokens: int) -> Iterator[None]:
        """Count the passes inside, of so many tokens."""
        self._pace += Pace(self._place, tokens)
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def take(self) -> Pace:
        """What was computed since the last call. Waits for the GPU."""
        seconds = 0.0
        for began, ended in self._spans:
            if isinstance(began, float):
                seconds += ended - began
            else:
                ended.synchronize()
                seconds += began.elapsed_time(ended) / 1000
        pace = self._pace + Pace(self._place, seconds=seconds)
        self._pace, self._spans, self._began = Pace(self._place), [], None
        return pace

    def _begin(self, inputs: tuple[Any, ...]) -> None:
        if self._running:
            on_gpu = any(isinstance(one, torch.Tensor) and one.is_cuda for one in inputs)
            self._began = _now(on_gpu)

    def _end(self) -> None:
        # a pass for gradient checkpointing ends before the layer does, if the rest is not needed
        if self._running and self._began is not None:
            self._spans.append((self._began, _now(not isinstance(self._began, float))))
            self._began = None


def _now(on_gpu: bool) -> Any:
    if not on_gpu:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
