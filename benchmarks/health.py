"""Do the monitors of `health` warn of failing runs, and only of those? `python benchmarks/health.py`, about an hour.

Trains runs that learn, and runs that are made to fail in a known way (`health_tasks.py`), each in its own process. Then compares
the metrics of all steps with the limits: prints the value of each monitor that is closest to its limit in the healthy runs, and
the step in which each failing run is noticed. The metrics are kept in the output folder, so a second call trains only what is
missing, and other limits can be tried at once: `--set health.kl=0.5`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from learning_tasks.start_model import make_data, prepare
from rich.console import Console
from rich.table import Table

from turnwise.config.recipe import load
from turnwise.options.schema import Config
from turnwise.record.reader import read_lines
from turnwise.runs.health import HealthMonitors

HERE = Path(__file__).resolve().parent
CALCULATOR = "recipes/calculator.yaml"
TASK = "benchmarks/learning_tasks/{}.yaml"
FAILURES = "benchmarks/health_tasks.py:"
SINGLE_TURN = ("environment=turnwise.environments.environment:SingleTurn", "eval.max_rows=16")


@dataclass(frozen=True, slots=True)
class Job:
    """A training run, and the monitors that must warn of it: none, if it is healthy."""

    name: str
    recipe: str
    overrides: tuple[str, ...]
    expected: tuple[str, ...] = ()


JOBS = (
    Job("calculator", CALCULATOR, ("train.steps=80", "eval.max_rows=16")),
    Job("calculator, asynchronous", CALCULATOR, ("train.steps=60", "train.max_staleness=2", "eval.max_rows=16")),
    Job(
        "calculator, 4 steps old, corrected", CALCULATOR,
        ("train.steps=40", "train.max_staleness=4", "correction.action=truncate", "eval.max_rows=16"),
    ),
    Job(
        "calculator, 2 epochs of 2 minibatches", CALCULATOR,
        ("train.steps=40", "train.minibatches=2", "train.ppo_epochs=2", "eval.max_rows=16"),
    ),
    Job("calculator, reference model", CALCULATOR, ("train.steps=40", "loss.kl_coef=0.02", "eval.max_rows=16")),
    Job("composite reward", "recipes/composite_reward.yaml", ("train.steps=80", "eval.max_rows=16")),
    Job("doors, grpo", TASK.format("doors"), ("credit.name=grpo",)),
    Job("doors, gigpo", TASK.format("doors"), ("credit.name=gigpo",)),
    Job("digging, grpo", TASK.format("digging"), ("credit.name=grpo",)),
    Job("digging, turn_return", TASK.format("digging"), ("credit.name=turn_return",)),
    Job("guessing, grpo", TASK.format("guessing"), ("credit.name=grpo",)),
    Job(
        "reward that is nearly never given", CALCULATOR,
        ("train.steps=25", *SINGLE_TURN, f"reward.trajectory=[{FAILURES}nearly_never]", "train.batch_size=8"),
        ("zero_std",),
    ),
    Job(
        "reward for fewer tool calls", CALCULATOR,
        ("train.steps=50", *SINGLE_TURN, f"reward.trajectory=[{FAILURES}without_tools]", "train.lr=1.0e-3"),
        ("tool_use",),
    ),
    Job(
        "no exploration", CALCULATOR,
        ("train.steps=25", "sampling.temperature=0.05", "eval.max_rows=16"), ("duplicates", "zero_std"),
    ),
    Job(
        "learning rate 10 times too high", CALCULATOR, ("train.steps=40", "train.lr=3.0e-3", "eval.max_rows=16"), ("entropy",),
    ),
    Job(
        "reward for many tokens", CALCULATOR,
        ("train.steps=60", *SINGLE_TURN, f"reward.trajectory=[{FAILURES}many_tokens]", "train.lr=1.0e-3",
         "limits.tokens_per_turn=128"),
        ("length",),
    ),
    Job(
        "learning rate 100 times too high", CALCULATOR,
        ("train.steps=25", "train.lr=3.0e-2", "eval.max_rows=16", "train.minibatches=2"), ("kl",),
    ),
    Job(
        "8 steps old, learning rate 10 times too high", CALCULATOR,
        ("train.steps=40", "train.max_staleness=8", "train.lr=3.0e-3", "correction.action=truncate", "eval.max_rows=16"),
        ("ratio", "mismatch"),
    ),
    Job(
        "rewards that contradict each other", CALCULATOR,
        ("train.steps=15", *SINGLE_TURN, f"reward.trajectory=[{FAILURES}long_answers, {FAILURES}short_answers]"),
        ("reward_correlation",),
    ),
    Job("environment that fails", CALCULATOR, ("train.steps=15", f"environment={FAILURES}unreliable", "tools=[]",
        "eval.max_rows=16"), ("failed",)),
    Job(
        "reward function that does not read the answer", CALCULATOR,
        ("train.steps=12", *SINGLE_TURN, f"reward.trajectory=[{FAILURES}always_the_same]", "train.batch_size=8"),
        ("constant_reward", "zero_std"),
    ),
)  # fmt: skip
COLUMNS = {
    "zero_std": "groups/zero_std",
    "tool_use": "tool_calls/mean",
    "entropy": "entropy",
    "duplicates": "groups/duplicates",
    "length": "tokens/sampled",
    "ratio": "ratio/max_deviation",
    "mismatch": "correction/k3",
    "kl": "kl",
    "reward_correlation": "reward/correlation",
    "failed": "failed",
}
"""The metric of each monitor that compares a mean over `health.window` steps."""
RELATIVE = ("tool_use", "entropy", "length")
"""Monitors that compare with the first steps."""
LOWEST = ("tool_use", "entropy", "reward_correlation")
"""Monitors that warn of small values."""


def main() -> None:
    """Train what is missing, and print the tables."""
    parser = argparse.ArgumentParser(description="Monitors of `health` on runs that learn and on runs that fail.")
    parser.add_argument("--out", type=Path, default=HERE / ".health", help="folder of the runs")
    parser.add_argument(
        "--set", action="append", default=[], metavar="OPTION=VALUE", help="another limit, such as health.kl=0.5"
    )
    parser.add_argument("--report", action="store_true", help="only print the tables of the runs that exist")
    options = parser.parse_args()
    out = options.out.resolve()
    start = out / "start"
    os.environ.update(LEARNING=str(start), OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    if not options.report:
        prepare(start, make_data())
        for job in JOBS:
            train(job, out)
    found = [(job, *replayed(job, out, options.set)) for job in JOBS if (folder(job, out) / "finished").exists()]
    report(found)


def folder(job: Job, out: Path) -> Path:
    """The run directory of a job."""
    return out / "runs" / job.name.replace(" ", "_").replace(",", "")


def train(job: Job, out: Path) -> None:
    """Train a job in its own process, unless it was trained before. Raises SystemExit if it fails."""
    run = folder(job, out)
    if (run / "finished").exists():
        return
    overrides = [*job.overrides, f"output={run}", "replace=true"]
    command = [sys.executable, "-m", "turnwise", "train", job.recipe, *overrides]
    process = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{job.name} failed:\n{process.stdout[-1000:]}{process.stderr[-3000:]}")
    (run / "finished").touch()
    print(f"trained: {job.name}", flush=True)


def replayed(job: Job, out: Path, changes: list[str]) -> tuple[dict[str, int], dict[str, float]]:
    """The first step in which each monitor warns, and the value of each monitor that is closest to its limit."""
    config, _ = load(HERE.parent / job.recipe, [*job.overrides, *changes])
    monitors = HealthMonitors(config)
    lines = list(read_lines(folder(job, out) / "metrics.jsonl"))
    steps: dict[str, int] = {}
    for line in lines:
        for problem in monitors.findings(line, []):
            steps.setdefault(problem.name, line["step"])
    first = [line["groups/zero_std"] for line in lines][: config.health.constant_reward or 0]
    if first and all(share == 1.0 for share in first):
        steps["constant_reward"] = len(first)
    values = {name: value for name in COLUMNS if (value := extreme(name, lines, config)) is not None}
    return steps, values


def extreme(name: str, lines: list[dict[str, float | None]], config: Config) -> float | None:
    """The largest (or smallest) mean of a monitor's metric over `health.window` steps; None if it is not known."""
    window = config.health.window
    first = mean_of(name, lines[:window])
    means = [mean_of(name, lines[end - window : end]) for end in range(window, len(lines) + 1)]
    known = [mean for mean in means if mean is not None]
    if name in RELATIVE:
        known = [mean / first for mean in known[window:]] if first else []
    return (min if name in LOWEST else max)(known, default=None)


def mean_of(name: str, lines: list[dict[str, float | None]]) -> float | None:
    """The mean of a monitor's metric over some steps."""
    values = [value for line in lines if (value := line.get(COLUMNS[name])) is not None]
    return sum(values) / len(values) if values else None


def report(found: list[tuple[Job, dict[str, int], dict[str, float]]]) -> None:
    """Print a table of the healthy runs, and one of the failing runs."""
    console = Console(width=150)
    limits = load(HERE.parent / CALCULATOR, [])[0].health
    table = Table("healthy run", *COLUMNS, "warnings")
    table.add_row("limit", *(f"{getattr(limits, name):g}" for name in COLUMNS), "")
    for job, steps, values in found:
        if not job.expected:
            table.add_row(
                job.name, *(f"{values[name]:.3g}" if name in values else "" for name in COLUMNS), warnings(steps)
            )
    console.print(table)
    table = Table("failing run", "expected", "warnings", "values")
    for job, steps, values in found:
        if job.expected:
            shown = ", ".join(f"{name} {values[name]:.3g}" for name in job.expected if name in values)
            table.add_row(job.name, ", ".join(job.expected), warnings(steps), shown)
    console.print(table)
    silent = sum(not steps for job, steps, _ in found if not job.expected)
    noticed = sum(set(job.expected) <= steps.keys() for job, steps, _ in found if job.expected)
    healthy = sum(not job.expected for job, _, _ in found)
    print(f"healthy runs without a warning: {silent} of {healthy}")
    print(f"health_noticed {noticed}/{len(found) - healthy}")


def warnings(steps: dict[str, int]) -> str:
    """The monitors that warn, with the step."""
    return ", ".join(f"{name} (step {step})" for name, step in steps.items())


if __name__ == "__main__":
    main()
