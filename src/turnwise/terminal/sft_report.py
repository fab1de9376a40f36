"""What a person sees of a fine-tuning run: the loss and the speed of its steps, and the curve of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from turnwise.config.schema import Config
from turnwise.record.reader import read_lines
from turnwise.record.run_directory import RunDirectory
from turnwise.terminal.activity import Activity
from turnwise.terminal.curves import draw_loss
from turnwise.terminal.report import Report
from turnwise.terminal.tables import number, sparkline

__all__ = ["SftReport"]


class SftReport(Report):
    """Shows a fine-tuning run."""

    def __init__(self, console: Console, activity: Activity | None = None) -> None:
        super().__init__(console, activity, label="fine-tuning")

    def begin(self, config: Config, *, rows: int, steps: int, done: int, notes: Sequence[str]) -> None:
        """Print what begins; `done` of the `steps` are finished already."""
        options = config.sft
        self.start(
            f"fine-tuning {config.model.path} on {rows} conversations: {steps} steps of {options.batch_size} "
            f"({steps * options.batch_size / rows:.3g} epochs), into {config.output}",
            steps=steps,
            done=done,
            notes=notes,
        )
        if done == steps:
            self.print_line("all steps are finished already; for more steps raise sft.steps or sft.epochs")

    def step(self, metrics: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Show a finished step. Each kind of problem is printed once."""
        self._problems(f"step {metrics['step']}", problems)
        left_out = "".join(
            f"  {name} {metrics[name]:.3f}" for name in ("left_out", "failed", "template_mismatch") if metrics[name]
        )
        self.finish_step(metrics, f"step {metrics['step']}  {_figures(metrics)}{left_out}")

    def evaluated(self, summary: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Print a held-out loss, and the problems of conversations that could not be measured."""
        self._problems("held out", problems)
        self.print_line(f"step {summary['step']}: held-out loss {number(summary['loss'])}")

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        """Draw the curve, and print where the results are."""
        self.close()
        metrics, evaluations = list(read_lines(directory.metrics)), list(read_lines(directory.evaluations))
        draw_loss(directory.curve, metrics, evaluations)
        self.console.print(f"loss {sparkline([step['loss'] for step in metrics if step['loss'] is not None])}")
        self.print_places(directory, checkpoint, conversations="the first conversations")
        self.print_line(
            f"to read the run: turnwise show {directory.shown}; to train further: turnwise train RECIPE model.path={checkpoint}"
        )

    def figures(self) -> RenderableType:
        return Text(_figures(self.recent[-1]) if self.recent else "")

    def _problems(self, where: str, problems: Sequence[str]) -> None:
        for problem in problems:  # `rows 3 and 17: tokens: ...`
            rows, _, kind = problem.partition(": ")
            self.print_problem(kind, f"{where}, {rows}: {kind}")


def _figures(metrics: Mapping[str, Any]) -> str:
    speed = metrics["tokens/all"] / max(metrics["seconds/step"], 1e-9)
    return f"loss {number(metrics['loss'])}  {speed:,.0f} tokens/s"
