"""Run directories as `train` leaves them, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml


def a_run(
    path: Path, *, options: dict[str, Any] | None = None, kind: str = "train", ended: dict[str, Any] | None = None
) -> Path:
    """A run of four of five steps, with two evaluations."""
    path.mkdir(parents=True)
    (path / "run.json").write_text(
        json.dumps({"kind": kind, "checkpoint": 4} | ({} if ended is None else {"ended": ended}))
    )
    recipe = {"model": {"path": "m"}, "output": str(path), "train": {"steps": 5, "lr": 1e-4}, **(options or {})}
    (path / "config.yaml").write_text(yaml.safe_dump(recipe, sort_keys=False))
    steps = [
        {"step": n, "reward/mean": reward, "loss": -reward} for n, reward in ((1, 0.2), (2, 0.8), (3, 0.5), (4, 0.6))
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps))
    held = [{"step": n, "reward/mean": reward} for n, reward in ((0, 0.25), (4, 0.75))]
    (path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in held))
    return path
