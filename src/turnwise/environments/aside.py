"""Sync functions of users, run beside the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from turnwise.errors import Failed, boundary
from turnwise.types import Failure

__all__ = ["aside"]

T = TypeVar("T")


async def aside(function: Callable[[], T], *, name: str, kind: str) -> T:
    """Run a sync function in a daemon thread of its own, so that it may block, hang or raise whatever it likes.

    Not an executor: a call that hangs would take one of its workers for good, and hold up the interpreter's exit.

    Raises Failed, of the kind `kind`.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def work() -> None:
        try:
            with boundary(kind):
                result = function()
        except Failed as failed:
            tell(future.set_exception, failed)
        except BaseException as error:  # on the loop it would end the run, and in a thread nobody would hear of it
            failed = Failed(Failure(kind, f"{type(error).__name__}: {error}"))
            failed.__cause__ = error
            tell(future.set_exception, failed)
        else:
            tell(future.set_result, result)

    def tell(settle: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be over by now, and nobody waits
            loop.call_soon_threadsafe(lambda: None if future.done() else settle(value))

    threading.Thread(target=work, name=f"{kind}-{name}", daemon=True).start()
    return await future
