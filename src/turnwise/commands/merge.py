"""`turnwise merge`: a model directory from an adapter and its base model."""

from __future__ import annotations

import argparse
from pathlib import Path

from turnwise.commands.command import Context, print_lines

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Add a LoRA adapter to the weights of its base model, and write the result as a model directory, which "
        "other programs can load (docs/memory.md)."
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN", help="the directory of a run, of a checkpoint or of an adapter"
    )
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the directory to write to")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="the data type of the weights; default: that of the base model",
    )
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    from turnwise.models.merging import write_merged  # torch

    adapter = write_merged(options.run, options.out, dtype=options.dtype)
    print_lines(context.console, [f"the model with the adapter {adapter} is in {options.out}"])
    return 0
