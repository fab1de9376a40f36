"""What a person sees of a run in the terminal: notes, progress, present activity, problems, and where the results are.

`Report` is the base of the reports of training and fine-tuning, which say what their steps look like. During a long step, the
present activity shows that the run makes progress.

`Terminal` is safe for texts from models, tools and environments. Escape sequences can set the title, the clipboard and the
colours of a terminal, and hide text, so this console prints control characters as escapes; only its own control sequences
reach the terminal.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

from turnwise.errors import counted
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.record.run_directory import RunDirectory

# the present activity


class Advance(Protocol):
    """Counts a finished item of a part of a step."""

    def __call__(self, tokens: int = 0, /) -> None:
        """`tokens` is the number of tokens that were sampled for the item."""
        ...


@dataclass(slots=True)
class Activity:
    """The part of a step that is running. The run writes it; a display reads it, possibly in another thread."""

    label: str = ""
    """`step 4: conversations`; empty before the first step."""
    done: int = 0
    total: int = 0
    """0 for a part without a count."""
    tokens: int = 0
    """The tokens that were sampled for the finished items of the part."""
    began: float = field(default_factory=time.monotonic)
    """When the step began, by `time.monotonic`."""
    part_began: float = field(default_factory=time.monotonic, init=False)
    _parts: int = field(default=0, init=False)

    def step(self, step: int) -> None:
        """Record that a step begins. Steps are counted from 1."""
        self.began = time.monotonic()
        self.part(step, "conversations")

    def part(self, step: int, name: str, total: int = 0) -> Advance:
        """Record that a part of a step begins, with `total` items.

        Returns a function to call after each item. It has no effect after another part began: with `train.max_staleness`, the
        conversations of later steps continue during training.
        """
        self.label, self.done, self.total, self.tokens = f"step {step}: {name}", 0, total, 0
        self.part_began = time.monotonic()
        self._parts += 1
        own = self._parts

        def advance(tokens: int = 0, /) -> None:
            if self._parts == own:
                self.advance(tokens)

        return advance

    def advance(self, tokens: int = 0, /) -> None:
        """Count a finished item, for which `tokens` tokens were sampled."""
        self.done += 1
        self.tokens += tokens

    def speed(self) -> str:
        """The sampled tokens per second of the part, such as `1,234 tokens/s`; empty without sampled tokens."""
        seconds = time.monotonic() - self.part_began
        return f"{self.tokens / seconds:,.0f} tokens/s" if self.tokens and seconds > 0 else ""

    def text(self) -> str:
        """The activity as text, such as `step 4: conversations 37 of 128, 1,234 tokens/s, 61 s`."""
        if not self.label:
            return ""
        count = f" {self.done} of {self.total}" if self.total else ""
        speed = f", {speed}" if (speed := self.speed()) else ""
        return f"{self.label}{count}{speed}, {time.monotonic() - self.began:.0f} s"


class Heartbeat:
    """Prints a line every `seconds` seconds during a long step, if the console is not a terminal with a live display; the first
    one after `first` seconds, if that is given."""

    def __init__(
        self, activity: Activity, console: Console, *, seconds: float = 60.0, first: float | None = None
    ) -> None:
        self._activity = activity
        self._console = console
        self._seconds = seconds
        self._first = seconds if first is None else first
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        if not self._console.is_terminal:
            self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _beat(self) -> None:
        pause = self._first
        while not self._ended.wait(pause):
            if time.monotonic() - self._activity.began >= pause and (text := self._activity.text()):
                self._console.print(text, highlight=False, markup=False, soft_wrap=True)
            pause = self._seconds


# the report

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

    def start(
        self, header: str, *, steps: int, done: int, notes: Sequence[str], output: str, section: str, evaluates: bool
    ) -> None:
        """Print notes and the header, and begin the display. `done` of the `steps` are finished already. If these are all, the
        header says what to set to go on, and whether the run `evaluates` all the same. `section` has the number of steps."""
        for note in notes:
            self.console.print(Text(note, style="dim"), soft_wrap=True)
        if done >= steps:
            what = "nothing to train, only to evaluate" if evaluates else "nothing to do"
            header = (
                f"{what}: {output} has done {counted(done, 'step')}, and the recipe has {steps}. To go on, raise {section}.steps "
                f"(or {section}.epochs, if that sets them)"
            )
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
    kind = "the model; loads with AutoModelForCausalLM"
    if (checkpoint / "adapter_config.json").is_file():
        kind = "the adapter; `turnwise merge` writes the model"
    elif (checkpoint / WEIGHTS_IN_PARTS).is_file():
        kind = "the model in parts of the ranks; `turnwise merge` writes it"
    files = [
        (directory.metrics, "the metrics of each step"),
        (directory.trajectories, f"{conversations}, token by token"),
        (directory.curve, "the curve"),
        (directory.config, "the recipe as it was run"),
        (checkpoint, kind),
    ]
    if (best := directory.path / "best").is_dir():
        files.append((best, "the checkpoint with the best evaluation (checkpoint.best)"))
    files = [(directory.shown / file.relative_to(directory.path), description) for file, description in files]
    width = max(len(str(file)) for file, _ in files)
    return Text("\n".join(f"{file!s:<{width}}  {description}" for file, description in files))


# the console

# C0 without tabulator and line feed, DEL, C1, and characters that change the direction of text
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """The text with its control characters written as escapes.

    Example: `"\\x1b]0;owned\\x07"` becomes `"\\\\x1b]0;owned\\\\x07"`.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


class Terminal(Console):
    """A rich console that prints control characters as text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)

    def out(
        self,
        *objects: Any,
        sep: str = " ",
        end: str = "\n",
        style: str | Style | None = None,
        highlight: bool | None = None,
    ) -> None:
        texts = [printable(str(value)) for value in objects]
        super().out(*texts, sep=sep, end=end, style=style, highlight=highlight)


# the progress bar of runs without training


_SILENT = 10.0
"""Seconds of a command after which each further stage has a line, where no terminal shows what it does."""
_FIRST_LINE = 15.0
"""Seconds of a stage until its first line there."""


@contextlib.contextmanager
def stages(console: Console) -> Iterator[Callable[[str], None]]:
    """Show which stage of a command is running, on a terminal. Elsewhere, in a line of each stage that begins when the command
    has taken some seconds, and in lines during a long stage. Yields the function that begins a stage, with the text that is
    shown."""
    activity, started = Activity(), time.monotonic()
    status = console.status("")

    def begin(text: str) -> None:
        activity.label, activity.began = text, time.monotonic()
        status.update(escape(text))
        if not console.is_terminal and activity.began - started >= _SILENT:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    with Heartbeat(activity, console, first=_FIRST_LINE), status if console.is_terminal else contextlib.nullcontext():
        yield begin


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
