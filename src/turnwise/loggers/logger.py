"""The protocol of experiment trackers, and the object that calls all trackers of a run in a thread of its own."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Trajectory

__all__ = ["Logger", "Loggers", "starting"]

_log = logging.getLogger(__name__)
_CLOSING_SECONDS = 60.0


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


@contextlib.contextmanager
def starting(name: str, *, extra: str) -> Iterator[None]:
    """Start a tracker or a tracing system inside. `extra` is the extra that installs it.

    Raises ConfigError, with `name` at its beginning, if its library is not installed, or if it does not start.
    """
    try:
        with boundary("logger"):
            yield
    except Failed as failed:
        if isinstance(failed.__cause__, ImportError):
            raise ConfigError(
                f"{name} needs a package that is not installed ({failed.__cause__}): pip install 'turnwise[{extra}]'"
            ) from failed
        raise ConfigError(f"{name} could not be started: {failed.failure.message}") from failed


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
            if text not in self._warned:
                self._warned.add(text)
                _log.warning("the logger %s; the run goes on, and its directory has everything", text)
