"""A teacher: the demo's model learns from rewards, from the trained demo, or from both (docs/distillation.md).

The student is the model of the demo, and the teacher is the same model after the demo's training (80 steps, with another seed
than the students). All setups have the same rows, conversations, learning rate and number of steps; they differ in what is learnt
from a conversation. With rewards, all tokens of it have one advantage, and a group without reward differences teaches
nothing. With the teacher, each token has its own, in every conversation.

Expectation: the reward on held-out rows begins near 0.47 and is at most 1. The student that learns from the teacher alone reaches
0.95 in fewer sampled tokens than with rewards alone, and cannot become better than the teacher. With both, it is not slower than
with either.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["prepare"]

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "calculator.yaml"
SEED = 1000


def prepare(folder: Path) -> None:
    """Train the teacher to `folder/teacher/checkpoint` unless it is there: 160 seconds of one core."""
    if (folder / "teacher_ready").exists():
        return
    options = [
        f"output={folder / 'teacher'}",
        f"seed={SEED}",
        "model.device=cpu",
        "model.dtype=float32",
        "replace=true",
    ]
    subprocess.run([sys.executable, "-m", "turnwise", "train", RECIPE, *options], check=True, cwd=RECIPE.parents[1])
    (folder / "teacher_ready").touch()
