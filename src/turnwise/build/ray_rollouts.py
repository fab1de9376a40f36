"""Builds the trainer's side of the rollout workers on a Ray cluster."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from turnwise.build.conversation_host import rollout_worker, worker_info
from turnwise.chat.renderer import Renderer
from turnwise.config.cluster import ClusterSection
from turnwise.config.schema import Config, ServerEngineSection
from turnwise.ray_workers.pool import PoolOptions
from turnwise.ray_workers.rank_actor import RAY_ADDRESS
from turnwise.ray_workers.ray_api import ActorOptions
from turnwise.ray_workers.rollouts import RayOptions, RayRollouts
from turnwise.rollout_server.client import trainer_name

__all__ = ["ray_options", "ray_rollouts", "worker_recipe"]


def ray_rollouts(config: Config, renderer: Renderer) -> RayRollouts:
    """The rollout workers of a recipe with `cluster.launcher: ray`. They are started by `Engine.start`."""
    trainer = trainer_name(config.output)
    return RayRollouts(
        ray_options(config, renderer),
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
    if isinstance(config.engine, ServerEngineSection) and config.engine.url is not None:
        own = config.engine.urls[number :: config.cluster.workers.count]
        changes["engine"] = config.engine.model_copy(update={"url": own})
    return config.model_copy(update=changes)


def ray_options(config: Config, renderer: Renderer) -> RayOptions:
    """Which cluster is used, what each worker needs, and what it must have loaded."""
    cluster, workers = config.cluster, config.cluster.workers
    actor = ActorOptions(
        num_cpus=workers.num_cpus,
        num_gpus=workers.num_gpus,
        resources=workers.resources,
        runtime_env=workers.runtime_env,
        max_concurrent=workers.max_concurrent,
    )
    pool = PoolOptions(
        count=workers.count, actor=actor, start_timeout=workers.start_timeout, heartbeat=cluster.heartbeat
    )
    # a rank on the Ray cluster may be reached by another address than the command
    address = os.environ.get(RAY_ADDRESS) or cluster.address
    return RayOptions(address=address, pool=pool, info=worker_info(config, renderer))
