"""Synchronous, lock-step and asynchronous training with slow tools: `python benchmarks/pipeline.py`, ten minutes.

The training job is that of against_trl.py: a tiny Qwen3 calls a calculator, 16 prompts x 8 conversations a step. The calculator
waits before it answers. The times are log-normal: the 99th percentile is 20 times the median. They depend on the conversation
and the number of the call only. The learning rate is 1e-9, so that all modes of turnwise sample the same conversations, and the
same tool calls are equally slow. Each mode runs in its own process, with equal numbers of samples:

* `sync`: `train.max_staleness: 0`
* `lockstep`: the same, and the engine receives the requests of all conversations together, as a blocking engine does
* `one ahead`: `train.max_staleness: 1`
* `asynchronous`: `train.max_staleness: N` (`--staleness`)
* `ideal`: as `asynchronous`, with tools that answer at once: engine and trainer never wait for a tool
* `TRL`: TRL's GRPOTrainer with the same model, rows, latencies and numbers of samples, and its own generation. TRL runs the tool
  calls of different conversations one after the other, so a step is long; `--trl-steps` steps are run, and the first one is not
  counted

Two times are printed for a step. "total" is the time of the run, from the request for the first groups to the last update of the
weights, divided by the number of steps. It includes the start, when the asynchronous modes have to wait as `sync` does, and the
end, when no new conversations are started. "steady" is the same without the first N + 2 and the last N steps.

`--modes` chooses some of the modes. The last line is the number of steps per minute of `asynchronous`, divided by that of `sync`
(total).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parent / "against_trl"))

import against_trl
from rich.console import Console
from rich.table import Table
from slow_tool import slow_calculator

from turnwise.user_code.calls import conversation_name

HERE = Path(__file__).resolve()
MODES = {"sync": 0, "lockstep": 0, "one ahead": 1, "asynchronous": None, "ideal": None, "TRL": None}
MEDIAN = "BENCHMARK_TOOL_MEDIAN"
"""The environment variable with the median latency of the tool, in seconds."""
_calls: Counter[str] = Counter()


def _call_name() -> str:
    """The conversation and the number of the call in it."""
    name = conversation_name()
    _calls[name] += 1
    return f"{name}:{_calls[name]}"


calculator = slow_calculator(float(os.environ.get(MEDIAN, "0")), _call_name)
"""The tool of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The times of a mode, in seconds."""

    total: float
    """Of a step, over all steps."""
    steady: float
    """Of a step, without the steps at the start and at the end."""
    waiting: float = 0.0
    """The share of the steady time in which the trainer waited for conversations."""
    staleness: float = 0.0
    """The mean staleness of the tokens."""
    tokens: float
    """Sampled tokens of a step."""


def train_here(mode: str, options: argparse.Namespace, folder: Path) -> None:
    """Train in this process, in one mode."""
    from turnwise.config.recipe import load
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    staleness = MODES[mode]
    overrides = [
        "environment.use=turnwise.environments.environment:SingleTurn",
        f"tools=[{HERE}:calculator]",
        f"output={folder / 'run'}",
        "train.lr=1.0e-9",
        f"train.steps={options.steps}",
        f"checkpoint.every={options.steps}",
        f"train.max_staleness={options.staleness if staleness is None else staleness}",
        f"max_concurrent={options.concurrent}",
        "engine.threads=1",
    ]
    os.environ["ARITHMETIC"] = str(against_trl.model(1))
    config, _ = load(HERE.parent / "against_trl" / "recipe.yaml", overrides)
    job = assemble(config)
    if mode == "lockstep":
        job.pipeline.context = replace(job.pipeline.context, lockstep=True)
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(job, TrainReport(Console(file=nowhere))))


def measure(mode: str, options: argparse.Namespace) -> Result:
    """Train in another process, in one mode."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if options.keep is None else options.keep / mode.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(HERE), "--mode", mode, "--folder", str(folder)]
        for name in ("steps", "staleness", "concurrent"):
            command += [f"--{name}", str(getattr(options, name))]
        environment = {**os.environ, MEDIAN: "0" if mode == "ideal" else str(options.median)}
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=HERE.parent.parent, env=environment)
        steps, times = [
            [json.loads(line) for line in (folder / "run" / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "timeline")
        ]
    first, last = options.staleness + 2, options.steps - options.staleness
    if last - first < 2:
        sys.exit(
            f"--steps={options.steps} is too few for --staleness={options.staleness}: no steps are left in the middle"
        )
    length = times[last - 1]["trained"] - times[first - 1]["trained"]
    return Result(
        total=(times[-1]["trained"] - times[0]["asked"]) / len(times),
        steady=length / (last - first),
        waiting=sum(line["seconds/waiting"] for line in steps[first:last]) / length,
        staleness=fmean(line["staleness/mean"] for line in steps),
        tokens=fmean(line["tokens/sampled"] for line in steps),
    )


def measure_trl(options: argparse.Namespace) -> Result:
    """Train with TRL."""
    settings = against_trl.Settings(
        folder=str(against_trl.model(1)),
        model="tiny",
        dtype="float32",
        steps=options.trl_steps,
        seed=0,
        threads=1,
        rows=16,
        samples=8,
        tokens=160,
        trl_micro_batch=0,
        lr=1e-9,
        tool_median=options.median,
    )
    arguments = [against_trl.peer(), against_trl.PARTS / "trl_side.py", json.dumps(asdict(settings))]
    side = against_trl.Side("TRL", arguments, settings.threads)
    for _ in range(settings.steps):
        side.step()
    side.end()
    seconds = fmean(side.seconds[1:])
    return Result(total=seconds, steady=seconds, tokens=fmean(side.tokens) * settings.rows * settings.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=36)
    parser.add_argument("--median", type=float, default=0.1, help="median latency of a tool, in seconds")
    parser.add_argument("--staleness", type=int, default=8)
    parser.add_argument("--concurrent", type=int, default=256, help="max_concurrent")
    parser.add_argument("--trl-steps", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--keep", type=Path, help="directory for the records of the runs")
    parser.add_argument("--mode", choices=list(MODES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mode is not None:
        train_here(options.mode, options, options.folder)
        return
    results: dict[str, Result] = {}
    for mode in options.modes:
        results[mode] = measure_trl(options) if mode == "TRL" else measure(mode, options)
        print(f"{mode}: {results[mode]}", flush=True)
    show(results)
    if {"sync", "asynchronous"} <= set(results):
        print(f"pipeline {results['sync'].total / results['asynchronous'].total:.2f}")


def show(results: dict[str, Result]) -> None:
    table = Table(
        "mode", "s/step total", "steady", "times sync", "steady", "of ideal", "steady", "waiting", "staleness", "tokens"
    )
    for mode, result in results.items():
        cells = [f"{result.total:.2f}", f"{result.steady:.2f}"]
        for other, form in (("sync", "{:.2f}"), ("ideal", "{:.0%}")):
            known = results.get(other)
            cells += ["", ""] if known is None else [
                form.format(known.total / result.total), form.format(known.steady / result.steady)
            ]  # fmt: skip
        table.add_row(mode, *cells, f"{result.waiting:.0%}", f"{result.staleness:.1f}", f"{result.tokens:.0f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
