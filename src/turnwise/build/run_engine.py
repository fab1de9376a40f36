"""Builds the engine of a run: in its own process, or in a process of rollout workers."""

from __future__ import annotations

from typing import Any

from turnwise.build.engines import Scripts, sampling_engine
from turnwise.build.ray_rollouts import ray_rollouts
from turnwise.build.rollout_server import rollout_client
from turnwise.chat.renderer import Renderer
from turnwise.config.schema import Config
from turnwise.engines.engine import Engine
from turnwise.engines.remote.ownership import Owner
from turnwise.rollout_server.client import trainer_name

__all__ = ["engine"]


def engine(
    config: Config,
    renderer: Renderer,
    model: Any | None = None,
    *,
    scripts: Scripts | None = None,
    version: int = 0,
    updated: bool = False,
) -> Engine:
    """The engine of a recipe: an engine that samples for conversations in this process, with the arguments of `sampling_engine`.
    With rollout_server.url, the client of that server; with cluster.launcher=ray, the rollout workers.

    Raises ConfigError or DataError.
    """
    if scripts is None and config.rollout_server.url is not None:
        return rollout_client(config, config.rollout_server.url, renderer)
    if scripts is None and config.cluster.launcher == "ray":
        return ray_rollouts(config, renderer)
    owner = Owner(trainer_name(config.output))  # only one process at a time writes the output
    return sampling_engine(config, renderer, model, scripts=scripts, version=version, updated=updated, owner=owner)
