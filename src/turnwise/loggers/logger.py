"""The protocol of experiment trackers, and the object that calls all trackers of a run in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Trajectory

_log = logging.getLogger(__name__)
_CLOSING_SECONDS = 60.0
_CHANGING = re.compile(r"0x[0-9a-f]+|\d+")
"""Addresses of objects, ports and times: messages that differ in them only are the same."""


class Logger(Protocol):
    """An experiment tracker or a tracing system."""

    name: str
    conversations: int
    """The number of conversations of each step that it wants."""

    def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        """A finished step: its number, its metrics without null values, and its first `conversations` trajectories."""
        ...

    def evaluation(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        """An evaluation on held-out rows after `step` steps."""
        ...

    def close(self) -> None:
        """Send what is left."""
        ...


class LoggerUnreachable(Exception):
    """The service of a tracker cannot be reached at present."""


@contextlib.contextmanager
def starting(name: str, *, extra: str) -> Iterator[None]:
    """Start a tracker or a tracing system inside. `extra` is the extra that installs it.

    Raises LoggerUnreachable if its service cannot be reached, ConfigError if its library is not installed or if it does not start
    for another reason. The message begins with `name`.
    """
    try:
        with boundary("logger"):
            yield
    except Failed as failed:
        if isinstance(failed.__cause__, ImportError):
            raise ConfigError(
                f"{name} needs a package that is not installed ({failed.__cause__}): pip install 'turnwise[{extra}]'"
            ) from failed
        if _unreachable(failed.__cause__):
            raise LoggerUnreachable(f"{name}: its service cannot be reached: {failed.failure.message}") from failed
        raise ConfigError(f"{name} could not be started: {failed.failure.message}") from failed


def _unreachable(error: BaseException | None) -> bool:
    """Whether an error of a library, or one of its causes, is a failed connection."""
    while error is not None:
        # CommError: of wandb, whose requests are made in another process
        if isinstance(error, ConnectionError | TimeoutError | socket.gaierror) or type(error).__name__ == "CommError":
            return True
        error = error.__cause__ or error.__context__
    return False


def start_or_wait(name: str, conversations: int, start: Callable[[], Logger]) -> Logger:
    """Start a tracker. If its service cannot be reached, a warning is logged, and it is started later in the run.

    Raises ConfigError.
    """
    try:
        return start()
    except LoggerUnreachable as unreachable:
        _log.warning(
            "%s. The run goes on, and its directory has everything; the connection is tried again after later steps",
            unreachable,
        )
        return RestartingLogger(name, conversations, start)


class RestartingLogger:
    """A tracker whose service could not be reached. It is started again at a later step, at most once a minute.

    The metrics of the steps until then are sent when it has started; their conversations are not.
    """

    def __init__(self, name: str, conversations: int, start: Callable[[], Logger]) -> None:
        self.name = name
        self.conversations = conversations
        self.pause = 60.0
        """Seconds between two attempts."""
        self._start = start
        self._started: Logger | None = None
        self._tried = time.monotonic()
        self._missed: list[tuple[bool, int, Mapping[str, float]]] = []
        """Whether it is an evaluation, the step and the metrics."""

    def step(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        if (logger := self._connected()) is None:
            self._missed.append((False, step, metrics))
        else:
            logger.step(step, metrics, trajectories)

    def evaluation(self, step: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        if (logger := self._connected()) is None:
            self._missed.append((True, step, metrics))
        else:
            logger.evaluation(step, metrics, trajectories)

    def close(self) -> None:
        if self._started is not None:
            self._started.close()

    def _connected(self) -> Logger | None:
        """The tracker, if it is started or can be started now."""
        if self._started is None and time.monotonic() - self._tried >= self.pause:
            self._tried = time.monotonic()
            try:
                self._started = self._start()
            except LoggerUnreachable:
                return None
            for evaluation, step, metrics in self._missed:
                (self._started.evaluation if evaluation else self._started.step)(step, metrics, ())
            self._missed.clear()
        return self._started


class Loggers:
    """All trackers of a run. They are called one after the other in one thread, so that a slow server delays no step.

    An exception of a tracker is logged as a warning, each message once.
    """

    def __init__(self, loggers: Sequence[Logger] = ()) -> None:
        self.loggers = tuple(loggers)
        self._worker = ThreadPoolExecutor(1, "turnwise-loggers") if loggers else None
        self._warned: set[str] = set()
        self._last: Future[None] | None = None

    def step(self, line: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """A line of metrics.jsonl and the step's trajectories."""
        for logger in self.loggers:
            self._call(logger, logger.step, line, trajectories)

    def evaluation(self, line: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> None:
        """A line of evaluations.jsonl and the conversations of the evaluation."""
        for logger in self.loggers:
            self._call(logger, logger.evaluation, line, trajectories)

    def close(self) -> None:
        """Wait until everything is sent, at most a minute, and close the trackers."""
        if self._worker is None:
            return
        for logger in self.loggers:
            self._submit(logger, logger.close)
        try:
            if self._last is not None:
                self._last.result(_CLOSING_SECONDS)
        except TimeoutError:
            _log.warning("loggers: not everything was sent within %g s; the rest is lost", _CLOSING_SECONDS)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._worker = None

    def _call(
        self,
        logger: Logger,
        method: Callable[[int, Mapping[str, float], Sequence[Trajectory]], None],
        line: Mapping[str, Any],
        trajectories: Sequence[Trajectory],
    ) -> None:
        numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
        step, chosen = int(numbers.pop("step", 0)), list(trajectories[: logger.conversations])
        self._submit(logger, lambda: method(step, numbers, chosen))

    def _submit(self, logger: Logger, work: Callable[[], None]) -> None:
        if self._worker is not None:
            self._last = self._worker.submit(self._guarded, logger, work)

    def _guarded(self, logger: Logger, work: Callable[[], None]) -> None:
        try:
            with boundary("logger"):
                work()
        except Failed as failed:
            text = f"{logger.name}: {failed.failure.message}"
            kind = _CHANGING.sub("", text)
            if kind not in self._warned:
                self._warned.add(kind)
                _log.warning("the logger %s; the run goes on, and its directory has everything", text)
