"""Event loops in threads of their own, for code that must not share the loop of the conversations.

`ThreadLoop` is one such loop. `OwnLoop` gives one conversation a loop for the `async` methods of users that block: they hold up
their own conversation only. It knows nothing of what is called; limits and cancellation are those of `calls`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextvars import ContextVar
from typing import Any, TypeVar

from turnwise.errors import OWN_CODE, ConfigError, boundary
from turnwise.user_code.calls import GRACE, forget

T = TypeVar("T")

_JOIN_SECONDS = 15.0


class ThreadLoop:
    """An event loop in a daemon thread. All calls of `run` share one context."""

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

    def start(
        self, function: Callable[[], Awaitable[T]], *, kind: str, context: contextvars.Context
    ) -> tuple[Future[T], Callable[[], None]]:
        """Begin to call and await a function in the thread's event loop, with the variables of `context`.

        Returns a future, which is done when the call has really ended, and a function that cancels the call.
        """
        ended: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        async def call() -> T:
            with boundary(kind):
                return await function()

        def end(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                ended.cancel()
                ended.set_running_or_notify_cancel()
            elif (error := task.exception()) is not None:
                ended.set_exception(error)
            else:
                ended.set_result(task.result())

        def begin() -> None:
            tasks.append(task := self._loop.create_task(call(), context=context))
            task.add_done_callback(end)

        def cancel() -> None:
            for task in tasks:
                task.cancel()

        def cancel_soon() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(cancel)

        self._loop.call_soon_threadsafe(begin)
        return ended, cancel_soon

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


class OwnLoop:
    """The event loop of one conversation, in a thread that begins with the first call and ends with the last one after `end`.

    A call that is cancelled has a moment to end. If it goes on (`time.sleep(1000)`), it keeps its thread, and later calls of the
    conversation get another one, so that what releases the user's objects does not wait for it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: ThreadLoop | None = None
        """The thread of the next call."""
        self._calls: dict[ThreadLoop, int] = {}
        """The calls that have not ended, by thread."""
        self._over = False
        self._lock = threading.Lock()

    @property
    def inside(self) -> bool:
        """Whether the caller is in a thread of this conversation."""
        return any(thread.inside for thread in list(self._calls))

    async def run(self, function: Callable[[], Awaitable[T]], *, kind: str) -> T:
        """Call and await a function in the conversation's thread, with the context variables of the caller, which receives those
        that the function sets. Raises Failed, of the kind `kind`.
        """
        context = contextvars.copy_context()
        thread = self._take()
        ended, cancel = thread.start(function, kind=kind, context=context)
        ended.add_done_callback(lambda _: self._ended(thread))
        waiting = asyncio.wrap_future(ended)
        waiting.add_done_callback(forget)
        try:
            return await asyncio.shield(waiting)
        except asyncio.CancelledError:
            cancel()
            try:
                await asyncio.wait({waiting}, timeout=GRACE / 2)
            finally:
                if not waiting.done():
                    self._leave(thread)
            raise
        finally:
            if waiting.done():
                copy_variables(context)

    def end(self) -> None:
        """The conversation has ended: the thread ends too, when no call runs in it. A later call has a thread of its own."""
        with self._lock:
            self._over = True
            self._retire(self._thread)

    def _take(self) -> ThreadLoop:
        with self._lock:
            if self._thread is None:
                self._thread = ThreadLoop(self._name)
            self._calls[self._thread] = self._calls.get(self._thread, 0) + 1
            return self._thread

    def _leave(self, thread: ThreadLoop) -> None:
        """Use the thread for no further call."""
        with self._lock:
            if self._thread is thread:
                self._thread = None
            self._retire(thread)

    def _ended(self, thread: ThreadLoop) -> None:
        with self._lock:
            self._calls[thread] -= 1
            self._retire(thread)

    def _retire(self, thread: ThreadLoop | None) -> None:
        """Stop a thread in which no call runs or will begin. The caller holds the lock."""
        if thread is None or self._calls.get(thread) or (thread is self._thread and not self._over):
            return
        if self._thread is thread:
            self._thread = None
        self._calls.pop(thread, None)
        thread.stop(wait=False)


own_loop: ContextVar[OwnLoop | None] = ContextVar("turnwise_own_loop", default=None)
"""The loop in which the `async` methods of the conversation run; None: the loop of all conversations."""


@contextlib.contextmanager
def ending(loop: OwnLoop | None) -> Iterator[None]:
    """Afterwards, the conversation's own loop has ended, if it has one. For the `close` of an environment."""
    try:
        yield
    finally:
        if loop is not None:
            loop.end()


async def call_async(function: Callable[[], Awaitable[T]], *, kind: str) -> T:
    """Await what a user's function returns: in the conversation's own loop, if it has one.

    Raises what the function raises; from the own loop as Failed, of the kind `kind`.
    """
    loop = own_loop.get()
    return await function() if loop is None or loop.inside else await loop.run(function, kind=kind)


def refuse_unused_thread(name: str, methods: list[Callable[..., Any]]) -> None:
    """Refuse `environment.arguments.thread` if none of the methods is an `async` method of a user. Raises ConfigError."""
    if not any(inspect.iscoroutinefunction(method) and not _is_own(method) for method in methods):
        raise ConfigError(
            f"environment.arguments.thread has no effect: {name} has no `async` method, and methods without `async` always run "
            f"in threads; remove it"
        )


def _is_own(method: Callable[..., Any]) -> bool:
    """Whether a function is ours: a default of a base class, which never blocks."""
    file = getattr(getattr(inspect.unwrap(method), "__code__", None), "co_filename", "")
    return os.path.realpath(file).startswith(OWN_CODE)


def copy_variables(context: contextvars.Context) -> None:
    """Set the variables that were set in the context in the caller's context too."""
    for variable, value in context.items():
        if variable.get(None) is not value:
            variable.set(value)
