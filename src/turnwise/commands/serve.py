"""`turnwise serve`: a rollout server, by a recipe or by the arguments of ms-swift's `swift rollout`."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
from typing import TYPE_CHECKING, Any

from turnwise.commands.command import Context, add_recipe, count, port, print_lines, step_number
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config.schema import Config

__all__ = ["register"]

_HOST, _PORT = "127.0.0.1", 8000
_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
"""An option of the recipe, such as `engine.python=...`."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run a server that holds an engine and runs conversations with the environment, the tools and the limits of "
        "a recipe (docs/server.md). Clients need the token in the environment variable TURNWISE_SERVER_TOKEN; if it is not set, "
        "a token is made and printed. With --from swift, write the arguments of `swift rollout` after `--`, and options of the "
        "recipe, such as engine.python=/path/to/vllm/bin/python, before it."
    )
    add_recipe(parser, nargs="?")
    parser.add_argument(
        "--from", dest="system", choices=["swift"], help="read arguments of ms-swift instead of a recipe"
    )
    parser.add_argument("--host", help=f"the address to listen on; default: {_HOST}, which only this machine can reach")
    parser.add_argument("--port", type=port, help=f"the port; default: {_PORT}; 0: any free port")
    parser.add_argument(
        "--queue",
        type=step_number,
        default=1024,
        help="the most conversations that wait for a free place; default: 1024",
    )
    parser.add_argument(
        "--multi_turn_scheduler",
        metavar="NAME",
        help="the scheduler that answers the model, instead of the recipe's environment: a name of ms-swift or of a plugin, "
        "or file.py:Class",
    )
    parser.add_argument(
        "--external_plugins", nargs="+", default=[], metavar="FILE", help="Python files that register schedulers"
    )
    parser.add_argument("--max_turns", type=count, metavar="N", help="the most turns of the model in a conversation")
    parser.set_defaults(command=_run, long=True)


def _run(options: argparse.Namespace, context: Context) -> int:
    host, port = options.host, options.port
    if options.queue < 0:
        raise ConfigError(f"--queue {options.queue} must be 0 or more")
    if options.system is None:
        config, notes = _from_recipe(options)
    else:
        config, notes, given = _from_swift(options)
        host = given.get("host") if host is None else host
        port = given.get("port") if port is None else port
    print_lines(context.console, notes, style="dim")
    # after the recipe was read: its errors show at once, and importing torch takes seconds
    from turnwise.rollout_server.server import TOKEN
    from turnwise.runs.serving import ServeOptions, serve

    served = ServeOptions(
        host=_HOST if host is None else host,
        port=_PORT if port is None else port,
        token=os.environ.get(TOKEN) or None,
        most_waiting=options.queue,
    )
    context.stops.run(serve(config, served, context.console))
    return 0


def _from_recipe(options: argparse.Namespace) -> tuple[Config, list[str]]:
    from turnwise.config.recipe import load

    if options.recipe is None:
        raise ConfigError("give a recipe, such as recipes/calculator.yaml, or `--from swift -- --model ...`")
    return load(options.recipe, [*options.overrides, *_overrides(options)])


def _overrides(options: argparse.Namespace) -> list[str]:
    """The options `--multi_turn_scheduler`, `--external_plugins` and `--max_turns` as options of the recipe."""
    overrides: list[str] = []
    if options.multi_turn_scheduler is not None:
        arguments: dict[str, Any] = {"name": options.multi_turn_scheduler}
        if options.external_plugins:
            arguments["external_plugins"] = options.external_plugins
        if options.max_turns is not None:
            arguments["max_turns"] = options.max_turns
        use = {"use": "turnwise.compat.swift:scheduler", "arguments": arguments}
        overrides.append(f"environment={json.dumps(use)}")
    elif options.external_plugins:
        raise ConfigError("--external_plugins has no effect without --multi_turn_scheduler: give the scheduler's name")
    if options.max_turns is not None:
        overrides.append(f"limits.turns={options.max_turns}")
    return overrides


def _from_swift(options: argparse.Namespace) -> tuple[Config, list[str], dict[str, Any]]:
    """The recipe of the arguments of `swift rollout`, notes on arguments that were left out, and the arguments."""
    from turnwise.commands.convert import refuse
    from turnwise.compat.swift.serving import from_rollout_arguments
    from turnwise.config.recipe import with_overrides

    for name in ("multi_turn_scheduler", "external_plugins", "max_turns"):
        if getattr(options, name):
            raise ConfigError(
                f"with --from swift, write --{name} after `--`, with the other arguments of `swift rollout`"
            )
    words = [word for word in (options.recipe, *options.overrides) if word is not None]
    overrides = list(itertools.takewhile(lambda word: _OVERRIDE.match(word) is not None, words))
    report, given = from_rollout_arguments(words[len(overrides) :])
    refuse(report, how="Remove these arguments, or write a recipe with `turnwise convert --from swift` and edit it")
    source = "the recipe of ms-swift's arguments (`turnwise convert --from swift` shows it)"
    config, notes = with_overrides(report.recipe, overrides, source=source)
    return config, [*notes, *(f"left out: {key}" for key in report.unsupported)], given
