"""An event loop in a daemon thread, and an environment that runs in such a loop.

Code that blocks there does not block other conversations. A call that times out is cancelled; if it does not react, the
conversation ends without waiting for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from turnwise.environments.environment import Environment, FinalReward
from turnwise.errors import boundary
from turnwise.types import Opening, Reply, Row, Turn

__all__ = ["ThreadLoop", "ThreadedEnvironment"]

T = TypeVar("T")

_JOIN_SECONDS = 15.0


class ThreadLoop:
    """An event loop in a daemon thread. All calls share one context."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._context = contextvars.copy_context()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the thread's event loop."""
        return self._context.copy().run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    async def run(self, function: Callable[[], Awaitable[T]], *, kind: str) -> T:
        """Call and await a function in the thread's event loop. Returns its result. Raises Failed, of the kind `kind`."""

        async def call() -> T:
            with boundary(kind):
                return await function()

        async def in_context() -> T:
            # a task for each call; all calls share one context
            return await asyncio.get_running_loop().create_task(call(), context=self._context)

        return await asyncio.wrap_future(self.submit(in_context()))

    @property
    def inside(self) -> bool:
        """Whether the caller is in this thread."""
        return threading.current_thread() is self._thread

    def stop(self, *, wait: bool = True) -> None:
        """Stop the loop and its thread. With `wait`, wait until the thread has ended."""
        with contextlib.suppress(RuntimeError):  # the loop is already closed
            self._loop.call_soon_threadsafe(self._loop.stop)
        if wait and not self.inside:
            self._thread.join(timeout=_JOIN_SECONDS)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


class ThreadedEnvironment:
    """Runs another environment in the event loop of a separate thread, so that its `async` methods may block.

    The other environment is also made in that thread, when the conversation begins.
    """

    def __init__(self, make: Callable[[], Environment], *, name: str = "environment") -> None:
        self._make = make
        self._name = name
        self._thread: ThreadLoop | None = None
        self._environment: Environment | None = None

    async def begin(self, row: Row) -> Opening:
        self._thread = ThreadLoop(self._name)

        async def begin() -> Opening:
            self._environment = self._make()
            return await self._environment.begin(row)

        return await self._thread.run(begin, kind="environment")

    async def step(self, turn: Turn) -> Reply:
        assert self._thread is not None, "step before begin"
        return await self._thread.run(lambda: self._begun_environment.step(turn), kind="environment")

    async def final_reward(self) -> float:
        if self._thread is None or not isinstance(self._environment, FinalReward):
            return 0.0
        return await self._thread.run(self._environment.final_reward, kind="environment")

    async def close(self) -> None:
        if self._thread is None:
            return

        async def close() -> None:
            if self._environment is not None:
                await self._environment.close()

        try:
            await self._thread.run(close, kind="environment")
        finally:
            self._thread.stop(wait=False)

    @property
    def _begun_environment(self) -> Environment:
        assert self._environment is not None, "step before begin"
        return self._environment
