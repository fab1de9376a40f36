"""turnwise's side: `python turnwise_side.py DIR STEPS`, from the repository's root; like trl_side.py.

`turnwise train` with recipe.yaml, and a clock in the place of the picture on the terminal.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnwise.config.recipe import load
from turnwise.config.schema import Config
from turnwise.record.run_directory import RunDirectory
from turnwise.train import assemble, train
from turnwise.types import Group


class Clock:
    """Takes a step when it is told to, and tells its wall time, whatever the run does between two steps."""

    started = 0.0

    def begin(self, config: Config, *, done: int, notes: Sequence[str]) -> None:
        self.tell({"step": 0})

    def step(self, metrics: Mapping[str, Any], problems: Sequence[str]) -> None:
        seconds = time.perf_counter() - self.started
        # a loop that samples from something else than the model would be a fast one, too
        if problems or metrics["template_mismatch"] or metrics["ratio/max_deviation"] > 0.01:
            sys.exit(f"step {metrics['step']} went wrong: {problems} {dict(metrics)}")
        figures = {"reward": metrics["reward/mean"], "tokens": metrics["tokens/sampled"] / 128}
        self.tell({"step": metrics["step"], "seconds": seconds, **figures})

    def evaluated(self, summary: Mapping[str, Any], groups: Sequence[Group]) -> None:
        pass

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        pass

    def tell(self, figures: dict[str, Any]) -> None:
        print(json.dumps(figures), flush=True)
        sys.stdin.readline()
        self.started = time.perf_counter()


def main() -> None:
    folder, steps = sys.argv[1:]
    os.environ["ARITHMETIC"] = folder
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [f"output={scratch}/run", f"train.steps={steps}", f"checkpoint.every={steps}"]
        config, _ = load(Path(__file__).with_name("recipe.yaml"), overrides)
        asyncio.run(train(assemble(config), Clock()))


if __name__ == "__main__":
    main()
