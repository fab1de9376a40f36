"""Synchronous, lock-step and asynchronous training with slow tools: `python benchmarks/pipeline.py`, some minutes.

The same training job runs in several modes, each in its own process, with equal numbers of samples. The embedded engine samples
with the demo model; each conversation has three turns, and the environment sleeps before it answers. The sleeping times are
log-normal: the 99th percentile is 20 times the median. They depend on the row, the turn and the trajectory only, so that all
modes have the same.

* `sync`: `train.max_staleness: 0`
* `lockstep`: the same, and the engine receives the requests of all conversations together, as a blocking engine does
* `one ahead`: `train.max_staleness: 1`
* `asynchronous`: `train.max_staleness: N` (`--staleness`)
* `ideal`: as `asynchronous`, with tools that answer at once: the engine and the trainer never wait

All steps are counted, also the first, in which the asynchronous modes wait as long as `sync`. The last line is the number of
steps per minute of `asynchronous`, divided by that of `sync`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from turnwise.types import Opening, Reply, Row, Turn
from turnwise.user_code.deadlines import conversation_name

HERE = Path(__file__).resolve()
MODEL = HERE.parent.parent / "demo" / "model"
SIGMA = math.log(20) / 2.326  # the 99th percentile of a normal distribution is 2.326
TURNS = 3
MODES = {"sync": 0, "lockstep": 0, "one ahead": 1, "asynchronous": None, "ideal": None}


class SlowTool:
    """Answers each turn after a log-normal time with the given median in seconds; rewards short turns."""

    def __init__(self, median: float) -> None:
        self.median = median

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        if self.median:
            name = conversation_name().partition(":")[2]
            generator = random.Random(f"{name}:{turn.index}")
            await asyncio.sleep(self.median * generator.lognormvariate(0.0, SIGMA))
        done = turn.index == TURNS - 1
        return Reply(
            messages=[] if done else [{"role": "user", "content": "And the next?"}],
            done=done,
            reward=-len(turn.text) / 100,
        )

    async def close(self) -> None:
        pass


def run(mode: str, options: argparse.Namespace, folder: Path) -> None:
    """Train in this process, in one mode."""
    from turnwise.config.schema import Config
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {n} + {n + 1}?"}) + "\n" for n in range(512)))
    staleness = MODES[mode]
    config = Config.model_validate(
        {
            "model": {"path": str(MODEL)},
            "data": {"train": str(rows)},
            "environment": {
                "use": f"{HERE}:SlowTool",
                "arguments": {"median": 0.0 if mode == "ideal" else options.median},
            },
            "limits": {"turns": TURNS, "tokens_per_turn": 48},
            "credit": {"name": "grpo"},
            "train": {
                "steps": options.steps,
                "batch_size": 4,
                "group_size": 8,
                "lr": 1e-5,
                "max_staleness": options.staleness if staleness is None else staleness,
            },
            "engine": {"threads": 1},
            "checkpoint": {"every": options.steps},
            "output": str(folder / "run"),
        }
    )
    job = assemble(config)
    if mode == "lockstep":
        job.pipeline.context = replace(job.pipeline.context, lockstep=True)
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(job, TrainReport(Console(file=nowhere))))


def measure(mode: str, options: argparse.Namespace) -> dict[str, float]:
    """Seconds per step, and means of metrics."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE), "--mode", mode, "--folder", folder]
        for name in ("steps", "median", "staleness"):
            command += [f"--{name}", str(getattr(options, name))]
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        total = time.perf_counter() - started
        lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = lines
    return {
        "step": sum(line["seconds/step"] - line["seconds/checkpoint"] for line in counted) / len(counted),
        "waiting": sum(line["seconds/waiting"] for line in counted) / len(counted),
        "staleness": sum(line["staleness/mean"] for line in counted) / len(counted),
        "tokens": sum(line["tokens/sampled"] for line in counted) / len(counted),
        "total": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--median", type=float, default=0.2, help="median latency of a tool, in seconds")
    parser.add_argument("--staleness", type=int, default=12)
    parser.add_argument("--mode", choices=list(MODES))
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.mode is not None:
        run(options.mode, options, options.folder)
        return
    results = {mode: measure(mode, options) for mode in MODES}
    table = Table("mode", "steps per minute", "times sync", "share of ideal", "waiting", "staleness", "tokens per step")
    for mode, result in results.items():
        table.add_row(
            mode,
            f"{60 / result['step']:.1f}",
            f"{results['sync']['step'] / result['step']:.2f}",
            f"{results['ideal']['step'] / result['step']:.0%}",
            f"{result['waiting'] / result['step']:.0%}",
            f"{result['staleness']:.1f}",
            f"{result['tokens']:.0f}",
        )
    Console().print(table)
    print(f"pipeline {results['sync']['step'] / results['asynchronous']['step']:.2f}")


if __name__ == "__main__":
    main()
