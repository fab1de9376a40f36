"""Rollout workers on Ray: 1 against 2 workers, and a run with a worker against a run in one process.

`python benchmarks/ray_rollouts.py`, five minutes. A tiny random model trains on conversations of several turns, whose
environment computes for some milliseconds in each turn. The same recipe is run in one process, with one worker and with two
workers on a Ray cluster of this machine, at the same number of conversations. The learning rate is so small that all runs sample
the same conversations.

The times are those of the steps after the first: the time from the request for the groups of a step to their arrival (`rollout`),
and that of a complete step. "overhead" is the time of a step with one worker, divided by the time of a step in one process: Ray
starts no second process that could work at the same time, because training waits for the conversations (`train.max_staleness=0`).

The last line is the number of conversations per second with two workers, divided by that with one worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

MODES = {
    "one process": [],
    "1 worker": ["cluster=ray", "cluster.workers.count=1"],
    "2 workers": ["cluster=ray", "cluster.workers.count=2"],
}


def recipe_in(folder: Path, *, steps: int, groups: int) -> Path:
    """The recipe, its model and its rows."""
    from support.recipes import save_recipe
    from support.tiny import save_model, save_rows

    return save_recipe(
        folder,
        save_model(folder / "model"),
        data={"train": str(save_rows(folder / "train.jsonl", groups))},
        environment=f"{HERE / 'busy_place.py'}:busy",
        limits={"turns": 4, "tokens_per_turn": 32},
        train={"steps": steps, "batch_size": groups, "group_size": 8, "lr": 1e-9},
        engine={"name": "local", "threads": 1},
        checkpoint={"every": 1000},
    )


def run(recipe: Path, output: Path, overrides: list[str]) -> tuple[float, float]:
    """The median seconds of the conversations of a step, and of a complete step, without the first step."""
    from turnwise.config.recipe import load
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    training = assemble(load(recipe, [*overrides, f"output={output}"])[0])
    asyncio.run(train(training, TrainReport(Console(quiet=True))))
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()][1:]
    return median(line["seconds/rollout"] for line in lines), median(line["seconds/step"] for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=8, help="groups of a step, with 8 conversations each")
    parser.add_argument("--rounds", type=int, default=2, help="how often each mode is run, alternately")
    options = parser.parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    with tempfile.TemporaryDirectory() as name:
        recipe = recipe_in(Path(name), steps=options.steps, groups=options.groups)
        for number in range(options.rounds):
            for mode, overrides in MODES.items():
                seconds[mode].append(run(recipe, Path(name) / f"{number}-{mode.replace(' ', '-')}", overrides))
    table = Table("", "rollout, s", "step, s", "conversations/s")
    best = {mode: (min(r for r, _ in of_mode), min(s for _, s in of_mode)) for mode, of_mode in seconds.items()}
    for mode, (rollout, step) in best.items():
        table.add_row(mode, f"{rollout:.2f}", f"{step:.2f}", f"{options.groups * 8 / rollout:.1f}")
    Console().print(table)
    print(f"overhead {best['1 worker'][1] / best['one process'][1]:.2f}")
    print(f"ray_rollouts {best['1 worker'][0] / best['2 workers'][0]:.2f}")


if __name__ == "__main__":
    main()
