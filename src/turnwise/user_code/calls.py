"""Runs the code of users (environments, tools, reward functions) so that it can neither hold up nor end a run.

Each call runs in a task of its own: a call that cancels itself is a failure of that call, and a call that does not end when it
is cancelled is abandoned. All calls of one conversation share one `contextvars.Context`. The time that a call blocks the event
loop is measured: it counts for the conversation that blocked it, and the deadlines of all others are extended by it.

This module knows nothing of what is called. Threads are in `environments.aside`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from contextvars import Context, ContextVar
from types import FrameType
from typing import Any, TypeVar

from turnwise.errors import OWN_CODE, Failed, boundary, failed_by
from turnwise.types import Failure

__all__ = [
    "Deadline",
    "call",
    "call_blocking",
    "conversation",
    "conversation_name",
    "deadline",
    "forget",
    "in_lockstep",
    "leave_running",
    "own_context",
    "spawn",
    "wait_for_left",
    "waiting_for_others",
]

T = TypeVar("T")
_Stretch = tuple[tuple[float, str] | None, tuple[float, str], float, float]

GRACE = 1.0
"""Seconds that a cancelled call has to clean up, before it is abandoned."""
BLOCKED = 0.25
"""Seconds without an `await` after which a call is reported as blocking the event loop."""
STUCK = 10.0
"""Seconds after which a call that still blocks the event loop is reported while it does so."""
_LOOK = 0.05
_log = logging.getLogger(__name__)


class _Account:
    """The time of one conversation: what does not count for its deadlines."""

    def __init__(self, name: str, loop: _Loop, *, lockstep: bool) -> None:
        self.name = name
        self.loop = loop
        self.lockstep = lockstep
        self.blocked = 0.0
        """Seconds for which this conversation blocked the event loop."""
        self._waited = 0.0
        self._waiting: list[tuple[float, float]] = []

    def excused(self) -> float:
        """Seconds until now that do not count: others blocked the event loop, or were waited for."""
        waiting = 0.0 if not self._waiting else self._since(self._waiting[0])
        return self._waited + waiting + self.loop.blocked - self.blocked

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        self._waiting.append((time.monotonic(), self.loop.blocked - self.blocked))
        try:
            yield
        finally:
            started = self._waiting.pop()
            if not self._waiting:
                self._waited += self._since(started)

    def _since(self, started: tuple[float, float]) -> float:
        """Seconds of waiting, those left out that are excused already because the event loop was blocked."""
        began, blocked = started
        return max(0.0, time.monotonic() - began - (self.loop.blocked - self.blocked - blocked))


class _Collecting:
    """Seconds that Python's garbage collector has taken in this process, for `gc.callbacks`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.monotonic()
        else:
            self.seconds += time.monotonic() - self._began


_collecting = _Collecting()
gc.callbacks.append(_collecting)


class _Loop:
    """How long the code of users has blocked one event loop, and where."""

    def __init__(self) -> None:
        self.blocked = 0.0
        """Seconds, of all calls together, short ones included."""
        self._thread = threading.get_ident()
        self._running: tuple[float, str] | None = None
        self._seen: tuple[float, str] | None = None
        """Since when the call has blocked that the watching thread has looked at last, and where it was."""
        self._told: set[str] = set()
        self._watching: threading.Thread | None = None

    def begin(self, name: str) -> _Stretch:
        """A stretch of a call between two awaits begins; whatever is returned is handed to `end`."""
        outer, running = self._running, (time.monotonic(), name)
        self._running = running
        if self._watching is None:
            self._watching = threading.Thread(target=_look, args=(weakref.ref(self),), name="loop-watch", daemon=True)
            self._watching.start()
        return outer, running, time.thread_time(), _collecting.seconds

    def end(self, stretch: _Stretch, account: _Account | None) -> None:
        """The stretch is over."""
        outer, (began, name), worked, collected = stretch
        seconds = time.monotonic() - began
        self._running = outer
        if outer is not None:  # it is a part of that one
            return
        self.blocked += seconds
        # a garbage collection of a large process takes a second, and begins in whichever call comes next
        seconds = max(0.0, seconds - (_collecting.seconds - collected))
        if account is not None:
            account.blocked += seconds
        if seconds >= BLOCKED and (self._was_seen(began) or time.thread_time() - worked >= seconds / 2):
            self._tell(name, seconds, began)
        # else the watching thread did not run either, and this one did not compute: the machine was busy with others

    def _was_seen(self, began: float) -> bool:
        return self._seen is not None and self._seen[0] == began

    def _tell(self, name: str, seconds: float, began: float, *, still: bool = False) -> None:
        seen = self._seen
        place = seen[1] if seen is not None and self._was_seen(began) else ""
        key = f"{still}{place or name}"
        if key in self._told or len(self._told) > 100:
            return
        self._told.add(key)
        _log.warning(
            "%s %s the event loop for %.1f s%s, and all other conversations waited for it (their deadlines are extended by "
            "that). Await instead of blocking, make it a sync function, or run it in a thread (docs/environments.md, "
            "What can go wrong)",
            name,
            "has blocked" if still else "blocked",
            seconds,
            f" in {place}" if place else "",
        )

    def look(self) -> None:
        """Note where the call is that blocks the event loop now."""
        running = self._running
        if running is None:
            return
        began, name = running
        seconds = time.monotonic() - began
        if seconds >= BLOCKED / 2 and (self._seen is None or self._seen[0] != began or seconds >= STUCK):
            frame = sys._current_frames().get(self._thread)
            if frame is not None and self._running is running:
                self._seen = (began, _place(frame))
        if seconds >= STUCK:
            self._tell(name, seconds, began, still=True)


def _look(of: weakref.ref[_Loop]) -> None:
    while True:
        time.sleep(_LOOK)
        watched = of()
        if watched is None:
            return
        watched.look()
        del watched


_LIBRARIES = tuple({os.path.realpath(sysconfig.get_path(name)) + os.sep for name in ("stdlib", "purelib", "platlib")})


def _place(frame: FrameType) -> str:
    """The innermost line of a user's own code: `solve (tools.py:12)`."""
    found: FrameType | None = frame
    while found is not None:
        file = os.path.realpath(found.f_code.co_filename)
        if not file.startswith((*_LIBRARIES, OWN_CODE)):
            break
        found = found.f_back
    found = found or frame
    return f"{found.f_code.co_qualname} ({found.f_code.co_filename}:{found.f_lineno})"


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Loop] = weakref.WeakKeyDictionary()
_account: ContextVar[_Account | None] = ContextVar("turnwise_account", default=None)
_context: ContextVar[Context | None] = ContextVar("turnwise_context", default=None)


def _loop() -> _Loop:
    return _loops.setdefault(asyncio.get_running_loop(), _Loop())


@contextlib.contextmanager
def conversation(name: str, *, lockstep: bool = False) -> Iterator[None]:
    """What is called inside belongs to one conversation: it shares a context, and its deadlines count its own time only.

    `lockstep` says that the engine waits until all conversations have asked (`engines.batched`)."""
    account = _account.set(_Account(name, _loop(), lockstep=lockstep))
    context = contextvars.copy_context()
    context.run(_context.set, context)
    shared = _context.set(context)
    try:
        yield
    finally:
        _context.reset(shared)
        _account.reset(account)


def conversation_name() -> str:
    """The id of the trajectory whose conversation the caller belongs to; empty outside of conversations."""
    account = _account.get()
    return "" if account is None else account.name


def in_lockstep() -> bool:
    """Whether the caller's conversation must not wait for another one to end, because the other waits for its request."""
    account = _account.get()
    return account is not None and account.lockstep


def waiting_for_others() -> contextlib.AbstractContextManager[None]:
    """Time inside does not count for the deadlines of this conversation."""
    account = _account.get()
    return contextlib.nullcontext() if account is None else account.waiting()


class Deadline:
    """`async with deadline(seconds) as limit:` raises TimeoutError like `asyncio.timeout`, in the conversation's own time."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self.expired = False
        """Whether the time was over."""

    async def __aenter__(self) -> Deadline:
        await self._timeout.__aenter__()
        if self._seconds is not None:
            account = _account.get()
            self._loop = asyncio.get_running_loop()
            self._excused: Callable[[], float] = (lambda: 0.0) if account is None else account.excused
            self._end = self._loop.time() + self._seconds - self._excused()
            self._timer = self._loop.call_at(self._loop.time() + self._seconds, self._over)
        return self

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool | None:
        if self._timer is not None:
            self._timer.cancel()
        return await self._timeout.__aexit__(kind, error, traceback)

    def _over(self) -> None:
        end = self._end + self._excused()
        if end > self._loop.time() + 0.001:
            self._timer = self._loop.call_at(end, self._over)
        else:
            self.expired = True
            self._timeout.reschedule(self._loop.time())


deadline = Deadline


class _Driven:
    """An awaitable that runs a coroutine, measures each stretch between two awaits, and can be abandoned."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        self._coroutine = coroutine
        self._name = name
        self.abandoned = False

    def __await__(self) -> Generator[Any, Any, Any]:
        loop, account, coroutine = _loop(), _account.get(), self._coroutine
        error: BaseException | None = None
        while True:
            stretch = loop.begin(self._name)
            try:
                waits_for = coroutine.send(None) if error is None else coroutine.throw(error)
            except StopIteration as result:
                return result.value
            finally:
                loop.end(stretch, account)
            error = None
            try:
                yield waits_for
            except BaseException as thrown:
                if self.abandoned or isinstance(thrown, GeneratorExit):
                    with contextlib.suppress(RuntimeError):  # it does not end even now; nobody runs it any more
                        coroutine.close()
                    raise
                error = thrown


def spawn(
    coroutine: Coroutine[Any, Any, T], *, context: Context | None = None, name: str | None = None
) -> asyncio.Task[T]:
    """A task in the context of the conversation, or in another one that `own_context` has made. asyncio does not complain of
    its exception where the conversation is over before it is."""
    task = asyncio.get_running_loop().create_task(coroutine, context=context or _context.get(), name=name)
    task.add_done_callback(forget)
    return task


def own_context() -> Context:
    """A copy of the conversation's context, for calls that run beside others: what they set in it stays there."""
    context = (_context.get() or contextvars.copy_context()).copy()
    context.run(_context.set, context)
    return context


async def call(function: Callable[[], Awaitable[T]], *, kind: str, name: str) -> T:
    """Await what a user's function returns, in a task of its own. A cancellation is passed on to it; if it has not ended
    `GRACE` seconds later, it is abandoned.

    Raises Failed, of the kind `kind`, whatever the function raises.
    """

    async def start() -> T:
        return await function()

    driven = _Driven(start(), name)

    async def run() -> T:
        with boundary(kind):
            return await driven

    task = spawn(run(), name=name)
    try:
        await asyncio.wait({task})
    finally:
        if not task.done():
            await _abandon(task, driven)
    if task.cancelled():  # by itself: nobody else has cancelled it
        raise Failed(Failure(kind, "CancelledError: it cancelled itself, or awaited a task that was cancelled"))
    try:
        return task.result()
    except GeneratorExit as error:
        raise failed_by(error, kind) from error


_patient: weakref.WeakKeyDictionary[asyncio.Task[Any], _Driven | None] = weakref.WeakKeyDictionary()
"""Calls that are left running where they outlast `GRACE`, and what drives them once they do."""


def leave_running() -> asyncio.Task[Any] | None:
    """To be called inside a `call`: where that is cancelled and takes longer than `GRACE`, it is left running instead of being
    abandoned. Returns its task, for `wait_for_left`."""
    task = asyncio.current_task()
    if task is not None:
        _patient[task] = None
    return task


async def wait_for_left(task: asyncio.Task[Any], seconds: float) -> None:
    """Wait for a call that was left running, and abandon it if it has not ended after so many seconds."""
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
    """Call a sync function in the event loop's own thread; it is measured like the stretch of an async one. `shared` runs it
    in the conversation's context, for callers that are outside of it.

    Raises Failed, of the kind `kind`, whatever the function raises.
    """
    loop, context = _loop(), _context.get()
    stretch = loop.begin(name)
    try:
        with boundary(kind):
            return context.run(function) if shared and context is not None else function()
    except (asyncio.CancelledError, GeneratorExit) as error:  # its own: a sync function cannot be cancelled
        raise failed_by(error, kind) from error
    finally:
        loop.end(stretch, _account.get())


def forget(task: asyncio.Future[Any]) -> None:
    """To be called when a task is done that nobody waits for: asyncio does not complain of its exception."""
    if not task.cancelled():
        task.exception()
