"""The fine-tuning of a start model, in a process of its own: `turnwise sft` on the conversations of its folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["fine_tune"]


def fine_tune(folder: Path, options: Mapping[str, Any]) -> None:
    """Fine-tune a model on `folder/conversations.jsonl` to `folder/start/checkpoint`, and write the file `folder/ready` then.
    `options` are those of a recipe by their full names."""
    arguments = {
        "data.train": folder / "conversations.jsonl",
        "sft.max_recorded_rows": 0,
        "output": folder / "start",
        "replace": "true",
        **options,
    }
    recipe = folder / "sft.yaml"
    recipe.write_text("{}\n", encoding="utf-8")
    command = [sys.executable, "-m", "turnwise", "sft", recipe, *(f"{key}={value}" for key, value in arguments.items())]
    subprocess.run(command, check=True)
    (folder / "ready").touch()
