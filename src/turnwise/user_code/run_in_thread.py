"""Runs sync functions of users in threads, so that they do not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar

from turnwise.errors import Failed, boundary, failed_by
from turnwise.user_code import main_thread, threads
from turnwise.user_code.main_thread import MainThreadNeeded

__all__ = ["run_in_thread"]

T = TypeVar("T")


async def run_in_thread(function: Callable[[], T], *, name: str, kind: str) -> T:
    """Run a sync function in a daemon thread (`threads`), so that it may block, never return, or raise.

    No executor is used: a call that does not return would occupy a worker forever and delay the interpreter's exit. The
    thread runs other functions later: what the function sets for its thread alone (`threading.local`) may be seen there. The
    function has the context variables of the caller, and the caller receives the variables that the function sets.

    Python allows signal handlers in the main thread only. A function that sets one (`signal.alarm` needs it) is stopped and run
    again in the event loop's thread, now and in all later calls.

    Raises Failed, of the kind `kind`.
    """
    if main_thread.is_needed(kind, name):
        return main_thread.run(function, name=name, kind=kind)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def work() -> None:
        try:
            with main_thread.required(), boundary(kind):
                result = context.run(function)
        except Failed as failed:
            resolve(future.set_exception, failed)
        except (
            BaseException
        ) as error:  # raised in the event loop it would end the run, and in a thread it would be lost
            resolve(future.set_exception, error if isinstance(error, MainThreadNeeded) else failed_by(error, kind))
        else:
            resolve(future.set_result, result)

    def resolve(set_outcome: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(lambda: None if future.done() else set_outcome(value))

    threads.start(work, name=f"{kind}-{name}")
    try:
        return await future
    except MainThreadNeeded:
        return main_thread.run(function, name=name, kind=kind)
    finally:
        if future.done():
            _copy_variables(context)


def _copy_variables(context: contextvars.Context) -> None:
    """Set the variables that were set in the thread in the caller's context too."""
    for variable, value in context.items():
        if variable.get(None) is not value:
            variable.set(value)
