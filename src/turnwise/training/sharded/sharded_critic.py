"""The critic on rank 0 of several ranks: it implements `Critic` by commands that all ranks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnwise.models.lora import save_adapter
from turnwise.training.background import StopFlag
from turnwise.training.critic_update import CriticSums, PassCritic
from turnwise.training.learner import PackingRequirements
from turnwise.training.packing import MicroBatch
from turnwise.training.sharded.commands import (
    Accumulate,
    BuildCritic,
    GatherWeights,
    MeasureValues,
    OptimizerStep,
    SaveShards,
)
from turnwise.training.sharded.critic_shard import HEAD_PREFIX
from turnwise.training.sharded.leader import Leader
from turnwise.training.sharded.options import CriticOptions
from turnwise.training.value_batch import StatePlaces, ValueTargets
from turnwise.training.value_head import save_head

__all__ = ["ShardedCritic"]


class ShardedCritic(PassCritic):
    """A `Critic` on all ranks, which the learner's `leader` commands. Raises what `ShardedLearner` raises."""

    def __init__(self, leader: Leader, options: CriticOptions) -> None:
        self._leader = leader
        self._requirements: PackingRequirements = leader.run(BuildCritic(options))

    @property
    def requirements(self) -> PackingRequirements:
        return self._requirements

    def measure(
        self, micro_batches: Sequence[MicroBatch[StatePlaces]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> list[torch.Tensor]:
        """See `PassCritic.measure`."""
        return self._leader.measure(
            micro_batches, lambda mine, rounds: MeasureValues(mine, rounds, len(micro_batches)), stop, on_micro_batch
        )

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[ValueTargets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> CriticSums:
        """See `PassCritic.accumulate`."""
        return self._leader.run_shared(
            micro_batches,
            lambda mine, rounds: Accumulate(mine, rounds, len(micro_batches), "critic"),
            stop,
            on_micro_batch,
        )

    def step(self, lr: float) -> float:
        """See `PassCritic.step`."""
        return self._leader.run(OptimizerStep(lr, "critic"))

    def save(self, folder: Path) -> None:
        shard, gathered = self._leader.rank.critic, self._leader.run(GatherWeights(part="critic"))
        weights = {name: tensor for name, tensor in gathered.items() if not name.startswith(HEAD_PREFIX)}
        head = {name.removeprefix(HEAD_PREFIX): gathered[name] for name in gathered.keys() - weights.keys()}
        if shard.trains_adapter:
            save_adapter(shard.model, folder, weights)
        else:
            shard.model.save_pretrained(folder, state_dict=weights)
        save_head(head, folder)

    def state(self) -> dict[str, Any]:
        """Nothing: `save_shards` writes it."""
        return {}

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        self._leader.load_state(state, shards, "critic")

    def save_shards(self, folder: Path) -> None:
        self._leader.run(SaveShards(folder.absolute(), "critic"))

    def base_fingerprint(self) -> str | None:
        return self._leader.rank.critic.base_fingerprint
