"""What a person sees of a fine-tuning run: progress while it goes, and the curve of its loss at its end."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from turnwise.config.schema import Config
from turnwise.record.reader import read_lines
from turnwise.record.writer import RunDirectory
from turnwise.terminal.activity import Activity
from turnwise.terminal.report import places
from turnwise.terminal.show import number, sparkline

__all__ = ["SftReport", "draw_loss"]

_log = logging.getLogger(__name__)


class _Doing(ProgressColumn):
    """What is being done at the moment."""

    def __init__(self, activity: Activity) -> None:
        super().__init__()
        self._activity = activity

    def render(self, task: Task) -> Text:
        return Text(self._activity.text())


class SftReport:
    """Shows a run: a bar on a terminal, a line a step elsewhere."""

    def __init__(self, console: Console, activity: Activity | None = None) -> None:
        self._console = console
        self._activity = activity or Activity()
        self._steps = 0
        self._recent: list[Mapping[str, Any]] = []
        self._told: set[str] = set()
        self._progress = Progress(
            TextColumn("learning"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("time left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            TextColumn("{task.fields[figures]}"),
            _Doing(self._activity),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("learning", total=None, figures="")

    def begin(self, config: Config, *, rows: int, steps: int, done: int, notes: Sequence[str]) -> None:
        """Say what begins; `done` steps are behind us."""
        for note in notes:
            self._console.print(Text(note, style="dim"), soft_wrap=True)
        options = config.sft
        self._console.print(
            f"fine-tuning {config.model.path} on {rows} conversations: {steps} steps of {options.batch_size} "
            f"({steps * options.batch_size / rows:.3g} epochs), into {config.output}",
            highlight=False,
            soft_wrap=True,
        )
        self._steps = steps
        if done == steps:
            self._console.print("all steps are finished already; more of them: sft.steps or sft.epochs")
        self._progress.update(self._task, total=steps, completed=done)
        if self._console.is_terminal:
            self._progress.start()

    def step(self, metrics: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Show a finished step. A problem is told the first time it is met."""
        self._recent = [*self._recent[-7:], metrics]
        self._tell(f"step {metrics['step']}", problems)
        speed = metrics["tokens/all"] / max(metrics["seconds/step"], 1e-9)
        figures = f"loss {number(metrics['loss'])}  {speed:,.0f} tokens/s"
        self._progress.update(self._task, completed=metrics["step"], figures=figures)
        if not self._console.is_terminal:
            seconds = sum(one["seconds/step"] for one in self._recent) / len(self._recent)
            left = timedelta(seconds=round(seconds * (self._steps - metrics["step"])))
            away = "".join(
                f"  {name} {metrics[name]:.3f}" for name in ("left_out", "failed", "template_mismatch") if metrics[name]
            )
            line = f"step {metrics['step']}  {figures}{away}  {metrics['seconds/step']:.2f} s/step  {left} left"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _tell(self, where: str, problems: Sequence[str]) -> None:
        for problem in problems:
            rows, _, kind = problem.partition(": ")
            if kind not in self._told and len(self._told) < 20:
                self._told.add(kind)
                self._console.print(Text(f"{where}, {rows}: {kind}", style="red"), soft_wrap=True)

    def evaluated(self, summary: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Tell a held-out loss, and what could not be measured."""
        self._tell("held out", problems)
        self._console.print(f"step {summary['step']}: held-out loss {number(summary['loss'])}", highlight=False)

    def close(self) -> None:
        """Leave the terminal as it was, however the run ends."""
        self._progress.stop()

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        """Draw the curve, and say where everything is."""
        self.close()
        metrics, evaluations = list(read_lines(directory.metrics)), list(read_lines(directory.evaluations))
        draw_loss(directory.curve, metrics, evaluations)
        self._console.print(f"loss {sparkline([one['loss'] for one in metrics if one['loss'] is not None])}")
        self._console.print(places(directory, checkpoint, conversations="the first conversations"), soft_wrap=True)
        self._console.print(
            f"look into it: turnwise show {directory.path}; go on: turnwise train RECIPE model.path={checkpoint}",
            highlight=False,
            soft_wrap=True,
        )


def draw_loss(path: Path, metrics: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Draw the loss over the steps. A picture that cannot be drawn is told, and ends nothing."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    known = [one for one in metrics if one["loss"] is not None]
    if not known:
        return
    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    axes.plot([one["step"] for one in known], [one["loss"] for one in known], color="tab:green", label="training")
    held_out = [one for one in evaluations if one["loss"] is not None]
    if held_out:
        steps, losses = [one["step"] for one in held_out], [one["loss"] for one in held_out]
        axes.plot(steps, losses, "o--", color="tab:blue", label="held out")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (negative log-likelihood a token)")
    axes.legend(loc="upper right", frameon=False)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        _log.warning("the curve could not be written to %s: %s", path, error)
    plt.close(figure)
