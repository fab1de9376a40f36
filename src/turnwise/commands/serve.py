"""`turnwise serve` and `turnwise retrieval`: the servers.

`serve` runs a rollout server, by a recipe or by the arguments of ms-swift's `swift rollout`: conversations that clients ask
for run with the recipe's engine, environments and limits. `retrieval` runs a local search server for the search tool.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from turnwise import assembly
from turnwise.commands.command import Context, add_recipe, count, port, print_lines, step_number
from turnwise.config.engine_checks import refuse_without_effect_when_serving
from turnwise.doctor.template import preflight
from turnwise.engines.vllm.worker import join_by_nccl
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout_server.conversations import ConversationQueue, Leases, ServerMetrics, WeightUpdates
from turnwise.rollout_server.server import TOKEN, Address, ServedRun, open_socket, serving, token_for
from turnwise.rollout_server.swift import SwiftWeights, swift_routes
from turnwise.rollout_server.wire import base_weights, processor_fingerprint, served_options
from turnwise.training import fingerprint

if TYPE_CHECKING:
    from turnwise.options.schema import Config


# `turnwise serve`

_HOST, _PORT = "127.0.0.1", 8000
_OVERRIDE = re.compile(r"[a-z_]+(\.[a-z_]+)*=")
"""An option of the recipe, such as `engine.python=...`."""


def register_serve(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(command=_run_serve, long=True)


def _run_serve(options: argparse.Namespace, context: Context) -> int:
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
    from turnwise.compat.swift.convert import from_rollout_arguments
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


# `turnwise retrieval`


def register_retrieval(parser: argparse.ArgumentParser) -> None:
    """Add the description and the arguments."""
    parser.description = (
        "Run a search server (BM25) over a corpus, reachable from this machine only (docs/tools.md). If the "
        "environment variable TURNWISE_RETRIEVAL_TOKEN is set, requests must carry this token."
    )
    parser.add_argument(
        "corpus", type=Path, help='a jsonl file with {"id", "title", "text"} or {"id", "contents"} on each line'
    )
    parser.add_argument("--port", type=port, default=8000, help="the port; default: 8000; 0: any free port")
    parser.set_defaults(command=_run_retrieval)


def _run_retrieval(options: argparse.Namespace, context: Context) -> int:
    from turnwise.environments.search import TOKEN, serve

    serve(options.corpus, port=options.port, token=os.environ.get(TOKEN) or None)
    return 0


# the rollout server of a recipe

_LARGEST_UNKNOWN = 1 << 40
"""Bytes of a body with weights where the size of the model is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how a server listens."""

    host: str
    port: int
    """0 selects a free port."""
    token: str | None
    """None: a token is made and printed."""
    most_waiting: int
    """Conversations in the queue, at most."""


async def serve(
    config: Config, options: ServeOptions, console: Console, *, on_ready: Callable[[Address, str], None] | None = None
) -> None:
    """Serve until the call is cancelled. `on_ready` receives the address and the token once the server answers.

    Raises TurnwiseError before it listens.
    """
    refuse_without_effect_when_serving(config)
    token = token_for(options.host, options.token)
    metrics = ServerMetrics()
    renderer = assembly.renderer(config)
    _print(console, preflight(config, renderer, source=config.model.path), style="dim")
    async with assembly.conversation_host(config, renderer) as host:
        conversations = ConversationQueue(host.context, metrics, most_waiting=options.most_waiting)
        updates, leases, longest_weights = (
            WeightUpdates(host.engine, metrics, load_adapter=host.load_adapter),
            Leases(),
            _longest_weights(config.model.path),
        )
        run = ServedRun(
            conversations=conversations,
            weights=updates,
            leases=leases,
            metrics=metrics,
            instance=secrets.token_hex(8),
            model_path=config.model.path,
            tokenizer=fingerprint.of_tokenizer(renderer.tokenizer),
            options=served_options(config),
            processor=processor_fingerprint(renderer.vision),
            base=base_weights(config),
            longest_weights=longest_weights,
            further_routes=swift_routes(
                conversations,
                _swift_weights(updates, leases, longest_weights),
                multi_turn=config.limits.turns > 1,
                gym=bool(config.environment.arguments.get("use_gym_env")),
            ),
        )
        address = open_socket(options.host, options.port)
        async with serving(run, address, token=token):
            _announce(console, config, address, token, given=options.token is not None)
            if on_ready is not None:
                on_ready(address, token)
            await asyncio.Event().wait()


def _swift_weights(updates: WeightUpdates, leases: Leases, longest: int) -> SwiftWeights | None:
    """The weights of ms-swift's trainers; None if this process cannot receive them."""
    join = join_by_nccl()
    return None if join is None else SwiftWeights(updates, leases, join=join, longest=longest)


def _longest_weights(path: str) -> int:
    """Bytes of a body with weights: twice the model's files, which may have half as many bytes a number."""
    files = [file for suffix in ("safetensors", "bin") for file in Path(path).glob(f"*.{suffix}")]
    size = sum(file.stat().st_size for file in files)
    return 2 * size + (64 << 20) if size else _LARGEST_UNKNOWN


def _announce(console: Console, config: Config, address: Address, token: str, *, given: bool) -> None:
    shown = f"of {TOKEN}" if given else token
    lines = [
        f"serving {config.model.path} at {address.url} (description: {address.url}/docs)",
        f"token: {shown}",
        f"to train with it: {TOKEN}=<token> turnwise train RECIPE rollout_server.url={address.url}",
    ]
    _print(console, lines)


def _print(console: Console, lines: Sequence[str], *, style: str | None = None) -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)
