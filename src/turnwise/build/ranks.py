"""Builds what several ranks train with: the connection between the ranks, and the learner on rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.config.cluster import ClusterSection
from turnwise.config.schema import Config
from turnwise.training.sharded.options import CriticOptions, RankOptions, ShardingOptions, ShardOptions

if TYPE_CHECKING:
    from turnwise.training.critic import Critic
    from turnwise.training.learner import Learner
    from turnwise.training.sharded.sharded_learner import ShardedLearner

__all__ = ["rank_options", "sharded_critic", "sharded_learner", "sharding_options"]


def rank_options(config: Config) -> RankOptions:
    """How the ranks of the recipe communicate."""
    cluster = config.cluster
    return RankOptions(
        backend=cluster.backend,
        device="cpu" if config.deterministic else config.model.device,
        timeout=cluster.timeout,
        heartbeat=cluster.heartbeat,
    )


def sharding_options(cluster: ClusterSection) -> ShardingOptions:
    """How the recipe's model is divided among the ranks."""
    fsdp = cluster.fsdp
    return ShardingOptions(
        param_dtype=fsdp.param_dtype,
        reduce_dtype=fsdp.reduce_dtype,
        reshard_after_forward=fsdp.reshard_after_forward,
        gradient_sync=fsdp.gradient_sync,
        offload=fsdp.offload == "cpu",
    )


def sharded_learner(ranks: RankOptions, options: ShardOptions) -> ShardedLearner:
    """The learner on rank 0, after connecting to the other ranks. Raises ConfigError."""
    from turnwise.training.sharded.ranks import Ranks  # torch.distributed
    from turnwise.training.sharded.sharded_learner import ShardedLearner

    return ShardedLearner(Ranks(ranks), options)


def sharded_critic(learner: Learner, options: CriticOptions) -> Critic:
    """The critic on the ranks of a learner. Raises ConfigError."""
    from turnwise.training.sharded.sharded_critic import ShardedCritic  # torch.distributed
    from turnwise.training.sharded.sharded_learner import ShardedLearner

    assert isinstance(learner, ShardedLearner)
    return ShardedCritic(learner.leader, options)
