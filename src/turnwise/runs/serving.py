"""Runs a rollout server by a recipe: engine, environments and limits of the recipe, for conversations that clients ask for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from turnwise import build
from turnwise.config.schema import Config
from turnwise.config.serve_checks import refuse_without_effect_when_serving
from turnwise.doctor.preflight import preflight
from turnwise.engines.vllm.trainer_group import join_by_nccl
from turnwise.rollout_server.application import ServedRun
from turnwise.rollout_server.conversations import ConversationQueue
from turnwise.rollout_server.images import processor_fingerprint
from turnwise.rollout_server.metrics import ServerMetrics
from turnwise.rollout_server.recipe import base_weights, served_options
from turnwise.rollout_server.server import TOKEN, Address, open_socket, serving, token_for
from turnwise.rollout_server.swift_routes import swift_routes
from turnwise.rollout_server.swift_weights import SwiftWeights
from turnwise.rollout_server.weights import Leases, WeightUpdates
from turnwise.training import fingerprint

__all__ = ["ServeOptions", "serve"]

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
    renderer = build.renderer(config)
    _print(console, preflight(config, renderer, source=config.model.path), style="dim")
    async with build.conversation_host(config, renderer) as host:
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
