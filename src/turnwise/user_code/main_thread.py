"""Sync functions that only work in the main thread: those that set signal handlers, as `signal.alarm` needs them.

Whether a function is of that kind shows when it calls `signal.signal` in a thread of ours: Python refuses that with a
ValueError, which libraries catch (math-verify then gives 0). Here the call is stopped with an exception that is no
`Exception`, and the function is run again in the main thread.
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
_here = threading.local()
_needed: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, set[tuple[str, str]]] = weakref.WeakKeyDictionary()
"""Kind and name of the functions that have needed the main thread, for each event loop: another run has other functions."""
_installing = threading.Lock()


class MainThreadNeeded(BaseException):
    """A function has set a signal handler outside of the main thread."""


def is_needed(kind: str, name: str) -> bool:
    """Whether a function of this name has needed the main thread before."""
    return (kind, name) in _needed.get(asyncio.get_running_loop(), ())


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Notice whether what runs inside, in a thread of ours, sets a signal handler.

    Raises MainThreadNeeded if it did, also where the code inside has caught that.
    """
    _install()
    _here.noticed = False
    try:
        yield
    finally:
        noticed, _here.noticed = _here.noticed, None
        if noticed:
            raise MainThreadNeeded


def run(function: Callable[[], T], *, name: str, kind: str) -> T:
    """Run it in the event loop's thread, which is to be the main thread.

    Raises Failed, of the kind `kind`.
    """
    if threading.current_thread() is not threading.main_thread():
        message = (
            f"{name} sets a signal handler, which Python allows in the main thread only, and this run is in another"
        )
        raise Failed(Failure(kind, message))
    known = _needed.setdefault(asyncio.get_running_loop(), set())
    if (kind, name) not in known:
        known.add((kind, name))
        _log.info(
            "%s sets a signal handler: from now on it runs in the main thread, where everybody waits for it", name
        )
    handler = signal.getsignal(signal.SIGALRM)
    try:
        return call_blocking(function, kind=kind, name=name)
    finally:  # an alarm that is left over must not ring in our own code
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def _install() -> None:
    with _installing:
        if getattr(signal.signal, "__module__", None) == __name__:
            return
        set_handler = signal.signal

        @functools.wraps(set_handler, assigned=("__name__", "__doc__"))
        def checked(signalnum: Any, handler: Any, /) -> Any:
            if getattr(_here, "noticed", None) is not None and threading.current_thread() is not _main:
                _here.noticed = True
                raise MainThreadNeeded
            return set_handler(signalnum, handler)

        signal.signal = checked


_main = threading.main_thread()
