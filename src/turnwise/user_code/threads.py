"""Sync user code in threads, so that it does not block the event loop; in the main thread where it must run there.

The threads are daemons that run one job after another: starting a thread takes longer than most tools. Their number has no
limit. A job that never returns keeps its thread, and each waiting job has a thread. Jobs begin in the order in which they are
given: all threads take them from one queue. A function whose calls do not return, one conversation after the other, is not called
any more (`_Abandoned`), so that the threads that it keeps are bounded.

Functions that set signal handlers (`signal.alarm` needs one) run in the main thread. A function is recognized when it calls
`signal.signal` in one of our threads. Python raises a ValueError there, which libraries may catch (math-verify then returns
0). Instead, the call is stopped with a BaseException, and the function is run again in the main thread.

`ThreadedObject` is an object of a user's class that belongs to one conversation. Its sync code runs in a thread of its own, so
it may block, hang or raise; its async code is awaited. There is one call at a time, and the object is closed exactly once,
however the conversation ends.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from turnwise.errors import Failed, boundary, failed_by
from turnwise.types import Failure, Row
from turnwise.user_code.calls import call_blocking, forget, spawn
from turnwise.user_code.thread_loops import call_async, copy_variables

# threads

_MAX_IDLE = 64
"""Idle threads that are kept; each takes some 50 KiB."""


class _Threads:
    """The threads of this process."""

    def __init__(self) -> None:
        self.idle = 0
        """Threads that wait, less the jobs that wait for them."""
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[str, Callable[[], None]]] = queue.SimpleQueue()

    def start(self, name: str, job: Callable[[], None]) -> None:
        with self._lock:
            new = not self.idle
            self.idle -= not new
        self._jobs.put((name, job))
        if new:
            threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        thread = threading.current_thread()
        while True:
            thread.name, job = self._jobs.get()
            job()
            del job  # it refers to the caller's objects
            thread.name = "idle"
            with self._lock:
                if self.idle >= _MAX_IDLE:
                    return
                self.idle += 1


_threads = _Threads()


def _forget_threads() -> None:
    global _threads
    _threads = _Threads()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)  # a forked process has none of these threads


def start(job: Callable[[], None], *, name: str) -> None:
    """Run `job`, which does not raise, in a thread with this name."""
    _threads.start(name, job)


# calls that do not return

_MOST_ABANDONED = 64
"""Calls of one name that may go on although nothing waits for them."""


class _Abandoned:
    """Counts the calls that have not returned although their conversations have ended, by kind and name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: collections.Counter[tuple[str, str]] = collections.Counter()

    def refuse(self, kind: str, name: str) -> None:
        """Raises Failed if there are too many of a name."""
        if self._counts[kind, name] >= _MOST_ABANDONED:
            message = (
                f"{name}: {self._counts[kind, name]} calls have not returned although their conversations have ended, and each "
                f"keeps a thread, so it is not called until some of them return: give what it waits for a time limit of its own"
            )
            raise Failed(Failure(kind, message))

    def add(self, call: _ThreadCall) -> None:
        """A call that nothing waits for any more."""
        with self._lock:
            if not call.returned and not call.abandoned:
                call.abandoned = True
                self._counts[call.key] += 1

    def returned(self, call: _ThreadCall) -> None:
        """A call that has returned, or raised."""
        with self._lock:
            call.returned = True
            if call.abandoned:
                self._counts[call.key] -= 1


class _ThreadCall:
    """A call in a thread."""

    def __init__(self, kind: str, name: str) -> None:
        self.key = kind, name
        self.abandoned = self.returned = False


_abandoned = _Abandoned()

# the main thread

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


# functions


_texts = {long: ThreadPoolExecutor(threads, "turnwise-text") for long, threads in ((True, 2), (False, 1))}


async def off_loop(function: Callable[[], T], *, long: bool) -> T:
    """Call our own code whose time grows with a text of others, such as the tokenizer, in one of two threads for long texts, or
    in that for short ones: these do not wait for long ones, however many an agent sends.

    The call goes on if its caller is cancelled, so its time must have a bound.
    """
    call = contextvars.copy_context().run
    return await asyncio.get_running_loop().run_in_executor(_texts[long], call, function)


async def run_in_thread(function: Callable[[], T], *, name: str, kind: str, closes: bool = False) -> T:
    """Run a sync function in a daemon thread (`threads`), so that it may block, never return, or raise.

    No executor is used: a call that does not return would occupy a worker forever and delay the interpreter's exit. The
    thread runs other functions later: what the function sets for its thread alone (`threading.local`) may be seen there. The
    function has the context variables of the caller, and the caller receives the variables that the function sets.

    Python allows signal handlers in the main thread only. A function that sets one (`signal.alarm` needs it) is stopped and run
    again in the event loop's thread, now and in all later calls.

    Raises Failed, of the kind `kind`; also if too many calls of this name do not return, unless it `closes` something.
    """
    if is_needed(kind, name):
        return run(function, name=name, kind=kind)
    if not closes:
        _abandoned.refuse(kind, name)
    call = _ThreadCall(kind, name)
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    # asyncio would report an exception that nothing awaits: the coroutine may be closed before the function raises
    future.add_done_callback(forget)
    context = contextvars.copy_context()

    def work() -> None:
        try:
            with required(), boundary(kind):
                result = context.run(function)
        except Failed as failed:
            resolve(future.set_exception, failed)
        except (
            BaseException
        ) as error:  # raised in the event loop it would end the run, and in a thread it would be lost
            resolve(future.set_exception, error if isinstance(error, MainThreadNeeded) else failed_by(error, kind))
        else:
            resolve(future.set_result, result)
        finally:
            _abandoned.returned(call)

    def resolve(set_outcome: Callable[[Any], None], value: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(lambda: None if future.done() else set_outcome(value))

    start(work, name=f"{kind}-{name}")
    try:
        return await future
    except MainThreadNeeded:
        return run(function, name=name, kind=kind)
    except asyncio.CancelledError:
        _abandoned.add(call)
        raise
    finally:
        if future.done():
            copy_variables(context)


# objects of one conversation

_GRACE = 1.0  # seconds for a call that is still running when the conversation has ended


class ThreadedObject(Generic[T]):
    """Holds the object that `make` returns. `end` closes it; None if the object needs no closing.

    If the conversation ends while the object is being created, the thread that creates it also closes it. If a call is still
    running, it has a second to end. Then the object is closed anyway, which also ends a call that does not return.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], Any] | None, *, name: str) -> None:
        self._make = make
        self._end = end
        self._name = name
        self._instances: list[T] = []
        self._over = False
        self._lock = threading.Lock()
        self._busy: asyncio.Future[Any] | None = None
        self._hangs = False

    async def make(self) -> T:
        """Create the object. Raises Failed if that fails."""
        return await self._aside(self._make_or_end)

    def adopt(self, instance: T) -> T:
        """Hold an object that was created elsewhere."""
        self._instances.append(instance)
        return instance

    @property
    def busy(self) -> bool:
        """Whether a call is still running, even if the conversation no longer waits for it."""
        return self._hangs or (self._busy is not None and not self._busy.done())

    async def ask(self, function: Callable[[], Any]) -> Any:
        """The result of a function, sync or async. Raises errors of a sync function, and of an async one in the conversation's
        own loop, as Failed; otherwise what the function raises."""
        if inspect.iscoroutinefunction(function):
            return await call_async(function, kind="environment")
        result = await self._aside(function)
        return await call_async(lambda: result, kind="environment") if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Close the object, if it was created and is not closed."""
        if self._busy is not None and self.busy:
            await asyncio.wait({self._busy}, timeout=_GRACE)
            if not self._busy.done():
                self._hangs = True
                self._busy.cancel()  # nothing waits for the call; it goes on in its thread
        with self._lock:
            objects, self._instances, self._over = self._instances, [], True
        for instance in objects:
            if self._end is not None:
                result = await run_in_thread(
                    lambda instance=instance, end=self._end: end(instance),
                    name=self._name,
                    kind="environment",
                    closes=True,
                )
                if inspect.isawaitable(result):
                    await call_async(lambda result=result: result, kind="environment")

    async def _aside(self, function: Callable[[], Any]) -> Any:
        self._busy = spawn(run_in_thread(function, name=self._name, kind="environment"))
        return await asyncio.shield(self._busy)  # the conversation may end before the call does

    def _make_or_end(self) -> T:
        instance = self._make()
        with self._lock:
            if not self._over:
                self._instances.append(instance)
                return instance
        try:
            with boundary("environment"):
                self._end_late(instance)
        except Failed as failed:
            _log.warning(
                "%s was created after its conversation had ended, and could not be closed: %s", self._name, failed
            )
        return instance

    def _end_late(self, instance: T) -> None:
        result = self._end(instance) if self._end is not None else None
        if inspect.iscoroutine(result):
            asyncio.run(result)


def columns_for(
    function: Callable[..., Any], row: Row, *, name: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The columns of a row that a function has as parameters; all columns if it has `**row`.

    `extra` are columns in addition to `row.fields`. Raises KeyError if a required column is missing.
    """
    columns = {**row.fields, **(extra or {})}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = dict(columns)
    else:
        arguments = {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and parameter.name not in arguments:
            have = ", ".join(sorted(columns)) or "none"
            raise KeyError(
                f"{name} needs the column {parameter.name!r}, and row {row.id!r} has no such column; its columns are: {have}. "
                f"Add the column to the data, or map another column to it: data.columns.{parameter.name}=<column>"
            )
    return arguments
