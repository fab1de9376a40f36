"""What a person sees of a training run: a table of steps, the reward curve, a conversation from the last evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnwise import types
from turnwise.config.schema import Config
from turnwise.record.reader import read_lines
from turnwise.record.run_directory import RunDirectory
from turnwise.terminal.activity import Activity
from turnwise.terminal.conversation import conversation
from turnwise.terminal.curves import draw_rewards
from turnwise.terminal.report import Report
from turnwise.terminal.tables import evaluations_table, number, sparkline

__all__ = ["TrainReport"]

_COLUMNS = (
    ("step", "step"),
    ("reward/mean", "reward"),
    ("turns/mean", "turns"),
    ("tool_calls/mean", "calls"),
    ("tool_errors/mean", "errors"),
    ("failed", "failed"),
)


class TrainReport(Report):
    """Shows a training run."""

    def __init__(self, console: Console, activity: Activity | None = None) -> None:
        super().__init__(console, activity, label="training")
        self._rewards: list[float] = []
        self._example: types.Trajectory | None = None

    def begin(self, config: Config, *, done: int, notes: Sequence[str]) -> None:
        """Print what begins; `done` steps are finished already."""
        options = config.train
        self.start(
            f"training {config.model.path}: {options.total_steps} steps of {options.batch_size} rows x {options.group_size} "
            f"conversations, into {config.output}",
            steps=options.total_steps,
            done=done,
            notes=notes,
        )

    def step(self, metrics: Mapping[str, Any], problems: Sequence[str]) -> None:
        """Show a finished step. Each kind of problem is printed once."""
        if metrics["reward/mean"] is not None:
            self._rewards.append(metrics["reward/mean"])
        for problem in problems:  # `environment (2 times): KeyError: ...`
            kind = problem.partition(":")[0].partition(" (")[0] + problem.partition(": ")[2]
            self.print_problem(kind, f"step {metrics['step']}: {problem}")
        figures = "  ".join(f"{label} {_figure(metrics, name)}" for name, label in _COLUMNS)
        self.finish_step(metrics, f"{figures}  {_speed(metrics)} tokens/s")

    def evaluated(self, summary: Mapping[str, Any], groups: Sequence[types.Group]) -> None:
        """Print an evaluation's reward. Its best conversation with the most turns is kept for the end."""
        finished = [trajectory for group in groups for trajectory in group.trajectories if not trajectory.failed]
        if finished:
            best = max(finished, key=lambda t: ((t.reward or 0.0) > 0, len(t.turns), t.reward or 0.0))
            self._example = best
        self.print_line(f"step {summary['step']}: held-out reward {number(summary['reward/mean'])}")

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        """Draw the curve; print the evaluations, a conversation, and where the results are."""
        self.close()
        metrics, evaluations = list(read_lines(directory.metrics)), list(read_lines(directory.evaluations))
        draw_rewards(directory.curve, metrics, evaluations)
        rewards = [step["reward/mean"] for step in metrics if step["reward/mean"] is not None]
        self.console.print(f"reward {sparkline(rewards)}")
        if len(evaluations) > 1:
            self.console.print(evaluations_table(evaluations))
        if self._example is not None:
            self.console.print(conversation(self._example))
        self.print_places(directory, checkpoint, conversations="every conversation")
        self.print_line(
            f"to read the run: turnwise show {directory.shown}, or in the browser: turnwise view {directory.shown}"
        )

    def figures(self) -> RenderableType:
        table = Table(box=None)
        for _, label in _COLUMNS:
            table.add_column(label, justify="right")
        table.add_column("tokens/s", justify="right")
        table.add_column("s/step", justify="right")
        for metrics in self.recent:
            row = [_figure(metrics, name) for name, _ in _COLUMNS]
            table.add_row(*row, _speed(metrics), f"{metrics['seconds/step']:.2f}")
        return Group(table, Text(f"reward {sparkline(self._rewards)}"))


def _figure(metrics: Mapping[str, Any], name: str) -> str:
    return str(metrics[name]) if name == "step" else number(metrics[name])


def _speed(metrics: Mapping[str, Any]) -> str:
    seconds = metrics["seconds/rollout"]
    return f"{metrics['tokens/sampled'] / seconds:,.0f}" if seconds else "-"
