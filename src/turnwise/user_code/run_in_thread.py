"""Sync functions of users, run beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from turnwise.errors import Failed, boundary, failed_by
from turnwise.user_code import main_thread
from turnwise.user_code.main_thread import MainThreadNeeded

__all__ = ["run_in_thread"]

T = TypeVar("T")


async def run_in_thread(function: Callable[[], T], *, name: str, kind: str) -> T:
    """Run a sync function in a daemon thread of its own, so that it may block, hang or raise whatever it likes.

    Not an executor: a call that hangs would take one of its workers for good, and hold up the interpreter's exit. The function
    sees the context variables of whoever awaits this, who sees what the function has set.

    A function that sets a signal handler (`signal.alarm` needs one) is stopped there, and runs in the event loop's own thread:
    this time and ever after, since Python allows it in the main thread only.

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
            tell(future.set_exception, failed)
        except BaseException as error:  # on the loop it would end the run, and in a thread nobody would hear of it
            tell(future.set_exception, error if isinstance(error, MainThreadNeeded) else failed_by(error, kind))
        else:
            tell(future.set_result, result)

    def tell(settle: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be over by now, and nobody waits
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(value))

    threading.Thread(target=work, name=f"{kind}-{name}", daemon=True).start()
    try:
        return await future
    except MainThreadNeeded:
        return main_thread.run(function, name=name, kind=kind)
    finally:
        if future.done():
            _take_over(context)


def _take_over(context: contextvars.Context) -> None:
    """What was set in the thread is set here too."""
    for variable, value in context.items():
        if variable.get(None) is not value:
            variable.set(value)
