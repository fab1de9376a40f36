"""What a person sees of a run: progress while it goes, a table, a conversation and a curve at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from turnwise import types
from turnwise.config.schema import Config
from turnwise.record.reader import read_lines
from turnwise.record.writer import RunDirectory, trajectory_record
from turnwise.terminal.activity import Activity
from turnwise.terminal.show import conversation, evaluations_table, number, sparkline

__all__ = ["Report", "draw_curve", "places"]

_log = logging.getLogger(__name__)

_COLUMNS = (
    ("step", "step"),
    ("reward/mean", "reward"),
    ("turns/mean", "turns"),
    ("tool_calls/mean", "calls"),
    ("tool_errors/mean", "errors"),
    ("failed", "failed"),
)


class Report:
    """Shows a training run: live on a terminal, a line a step elsewhere."""

    def __init__(self, console: Console, activity: Activity | None = None) -> None:
        self._console = console
        self._activity = activity or Activity()
        self._live: Live | None = None
        self._recent: list[Mapping[str, Any]] = []
        self._rewards: list[float] = []
        self._told: set[str] = set()
        self._steps = 0
        self._example: dict[str, Any] | None = None
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self._task = self._progress.add_task("training", total=None)

    def begin(self, config: Config, *, done: int, notes: Sequence[str]) -> None:
        """Say what begins; `done` steps are behind us."""
        for note in notes:
            self._console.print(Text(note, style="dim"), soft_wrap=True)
        options = config.train
        self._console.print(
            f"training {config.model.path}: {options.steps} steps of {options.batch_size} rows x {options.group_size} "
            f"conversations, into {config.output}",
            highlight=False,
            soft_wrap=True,
        )
        self._steps = options.steps
        self._progress.update(self._task, total=options.steps, completed=done)
        if self._console.is_terminal:
            # drawn again by its own thread: a long step shows what it does
            self._live = Live(get_renderable=self._picture, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def step(self, metrics: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Show a finished step. A problem is told the first time it is met."""
        self._recent = [*self._recent[-7:], metrics]
        if metrics["reward/mean"] is not None:
            self._rewards.append(metrics["reward/mean"])
        self._progress.update(self._task, completed=metrics["step"])
        for problem in problems:
            kind = problem.partition(":")[0].partition(" (")[0] + problem.partition(": ")[2]
            if kind not in self._told and len(self._told) < 20:
                self._told.add(kind)
                self._console.print(Text(f"step {metrics['step']}: {problem}", style="red"))
        if self._live is None:
            figures = "  ".join(f"{label} {_figure(metrics, name)}" for name, label in _COLUMNS)
            seconds = sum(one["seconds/step"] for one in self._recent) / len(self._recent)
            left = timedelta(seconds=round(seconds * (self._steps - metrics["step"])))
            line = f"{figures}  {_speed(metrics)} tokens/s  {metrics['seconds/step']:.2f} s/step  {left} left"
            self._console.print(line, highlight=False, soft_wrap=True)

    def evaluated(self, summary: Mapping[str, Any], groups: Sequence[types.Group]) -> None:
        """Keep an evaluation's most telling conversation for the end."""
        whole = [one for group in groups for one in group.trajectories if not one.failed]
        if whole:
            best = max(whole, key=lambda one: ((one.reward or 0.0) > 0, len(one.turns), one.reward or 0.0))
            self._example = trajectory_record(best, step=summary["step"])
        self._console.print(
            f"step {summary['step']}: held-out reward {number(summary['reward/mean'])}", highlight=False
        )

    def close(self) -> None:
        """Leave the terminal as it was, however the run ends."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        """Draw the curve; show before and after, one conversation, and where everything is."""
        self.close()
        metrics, evaluations = list(read_lines(directory.metrics)), list(read_lines(directory.evaluations))
        draw_curve(directory.curve, metrics, evaluations)
        rewards = [one["reward/mean"] for one in metrics if one["reward/mean"] is not None]
        self._console.print(f"reward {sparkline(rewards)}")
        if len(evaluations) > 1:
            self._console.print(evaluations_table(evaluations))
        if self._example is not None:
            self._console.print(conversation(self._example))
        self._console.print(places(directory, checkpoint, conversations="every conversation"), soft_wrap=True)
        self._console.print(f"look into it: turnwise show {directory.path}", highlight=False, soft_wrap=True)

    def _picture(self) -> RenderableType:
        table = Table(box=None)
        for _, label in _COLUMNS:
            table.add_column(label, justify="right")
        table.add_column("tokens/s", justify="right")
        table.add_column("s/step", justify="right")
        for metrics in self._recent:
            figures = [_figure(metrics, name) for name, _ in _COLUMNS]
            table.add_row(*figures, _speed(metrics), f"{metrics['seconds/step']:.2f}")
        return Group(table, Text(f"reward {sparkline(self._rewards)}"), self._progress, Text(self._activity.text()))


def places(directory: RunDirectory, checkpoint: Path, *, conversations: str) -> Text:
    """Where a run has left what, a line each; `conversations` says which of them are in the record.

    To be printed with `soft_wrap=True`, so that a path longer than the terminal stays in one piece.
    """
    files = [
        (directory.metrics, "one object a step"),
        (directory.trajectories, f"{conversations}, token by token"),
        (directory.curve, "the curve"),
        (directory.config, "the recipe as it was run"),
        (checkpoint, "the model; loads with AutoModelForCausalLM"),
    ]
    width = max(len(str(file)) for file, _ in files)
    return Text("\n".join(f"{file!s:<{width}}  {what}" for file, what in files))


def _figure(metrics: Mapping[str, Any], name: str) -> str:
    return str(metrics[name]) if name == "step" else number(metrics[name])


def _speed(metrics: Mapping[str, Any]) -> str:
    seconds = metrics["seconds/rollout"]
    return f"{metrics['tokens/sampled'] / seconds:,.0f}" if seconds else "-"


def draw_curve(path: Path, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Draw reward, turns and tool use over the steps. A picture that cannot be drawn is told, and ends nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = [one for one in metrics if one["reward/mean"] is not None]
    if not known:
        return
    steps = [one["step"] for one in known]
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(8, 6), sharex=True, height_ratios=(3, 1.4), layout="constrained"
    )
    means, widths = [one["reward/mean"] for one in known], [one["reward/std"] for one in known]
    above.plot(steps, means, color="tab:green", label="training, mean")
    low, high = zip(*((mean - width, mean + width) for mean, width in zip(means, widths, strict=True)), strict=True)
    above.fill_between(steps, low, high, color="tab:green", alpha=0.12, label="± one standard deviation")
    if evaluations:
        above.plot(
            [one["step"] for one in evaluations],
            [one["reward/mean"] for one in evaluations],
            "o--",
            color="tab:blue",
            label="held out",
        )
    above.set_ylabel("reward")
    above.legend(loc="lower right", frameon=False)
    for name, label in (
        ("turns/mean", "turns"),
        ("tool_calls/mean", "tool calls"),
        ("tool_errors/mean", "tool errors"),
    ):
        below.plot(steps, [one[name] for one in known], label=label)
    below.set_xlabel("step")
    below.set_ylabel("per conversation")
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=3, frameon=False)
    for axes in (above, below):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        _log.warning("the curve could not be written to %s: %s", path, error)
    plt.close(figure)
