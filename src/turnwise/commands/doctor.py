"""`turnwise doctor`: checks whether a model, and a recipe with it, would be trained rightly."""

from __future__ import annotations

import argparse
import json

from turnwise.commands.command import Context, add_overrides, positive
from turnwise.errors import ConfigError

__all__ = ["register"]


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Check a model's chat template, tokenizer and weights, and a recipe with them (docs/doctor.md). The exit "
        "status is 1 if a check fails."
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a model directory or a hub name; used instead of the recipe's model"
    )
    add_overrides(parser, help="options of the recipe to change")
    parser.add_argument("--recipe", metavar="FILE", help="a recipe to check with the model")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--weights",
        choices=("auto", "always", "never"),
        default="auto",
        help="whether to load the model's weights; auto: only if loading does not take long",
    )
    parser.add_argument(
        "--memory-gb",
        type=positive,
        metavar="GIB",
        help="the memory that a training step of the recipe may use; default: that of the GPU, or of this machine",
    )
    parser.set_defaults(command=_run)


def _run(options: argparse.Namespace, context: Context) -> int:
    if options.overrides and options.recipe is None:
        raise ConfigError(f"{options.overrides[0]} is an option of a recipe, and no recipe is given: add --recipe FILE")
    if options.memory_gb is not None and options.recipe is None:
        raise ConfigError("--memory-gb is compared with a recipe's memory, and there is no recipe: add --recipe FILE")
    from turnwise.config.recipe import load
    from turnwise.doctor.check import as_json, show, worst
    from turnwise.doctor.examine import examine

    config = None
    if options.recipe is not None:
        config, _ = load(options.recipe, [*options.overrides, f"model.path={json.dumps(options.model)}"])
    checks = examine(options.model, config, weights=options.weights, memory_gb=options.memory_gb)
    if options.json:
        context.console.out(as_json(options.model, checks), highlight=False)
    else:
        show(checks, context.console)
    return int(worst([check.status for check in checks]) == "fail")
