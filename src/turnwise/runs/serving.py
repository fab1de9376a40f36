"""Runs a rollout server by a recipe: engine, environments and limits of the recipe, for conversations that clients ask for."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise import build
from turnwise.config.schema import Config
from turnwise.config.serve_checks import refuse_without_effect_when_serving
from turnwise.doctor.preflight import preflight
from turnwise.engines.engine import Engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.vllm.trainer_group import join_by_nccl
from turnwise.models.model_config import context_length
from turnwise.rollout_server.adapters import LoadAdapter
from turnwise.rollout_server.application import ServedRun
from turnwise.rollout_server.conversations import ConversationQueue
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
    _print(console, preflight(config, renderer), style="dim")
    async with contextlib.aclosing(build.environment_factory(config, encode=renderer.encode)) as environments:
        model = build.engine_model(config, adapter=True)
        if config.deterministic:
            from turnwise.models.torch_threads import use_deterministic_algorithms  # torch

            use_deterministic_algorithms()
        engine = build.engine(config, renderer, model, updated=True)
        try:
            await engine.start()
            longest = context_length(model.config.to_dict()) if model is not None else build.longest_context(config)
            context = build.rollout_context(config, renderer, engine, environments, longest=longest)
            conversations = ConversationQueue(context, metrics, most_waiting=options.most_waiting)
            updates, leases, longest_weights = (
                WeightUpdates(engine, metrics, load_adapter=_adapter_loader(config, engine, model)),
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
        finally:
            await engine.close()


def _adapter_loader(config: Config, engine: Engine, model: Any | None) -> LoadAdapter | None:
    """How an adapter reaches the engine; None if the recipe has no adapter. `model` is that of an engine in this process."""
    if config.model.lora.rank is None:
        return None

    async def to_servers(version: int, folder: Path) -> None:
        assert isinstance(engine, RemoteEngine)
        await engine.update(version, lambda target: shutil.copytree(folder, target, dirs_exist_ok=True) and None)

    async def in_process(version: int, folder: Path) -> None:
        from turnwise.models.lora import load_adapter  # torch

        load_adapter(model, folder)
        await engine.load_weights(version)

    return to_servers if isinstance(engine, RemoteEngine) else in_process


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
