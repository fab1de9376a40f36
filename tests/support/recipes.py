"""Recipes of small training runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from support.tiny import save_rows

__all__ = ["PLACES", "save_recipe"]

PLACES = Path(__file__).parent / "places.py"


def save_recipe(folder: Path, model: Path, **options: Any) -> Path:
    """Write `folder/recipe.yaml`. `options` are sections of the recipe; they replace the sections below."""
    recipe = {
        "model": {"path": str(model)},
        "environment": f"{PLACES}:low_bytes",
        "output": str(folder / "run"),
        **options,
    }
    if "sft" not in options:  # without a name, the run prints a note about its choice
        recipe.setdefault("credit", {"name": "grpo"})
    if "data" not in options:  # rows of the caller may be in the same file
        recipe["data"] = {"train": str(save_rows(folder / "train.jsonl"))}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path
