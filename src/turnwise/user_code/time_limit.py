"""Interrupts sync functions of users that run in the main thread and take too long."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["Interrupted", "time_limit"]


class Interrupted(BaseException):
    """The code took longer than its time limit. Not an Exception, so that `except Exception` does not catch it."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise Interrupted in the code inside when `seconds` are over, and again at the end if the code has caught it.

    Uses SIGALRM. There is no limit in another thread than the main thread, on systems without SIGALRM, if another alarm is
    set already, and after the code inside has set an alarm of its own.
    """
    if seconds is None or not _available():
        yield
        return
    inside, reached = True, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal reached
        reached = True
        if inside:
            raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        try:
            inside = False
        finally:  # also if the alarm goes off in the line above
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous)
    if reached:
        raise Interrupted


def _available() -> bool:
    in_main_thread = threading.current_thread() is threading.main_thread()
    return in_main_thread and hasattr(signal, "SIGALRM") and signal.getitimer(signal.ITIMER_REAL)[0] == 0
