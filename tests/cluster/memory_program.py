"""The program of each process in test_sharded_memory.py: loads a model, and prints the peak of its memory.

Arguments: the model; `complete` (one process) or `sharded` (this rank's part); the file of the result.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers.models.qwen2 import modeling_qwen2  # before the measurement

from turnwise.models.loading import ModelOptions, load_model
from turnwise.training.sharded.loading import load_sharded
from turnwise.training.sharded.options import RankOptions, ShardingOptions
from turnwise.training.sharded.ranks import Ranks


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    assert modeling_qwen2
    torch.set_num_threads(1)
    path, kind, out = sys.argv[1:]
    options = ModelOptions(path=path, dtype="float32", device="cpu")
    ranks = Ranks(RankOptions(device="cpu")) if kind == "sharded" else None
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    model: Any = load_model(options) if ranks is None else load_sharded(options, ranks.mesh, ShardingOptions())
    assert model
    peak = kilobytes("VmHWM") - before
    Path(f"{out}{os.environ.get('RANK', '0')}").write_text(str(peak))
    if ranks is not None:
        ranks.close()


if __name__ == "__main__":
    main()
