"""An event loop without waiting: where all tasks sleep, its clock jumps to the first that wakes up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

__all__ = ["run_instantly"]


class _InstantLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__()
        # later than the real clock of any machine: what compares a deadline of this loop with `time.monotonic()`, as the watch
        # of blocked loops does, then finds that the deadline is not over
        self._now = 1e9
        self._clock_resolution = 1e-6  # above the rounding of sums of such numbers
        select = self._selector.select  # type: ignore[attr-defined]

        def jump(timeout: float | None = None) -> Any:
            if timeout is None:
                raise AssertionError("all tasks wait for something that never comes")
            self._now += timeout
            return select(0)

        self._selector.select = jump  # type: ignore[attr-defined]

    def time(self) -> float:
        return self._now


def run_instantly(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in which no thread and no socket is needed. Fails if everything waits for ever."""
    with asyncio.Runner(loop_factory=_InstantLoop) as runner:
        return runner.run(main)
