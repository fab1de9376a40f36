"""Deadlines that count the time of one conversation only, and the context that its calls share.

Many conversations share one event loop. A deadline is extended by the time for which others blocked the loop, and by the time
for which the conversation waited for others.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import Context, ContextVar, Token
from typing import Any

from turnwise.user_code.loop_watch import LoopWatch, loop_watch

__all__ = [
    "Deadline",
    "Stopwatch",
    "conversation",
    "conversation_name",
    "deadline",
    "first_end",
    "in_lockstep",
    "limits",
    "shared_context",
    "stopwatch",
    "waiting_for_others",
]


class Stopwatch:
    """Counts the seconds that do not count for the deadlines of one conversation."""

    __slots__ = ("_waited", "_waiting", "_watch", "blocked", "lockstep", "name")

    def __init__(self, name: str, watch: LoopWatch, *, lockstep: bool) -> None:
        self.name = name
        self.lockstep = lockstep
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
    def waiting(self) -> Iterator[None]:
        """Time inside does not count."""
        self._waiting.append((time.monotonic(), self._blocked_by_others()))
        try:
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

    `lockstep` says that the engine waits until all conversations have sent a request (`engines.batched`).
    """

    __slots__ = ("_context", "_stopwatch")

    def __init__(self, name: str, *, lockstep: bool = False) -> None:
        self._stopwatch: Stopwatch | Token[Stopwatch | None] = Stopwatch(name, loop_watch(), lockstep=lockstep)
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


def shared_context() -> Context | None:
    """The context that all calls of the caller's conversation share; None outside of conversations."""
    return _context.get()


def stopwatch() -> Stopwatch | None:
    """The stopwatch of the caller's conversation; None outside of conversations."""
    return _stopwatch.get()


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


class Deadline:
    """`async with deadline(seconds) as limit:` raises TimeoutError like `asyncio.timeout`, in the conversation's own time.

    None sets no limit.
    """

    __slots__ = ("_excused", "_loop", "_seconds", "_timeout", "_timer", "_token", "end", "expired")

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
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
            self._excused: Callable[[], float] = (lambda: 0.0) if watch is None else watch.excused
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


def first_end(of: Sequence[Deadline]) -> float:
    """When the first of these deadlines is over, as `time.monotonic()`, if nothing more is excused until then."""
    watch = _stopwatch.get()
    if watch is None or not of:
        return math.inf
    return min([limit.end for limit in of]) + watch.excused()
