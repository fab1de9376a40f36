"""`turnwise train`: reinforcement learning by a recipe, or by a configuration of verl's."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from turnwise.commands.command import Context, add_recipe, load_recipe
from turnwise.commands.ranks import run_as_rank
from turnwise.commands.run_command import resume_command, run_to_end
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config.schema import Config

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Train a model by reinforcement learning, with the options of a recipe or of a configuration for verl "
        "(docs/verl.md)."
    )
    add_recipe(parser, nargs="?")
    parser.add_argument("--config-path", metavar="DIR", help="instead of a recipe: a directory of verl's YAML files")
    parser.add_argument(
        "--config-name",
        metavar="NAME",
        help="the file in that directory, without .yaml; key=value then sets options of verl",
    )
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    from turnwise.config.train_checks import refuse_without_effect

    if options.config_path is not None or options.config_name is not None:
        config, notes = _from_verl(options)
        resume = "the same command"
    elif options.recipe is None:
        raise ConfigError("give a recipe, such as recipes/calculator.yaml, or verl's --config-path and --config-name")
    else:
        config, notes = load_recipe(options)
        resume = resume_command("train", options, config)
    if (status := run_as_rank(config, context, refuse_without_effect, conversations=True)) is not None:
        return status
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.terminal.train_report import TrainReport
    from turnwise.train import assemble, train

    run = assemble(config)
    run.notes[:0] = notes
    report = TrainReport(context.console, run.activity)
    return run_to_end(train(run, report), run, report, context, resume=resume)


def _from_verl(options: argparse.Namespace) -> tuple[Config, list[str]]:
    """The recipe of a configuration for verl, and notes on the keys that were left out. Raises ConfigError."""
    from turnwise.commands.convert import converted, refuse
    from turnwise.config.recipe import checked

    overrides: list[str] = options.overrides
    if options.recipe is not None:  # the first word is an override too
        if "=" not in options.recipe and not options.recipe.startswith("~"):
            raise ConfigError(f"the recipe {options.recipe} and --config-path are both given: give one of them")
        overrides = [options.recipe, *overrides]
    result = converted("verl", overrides, folder=options.config_path, name=options.config_name)
    refuse(
        result,
        how="Change these keys, or remove them (~key), or write a recipe with `turnwise convert` and edit it",
    )
    source = "the recipe of verl's configuration (`turnwise convert` shows it)"
    return checked(result.recipe, source=source), [f"left out: {key}" for key in result.unsupported]
