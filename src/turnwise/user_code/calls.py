"""Calls the code of users (environments, tools, reward functions) so that it can neither block nor end a run.

Each call runs in a task of its own: a call that cancels itself is a failure of that call, and a call that does not end when it
is cancelled is abandoned. All calls of one conversation share one `contextvars.Context`. `loop_watch` measures how long a call
blocks the event loop; that time counts for the deadlines of its own conversation only (`deadlines`).

This module knows nothing of what is called. Sync functions that may block run in threads: `run_in_thread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from turnwise.errors import Failed, boundary, failed_by
from turnwise.types import Failure
from turnwise.user_code.deadlines import first_end, limits, shareable, shared_context, stopwatch
from turnwise.user_code.loop_watch import loop_watch
from turnwise.user_code.time_limit import Interrupted

__all__ = [
    "call",
    "call_blocking",
    "forget",
    "leave_running",
    "own_context",
    "spawn",
    "wait_for_left",
]

T = TypeVar("T")

GRACE = 1.0
"""Seconds that a cancelled call has to clean up, before it is abandoned."""


class _Driven:
    """Awaits what a user's function returns, measures each stretch between two awaits, and can abandon the function."""

    __slots__ = ("_function", "_limits", "_name", "abandoned")

    def __init__(self, function: Callable[[], Awaitable[Any]], name: str) -> None:
        self._function = function
        self._limits = limits.get()
        self._name = name
        self.abandoned = False

    def __await__(self) -> Generator[Any, Any, Any]:
        watch, own_time, coroutine = loop_watch(), stopwatch(), _awaited(self._function)
        error: BaseException | None = None
        while True:
            stretch = watch.begin(self._name, until=first_end(self._limits))
            try:
                waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as result:
                return result.value
            finally:
                blocked = watch.end(stretch)
                if own_time is not None:
                    own_time.blocked += blocked
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                if self.abandoned or isinstance(thrown, GeneratorExit):
                    with contextlib.suppress(RuntimeError):  # it ignores even this; it is not run any more
                        coroutine.close()
                    raise
                error = thrown

    async def run(self, kind: str) -> Any:
        """The result of the function. Raises Failed, of the kind `kind`."""
        limits.set(self._limits)  # the context of the conversation does not have those of the caller
        with boundary(kind):
            return await self


async def _awaited(function: Callable[[], Awaitable[T]]) -> T:
    return await function()


def spawn(
    coroutine: Coroutine[Any, Any, T], *, context: Context | None = None, name: str | None = None
) -> asyncio.Task[T]:
    """Start a task in the conversation's context, or in one that `own_context` has made.

    If the conversation ends first, asyncio does not log the task's exception.
    """
    task = asyncio.get_running_loop().create_task(coroutine, context=context or shared_context(), name=name)
    task.add_done_callback(forget)
    return task


def own_context() -> Context:
    """A copy of the conversation's context, so that calls that run at the same time do not see each other's variables."""
    return shareable((shared_context() or contextvars.copy_context()).copy())


async def call(function: Callable[[], Awaitable[T]], *, kind: str, name: str) -> T:
    """Await what a user's function returns, in a task of its own.

    If the caller is cancelled, so is the task. If the task has not ended `GRACE` seconds later, it is abandoned.

    Raises Failed, of the kind `kind`, whatever the function raises. Raises TimeoutError if the function blocks the event loop
    when a limit of its conversation is over: it is interrupted then, in the main thread.
    """

    driven = _Driven(function, name)
    task = spawn(driven.run(kind), name=name)
    try:
        await _end_of(task)
    finally:
        if not task.done():
            await _abandon(task, driven)
    if task.cancelled():  # by itself: the caller has not cancelled it
        raise Failed(Failure(kind, "CancelledError: the call cancelled itself, or awaited a task that was cancelled"))
    try:
        return task.result()
    except GeneratorExit as error:
        raise failed_by(error, kind) from error
    except Failed as failed:
        if isinstance(failed.__cause__, Interrupted) and any(limit.over() for limit in limits.get()):
            raise TimeoutError from failed
        raise


async def _end_of(task: asyncio.Task[Any]) -> None:
    """Wait until the task has ended, without cancelling it if the caller is cancelled: `asyncio.wait` of one task."""
    ended = task.get_loop().create_future()

    def note(_: asyncio.Task[Any]) -> None:
        if not ended.done():
            ended.set_result(None)

    task.add_done_callback(note)
    try:
        await ended
    finally:
        task.remove_done_callback(note)


_patient: weakref.WeakKeyDictionary[asyncio.Task[Any], _Driven | None] = weakref.WeakKeyDictionary()
"""Calls that are not abandoned after `GRACE`. The value is set when such a call has outlasted it."""


def leave_running() -> asyncio.Task[Any] | None:
    """Keep the current `call` from being abandoned: if it is cancelled and takes longer than `GRACE`, it continues to run.

    Called inside the call. Returns its task, for `wait_for_left`.
    """
    task = asyncio.current_task()
    if task is not None:
        _patient[task] = None
    return task


async def wait_for_left(task: asyncio.Task[Any], seconds: float) -> None:
    """Wait for a call that was left running, and abandon it if it has not ended after `seconds`."""
    try:
        await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done() and (driven := _patient.get(task)) is not None:
            driven.abandoned = True
            task.cancel()


async def _abandon(task: asyncio.Task[Any], driven: _Driven) -> None:
    task.cancel()
    try:
        await asyncio.wait({task}, timeout=GRACE)
    finally:
        if task in _patient:
            _patient[task] = driven
        elif not task.done():
            driven.abandoned = True
            task.cancel()


def call_blocking(function: Callable[[], T], *, kind: str, name: str, shared: bool = False) -> T:
    """Call a sync function in the event loop's thread. Its time is measured like that of an async call.

    `shared` runs the function in the conversation's context, for callers outside of it.

    Raises Failed, of the kind `kind`, whatever the function raises.
    """
    watch, own_time, context = loop_watch(), stopwatch(), shared_context()
    stretch = watch.begin(name)
    try:
        with boundary(kind):
            return context.run(function) if shared and context is not None else function()
    except (asyncio.CancelledError, GeneratorExit) as error:  # raised by the function: a sync call cannot be cancelled
        raise failed_by(error, kind) from error
    finally:
        blocked = watch.end(stretch)
        if own_time is not None:
            own_time.blocked += blocked


def forget(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a finished task as seen, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
