"""Training runs in the process of the test."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from support.forked import Forked
from support.recipes import save_recipe
from support.tiny import save_rows
from turnwise.config.recipe import load
from turnwise.record.run_directory import RunDirectory
from turnwise.runs.training_run import TrainingRun
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train

__all__ = ["Silent", "Started", "overlap_surely", "save_short_recipe", "train_run", "train_silently"]


class Silent(TrainReport):
    """A report that prints nothing, and draws no curve at the end: a quarter of the time of a run of two steps."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        self.close()


def train_silently(run: TrainingRun) -> None:
    """Train in this process."""
    asyncio.run(train(run, Silent()))


def save_short_recipe(folder: Path, model: Path) -> Path:
    """A recipe of three steps of two rows with four conversations each, and held-out rows."""
    return save_recipe(
        folder,
        model,
        data={"train": str(save_rows(folder / "train.jsonl", 4)), "eval": str(save_rows(folder / "eval.jsonl", 2))},
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 0.01},
        checkpoint={"every": 100},
    )


def train_run(
    recipe: Path, out: Path, *overrides: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], TrainingRun]:
    """Train into the directory `out`. Returns the trajectories and the metrics of its files, and the run."""
    run = assemble(load(recipe, [*overrides, f"output={out}"])[0])
    train_silently(run)
    trajectories, metrics = (
        [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
        for name in ("trajectories.jsonl", "metrics.jsonl")
    )
    return trajectories, metrics, run


def overlap_surely(run: TrainingRun, seconds: float = 60.0) -> None:
    """Let each update begin when all conversations that have been started have a turn by the weights before the update.

    Otherwise a busy machine may finish an update before the engine has sampled a token of the next step. Without
    `train.max_staleness`, none have been started then.
    """
    update = run.learner.update

    async def after_first_turns(*args: Any, **options: Any) -> Any:
        async with asyncio.timeout(seconds):
            while not all(
                one.turns or one.failed for active in run.pipeline.active for one in active.group.trajectories
            ):
                await asyncio.sleep(0.01)
        return await update(*args, **options)

    run.learner.update = after_first_turns


class Started:
    """`turnwise train` in a process of its own; what it prints goes to a file. `fresh`: not forked from one that other tests use,
    so that it has other hashes of strings and imports what it needs."""

    def __init__(self, recipe: Path, *overrides: str, fresh: bool = False) -> None:
        self.log = recipe.with_name(f"log-{time.monotonic_ns()}.txt")
        words = ["train", str(recipe), *overrides]
        self.process: subprocess.Popen[bytes] | Forked
        with self.log.open("w") as log:
            if fresh:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "turnwise.cli", *words], stdout=log, stderr=subprocess.STDOUT
                )
            else:
                self.process = Forked(words, stdout=log)

    def wait(self) -> int:
        return self.process.wait(timeout=300)

    def wait_for_steps(self, path: Path, count: int) -> None:
        deadline = time.monotonic() + 120
        while not path.exists() or path.read_text().count("\n") < count:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def kill_after_steps(self, path: Path, count: int, delay: float) -> None:
        """`kill -9` when `path` has `count` lines, and `delay` seconds later."""
        self.wait_for_steps(path, count)
        time.sleep(delay)
        self.process.kill()
        self.wait()
