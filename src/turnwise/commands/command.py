"""What every command has: its arguments, and what it runs with.

A command is a module with `register(parser)`, which adds its arguments and sets `command` to a function of the parsed options
and the `Context` that returns the exit status. Heavy imports are made in that function. `cli.py` imports the module of the
command that is run, and no other.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.commands.stopping import Stops

__all__ = ["Command", "Context", "add_overrides", "add_recipe", "print_lines"]


@dataclass(frozen=True, slots=True)
class Context:
    """What a command runs with."""

    console: Console
    stops: Stops
    """Runs coroutines until a signal stops them."""


Command = Callable[[argparse.Namespace, Context], int]
"""Runs a command and returns its exit status. Raises TurnwiseError for what a person can put right."""

_OVERRIDES = "options of the recipe to change; values are YAML: {lr}=1e-4 limits.turns=4 'sampling.stop=[\"###\"]'"


def add_recipe(
    parser: argparse.ArgumentParser,
    *,
    example: str = "recipes/calculator.yaml",
    lr: str = "train.lr",
    nargs: str | None = None,
) -> None:
    """Add the arguments `recipe` and `key=value ...`. `nargs="?"` makes the recipe optional."""
    parser.add_argument("recipe", nargs=nargs, help=f"a YAML file, such as {example}")
    add_overrides(parser, help=_OVERRIDES.format(lr=lr))


def add_overrides(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Add the argument `key=value ...`. The shell completes the names of options."""
    overrides = parser.add_argument("overrides", nargs="*", metavar="key=value", help=help)
    overrides.completer = _option_names  # pyright: ignore[reportAttributeAccessIssue]  # argcomplete reads this attribute


def _option_names(prefix: str, action: object, parser: object, parsed_args: object) -> list[str]:
    """The options of recipes that begin with `prefix`, such as `train.lr=`. argcomplete gives all arguments by keyword."""
    from turnwise.config.resume_rules import RULES

    return [f"{option}=" for option in RULES if option.startswith(prefix) and "[" not in option]


def print_lines(console: Console, lines: Sequence[str], *, style: str | None = None) -> None:
    """Print lines as they are: without markup, and without wrapping paths."""
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
