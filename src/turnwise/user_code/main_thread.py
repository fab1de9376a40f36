"""Runs sync functions that set signal handlers (`signal.alarm` needs one) in the main thread.

A function is recognized when it calls `signal.signal` in one of our threads. Python raises a ValueError there, which libraries
may catch (math-verify then returns 0). Instead, the call is stopped with a BaseException, and the function is run again in the
main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from turnwise.errors import Failed
from turnwise.types import Failure
from turnwise.user_code.calls import call_blocking

__all__ = ["MainThreadNeeded", "is_needed", "required", "run"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_thread_data = threading.local()
_needed: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""Kind and name of the functions that need the main thread, by event loop: each run has its own."""
_installing = threading.Lock()


class MainThreadNeeded(BaseException):
    """A function has set a signal handler in another thread than the main thread."""


def is_needed(kind: str, name: str) -> bool:
    """Whether a function of this name has set a signal handler before."""
    return (kind, name) in _needed.get(asyncio.get_running_loop(), ())


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Detect whether the code inside, which runs in one of our threads, sets a signal handler.

    Raises MainThreadNeeded if it does, even if the code inside has caught that exception.
    """
    _install()
    _thread_data.noticed = False
    try:
        yield
    finally:
        noticed, _thread_data.noticed = _thread_data.noticed, None
        if noticed:
            raise MainThreadNeeded


def run(function: Callable[[], T], *, name: str, kind: str) -> T:
    """Run a function in the event loop's thread, which must be the main thread.

    Raises Failed, of the kind `kind`.
    """
    if threading.current_thread() is not threading.main_thread():
        message = (
            f"{name} sets a signal handler, which Python allows in the main thread only, and this run is in another thread: "
            f"start the run in the main thread, or remove the handler"
        )
        raise Failed(Failure(kind, message))
    known = _needed.setdefault(asyncio.get_running_loop(), set())
    if (kind, name) not in known:
        known.add((kind, name))
        _log.info(
            "%s sets a signal handler: from now on it runs in the main thread, and all conversations wait for each call",
            name,
        )
    handler = signal.getsignal(signal.SIGALRM)
    try:
        return call_blocking(function, kind=kind, name=name)
    finally:  # an alarm that is still set must not go off in our own code
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _install() -> None:
    with _installing:
        if getattr(signal.signal, "__module__", None) == __name__:
            return
        set_handler = signal.signal

        @functools.wraps(set_handler, assigned=("__name__", "__doc__"))
        def checked(signalnum: Any, handler: Any, /) -> Any:
            if getattr(_thread_data, "noticed", None) is not None and threading.current_thread() is not _main:
                _thread_data.noticed = True
                raise MainThreadNeeded
            return set_handler(signalnum, handler)

        signal.signal = checked


_main = threading.main_thread()
