"""`turnwise init`: writes a starter project."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path

from turnwise.commands.command import Context, print_lines
from turnwise.starter import write_project

__all__ = ["register"]

_ABOUT = {
    "recipe.yaml": "the options of the run, with comments",
    "environment.py": "the environment, a tool and a reward function",
    "train.jsonl": "rows to train on",
    "heldout.jsonl": "rows for evaluations",
    "model": "the tiny model of the demo",
}


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Write a starter project: a recipe with comments, an environment, a tool, rows, and the tiny model of the demo. It can "
        "be trained at once. Existing files are never changed."
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="the directory; default: the present directory",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a model directory or a hub name for the recipe, instead of the demo's model"
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, context: Context) -> int:
    paths = write_project(options.folder, model=options.model)
    model = "model" if options.model is None else options.model
    commands = {
        f"turnwise doctor {shlex.quote(model)} --recipe recipe.yaml": "check the model and the recipe",
        "turnwise train recipe.yaml": "train",
        "turnwise show runs/first --best 1": "read a conversation",
        "turnwise eval recipe.yaml --model runs/first": "evaluate the trained model",
    }
    enter = [] if options.folder == Path() else [f"  cd {shlex.quote(str(options.folder))}"]
    files = _aligned({str(path): _ABOUT[path.name] for path in paths})
    lines = [*files, "\nnext:", *enter, *(f"  {line}" for line in _aligned(commands))]
    print_lines(context.console, lines)
    return 0


def _aligned(texts: Mapping[str, str]) -> list[str]:
    width = max(len(name) for name in texts)
    return [f"{name:<{width}}  {text}" for name, text in texts.items()]
