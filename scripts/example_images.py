"""Draws the pictures of docs/examples.md from the runs of its commands: `python scripts/example_images.py [RUNS]`.

RUNS is the directory of the runs, by default runs/examples. Runs that are not there are left out.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from turnwise.record.reader import read_lines

IMAGES = Path(__file__).parent.parent / "docs" / "images" / "examples"


def series(run: Path, name: str, file: str = "metrics.jsonl") -> tuple[list[float], list[float]]:
    """The steps and the values of a metric. Steps without the metric are left out."""
    found = [(line["step"], line[name]) for line in read_lines(run / file) if line.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def axes(count: int) -> tuple[Any, Sequence[Axes]]:
    """A row of plots."""
    mpl.rcParams.update({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, plots = plt.subplots(1, count, figsize=(3.6 * count + 0.4, 2.7), squeeze=False)
    for plot in plots[0]:
        plot.grid(alpha=0.3)
    return figure, plots[0]


def save(figure: Any, name: str) -> None:
    """Write a picture, with the same bytes for the same runs."""
    figure.tight_layout()
    IMAGES.mkdir(parents=True, exist_ok=True)
    mpl.rcParams["svg.hashsalt"] = name
    figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
    plt.close(figure)


def metrics(run: Path, name: str, plots: dict[str, dict[str, str]]) -> None:
    """A picture with one plot for each title: metric -> label."""
    figure, places = axes(len(plots))
    for plot, (title, lines) in zip(places, plots.items(), strict=True):
        for metric, label in lines.items():
            plot.plot(*series(run, metric), label=label)
        plot.set_title(title, fontsize=9)
        plot.set_xlabel("training step")
        if len(lines) > 1:
            plot.legend(frameon=False, fontsize=8)
    save(figure, name)


def of_seeds(seeds: Sequence[Path], name: str, titles: dict[str, str]) -> None:
    """A picture with one plot for each metric, and in it a curve for each run."""
    figure, plots = axes(len(titles))
    for plot, (metric, title) in zip(plots, titles.items(), strict=True):
        for number, seed in enumerate(seeds):
            plot.plot(*series(seed, metric), label=f"seed {number}")
        plot.set_title(title, fontsize=9)
        plot.set_xlabel("training step")
    plots[0].legend(frameon=False, fontsize=8)
    save(figure, name)


def evaluation(out: Path, name: str) -> None:
    """The mean rewards of an evaluation, with their intervals."""
    results = json.loads((out / "eval.json").read_text(encoding="utf-8"))["models"]
    figure, (plot,) = axes(1)
    for place, result in enumerate(results):
        mean, low, high = (result["reward"][key] for key in ("mean", "low", "high"))
        plot.errorbar(mean, -place, xerr=[[mean - low], [high - mean]], fmt="o", capsize=3)
    plot.set_yticks([-place for place in range(len(results))], [result["name"] for result in results])
    plot.set_xlabel("mean reward, 95% interval")
    save(figure, name)


def main(runs: Path) -> None:
    """Draw all pictures."""
    if (run := runs / "calculator").is_dir():
        metrics(
            run,
            "calculator",
            {
                "reward": {"reward/mean": "mean"},
                "turns and failed tool calls": {"turns/mean": "turns", "tool_errors/mean": "failed calls"},
                "entropy of the model": {"entropy": "entropy"},
            },
        )
    if (run := runs / "composite").is_dir():
        parts = ("correctness", "efficiency", "tool_quality")
        metrics(run, "composite_reward", {"parts of the reward": {f"rewards/{part}/mean": part for part in parts}})
    if (run := runs / "sft").is_dir():
        figure, (plot,) = axes(1)
        plot.plot(*series(run, "loss"), label="training")
        plot.plot(*series(run, "loss", "evaluations.jsonl"), "o-", label="held-out conversations")
        plot.set(xlabel="training step", ylabel="loss per token")
        plot.legend(frameon=False, fontsize=8)
        save(figure, "sft")
    for name, title_of in (
        ("smollm2", {"metrics/wasted": "guesses that were excluded"}),
        ("smollm2_tool", {"rewards/right/mean": "right answers"}),
    ):
        if seeds := sorted(runs.glob(f"{name}-*")):
            of_seeds(seeds, name, {"reward/mean": "reward", **title_of, "entropy": "entropy of the model"})
    if (runs / "eval" / "eval.json").is_file():
        evaluation(runs / "eval", "evaluation")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path("runs/examples"))
