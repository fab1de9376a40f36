"""Interrupts sync functions of users that run in the main thread and take too long."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["Interrupted", "call_within"]

T = TypeVar("T")


class Interrupted(BaseException):
    """The code took longer than its time limit. Not an Exception, so that `except Exception` does not catch it."""


def call_within(seconds: float | None, function: Callable[[], T]) -> T:
    """Call a function. Raises Interrupted in the function when `seconds` are over, and again here if the function has caught it.

    Uses SIGALRM. There is no limit in another thread than the main thread, on systems without SIGALRM, if another alarm is
    set already, and after the function has set an alarm of its own.
    """
    if seconds is None or not _IN_POSIX or threading.current_thread() is not threading.main_thread():
        return function()
    inside, reached = True, False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal reached
        reached = True
        if inside:
            raise Interrupted

    remaining, interval = signal.setitimer(signal.ITIMER_REAL, 0)
    if remaining:  # an alarm of other code: it stays as it was
        signal.setitimer(signal.ITIMER_REAL, remaining, interval)
        return function()
    previous = _set_handler(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        result = function()
    finally:
        try:
            inside = False
        finally:  # also if the alarm goes off in the line above
            signal.setitimer(signal.ITIMER_REAL, 0)
            _set_handler(signal.SIGALRM, previous)
    if reached:
        raise Interrupted
    return result


_IN_POSIX = hasattr(signal, "SIGALRM")

# `signal.signal` without its conversion of handlers to enums and back, which takes longer than a small reward function
_set_handler: Callable[[int, Any], Any] = importlib.import_module("_signal").signal
