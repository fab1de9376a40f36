"""The pool in which verl's service tools run sync functions: `execution_pool.execute.remote(function, ...)`, without Ray."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["ExecutionPool", "PoolMode", "Rate", "init_execution_pool"]

T = TypeVar("T")


class PoolMode(Enum):
    """The way in which functions are run. As in verl, only threads are supported."""

    ThreadMode = 1
    ProcessMode = 2


class Rate:
    """Allows at most `per_second` calls per second over all conversations, evenly spaced. None means no limit."""

    def __init__(self, per_second: float | None) -> None:
        self._pause = 1.0 / per_second if per_second else 0.0
        self._next = 0.0

    async def turn(self) -> None:
        """Wait until the next call may begin."""
        now = time.monotonic()
        mine, self._next = max(now, self._next), max(now, self._next) + self._pause
        if mine > now:
            await asyncio.sleep(mine - now)


class ExecutionPool:
    """Runs functions in threads: at most `workers` at the same time, at most `per_second` started per second."""

    def __init__(self, workers: int, per_second: float | None) -> None:
        self.execute = self
        """The pool itself, so that `pool.execute.remote(...)` works as with verl's Ray actor."""
        self._workers = workers
        self._rate = Rate(per_second)
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def remote(self, function: Callable[..., T], *arguments: Any, **keywords: Any) -> T:
        """Run a function and return its result. Raises Failed of kind `tool`, with the function's exception as the cause."""
        slot = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._workers))
        async with slot:
            await self._rate.turn()
            name = getattr(function, "__name__", type(function).__name__)
            return await run_in_thread(lambda: function(*arguments, **keywords), name=name, kind="tool")


def init_execution_pool(
    num_workers: int,
    enable_global_rate_limit: bool = True,
    rate_limit: float = 10,
    mode: PoolMode = PoolMode.ThreadMode,
) -> ExecutionPool:
    """Create a pool, with verl's arguments. Raises NotImplementedError for ProcessMode."""
    if mode is not PoolMode.ThreadMode:
        raise NotImplementedError("functions are run in threads: mode=PoolMode.ThreadMode")
    return ExecutionPool(num_workers, rate_limit if enable_global_rate_limit else None)
