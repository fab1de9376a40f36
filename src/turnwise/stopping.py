"""How a command is stopped: Ctrl-C, SIGTERM and SIGHUP do the same; and a terminal or pipe that is gone stops nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TextIO, TypeVar

__all__ = ["Stops", "lasting_output"]

T = TypeVar("T")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stops:
    """Within it, a signal ends what `run` runs as a cancellation does: whatever is open is closed, a checkpoint is written.

    A second Ctrl-C ends it at once. Other repeated signals change nothing: terminals and schedulers send them twice. A signal
    that is ignored (`nohup`, a shell's background) stays ignored. KeyboardInterrupt is raised for all of them; `received` says
    which it was.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._former: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Stops:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                former = signal.getsignal(number)
                if former not in (signal.SIG_IGN, None):
                    self._former[number] = former
                    signal.signal(number, self._stop)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    @property
    def status(self) -> int:
        """The exit status of a stopped command: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
        return 128 + (self.received or signal.SIGINT)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` in an event loop of its own, as `asyncio.run` does.

        Raises KeyboardInterrupt if a signal has ended it.
        """
        try:
            return asyncio.run(self._supervised(main))
        except asyncio.CancelledError:
            if self.received is None:
                raise
            raise KeyboardInterrupt from None
        finally:
            self._loop = self._task = None

    async def _supervised(self, main: Coroutine[Any, Any, T]) -> T:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        if self.received is not None:  # it came before there was a task
            main.close()
            raise asyncio.CancelledError
        return await main

    def _stop(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = self.received or signal.Signals(number)
        if self._task is None or self._loop is None:
            if not again or number == signal.SIGINT:
                raise KeyboardInterrupt
        elif not again:
            with contextlib.suppress(OSError):  # no print: it could be in the middle of another
                os.write(2, f"turnwise: stopping ({self.received.name}); Ctrl-C stops at once\n".encode())
            self._loop.call_soon_threadsafe(self._task.cancel)  # threadsafe: it wakes a loop that waits
        elif number == signal.SIGINT:
            raise KeyboardInterrupt


class _Lasting:
    """A stream whose reader may go away: from then on, what is written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:  # the pipe or the terminal is gone: for C code and for child processes, too
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)
        except ValueError:  # closed in this process
            pass


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Within it, writing to stdout and stderr never fails: a run goes on when `| head` or the terminal is gone."""
    former = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _Lasting(former[0]), _Lasting(former[1])  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        sys.stdout, sys.stderr = former
