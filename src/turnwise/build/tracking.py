"""Builds the loggers of a recipe: experiment trackers and traces."""

from __future__ import annotations

from pathlib import Path

from turnwise.config.schema import Config
from turnwise.loggers.logger import Loggers
from turnwise.loggers.tracers import start_tracer
from turnwise.loggers.trackers import Start, start_tracker

__all__ = ["loggers"]

_PROJECT = "turnwise"


def loggers(config: Config, *, step: int) -> Loggers:
    """The trackers of `loggers` and the traces of `trace`, started. `step` is the number of finished steps of a resumed run.

    Raises ConfigError if a library is not installed, or a tracker does not start.
    """
    directory = Path(config.output)
    started = [
        start_tracker(
            use.name,
            Start(
                project=use.project or _PROJECT,
                run=use.run or directory.name,
                conversations=use.conversations,
                arguments=use.arguments,
                directory=directory,
                options=config.written(),
                step=step,
            ),
        )
        for use in config.loggers
    ]
    trace = config.trace
    if trace.backend is not None:
        project = trace.project or _PROJECT
        started.append(
            start_tracer(trace.backend, conversations=trace.conversations, project=project, directory=directory)
        )
    return Loggers(started)
