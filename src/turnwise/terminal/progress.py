"""The progress bar of runs without training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from turnwise.terminal.activity import Activity, Advance, Heartbeat

__all__ = ["progress"]


@contextlib.contextmanager
def progress(console: Console, total: int, *, done: int = 0, label: str = "conversations") -> Iterator[Advance]:
    """Show a bar on a terminal, and a line each minute elsewhere. Yields the function that counts a conversation and its tokens.

    `done` of the `total` conversations have been counted already.
    """
    activity = Activity(label=label, total=total, done=done)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(label, total=total, completed=done, speed="")

    def advance(tokens: int = 0, /) -> None:
        activity.advance(tokens)
        bar.update(task, advance=1, speed=activity.speed())

    with Heartbeat(activity, console), bar:
        yield advance
