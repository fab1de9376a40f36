"""The report of `benchmarks/learning.py`: curves with bands, and tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from learning_tasks.setups import Task

__all__ = ["Curve", "Point", "draw", "markdown", "print_tables"]

WINDOW = 5
"""The number of training steps whose mean reward is one point of a drawn curve."""
FINAL = 0.1
"""The share of the points, at the end, whose mean is the final reward."""
COLUMNS = ("estimator", "seeds", "final reward: mean", "lowest to highest", "reaches the level: median")


@dataclass(frozen=True, slots=True)
class Point:
    """The mean reward after `step` steps, in which `tokens` tokens were sampled."""

    step: int
    tokens: int
    reward: float


@dataclass(frozen=True, slots=True)
class Curve:
    """The result of one run."""

    task: str
    setup: str
    seed: int
    points: list[Point]
    seconds: float

    @property
    def final(self) -> float:
        """The mean reward of the last tenth of the points, at least one."""
        count = max(1, round(FINAL * len(self.points)))
        return statistics.fmean(point.reward for point in self.points[-count:])

    def smooth(self, window: int) -> list[float]:
        """For each point, the mean reward of the last `window` points."""
        rewards = [point.reward for point in self.points]
        return [statistics.fmean(rewards[max(0, end - window) : end]) for end in range(1, len(rewards) + 1)]


@dataclass(frozen=True, slots=True)
class Seeds:
    """The curves of one setup."""

    setup: str
    xs: list[int]
    """Steps, or sampled tokens: what the shortest curve has."""
    curves: list[list[float]]
    finals: list[float]
    reached: list[int | None]
    """For each seed the first x at which the smooth curve reaches the level; None if it does not."""


def draw(path: Path, tasks: Sequence[Task], curves: Sequence[Curve]) -> None:
    """Draw all curves to one picture: the mean of the seeds as a line, lowest to highest as a band."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [task for task in tasks if any(curve.task == task.name for curve in curves)]
    figure, axes = plt.subplots(1, len(shown), figsize=(6 * len(shown), 4.6), layout="constrained", squeeze=False)
    for axis, task in zip(axes[0], shown, strict=True):
        for number, seeds in enumerate(of_task(task, curves)):
            low, high = zip(*((min(values), max(values)) for values in zip(*seeds.curves, strict=True)), strict=True)
            mean = [statistics.fmean(values) for values in zip(*seeds.curves, strict=True)]
            axis.plot(seeds.xs, mean, color=f"C{number}", label=seeds.setup)
            axis.fill_between(seeds.xs, low, high, color=f"C{number}", alpha=0.15, linewidth=0)
        axis.axhline(task.optimum, color="0.5", linestyle=":", linewidth=1)
        axis.set_title(f"{task.name}: {task.title}", fontsize=10)
        axis.set_xlabel("sampled tokens" if task.evaluated else "step")
        axis.set_ylabel("reward on held-out rows" if task.evaluated else f"reward, mean of {WINDOW} steps")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def of_task(task: Task, curves: Sequence[Curve]) -> list[Seeds]:
    """The curves of a task by setup. Over tokens, the final rewards are those where the shortest curve of the task ends, so that
    all have equal tokens, and the curves of a setup go to the end of its shortest one."""
    own = [curve for curve in curves if curve.task == task.name]
    end = min((curve.points[-1].tokens for curve in own), default=0)
    result: list[Seeds] = []
    for setup in task.setups:
        of_setup = [curve for curve in own if curve.setup == setup.name]
        if not of_setup:
            continue
        if task.evaluated:
            own_end = min(curve.points[-1].tokens for curve in of_setup)
            xs = [round(end * part / 40) for part in range(40 * own_end // end + 1)]
            values = [[at(curve, x) for x in xs] for curve in of_setup]
            finals = [at(curve, end) for curve in of_setup]
        else:
            xs = [point.step for point in of_setup[0].points]
            values = [curve.smooth(WINDOW) for curve in of_setup]
            finals = [curve.final for curve in of_setup]
        reached = [next((x for x, value in zip(xs, line, strict=True) if value >= task.level), None) for line in values]
        result.append(Seeds(setup.name, xs, values, finals, reached))
    return result


def at(curve: Curve, tokens: float) -> float:
    """The reward after this number of sampled tokens, on the straight line between two evaluations."""
    for before, after in zip(curve.points, curve.points[1:], strict=False):
        if tokens <= after.tokens:
            share = (tokens - before.tokens) / (after.tokens - before.tokens)
            return before.reward + share * (after.reward - before.reward)
    return curve.points[-1].reward


def rows(task: Task, curves: Sequence[Curve]) -> list[list[str]]:
    """The rows of a task's table."""
    unit = " tokens" if task.evaluated else " steps"
    table: list[list[str]] = []
    for seeds in of_task(task, curves):
        known = [x for x in seeds.reached if x is not None]
        often = len(known) * 2 > len(seeds.reached)
        reached = (
            f"{statistics.median_high([*known, *[10**9] * (len(seeds.reached) - len(known))]):,}{unit}"
            if often
            else "no"
        )
        mean = f"{statistics.fmean(seeds.finals):.2f}"
        table.append(
            [seeds.setup, str(len(seeds.finals)), mean, f"{min(seeds.finals):.2f} to {max(seeds.finals):.2f}", reached]
        )
    return table


def heading(task: Task) -> str:
    """The numbers of a task that do not depend on a run."""
    return f"{task.title}; start {task.start:g}, optimum {task.optimum:g}, level {task.level:g}"


def print_tables(console: Console, tasks: Sequence[Task], curves: Sequence[Curve]) -> None:
    """Print a table for each task that has results."""
    for task in tasks:
        lines = rows(task, curves)
        if lines:
            table = Table(*COLUMNS, title=f"{task.name}: {heading(task)}", title_justify="left")
            for line in lines:
                table.add_row(*line)
            console.print(table)


def markdown(tasks: Sequence[Task], curves: Sequence[Curve], refused: Mapping[tuple[str, str], str]) -> str:
    """The tables as a Markdown page, with the setups that turnwise refused."""
    parts: list[str] = ["# Learning curves", "", "![curves](learning.png)", ""]
    for task in tasks:
        lines = rows(task, curves)
        if lines:
            parts += [f"## {task.name}", "", heading(task)[0].upper() + heading(task)[1:] + ".", ""]
            parts += [f"| {' | '.join(line)} |" for line in (COLUMNS, ["---"] * len(COLUMNS), *lines)]
            parts.append("")
    if refused:
        parts += [
            "Not available:",
            "",
            *(f"- {task}, {setup}: {problem}" for (task, setup), problem in refused.items()),
            "",
        ]
    return "\n".join(parts)
