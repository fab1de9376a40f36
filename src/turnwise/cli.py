"""The command line: parses the words, and runs the command that they name. Each command is a module in `commands/`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.logging import RichHandler

from turnwise.commands import (
    convert,
    doctor,
    eval,
    merge,
    plan,
    replay,
    retrieval,
    rollout,
    serve,
    sft,
    show,
    train,
    view,
)
from turnwise.commands.command import Context
from turnwise.commands.stopping import Stops, lasting_output, open_closed_streams
from turnwise.config.known_names import called_here
from turnwise.errors import TurnwiseError
from turnwise.terminal.console import Terminal
from turnwise.version import __version__

__all__ = ["main", "program"]

_COMMANDS = (train, convert, sft, eval, rollout, replay, serve, show, view, doctor, plan, merge, retrieval)

_EPILOG = """\
examples:
  turnwise train recipes/calculator.yaml                         train the tiny model that comes with the repository
  turnwise train recipes/calculator.yaml train.lr=1e-4 seed=1    change options (docs/recipes.md lists all options)
  turnwise train recipes/calculator.yaml resume=auto             resume a run that was stopped
  turnwise sft recipes/sft.yaml                                  fine-tune on given conversations (docs/sft.md)
  turnwise train recipes/calculator.yaml model.path=runs/sft/checkpoint
                                                                 then train the fine-tuned model by reinforcement learning
  turnwise rollout recipes/calculator.yaml --out runs/look       run and score conversations, without training
  turnwise rollout R.yaml engine.name=scripted engine.script=lines.jsonl --out runs/replay
                                                                 replay given answers (each line of the file: a list of texts)
  turnwise eval recipes/calculator.yaml --model demo/model --model runs/demo
                                                                 compare models on held-out rows (docs/evaluation.md)
  turnwise convert --config-path config --config-name gsm8k_multiturn_grpo --out recipe.yaml
                                                                 make a recipe from a configuration of verl (docs/verl.md)
  turnwise show runs/demo                                        print the summary of a run
  turnwise show runs/demo --worst 3 --tokens                     print the conversations with the lowest rewards, with every token
  turnwise view runs                                             show runs in the browser: curves, conversations, tokens
  turnwise replay runs/demo --all                                run environment and rewards again; print what differs
  turnwise doctor demo/model                                     check whether a model can be trained
  turnwise doctor demo/model --recipe recipes/calculator.yaml    also check a recipe
  turnwise plan recipes/calculator.yaml --simulate runs/demo     predict the speed on more devices (docs/plan.md)
"""


def program() -> int:
    """`main` in a process of its own: its signal handlers stay until the process has ended. Returns the exit status."""
    open_closed_streams()
    return main(stops=Stops(until_exit=True))


def main(arguments: Sequence[str] | None = None, *, stops: Stops | None = None) -> int:
    """Run a command.

    Returns its exit status: 0; 1 for an error that a person can put right; 130, 143 or 129 after Ctrl-C, SIGTERM or SIGHUP.
    """
    # before torch is loaded: threads that wait by spinning slow down everything else on the machine
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options = _parse(arguments)
    console, errors = Terminal(), Terminal(stderr=True)
    level, levels = os.environ.get("TURNWISE_LOG", "warning").upper(), logging.getLevelNamesMapping()
    if level not in levels:
        errors.print(
            f"turnwise: TURNWISE_LOG={level} is not a log level; the levels are: {', '.join(levels)}", style="red"
        )
        return 1
    logging.basicConfig(
        level=level,
        format="%(message)s",
        handlers=[RichHandler(console=console, show_time=False, show_path=False)],
    )
    with stops or Stops() as stops:
        context = Context(console, stops)
        if options.long:
            with lasting_output():
                return _run(options, context, errors)
        return _run(options, context, errors)


def _run(options: argparse.Namespace, context: Context, errors: Console) -> int:
    """Run the command, and print what stops it."""
    stops = context.stops
    try:
        return options.command(options, context)
    except TurnwiseError as error:
        # not wrapped: a path in it stays in one piece
        errors.print(f"turnwise: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        name = stops.received.name if stops.received not in (None, signal.SIGINT) else ""
        errors.print(f"turnwise: stopped{f' ({name})' if name else ''}", style="yellow")
        return stops.status


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="turnwise",
        description="Train language models by reinforcement learning over multi-turn conversations.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"turnwise {__version__}")
    # `long`: the command goes on when the terminal is gone
    parser.set_defaults(long=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.register(commands)
    options, rest = parser.parse_known_args(arguments)
    # argparse accepts the overrides in one piece only: those behind an option are in `rest`
    overrides: list[str] | None = vars(options).get("overrides")
    unknown = [word for word in rest if overrides is None or word.startswith("-")]
    if unknown:
        hint = "" if overrides is None else _recipe_hint(unknown[0])
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    if overrides is not None:
        overrides += rest
    return options


def _recipe_hint(argument: str) -> str:
    """How an option that was written with dashes, as in other systems, is written in a recipe."""
    name, _, _ = argument.lstrip("-").partition("=")
    return f"{called_here(name)}; options of a recipe are written without dashes: key=value, such as train.lr=1e-5"


if __name__ == "__main__":
    sys.exit(program())
