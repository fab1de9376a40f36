"""What a person sees of a training run and of a fine-tuning run, and their curves in a picture file.

Training shows a table of steps, the reward curve, and a conversation from the last evaluation. Fine-tuning shows the loss and
the speed of its steps, and the curve of the loss.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from turnwise import types
from turnwise.errors import RunError, counted
from turnwise.options.schema import Config
from turnwise.record.reader import read_lines
from turnwise.record.run_directory import RunDirectory
from turnwise.record.summary import held_out_change
from turnwise.terminal.conversation import conversation
from turnwise.terminal.report import Activity, Report
from turnwise.terminal.runs import change_line
from turnwise.terminal.tables import evaluations_table, number, sparkline

# pictures

_log = logging.getLogger(__name__)

Lines = Sequence[Mapping[str, Any]]
"""Lines of metrics.jsonl or evaluations.jsonl."""


def draw_rewards(path: Path, metrics: Lines, evaluations: Lines) -> None:
    """Draw reward, turns and tool use over the steps. If the file cannot be written, a warning is logged."""
    known = [step for step in metrics if step["reward/mean"] is not None]
    if not known:
        return
    steps = [step["step"] for step in known]
    figure = _empty_figure(8, 6)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1.4))
    figure.subplots_adjust(left=0.12, right=0.98, bottom=0.09, top=0.98, hspace=0.17)
    means, widths = [step["reward/mean"] for step in known], [step["reward/std"] for step in known]
    above.plot(steps, means, color="tab:green", label="training, mean")
    low, high = zip(*((mean - width, mean + width) for mean, width in zip(means, widths, strict=True)), strict=True)
    above.fill_between(steps, low, high, color="tab:green", alpha=0.12, label="± one standard deviation")
    if evaluations:
        _plot_held_out(above, evaluations, "reward/mean")
    above.set_ylabel("reward")
    above.legend(loc="lower right", frameon=False)
    for name, label in (
        ("turns/mean", "turns"),
        ("tool_calls/mean", "tool calls"),
        ("tool_errors/mean", "tool errors"),
    ):
        below.plot(steps, [step[name] for step in known], label=label)
    below.set_xlabel("step")
    below.set_ylabel("per conversation")
    below.legend(loc="lower center", bbox_to_anchor=(0.5, 0.97), ncols=3, frameon=False)
    _save(figure, (above, below), path)


def draw_loss(path: Path, metrics: Lines, evaluations: Lines) -> None:
    """Draw the loss over the steps. If the file cannot be written, a warning is logged."""
    known = [step for step in metrics if step["loss"] is not None]
    if not known:
        return
    figure = _empty_figure(8, 4)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.12, right=0.98, bottom=0.13, top=0.97)
    axes.plot([step["step"] for step in known], [step["loss"] for step in known], color="tab:green", label="training")
    held_out = [line for line in evaluations if line["loss"] is not None]
    if held_out:
        _plot_held_out(axes, held_out, "loss")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (negative log-likelihood per token)")
    axes.legend(loc="upper right", frameon=False)
    _save(figure, (axes,), path)


def _empty_figure(width: float, height: float) -> Any:
    """A figure that needs no display. Not made by pyplot, whose backend belongs to the notebook that calls `turnwise.api`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))  # with fixed margins: a layout that fits them draws the figure three times


def _plot_held_out(axes: Any, evaluations: Lines, name: str) -> None:
    steps, values = [line["step"] for line in evaluations], [line[name] for line in evaluations]
    axes.plot(steps, values, "o--", color="tab:blue", label="held out")


def _save(figure: Any, axes: Sequence[Any], path: Path) -> None:
    for part in axes:
        part.grid(alpha=0.25)
        part.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        _log.warning("the curve could not be written to %s: %s", path, error)


# training

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
        self._keeps_best = False
        self._example_is: str = ""

    def begin(self, config: Config, *, done: int, notes: Sequence[str], evaluates: bool = False) -> None:
        """Print what begins; `done` steps are finished already. `evaluates`: an evaluation comes first."""
        options = config.train
        self._keeps_best = config.checkpoint.best is not None
        self.start(
            f"training {config.model.path}: {counted(options.total_steps, 'step')} of {counted(options.batch_size, 'row')} x "
            f"{counted(options.group_size, 'conversation')}, into {config.output}",
            steps=options.total_steps,
            done=done,
            notes=notes,
            output=config.output,
            section="train",
            evaluates=evaluates,
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
        """Print an evaluation's reward. Of its best conversations, one with the most turns is kept for the end."""
        finished = [trajectory for group in groups for trajectory in group.trajectories if not trajectory.failed]
        if finished:
            self._example = max(finished, key=lambda t: (t.reward or 0.0, len(t.turns)))
            # the deviation is 0 where rewards are equal up to rounding
            self._example_is = "one of the best conversations" if summary["reward/std"] else "a conversation"
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
            # the run has ended well; `turnwise show` says what is wrong with its record
            with contextlib.suppress(RunError):
                if (change := held_out_change(directory.path)) is not None:
                    self.console.print(change_line(change))
        if not self._keeps_best and (passed := _passed_best(evaluations)) is not None:
            self.print_line(passed)
        if self._example is not None:
            self.print_line(f"{self._example_is} of the last evaluation:")
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


def _passed_best(evaluations: Lines) -> str | None:
    """What to say of an evaluation that was better than the last; None if there is none."""
    known = [line for line in evaluations if line["reward/mean"] is not None]
    best = max(known, key=lambda line: line["reward/mean"], default=None)
    if best is None or best["reward/mean"] <= known[-1]["reward/mean"]:
        return None
    if not best["step"]:
        return f"the held-out reward was highest before training ({number(best['reward/mean'])})"
    return (
        f"the held-out reward was highest after step {best['step']} ({number(best['reward/mean'])}): "
        f"checkpoint.best=reward/mean keeps that checkpoint"
    )


def _figure(metrics: Mapping[str, Any], name: str) -> str:
    return str(metrics[name]) if name == "step" else number(metrics[name])


def _speed(metrics: Mapping[str, Any]) -> str:
    seconds = metrics["seconds/rollout"]
    return f"{metrics['tokens/sampled'] / seconds:,.0f}" if seconds else "-"


# fine-tuning


class SftReport(Report):
    """Shows a fine-tuning run."""

    def __init__(self, console: Console, activity: Activity | None = None) -> None:
        super().__init__(console, activity, label="fine-tuning")

    def begin(
        self, config: Config, *, rows: int, steps: int, done: int, notes: Sequence[str], evaluates: bool = False
    ) -> None:
        """Print what begins; `done` of the `steps` are finished already. `evaluates`: an evaluation comes first."""
        options = config.sft
        self.start(
            f"fine-tuning {config.model.path} on {counted(rows, 'conversation')}: {counted(steps, 'step')} of "
            f"{options.batch_size} ({steps * options.batch_size / rows:.3g} epochs), into {config.output}",
            steps=steps,
            done=done,
            notes=notes,
            output=config.output,
            section="sft",
            evaluates=evaluates,
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
