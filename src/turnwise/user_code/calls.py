"""Calls the code of users (environments, tools, reward functions) so that it can neither block nor end a run.

Each call runs in a task of its own: a call that cancels itself is a failure of that call, and a call that does not end when it
is cancelled is abandoned. All calls of one conversation share one `contextvars.Context`. Sync functions that may block run in
threads (`run_in_thread`); those that must run in the main thread are interrupted when they take too long. This module knows
nothing of what is called.

User code runs in stretches: from one `await` to the next. While a stretch runs, no other conversation continues. `LoopWatch`
adds up the time of all stretches, and reports a stretch that blocks the loop for long with its function and line; a thread
looks at the event loop's stack to find the line.

Many conversations share one event loop, but a `Deadline` counts the time of one only: it is extended by the time for which
others blocked the loop, and by the time for which the conversation waited for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib
import logging
import math
import os
import signal
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Sequence
from contextvars import Context, ContextVar, Token
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeVar

from turnwise.errors import OWN_CODE, Failed, boundary, failed_by
from turnwise.types import Failure

T = TypeVar("T")


# sync functions in the main thread


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


# how long user code blocks the event loop

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
    advice: str = ""
    """What to do if it blocks, as a sentence without a period."""


class LoopWatch:
    """How long the code of users has blocked one event loop, which is the running one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.blocked = 0.0
        """Seconds, of all calls together, short ones included."""
        self._loop = weakref.ref(loop)
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

    def begin(self, name: str, *, advice: str, until: float = math.inf) -> Stretch:
        """A stretch of the call `name` begins, which is interrupted at `until`. What is returned is handed to `end`.

        `advice` says what to do if it blocks.
        """
        if self._watcher is None:
            self._watcher = threading.Thread(target=_watch, args=(weakref.ref(self),), name="loop-watch", daemon=True)
            self._watcher.start()
        stretch = Stretch(
            name, time.monotonic(), self._running, time.thread_time(), collector_time.seconds, until, advice
        )
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

    @property
    def over(self) -> bool:
        """Whether the event loop will not run again."""
        loop = self._loop()
        return loop is None or loop.is_closed()

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
            if frame is not None and self._running is stretch and not _starts_thread(frame):
                self._seen = (stretch, _line(frame))
        if seconds >= STUCK:
            self._report(stretch, seconds, still=True)

    def interrupt(self, frame: FrameType | None) -> None:
        """Raise Interrupted in the call that runs now, if its time is over. Runs in the loop's thread, in a signal handler."""
        stretch = self._running
        own = frame is not None and frame.f_code.co_filename == __file__
        if stretch is None or own or time.monotonic() < stretch.until:
            return
        if _in_finalizer(frame):
            self._interrupted = 0.0  # at the next look
            return
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
            "time). %s (docs/environments.md, Errors)",
            stretch.name,
            "has blocked" if still else "blocked",
            seconds,
            f" in {line}" if line else "",
            stretch.advice,
        )


def _starts_thread(frame: FrameType | None) -> bool:
    """Whether a call waits for the system to run a new thread, which takes long on a busy machine only."""
    return any(one.f_code is threading.Thread.start.__code__ for one in _outward(frame))


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether a `__del__` runs, of whichever object is freed at this moment: Python prints what it raises, and goes on."""
    return any(one.f_code.co_name == "__del__" for one in _outward(frame))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame and those that have called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


NO_ASYNC = "write `def` instead of `async def`"
"""A way out for users' classes of other systems: their methods without `async` run in threads."""

_OWN_ENVIRONMENT = "set environment.thread: true"


def _advice(kind: str, ways: str | None) -> str:
    """What to do if an `async` function of the kind blocks. `ways` are those of the function; None: of its environment."""
    if ways is None:
        ways = "" if kind == "reward" else _thread_ways()
    instead = f"{ways}, or " if ways else ""
    return (
        f"Use `await` instead of blocking calls; or run the code in a thread: {instead}write "
        f"`await asyncio.to_thread(function, ...)` around the blocking call"
    )


_SYNC_REWARD = (
    "Write `async def`, with `await asyncio.to_thread(function, ...)` around what takes long: a sync reward function runs in the "
    "main thread"
)
_SYNC = "Shorten it: code that is neither `async` nor in a thread holds up all conversations"


def _watch(reference: weakref.ref[LoopWatch]) -> None:
    while True:
        time.sleep(_INTERVAL)
        watch = reference()
        if watch is None or watch.over:  # a closed loop may be freed much later, and threads that look wake the process
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
        if frame.f_code is asyncio.Handle._run.__code__:  # below it is what has started the loop, such as a script
            frame = None
            break
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
        watch = _watches[loop] = LoopWatch(loop)
    return watch


# deadlines, and the context of a conversation


class Stopwatch:
    """Counts the seconds that do not count for the deadlines of one conversation."""

    __slots__ = ("_opened_by", "_waited", "_waiting", "_watch", "blocked", "lockstep", "name", "thread_ways")

    def __init__(self, name: str, watch: LoopWatch, *, lockstep: bool, opened_by: Stopwatch | None = None) -> None:
        self.name = name
        self._opened_by = opened_by
        """The conversation whose environment waits for this one; None if there is none."""
        self.lockstep = lockstep
        self.thread_ways = _OWN_ENVIRONMENT
        """How `async` methods of the environment are run in a thread, for the advice if they block."""
        self.blocked = 0.0
        """Seconds for which this conversation blocked the event loop itself."""
        self._watch = watch
        self._waited = 0.0
        """Seconds of finished waiting for others."""
        self._waiting: list[tuple[float, float]] = []
        """Nested waits that are going on: when each began, and how long others had blocked the loop by then."""

    def excused(self) -> float:
        """Seconds until now that do not count: others blocked the event loop, or the conversation waited for others."""
        waiting = 0.0 if not self._waiting else self._waited_since(self._waiting[0])
        return self._waited + waiting + self._blocked_by_others()

    @contextlib.contextmanager
    def waiting(self, *, for_opener: bool = False) -> Iterator[None]:
        """Time inside does not count. Neither does it for the conversation whose environment waits for this one, unless this one
        waits for that environment (`for_opener`)."""
        opener = None if for_opener else self._opened_by
        self._waiting.append((time.monotonic(), self._blocked_by_others()))
        try:
            with contextlib.nullcontext() if opener is None else opener.waiting():
                yield
        finally:
            started = self._waiting.pop()
            if not self._waiting:  # the outermost wait includes the others
                self._waited += self._waited_since(started)

    def _blocked_by_others(self) -> float:
        return self._watch.blocked - self.blocked

    def _waited_since(self, started: tuple[float, float]) -> float:
        """Seconds of waiting, without those that are excused already because others blocked the event loop."""
        began, blocked = started
        return max(0.0, time.monotonic() - began - (self._blocked_by_others() - blocked))


_stopwatch: ContextVar[Stopwatch | None] = ContextVar("turnwise_stopwatch", default=None)
_context: ContextVar[Context | None] = ContextVar("turnwise_context", default=None)


class ConversationScope:
    """All calls inside belong to one conversation: they share a context, and their deadlines count its own time only.

    `lockstep` says that the engine waits until all conversations have sent a request (`engines.engine.Batched`).
    """

    __slots__ = ("_context", "_stopwatch")

    def __init__(self, name: str, *, lockstep: bool = False) -> None:
        # a conversation that begins inside another one was opened by the environment of that one
        self._stopwatch: Stopwatch | Token[Stopwatch | None] = Stopwatch(
            name, loop_watch(), lockstep=lockstep, opened_by=_stopwatch.get()
        )
        self._context: Token[Context | None] | None = None

    def __enter__(self) -> None:
        assert isinstance(self._stopwatch, Stopwatch)
        self._stopwatch = _stopwatch.set(self._stopwatch)
        context = shareable(contextvars.copy_context())
        self._context = _context.set(context)

    def __exit__(self, *_: object) -> None:
        assert self._context is not None
        assert isinstance(self._stopwatch, Token)
        _context.reset(self._context)
        _stopwatch.reset(self._stopwatch)


conversation = ConversationScope


def shareable(context: Context) -> Context:
    """The same context, which is from now on the shared one of all calls inside it."""
    context.run(_context.set, context)
    return context


def advise_threads(ways: str) -> None:
    """Say how `async` methods of the conversation's environment are run in a thread: imperatives, or empty if in no way.

    Without a call, it is by `environment.thread`. No effect outside of conversations.
    """
    watch = _stopwatch.get()
    if watch is not None:
        watch.thread_ways = ways


def _thread_ways() -> str:
    watch = _stopwatch.get()
    return _OWN_ENVIRONMENT if watch is None else watch.thread_ways


def conversation_name() -> str:
    """The id of the trajectory whose conversation the caller belongs to; empty outside of conversations."""
    watch = _stopwatch.get()
    return "" if watch is None else watch.name


def in_lockstep() -> bool:
    """Whether the caller's conversation must not wait for another one to end, because the other waits for its request."""
    watch = _stopwatch.get()
    return watch is not None and watch.lockstep


def waiting_for_others() -> contextlib.AbstractContextManager[None]:
    """Time inside does not count for the deadlines of this conversation."""
    watch = _stopwatch.get()
    return contextlib.nullcontext() if watch is None else watch.waiting()


def waiting_for_opener() -> contextlib.AbstractContextManager[None]:
    """Time inside does not count for the deadlines of this conversation: it waits for the environment that has opened it, whose
    own time counts."""
    watch = _stopwatch.get()
    return contextlib.nullcontext() if watch is None else watch.waiting(for_opener=True)


class _AskedTime:
    """The time in which turns of agents are awaited, several of which may be at once. Without what others excuse meanwhile: that
    is excused already (`others`, the seconds so far)."""

    def __init__(self) -> None:
        self._asking = 0
        self._began = (0.0, 0.0)
        """When the first of those that are awaited now was asked for, and what others had excused then."""
        self._before = 0.0

    @contextlib.contextmanager
    def asking(self, others: Callable[[], float]) -> Iterator[None]:
        """A turn is awaited inside."""
        if not self._asking:
            self._began = time.monotonic(), others()
        self._asking += 1
        try:
            yield
        finally:
            self._before = self.seconds(others) if self._asking == 1 else self._before
            self._asking -= 1

    def seconds(self, others: Callable[[], float]) -> float:
        """The time so far."""
        if not self._asking:
            return self._before
        began, excused = self._began
        return self._before + max(0.0, time.monotonic() - began - (others() - excused))


class Deadline:
    """`async with deadline(seconds) as limit:` raises TimeoutError like `asyncio.timeout`, in the conversation's own time.

    None sets no limit.
    """

    __slots__ = (
        "_asked",
        "_loop",
        "_others",
        "_seconds",
        "_timeout",
        "_timer",
        "_token",
        "end",
        "expired",
    )

    def __init__(self, seconds: float | None, *, agents: bool = True) -> None:
        """`agents`: whether the time counts in which the caller awaits a turn of an agent (`asking_agent`)."""
        self._seconds = seconds
        self._asked = None if agents else _AskedTime()
        self._timeout: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._token: Token[tuple[Deadline, ...]] | None = None
        self.end = math.inf
        """When the time is over, in the time of the event loop, without what is excused."""
        self.expired = False
        """Whether the time was over."""

    async def __aenter__(self) -> Deadline:
        if self._seconds is not None:
            self._timeout = asyncio.timeout(None)
            await self._timeout.__aenter__()
            watch = _stopwatch.get()
            self._loop = asyncio.get_running_loop()
            self._others: Callable[[], float] = (lambda: 0.0) if watch is None else watch.excused
            now = self._loop.time()
            self.end = now + self._seconds - self._excused()
            self._token = limits.set((*limits.get(), self))
            self._timer = self._loop.call_at(now + self._seconds, self._check)
        return self

    async def __aexit__(self, kind: Any, error: Any, traceback: Any) -> bool | None:
        if self._timer is not None:
            self._timer.cancel()
        if self._token is not None:
            limits.reset(self._token)
        return None if self._timeout is None else await self._timeout.__aexit__(kind, error, traceback)

    def asking_agent(self) -> contextlib.AbstractContextManager[None]:
        """A turn of an agent is awaited inside."""
        if self._asked is None or self._seconds is None:
            return contextlib.nullcontext()
        return self._asked.asking(self._others)

    def asked(self) -> float:
        """Seconds in which turns of agents were awaited that do not count."""
        return 0.0 if self._asked is None or self._seconds is None else self._asked.seconds(self._others)

    def _excused(self) -> float:
        return self._others() + self.asked()

    def over(self) -> bool:
        """Whether the time is over now; `expired` then says so too."""
        self.expired = self.expired or self.end + self._excused() <= self._loop.time()
        return self.expired

    def _check(self) -> None:
        """End the block, or look again later if some of the time was excused."""
        assert self._timeout is not None
        end = self.end + self._excused()
        if end > self._loop.time() + 0.001:
            self._timer = self._loop.call_at(end, self._check)
        else:
            self.expired = True
            self._timeout.reschedule(self._loop.time())


deadline = Deadline

limits: ContextVar[tuple[Deadline, ...]] = ContextVar("turnwise_limits", default=())
"""The deadlines that hold for the caller, outermost first."""


@contextlib.contextmanager
def asking_agent() -> Iterator[None]:
    """A turn of an agent is awaited inside: its time does not count for the deadlines of the caller that say so."""
    with contextlib.ExitStack() as stack:
        for limit in limits.get():
            stack.enter_context(limit.asking_agent())
        yield


def first_end(of: Sequence[Deadline]) -> float:
    """When the first of these deadlines is over, as `time.monotonic()`, if nothing more is excused until then.

    If one is over already, `GRACE` seconds from now: what runs then is what cleans up after the limit.
    """
    watch = _stopwatch.get()
    if watch is None or not of:
        return math.inf
    end, now = min([limit.end + limit.asked() for limit in of]) + watch.excused(), time.monotonic()
    return end if end > now else now + GRACE


# calls

GRACE = 1.0
"""Seconds that a cancelled call has to clean up, before it is abandoned."""


class _Driven:
    """Awaits what a user's function returns, measures each stretch between two awaits, and can abandon the function."""

    __slots__ = ("_advice", "_function", "_limits", "_name", "_ways", "abandoned")

    def __init__(self, function: Callable[[], Awaitable[Any]], name: str, ways: str | None) -> None:
        self._advice = ""
        self._ways = ways
        self._function = function
        self._limits = limits.get()
        self._name = name
        self.abandoned = False

    def __await__(self) -> Generator[Any, Any, Any]:
        watch, own_time, coroutine = loop_watch(), _stopwatch.get(), _awaited(self._function)
        error: BaseException | None = None
        while True:
            stretch = watch.begin(self._name, advice=self._advice, until=first_end(self._limits))
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
        self._advice = _advice(kind, self._ways)  # here, because this context knows the conversation's environment
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
    task = asyncio.get_running_loop().create_task(coroutine, context=context or _context.get(), name=name)
    task.add_done_callback(forget)
    return task


def own_context() -> Context:
    """A copy of the conversation's context, so that calls that run at the same time do not see each other's variables."""
    return shareable((_context.get() or contextvars.copy_context()).copy())


async def call(function: Callable[[], Awaitable[T]], *, kind: str, name: str, ways: str | None = None) -> T:
    """Await what a user's function returns, in a task of its own.

    `ways` says how the function is run in a thread, if not in those of its environment (`thread_ways`).

    If the caller is cancelled, so is the task. If the task has not ended `GRACE` seconds later, it is abandoned.

    Raises Failed, of the kind `kind`, whatever the function raises. Raises TimeoutError if the function blocks the event loop
    when a limit of its conversation is over: it is interrupted then, in the main thread.
    """

    driven = _Driven(function, name, ways)
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
    watch, own_time, context = loop_watch(), _stopwatch.get(), _context.get()
    stretch = watch.begin(name, advice=_SYNC_REWARD if kind == "reward" else _SYNC)
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


# which conversations are scored together: set by the scorer before they start, inherited by their tasks

scored_together: ContextVar[Literal["group", "batch"]] = ContextVar("scored_together", default="group")
"""`group`: the conversations of a row. `batch`: all conversations of the step, because of a function in `reward.batch`."""
conversations_of_step: ContextVar[int] = ContextVar("conversations_of_step", default=0)
"""The number of conversations of a step, where conversations of later steps run at the same time (`train.max_staleness`). 0: all
running conversations belong to the same step."""
