"""Long computations in a thread, which end early where their task is cancelled.

It knows nothing of what is computed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

__all__ = ["Halt", "halted_if_cancelled", "to_the_end"]

T = TypeVar("T")


class Halt:
    """Whether a computation is to end early. Set by the event loop, read by the thread."""

    def __init__(self) -> None:
        self._set = threading.Event()

    def set(self) -> None:
        """End after the current piece."""
        self._set.set()

    def until(self, pieces: Iterable[T]) -> Iterator[T]:
        """The pieces, until it is set: the next piece is not asked for then."""
        if self._set.is_set():
            return
        for piece in pieces:
            yield piece
            if self._set.is_set():
                return


async def halted_if_cancelled(work: Callable[[Halt], T]) -> T:
    """Run `work` in a thread. A cancellation is raised at once, and `work` ends after its current piece.

    Nobody sees the result of work that ended early.
    """
    halt = Halt()
    try:
        return await asyncio.to_thread(work, halt)
    except asyncio.CancelledError:
        halt.set()
        raise


async def to_the_end(work: Callable[[Halt], T]) -> T:
    """Run `work` in a thread, and wait for its end. A cancellation meanwhile is raised at the task's next wait."""
    running = asyncio.ensure_future(asyncio.to_thread(work, Halt()))
    cancelled = False
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and (task := asyncio.current_task()) is not None:
        task.cancel()
    return running.result()
