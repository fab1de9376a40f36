"""Builds the command's side of the training ranks on a Ray cluster. Imports no torch."""

from __future__ import annotations

from turnwise.config.schema import Config
from turnwise.ray_workers.ranks import RankGroupOptions, RayRanks
from turnwise.ray_workers.ray_api import ActorOptions

__all__ = ["rank_group_options", "ray_ranks"]


def ray_ranks(config: Config, *, workers: bool) -> RayRanks:
    """The ranks of a recipe with `cluster.launcher: ray` and `cluster.trainers`. `workers`: the run has rollout workers."""
    return RayRanks(rank_group_options(config, workers=workers))


def rank_group_options(config: Config, *, workers: bool) -> RankGroupOptions:
    """Which cluster is used, and what each rank needs."""
    cluster, ranks, of_workers = config.cluster, config.cluster.ranks, config.cluster.workers
    assert cluster.trainers is not None
    worker = ActorOptions(num_cpus=of_workers.num_cpus, num_gpus=of_workers.num_gpus, resources=of_workers.resources)
    return RankGroupOptions(
        address=cluster.address,
        count=cluster.trainers,
        actor=ActorOptions(
            num_cpus=ranks.num_cpus,
            num_gpus=ranks.num_gpus or 0,
            resources=ranks.resources,
            runtime_env=ranks.runtime_env,
        ),
        gpus=ranks.num_gpus is None and config.model.device != "cpu",
        start_timeout=ranks.start_timeout,
        workers=f"{of_workers.count} x ({worker.text})" if workers else "",
    )
