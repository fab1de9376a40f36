"""Builds what runs the conversations of a recipe: an engine of this process, a rollout server, or rollout workers on Ray.

`ConversationHost` is the other side: what runs conversations in a rollout server, and in a worker on Ray, for a trainer in
another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
from collections.abc import AsyncIterator, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.assembly.conversations import environment_factory, rollout_context
from turnwise.assembly.conversations import renderer as build_renderer
from turnwise.assembly.engines import Scripts, engine, engine_model, longest_context, probe_options
from turnwise.assembly.policies import agent_policies
from turnwise.chat.renderer import Renderer
from turnwise.config.policy_checks import refuse_changing
from turnwise.data.images import media_kind, media_value
from turnwise.engines.engine import Engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.launch import on_cpu
from turnwise.engines.remote.server_process import visible_devices
from turnwise.engines.remote.servers import Owner
from turnwise.errors import ConfigError
from turnwise.models.device import gpu_number
from turnwise.models.model_config import context_length
from turnwise.options.engines import ClusterSection
from turnwise.options.schema import Config
from turnwise.ray_workers.ray_api import RAY_ADDRESS
from turnwise.ray_workers.rollout_worker import RolloutWorker, WorkerInfo
from turnwise.ray_workers.rollouts import RayOptions, RayRollouts
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import ConversationRunner, EngineRunner, RolloutContext
from turnwise.rollout_server.client import RolloutClient, TrainerIdentity, trainer_name
from turnwise.rollout_server.wire import LoadAdapter, base_weights, processor_fingerprint, served_options
from turnwise.training import fingerprint
from turnwise.types import Row
from turnwise.version import source_version

# the client of a rollout server


def rollout_client(config: Config, url: str, renderer: Renderer) -> RolloutClient:
    """The client of the server at `url`, after the server's recipe was compared with this recipe.

    Raises ConfigError if the server does not answer, refuses the token, or has another recipe or tokenizer.
    """
    options = config.rollout_server
    trainer = TrainerIdentity(
        name=trainer_name(config.output),
        tokenizer=fingerprint.of_tokenizer(renderer.tokenizer),
        recipe=served_options(config),
        base=base_weights(config),
        vision=renderer.vision,
    )
    client = RolloutClient(url, options, token=os.environ.get(options.token_env) or None, trainer=trainer)
    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        thread.submit(lambda: asyncio.run(client.check())).result()
    return client


def refuse_what_needs_conversations_here(scorer: Scorer, rows: Iterable[Row], option: str) -> None:
    """Refuse reward functions and rows that need the conversations in this process. `option` is the option by which they run in
    other processes. Raises ConfigError."""
    place = "on the rollout server" if option == "rollout_server.url" else "in a rollout worker"
    for function in scorer.functions:
        if function.plan.needs_environment:
            raise ConfigError(
                f"the reward function {function.name} reads the environment's object, which is {place}: give the "
                f"reward in the environment, or remove {option}"
            )
    for row in rows:
        contents = [message.get("content") for message in row.messages]
        parts = [part for content in contents if isinstance(content, list) for part in content]
        media = [part for part in parts if isinstance(part, dict) and media_kind(part) is not None]
        if any(media_kind(part) == "video" and not isinstance(media_value(part), list | tuple) for part in media):
            raise ConfigError(
                f"row {row.id} contains a video file, and only frames can be sent to environments {place}: give a list of "
                f"frames, or remove {option}"
            )
        if "multi_modal_inputs" in row.fields:
            raise ConfigError(
                f"data.return_multi_modal_inputs=true has no effect with {option}: environments {place} receive no tensors. "
                f"Remove it, or remove {option}"
            )


# what runs conversations for a trainer in another process


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
    refuse_changing(config)
    async with contextlib.aclosing(environment_factory(config, encode=renderer.encode)) as environments:
        model = engine_model(config, adapter=True)
        if config.deterministic:
            from turnwise.models.precision import use_deterministic_algorithms  # torch

            use_deterministic_algorithms()
        sampling = engine(config, renderer, model, updated=True, owner=owner or Owner())
        policies = agent_policies(config, renderer, model, engine=sampling)
        try:
            await sampling.start()
            longest = context_length(model.config.to_dict()) if model is not None else longest_context(config)
            yield ConversationHost(
                engine=sampling,
                context=rollout_context(config, renderer, sampling, environments, longest=longest, policies=policies),
                load_adapter=_adapter_loader(config, sampling, model),
            )
        finally:
            await sampling.close()


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
        turnwise=source_version(),
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


# rollout workers on a Ray cluster


def ray_rollouts(config: Config, renderer: Renderer, *, trains: bool = False) -> RayRollouts:
    """The rollout workers of a recipe with `cluster.launcher: ray`. They are started by `Engine.start`. `trains`: this process
    trains, too."""
    trainer = trainer_name(config.output)
    return RayRollouts(
        ray_options(config, renderer, trains=trains),
        lambda number: functools.partial(
            rollout_worker, worker_recipe(config, number), f"{trainer}, rollout worker {number}"
        ),
    )


def worker_recipe(config: Config, number: int) -> Config:
    """The recipe of the worker with a number. Conversations run in its process. The servers of `engine.url` are divided among the
    workers, because one engine changes the weights of a server. Servers that the worker starts write their logs into a directory
    of the worker."""
    output = str(Path(config.output) / f"worker-{number}")
    changes: dict[str, Any] = {"cluster": ClusterSection(), "output": output}
    if (engine := config.engine.servers) is not None and engine.url is not None:
        own = engine.urls[number :: config.cluster.workers.count]
        changes["engine"] = engine.model_copy(update={"url": own})
    return config.model_copy(update=changes)


def ray_options(config: Config, renderer: Renderer, *, trains: bool = False) -> RayOptions:
    """Which cluster is used, what each worker needs, and what it must have loaded."""
    # a rank on the Ray cluster may be reached by another address than the command
    address = os.environ.get(RAY_ADDRESS) or config.cluster.address
    info, probe = worker_info(config, renderer), probe_options(config)
    gpu = _gpu_beside_workers(config) if trains else None
    own = config.engine.embedded is not None or (config.engine.servers is not None and config.engine.starts_servers)
    return RayOptions(
        address=address,
        cluster=config.cluster,
        info=info,
        probe=probe,
        gpu=gpu,
        takes_gpu=own and config.model.device != "cpu",
    )


def _gpu_beside_workers(config: Config) -> str | None:
    """The GPU of a command that trains on a machine of the Ray cluster, which does not know of it. A rank's GPU is reserved, and
    the machine of a command with `ray://` is outside of the cluster."""
    outside = (config.cluster.address or os.environ.get("RAY_ADDRESS") or "").startswith("ray://")
    if outside or RAY_ADDRESS in os.environ or on_cpu(config.model.device):
        return None
    index, names = gpu_number(config.model.device), visible_devices()
    return names[index] if index < len(names) else None


# the runner of a run


def runner(
    config: Config,
    renderer: Renderer,
    model: Any | None = None,
    *,
    scripts: Scripts | None = None,
    version: int = 0,
    updated: bool = False,
) -> ConversationRunner:
    """What runs the conversations of a recipe: this process, with the `engine` of the same arguments; with rollout_server.url,
    that server; with cluster.launcher=ray, rollout workers.

    Raises ConfigError or DataError.
    """
    if scripts is None and config.rollout_server.url is not None:
        return rollout_client(config, config.rollout_server.url, renderer)
    if scripts is None and config.cluster.launcher == "ray":
        return ray_rollouts(config, renderer, trains=updated)
    return EngineRunner(engine(config, renderer, model, scripts=scripts, version=version, updated=updated))
