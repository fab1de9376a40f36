"""Does turnwise learn? Estimators of advantages on small tasks where credit matters: `python benchmarks/learning.py`.

Each task (`learning_tasks/`) is run with several estimators and three seeds. The docstring of a task computes what must come
out: the optimum, and what a biased estimator converges to. All runs start from the same tiny model, and use the same options
except the estimator and the seed. The learning rate was chosen with `grpo` alone.

Each run is a process, `turnwise train`, with one torch thread. Its result is kept as a JSON file in the output folder, so a
second call continues where the first was stopped. The curves (mean and range of the seeds) are drawn to `learning.png`, and the
table is written to `learning.md`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from learning_tasks import delegation, distillation
from learning_tasks.report import Curve, Point, draw, markdown, print_tables
from learning_tasks.setups import TASKS, Setup, Task
from learning_tasks.start_model import make_data, prepare
from rich.console import Console

from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import TurnwiseError
from turnwise.record.reader import read_lines

HERE = Path(__file__).resolve().parent
TASK_FILES = HERE / "learning_tasks"


@dataclass(frozen=True, slots=True)
class Run:
    """One training run: a task, an estimator and a seed."""

    task: Task
    setup: Setup
    seed: int
    steps: int
    version: str
    """A hash of the model, the rows and the code of the task."""

    @property
    def name(self) -> str:
        """The name of the files of the run: `doors-grpo-0-150`."""
        return f"{self.task.name}-{self.setup.name.replace(' ', '_')}-{self.seed}-{self.steps}"

    @property
    def recipe(self) -> Path:
        """The recipe of the task."""
        return TASK_FILES / f"{self.task.name}.yaml"

    @property
    def overrides(self) -> list[str]:
        """The options that differ from the recipe."""
        return [*self.setup.overrides, f"train.steps={self.steps}", f"seed={self.seed}"]


def main() -> None:
    """Run everything that has no result yet, and write the report."""
    options = parse()
    data = make_data()
    start = options.out / f"start-{version_of('start_model', data['conversations'])}"
    os.environ.update(environment(start))
    if any(task not in ("distillation", "delegation") for task in options.tasks):
        prepare(start, data)
    if "distillation" in options.tasks and not options.report:
        distillation.prepare(start)
    if "delegation" in options.tasks and not options.report:
        delegation.prepare(start / "delegation")
    runs = [
        Run(task, setup, seed, steps, version_of(task.name, start.name, *(data[name] for name in task.data)))
        for seed in range(1 if options.quick else options.seeds)
        for task in TASKS
        if task.name in options.tasks
        for setup in task.setups
        if not options.only or setup.name in options.only
        for steps in (setup.quick_steps if options.quick else setup.steps,)
    ]
    refused = {(run.task.name, run.setup.name): problem for run in runs if (problem := refusal(run)) is not None}
    for (task, setup), problem in refused.items():
        print(f"not available: {task}, {setup}: {problem}", flush=True)
    runs = [run for run in runs if (run.task.name, run.setup.name) not in refused]
    if not options.report:
        finish(runs, options.out, options.jobs)
    curves = [curve for run in runs if (curve := result(run, options.out)) is not None]
    report(curves, refused, options.out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Learning curves of estimators on small tasks.")
    names = [task.name for task in TASKS]
    parser.add_argument("--out", type=Path, default=HERE / ".learning", help="folder of the model, results and report")
    parser.add_argument("--tasks", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", default=[], metavar="SETUP", help="only these setups, such as grpo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes at the same time")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps")
    parser.add_argument("--report", action="store_true", help="only write the report of the results that exist")
    options = parser.parse_args()
    options.out = options.out.resolve()
    return options


def environment(start: Path) -> dict[str, str]:
    """Variables for the runs: the folder of the model, one thread, no network."""
    return {"LEARNING": str(start), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def version_of(module: str, *data: str) -> str:
    """A hash of data and of a module's code, without its comments and docstrings."""
    tree = ast.parse((TASK_FILES / f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.body = [part for part in node.body if not is_text(part)]
    return hashlib.sha256("\n".join([ast.dump(tree), *data]).encode()).hexdigest()[:8]


def is_text(node: ast.stmt) -> bool:
    """Whether a statement is a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def refusal(run: Run) -> str | None:
    """Why turnwise refuses the run, such as an estimator that does not exist; None if it does not."""
    try:
        config, _ = load(run.recipe, run.overrides)
        refuse_without_effect(config)
    except TurnwiseError as error:
        return " ".join(str(error).split())
    return None


def finish(runs: list[Run], out: Path, jobs: int) -> None:
    """Do the runs that have no result."""
    missing = [run for run in runs if not result_file(run, out).exists()]
    print(f"{len(runs) - len(missing)} runs have a result, {len(missing)} are to be done", flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for number, line in enumerate(pool.map(lambda run: do(run, out), missing), 1):
                print(f"{number}/{len(missing)} {line}", flush=True)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure no further run is started


def do(run: Run, out: Path) -> str:
    """Train, keep the result and delete the run's folder. Returns a line for the terminal. Raises SystemExit if it fails."""
    folder, started = out / "runs" / run.name, time.perf_counter()
    overrides = [*run.overrides, f"output={folder}", "replace=true"]
    command = [sys.executable, "-m", "turnwise", "train", run.recipe, *overrides]
    process = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(f"{run.name} failed:\n{process.stdout[-1000:]}{process.stderr[-3000:]}")
    curve = read_curve(run, folder)
    file = result_file(run, out)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(dataclasses.asdict(curve)), encoding="utf-8")
    shutil.rmtree(folder)
    return (
        f"{run.name}: reward {curve.points[0].reward:.2f} to {curve.final:.2f}, {time.perf_counter() - started:.0f} s"
    )


def read_curve(run: Run, folder: Path) -> Curve:
    """The rewards of a finished run: of each training step, or of each evaluation if the task has held-out rows."""
    steps = list(read_lines(folder / "metrics.jsonl"))
    tokens = [0]
    for step in steps:
        tokens.append(tokens[-1] + sum(step[name] for name in step if name.endswith("tokens/sampled")))  # and of agents
    lines = list(read_lines(folder / "evaluations.jsonl")) if run.task.evaluated else steps
    points = [Point(line["step"], tokens[line["step"]], line["reward/mean"]) for line in lines]
    seconds = sum(step["seconds/step"] for step in steps)
    return Curve(run.task.name, run.setup.name, run.seed, points, seconds)


def result_file(run: Run, out: Path) -> Path:
    """The file with the result of a run. Another model or another recipe has another file."""
    about = f"{run.version} {run.recipe.read_text(encoding='utf-8')} {run.overrides}"
    return out / "results" / f"{run.name}-{hashlib.sha256(about.encode()).hexdigest()[:8]}.json"


def result(run: Run, out: Path) -> Curve | None:
    """The result of a run, or None if it was not done."""
    file = result_file(run, out)
    if not file.exists():
        return None
    fields = json.loads(file.read_text(encoding="utf-8"))
    return Curve(**{**fields, "points": [Point(**point) for point in fields["points"]]})


def report(curves: list[Curve], refused: dict[tuple[str, str], str], out: Path) -> None:
    """Draw the curves, write and print the tables."""
    if not curves:
        print("no run is finished")
        return
    draw(out / "learning.png", TASKS, curves)
    text = markdown(TASKS, curves, refused)
    (out / "learning.md").write_text(text, encoding="utf-8")
    print_tables(Console(width=140), TASKS, curves)
    print(f"{out / 'learning.md'}\n{out / 'learning.png'}")
    right = [curve.final for curve in curves if curve.task == "digging" and curve.setup in ("grpo", "turn_return")]
    wrong = [curve.final for curve in curves if curve.task == "digging" and curve.setup == "mt_grpo"]
    if right and wrong:
        print(f"learning_unbiased_minus_biased {statistics.fmean(right) - statistics.fmean(wrong):.2f}")


if __name__ == "__main__":
    main()
