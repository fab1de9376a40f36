"""The program of each process in test_sharded.py: loads a model, and writes the peak of its memory.

Arguments: a small model, which is loaded first, so that modules imported on first use and the buffers of the connections
between the ranks are not counted; the model; `complete` (one process) or `sharded` (this rank's part); the file of the result.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from turnwise.models.loading import ModelSource, load_model
from turnwise.options.engines import ClusterSection, FsdpSection
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_model import load_sharded


def kilobytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def load(path: str, ranks: Ranks | None) -> Any:
    options = ModelSource(path=str(path), device="cpu")
    return load_model(options) if ranks is None else load_sharded(options, ranks.mesh, FsdpSection())


def main() -> None:
    torch.set_num_threads(1)
    small, path, kind, out = sys.argv[1:]
    ranks = Ranks(ClusterSection(), device="cpu") if kind == "sharded" else None
    assert load(small, ranks)
    before = kilobytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    model = load(path, ranks)
    assert model
    peak = kilobytes("VmHWM") - before
    Path(f"{out}{os.environ.get('RANK', '0')}").write_text(str(peak))
    if ranks is not None:
        ranks.close()


if __name__ == "__main__":
    main()
    os._exit(0)  # as a command's rank: threads of gloo could abort a process that finalizes the interpreter
