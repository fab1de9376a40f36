"""turnwise's side: `python turnwise_side.py SETTINGS`, in the repository's root. Its output has the format of trl_side.py.

It runs `turnwise train` with recipe.yaml, and writes times instead of the progress report.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnwise.config.recipe import load
from turnwise.options.schema import Config
from turnwise.record.run_directory import RunDirectory
from turnwise.train import assemble, train
from turnwise.types import Group


class Clock:
    """Begins a step when it reads a line, and writes the wall time since then, with all work between two steps.

    Ends the process after `steps` steps.
    """

    started = cpu = 0.0

    def __init__(self, *, steps: int, conversations: int, large: bool, plays: bool) -> None:
        self.steps = steps
        self.conversations = conversations
        self.large = large
        self.plays = plays
        """Whether the run ends as all runs do: its checkpoint is evaluated."""

    def begin(self, config: Config, *, done: int, notes: Sequence[str]) -> None:
        self.tell({"step": 0})

    def step(self, metrics: Mapping[str, Any], problems: Sequence[str]) -> None:
        seconds = time.perf_counter() - self.started
        # a loop that samples from another distribution than the model's would be fast, too. The texts of a model with random
        # weights are not encoded as its tokens again
        mismatch = not (self.large or self.plays) and (problems or metrics["template_mismatch"])
        if mismatch or metrics["ratio/max_deviation"] > (0.1 if self.large or self.plays else 0.01):
            sys.exit(f"step {metrics['step']} went wrong: {problems} {dict(metrics)}")
        figures = {
            "reward": metrics["reward/mean"],
            "tokens": metrics["tokens/sampled"] / self.conversations,
            "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
            "cpu": time.process_time() - self.cpu,
            "rollout": metrics["seconds/rollout"],
            "train": metrics["seconds/train"],
            "deviation": metrics["ratio/max_deviation"],
        }
        self.tell({"step": metrics["step"], "seconds": seconds, **figures})
        if metrics["step"] == self.steps and not self.plays:
            sys.exit()

    def evaluated(self, summary: Mapping[str, Any], groups: Sequence[Group]) -> None:
        pass

    def end(self, directory: RunDirectory, checkpoint: Path) -> None:
        pass

    def tell(self, figures: dict[str, Any]) -> None:
        print(json.dumps(figures), flush=True)
        sys.stdin.readline()
        self.started, self.cpu = time.perf_counter(), time.process_time()


PRECISION = {"float32": (), "bfloat16": ("model.autocast=true",)}
LARGE = (
    "environment.use=turnwise.environments.environment:SingleTurn",
    "reward.trajectory=[benchmarks/against_trl/digits.py:reward]",
    "limits.turns=1",
    "train.lr=1.0e-6",
)
"""The changes of recipe.yaml for `--model 135m`."""


def game(folder: str) -> tuple[str, ...]:
    """The changes of recipes/smollm2/game.yaml for `--model smollm2`."""
    return (
        f"model.path={folder}/model",
        f"data.train={folder}/train.jsonl",
        "data.shuffle=false",
        "data.eval=null",
        "eval.max_rows=null",
        "credit.name=grpo",
        "loss.normalizer=trajectory",
    )


def main() -> None:
    settings = json.loads(sys.argv[1])
    os.environ["ARITHMETIC"] = settings["folder"]
    large, plays = settings["model"] == "135m", settings["model"] == "smollm2"
    torch.set_num_threads(settings["threads"])
    steps, tokens = settings["steps"], settings["tokens"]
    with tempfile.TemporaryDirectory() as scratch:
        last = steps if plays else steps + 1
        overrides = [
            f"output={settings['out'] if plays else scratch}/run",
            f"seed={settings['seed']}",
            # TRL saves nothing: the checkpoint at the end of a run is behind the last step that is measured
            f"train.steps={last}",
            f"checkpoint.every={last}",
            f"train.batch_size={settings['rows']}",
            f"train.group_size={settings['samples']}",
            f"limits.tokens_per_turn={tokens}",
            *(game(settings["folder"]) if plays else (f"limits.tokens={tokens}",)),
            *PRECISION[settings["dtype"]],
            *(LARGE if large else ()),
        ]
        recipe = "recipes/smollm2/game.yaml" if plays else Path(__file__).with_name("recipe.yaml")
        config, _ = load(recipe, overrides)
        clock = Clock(steps=steps, conversations=settings["rows"] * settings["samples"], large=large, plays=plays)
        asyncio.run(train(assemble(config), clock))


if __name__ == "__main__":
    main()
