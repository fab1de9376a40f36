"""What every command has: its arguments, and what it runs with.

A command is a module with `register(parser)`, which adds its arguments and sets `command` to a function of the parsed options
and the `Context` that returns the exit status. Heavy imports are made in that function. `cli.py` imports the module of the
command that is run, and no other.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from turnwise.commands.stopping import Stops
    from turnwise.config.schema import Config

__all__ = [
    "Command",
    "Context",
    "add_overrides",
    "add_recipe",
    "count",
    "damage_notes",
    "load_recipe",
    "port",
    "positive",
    "print_lines",
    "refuse_missing_files",
    "step_number",
]

_MOST_DAMAGED, _LAST_PORT = 5, 65535


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


def load_recipe(options: argparse.Namespace) -> tuple[Config, list[str]]:
    """The recipe and the overrides of a command line, and notes for the person who starts the run.

    Files that the recipe names are looked for here, before torch is imported, which takes seconds. Raises ConfigError or
    DataError.
    """
    from turnwise.config.recipe import load

    config, notes = load(options.recipe, options.overrides)
    refuse_missing_files(config)
    return config, notes


def refuse_missing_files(config: Config) -> None:
    """Refuse a recipe with a data set or a file of user code that does not exist. Raises ConfigError or DataError."""
    from turnwise.config.section import Section, Use
    from turnwise.data.rows import refuse_missing_source
    from turnwise.user_code.object_references import refuse_missing_file

    for source in (config.data.train, config.data.eval):
        for path in [source] if isinstance(source, str) else source or ():
            refuse_missing_source(path)

    def visit(value: object, key: str) -> None:
        if isinstance(value, Use):
            refuse_missing_file(value.use, key=key)
        elif isinstance(value, Section):
            for name in type(value).model_fields:
                visit(getattr(value, name), f"{key}.{name}" if key else name)
        elif isinstance(value, list | tuple):
            for part in value:
                visit(part, key)

    visit(config, "")


def add_overrides(parser: argparse.ArgumentParser, *, help: str) -> None:
    """Add the argument `key=value ...`. The shell completes the names of options."""
    overrides = parser.add_argument("overrides", nargs="*", metavar="key=value", help=help)
    overrides.completer = _option_names  # pyright: ignore[reportAttributeAccessIssue]  # argcomplete reads this attribute


def _option_names(prefix: str, action: object, parser: object, parsed_args: object) -> list[str]:
    """The options of recipes that begin with `prefix`, such as `train.lr=`. argcomplete gives all arguments by keyword."""
    from turnwise.config.resume_rules import RULES

    return [f"{option}=" for option in RULES if option.startswith(prefix) and "[" not in option]


def count(text: str) -> int:
    """A number of at least 1, as the value of an argument."""
    return _integer(text, least=1)


def step_number(text: str) -> int:
    """The number of a step, as the value of an argument. Evaluations before training have step 0."""
    return _integer(text, least=0)


def port(text: str) -> int:
    """A TCP port, as the value of an argument; 0: any free one."""
    value = _integer(text, least=0)
    if value > _LAST_PORT:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give a number from 0 to {_LAST_PORT}")
    return value


def positive(text: str) -> float:
    """A finite number above 0, as the value of an argument."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0")
    return value


def _integer(text: str, *, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of at least {least}")
    return value


def damage_notes(damaged: Sequence[str]) -> list[str]:
    """What to print about damaged lines of a record, which were left out."""
    lines = list(dict.fromkeys(damaged))
    more = [f"and {len(lines) - _MOST_DAMAGED} more damaged lines"] if len(lines) > _MOST_DAMAGED else []
    return [*(f"left out: {line}" for line in lines[:_MOST_DAMAGED]), *more]


def print_lines(console: Console, lines: Sequence[str], *, style: str | None = None) -> None:
    """Print lines as they are: without markup, and without wrapping paths."""
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
