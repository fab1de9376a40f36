"""What a person sees of a run in the terminal: notes, progress, problems, and where the results are.

The base of the reports of training and fine-tuning, which say what their steps look like.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from turnwise.record.run_directory import RunDirectory
from turnwise.terminal.activity import Activity

__all__ = ["Report", "activity_line", "places"]

_RECENT = 8
"""Steps that the live display shows, and over which the time of a step is averaged."""
_MOST_PROBLEMS = 20
"""Different problems that are printed; a run with more of them prints no further ones."""


class Report:
    """Shows a run: a live display on a terminal, a line for each step elsewhere."""

    def __init__(self, console: Console, activity: Activity | None = None, *, label: str) -> None:
        self.console = console
        self.activity = activity or Activity()
        self.recent: list[Mapping[str, Any]] = []
        """The metrics of the latest steps."""
        self._printed: set[str] = set()
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn(label),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task = self._progress.add_task(label, total=None)

    def start(self, header: str, *, steps: int, done: int, notes: Sequence[str]) -> None:
        """Print notes and the header, and begin the display. `done` of the `steps` are finished already."""
        for note in notes:
            self.console.print(Text(note, style="dim"), soft_wrap=True)
        self.print_line(header)
        self._progress.update(self._task, total=steps, completed=done)
        if self.console.is_terminal:
            # drawn by its own thread, so that the display moves during a long step
            self._live = Live(get_renderable=self._picture, console=self.console, refresh_per_second=4, transient=True)
            self._live.start()

    def finish_step(self, metrics: Mapping[str, Any], line: str) -> None:
        """Count a finished step. Where there is no live display, print `line`, the step's time and the time left."""
        self.recent = [*self.recent[1 - _RECENT :], metrics]
        self._progress.update(self._task, completed=metrics["step"])
        if self._live is None:
            seconds = sum(step["seconds/step"] for step in self.recent) / len(self.recent)
            steps = self._progress.tasks[0].total or 0
            remaining = timedelta(seconds=round(seconds * (steps - metrics["step"])))
            self.print_line(f"{line}  {metrics['seconds/step']:.2f} s/step  {remaining} left")

    def print_problem(self, kind: str, text: str) -> None:
        """Print a problem, if no problem of this `kind` was printed before."""
        if kind not in self._printed and len(self._printed) < _MOST_PROBLEMS:
            self._printed.add(kind)
            self.console.print(Text(text, style="red"), soft_wrap=True)

    def print_line(self, text: str) -> None:
        """Print plain text without wrapping it, so that a path stays in one piece."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def print_places(self, directory: RunDirectory, checkpoint: Path, *, conversations: str) -> None:
        """Print where the results are. `conversations` says which of them were recorded."""
        self.console.print(places(directory, checkpoint, conversations=conversations), soft_wrap=True)

    def close(self) -> None:
        """End the live display, however the run ends."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def figures(self) -> RenderableType:
        """What the live display shows above the progress bar."""
        raise NotImplementedError

    def _picture(self) -> RenderableType:
        return Group(self.figures(), self._progress, activity_line(self.activity))


def activity_line(activity: Activity) -> RenderableType:
    """The part of the step that is running: its text, and a bar if the number of its items is known."""
    text = Text(activity.text(), no_wrap=True, overflow="ellipsis")
    if not activity.total:
        return text
    line = Table.grid(padding=(0, 1), expand=True)
    line.add_column()
    line.add_column(ratio=1)
    line.add_row(text, ProgressBar(total=activity.total, completed=activity.done))
    return line


def places(directory: RunDirectory, checkpoint: Path, *, conversations: str) -> Text:
    """The files of a run, a line for each. `conversations` says which of them were recorded.

    To be printed with `soft_wrap=True`, so that a path longer than the terminal stays in one piece.
    """
    files = [
        (directory.metrics, "the metrics of each step"),
        (directory.trajectories, f"{conversations}, token by token"),
        (directory.curve, "the curve"),
        (directory.config, "the recipe as it was run"),
        (checkpoint, "the model; loads with AutoModelForCausalLM"),
    ]
    files = [(directory.shown / file.relative_to(directory.path), description) for file, description in files]
    width = max(len(str(file)) for file, _ in files)
    return Text("\n".join(f"{file!s:<{width}}  {description}" for file, description in files))
