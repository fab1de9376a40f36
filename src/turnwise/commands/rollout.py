"""`turnwise rollout`: conversations without training."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from turnwise.commands.command import Context, add_recipe, load_recipe, print_lines

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run and score conversations on a recipe's rows and write them to DIR/trajectories.jsonl; no weights "
        "change. rollout.max_rows and rollout.samples_per_row set the number of conversations."
    )
    add_recipe(parser)
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory to write to")
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    config, notes = load_recipe(options)
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.runs.collect import collect

    print_lines(context.console, notes, style="dim")
    started = time.perf_counter()
    summary = context.stops.run(collect(config, options.out, context.console))
    print_lines(
        context.console,
        [
            f"{summary['conversations']} conversations in {time.perf_counter() - started:.1f} s, reward "
            f"{summary['reward/mean']}; to read them: turnwise show {options.out}"
        ],
    )
    return 0
