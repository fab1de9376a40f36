"""A short recipe whose rows and environment have images."""

from __future__ import annotations

import json
from pathlib import Path

from support.recipes import save_recipe
from support.vision import picture, save_vision_model

__all__ = ["save_image_recipe"]


def save_image_recipe(folder: Path) -> Path:
    """Two steps on four rows with an image each; the environment `shows_another` adds images."""
    for n in range(4):
        picture(16, 24, seed=100 + n).save(folder / f"{n}.png")
    rows = [{"id": str(n), "prompt": "<image>What is it?", "images": [f"{n}.png"]} for n in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return save_recipe(
        folder,
        save_vision_model(folder / "model"),
        data={"train": str(folder / "train.jsonl")},
        environment=f"{Path(__file__).with_name('vision.py')}:shows_another",
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 100},
    )
