"""The event loop in which a library runs its rollouts beside ours: one thread for all conversations of a source."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from turnwise.errors import Failed
from turnwise.user_code.calls import forget
from turnwise.user_code.thread_loops import ThreadLoop

T = TypeVar("T")

_CLEANING_SECONDS = 20.0
"""How long rollouts that were cancelled may take to release what they hold, such as sandboxes."""


class LibraryThread:
    """Runs coroutines of a library in a thread that begins with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadLoop | None = None
        self._running: set[Future[Any]] = set()

    async def run(self, function: Callable[[], Awaitable[T]]) -> T:
        """Await a function in the thread. If the caller is cancelled, the function is too; its cleaning goes on."""
        if self._thread is None:
            self._thread = ThreadLoop(self._name)
        ended, cancel = self._thread.start(function, kind="environment", context=contextvars.copy_context())
        self._running.add(ended)
        ended.add_done_callback(self._running.discard)
        waiting = asyncio.wrap_future(ended)
        waiting.add_done_callback(forget)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            cancel()
            raise

    async def close(self, release: Callable[[], Awaitable[Any]] | None = None) -> None:
        """Wait for rollouts that clean up, await `release` in the thread, and end it."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        # a copy, because rollouts leave the set in the other thread
        running = [asyncio.wrap_future(future) for future in list(self._running)]
        if running:
            await asyncio.wait(running, timeout=_CLEANING_SECONDS)
        try:
            if release is not None:
                async with asyncio.timeout(_CLEANING_SECONDS):
                    await thread.run(release, kind="environment")
        except (Failed, TimeoutError) as error:
            logging.getLogger(__name__).warning("%s was not closed: %s", self._name, error)
        finally:
            thread.stop(wait=False)
