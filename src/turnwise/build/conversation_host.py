"""Builds what runs conversations for a trainer in another process: in a rollout server, and in a rollout worker on Ray."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.build.engines import engine_model, sampling_engine
from turnwise.build.environments import environment_factory
from turnwise.build.rollouts import renderer as build_renderer
from turnwise.build.rollouts import rollout_context
from turnwise.build.server_engines import longest_context
from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.engines.engine import Engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.ownership import Owner
from turnwise.models.model_config import context_length
from turnwise.ray_workers.rollout_worker import RolloutWorker, WorkerInfo
from turnwise.rollout.context import RolloutContext
from turnwise.rollout_server.adapters import LoadAdapter
from turnwise.rollout_server.images import processor_fingerprint
from turnwise.rollout_server.recipe import base_weights
from turnwise.training import fingerprint
from turnwise.version import __version__

__all__ = ["ConversationHost", "conversation_host", "rollout_worker", "worker_info"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationHost:
    """A started engine, and the context of the conversations that it samples for."""

    engine: Engine
    context: RolloutContext
    load_adapter: LoadAdapter | None
    """How an adapter reaches the engine; None if the recipe has no adapter."""


@contextlib.asynccontextmanager
async def conversation_host(
    config: Config, renderer: Renderer, *, owner: Owner | None = None
) -> AsyncIterator[ConversationHost]:
    """The engine and the environments of a recipe, for conversations whose weights a trainer sends. `owner` is this process,
    as the engine's servers know it; None: under a new name. Raises TurnwiseError."""
    async with contextlib.aclosing(environment_factory(config, encode=renderer.encode)) as environments:
        model = engine_model(config, adapter=True)
        if config.deterministic:
            from turnwise.models.deterministic import use_deterministic_algorithms  # torch

            use_deterministic_algorithms()
        engine = sampling_engine(config, renderer, model, updated=True, owner=owner)
        try:
            await engine.start()
            longest = context_length(model.config.to_dict()) if model is not None else longest_context(config)
            yield ConversationHost(
                engine=engine,
                context=rollout_context(config, renderer, engine, environments, longest=longest),
                load_adapter=_adapter_loader(config, engine, model),
            )
        finally:
            await engine.close()


@contextlib.asynccontextmanager
async def rollout_worker(config: Config, name: str) -> AsyncIterator[RolloutWorker]:
    """A rollout worker by a recipe without the section `cluster`. The servers of its engine know the worker by its
    `name`, which is the same for the worker that replaces a lost one. Raises TurnwiseError."""
    renderer = build_renderer(config)
    async with conversation_host(config, renderer, owner=Owner(name)) as host:
        yield RolloutWorker(host.context, load_adapter=host.load_adapter, info=worker_info(config, renderer))


def worker_info(config: Config, renderer: Renderer) -> WorkerInfo:
    """What this process has loaded: the worker compares it with what the trainer has."""
    return WorkerInfo(
        turnwise=__version__,
        tokenizer=fingerprint.of_tokenizer(renderer.tokenizer),
        processor=processor_fingerprint(renderer.vision),
        base=base_weights(config),
    )


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
