"""Long computations in a thread, which stop early if the asyncio task that waits for them is cancelled.

This module does not depend on the computation.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["StopFlag", "run_cancellable", "run_to_completion"]

T = TypeVar("T")


class StopFlag:
    """Whether a computation is to stop early. Set by the event loop, read by the thread."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Stop after the current item."""
        self._event.set()

    @property
    def is_set(self) -> bool:
        """Whether the computation is to stop."""
        return self._event.is_set()

    def until_set(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until the flag is set. After that, no further item is taken from the iterable."""
        if self._event.is_set():
            return
        for item in items:
            yield item
            if self._event.is_set():
                return


async def run_cancellable(work: Callable[[StopFlag], T]) -> T:
    """Run `work` in a thread. If the caller is cancelled, CancelledError is raised at once and the flag is set.

    The result of work that was stopped early is discarded.
    """
    stop = StopFlag()
    try:
        return await asyncio.to_thread(work, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


async def run_to_completion(work: Callable[[StopFlag], T]) -> T:
    """Run `work` in a thread and wait for its end, even if the caller is cancelled.

    A cancellation that arrives meanwhile is raised at the next `await` of the task.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, StopFlag()))
    cancelled = False
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and (task := asyncio.current_task()) is not None:
        task.cancel()
    return running.result()
