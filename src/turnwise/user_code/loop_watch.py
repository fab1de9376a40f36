"""Measures how long the code of users blocks the event loop, and where.

User code runs in stretches: from one `await` to the next. While a stretch runs, no other conversation continues. The time of
all stretches is added up, and a stretch that blocks the loop for long is reported with its function and line. A thread looks
at the event loop's stack to find the line.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import signal
import sys
import sysconfig
import threading
import time
import weakref
from types import FrameType
from typing import Any, NamedTuple

from turnwise.errors import OWN_CODE
from turnwise.user_code.time_limit import Interrupted

__all__ = ["LoopWatch", "Stretch", "loop_watch"]

BLOCKED = 0.25
"""Seconds without an `await` after which a call is reported as blocking the event loop."""
STUCK = 10.0
"""Seconds after which a call that still blocks the event loop is reported while it does so."""
_INTERVAL = 0.05
"""Seconds between two looks of the watching thread."""
_MAX_REPORTS = 100
_log = logging.getLogger(__name__)


class _CollectorTime:
    """Seconds that Python's garbage collector has taken in this process, for `gc.callbacks`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        else:
            self.seconds += time.monotonic() - self._began


collector_time = _CollectorTime()
gc.callbacks.append(collector_time)


class Stretch(NamedTuple):
    """A running stretch of a call."""

    name: str
    """Of the call."""
    began: float
    """`time.monotonic()`."""
    outer: Stretch | None
    """The stretch inside which this one began, if any."""
    thread_time: float
    """CPU seconds of the event loop's thread when it began."""
    collected: float
    """Seconds of garbage collection when it began."""
    until: float = math.inf
    """`time.monotonic()` at which a limit of its conversation is over: the call is then interrupted."""


class LoopWatch:
    """How long the code of users has blocked one event loop."""

    def __init__(self) -> None:
        self.blocked = 0.0
        """Seconds, of all calls together, short ones included."""
        self._loop_thread = threading.get_ident()
        self._running: Stretch | None = None
        """The innermost stretch that runs now. Read by the watching thread."""
        self._seen: tuple[Stretch, str] | None = None
        """The stretch that the watching thread has looked at last, and the line where it was. Written by that thread."""
        self._reported: set[str] = set()
        self._watcher: threading.Thread | None = None
        self._interrupted = 0.0
        """When the watching thread has last interrupted a call, as `time.monotonic()`."""
        self._interrupts = _set_interrupt(self)

    def begin(self, name: str, *, until: float = math.inf) -> Stretch:
        """A stretch of the call `name` begins, which is interrupted at `until`. What is returned is handed to `end`."""
        if self._watcher is None:
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="loop-watch", daemon=True)
            self._watcher.start()
        stretch = Stretch(name, time.monotonic(), self._running, time.thread_time(), collector_time.seconds, until)
        self._running = stretch
        return stretch

    def end(self, stretch: Stretch) -> float:
        """The stretch has ended. Returns the seconds for which its conversation is responsible."""
        seconds = time.monotonic() - stretch.began
        self._running = stretch.outer
        if stretch.outer is not None:  # the outer stretch includes this time
            return 0.0
        self.blocked += seconds
        # a garbage collection of a large process takes a second, and begins in whichever call allocates next
        seconds = max(0.0, seconds - (collector_time.seconds - stretch.collected))
        if seconds >= BLOCKED:
            # if neither the watching thread ran nor this one computed, the machine was busy with other processes
            computed = time.thread_time() - stretch.thread_time >= seconds / 2
            if computed or self._line_of(stretch):
                self._report(stretch, seconds)
        return seconds

    def look(self) -> None:
        """Note the line of the call that blocks the event loop now. Runs in the watching thread."""
        stretch = self._running
        if stretch is None:
            return
        now = time.monotonic()
        seconds = now - stretch.began
        if now >= stretch.until and now - self._interrupted >= _PAUSE and self._interrupts:
            self._interrupted = now
            signal.pthread_kill(self._loop_thread, _INTERRUPT)
        if seconds >= BLOCKED / 2 and (not self._line_of(stretch) or seconds >= STUCK):
            frame = sys._current_frames().get(self._loop_thread)
            if frame is not None and self._running is stretch:
                self._seen = (stretch, _line(frame))
        if seconds >= STUCK:
            self._report(stretch, seconds, still=True)

    def interrupt(self, frame: FrameType | None) -> None:
        """Raise Interrupted in the call that runs now, if its time is over. Runs in the loop's thread, in a signal handler."""
        stretch = self._running
        own = frame is not None and frame.f_code.co_filename == __file__
        if stretch is not None and not own and time.monotonic() >= stretch.until:
            raise Interrupted

    def _line_of(self, stretch: Stretch) -> str:
        seen = self._seen
        return seen[1] if seen is not None and seen[0] is stretch else ""

    def _report(self, stretch: Stretch, seconds: float, *, still: bool = False) -> None:
        """Log a warning, once for each line."""
        line = self._line_of(stretch)
        key = f"{still}{line or stretch.name}"
        if key in self._reported or len(self._reported) > _MAX_REPORTS:
            return
        self._reported.add(key)
        _log.warning(
            "%s %s the event loop for %.1f s%s, and all other conversations waited (their deadlines are extended by this "
            "time). Use `await` instead of blocking calls; or run the code in a thread: write `def` instead of `async def`, set "
            "environment.thread: true for an environment of turnwise, thread: true for a tool, or write "
            "`await asyncio.to_thread(function, ...)` around the blocking call (docs/environments.md, Errors)",
            stretch.name,
            "has blocked" if still else "blocked",
            seconds,
            f" in {line}" if line else "",
        )


def _watch(reference: weakref.ref[LoopWatch]) -> None:
    while True:
        time.sleep(_INTERVAL)
        watch = reference()
        if watch is None:
            return
        watch.look()
        del watch


_INTERRUPT: Any = getattr(signal, "SIGRTMIN", 0) + 5 if hasattr(signal, "SIGRTMIN") else None
"""The signal that interrupts a call: unlike an exception that is set for a thread, it also ends `time.sleep`. None: not here."""
_PAUSE = 1.0
"""Seconds between two interruptions of a call that has caught the first one."""


def _set_interrupt(watch: LoopWatch) -> bool:
    """Let the signal interrupt calls in the event loop of `watch`. Returns False where this is not possible."""
    if _INTERRUPT is None or threading.current_thread() is not threading.main_thread():
        return False
    reference = weakref.ref(watch)

    def handler(number: int, frame: FrameType | None) -> None:
        if (watch := reference()) is not None:
            watch.interrupt(frame)

    signal.signal(_INTERRUPT, handler)
    return True


_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")})


def _line(innermost: FrameType) -> str:
    """The innermost line of a user's own code: `solve (tools.py:12)`."""
    frame: FrameType | None = innermost
    while frame is not None:
        file = os.path.realpath(frame.f_code.co_filename)
        if not file.startswith((*_LIBRARIES, OWN_CODE)):
            break
        frame = frame.f_back
    frame = frame or innermost
    return f"{frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})"


_watches: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWatch] = weakref.WeakKeyDictionary()


def loop_watch() -> LoopWatch:
    """The watch of the running event loop."""
    loop = asyncio.get_running_loop()
    watch = _watches.get(loop)
    if watch is None:
        watch = _watches[loop] = LoopWatch()
    return watch
