"""Training runs in the process of the test."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from support.recipes import save_recipe
from support.tiny import save_rows
from turnwise.config.recipe import load
from turnwise.runs.training_run import TrainingRun
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train

__all__ = ["save_short_recipe", "train_run"]


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
    asyncio.run(train(run, TrainReport(Console(quiet=True))))
    trajectories, metrics = (
        [json.loads(line) for line in (out / name).read_text(encoding="utf-8").splitlines()]
        for name in ("trajectories.jsonl", "metrics.jsonl")
    )
    return trajectories, metrics, run
