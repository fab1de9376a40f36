"""The progress bar of runs without training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from turnwise.terminal.activity import Activity, Heartbeat

__all__ = ["progress"]


@contextlib.contextmanager
def progress(
    console: Console, total: int, *, done: int = 0, label: str = "conversations"
) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal, and a line now and then elsewhere. Yields the function that counts a conversation.

    `done` of the `total` conversations have been counted already.
    """
    activity = Activity(label=label, total=total, done=done)
    bar = Progress(
        *Progress.get_default_columns()[:2],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
    task = bar.add_task(label, total=total, completed=done)

    def advance() -> None:
        activity.advance()
        bar.advance(task)

    with Heartbeat(activity, console), bar:
        yield advance
