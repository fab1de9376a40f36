"""The learner on rank 0 of several ranks: it implements `Learner` by commands that all ranks run.

The training loop and the state of the run do not know that there are several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnwise.models.lora import save_adapter
from turnwise.models.published_weights import published_weights
from turnwise.training.background import StopFlag
from turnwise.training.learner import BatchRequirements
from turnwise.training.loss import make_loss
from turnwise.training.packing import MicroBatch
from turnwise.training.policy_update import PassLearner
from turnwise.training.sharded.commands import (
    Accumulate,
    Build,
    ComputeTokenLogprobs,
    FindLargestLogit,
    Fingerprint,
    GatherWeights,
    MeasureLogprobs,
    MixReference,
    OptimizerStep,
    SaveShards,
    StreamWeights,
)
from turnwise.training.sharded.leader import Leader
from turnwise.training.sharded.model_shard import ShardReport
from turnwise.training.sharded.options import ShardOptions
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.targets import Targets
from turnwise.training.update_sums import UpdateSums

__all__ = ["ShardedLearner"]


class ShardedLearner(PassLearner):
    """A `Learner` on all `ranks`. Raises ConfigError if the model cannot be loaded, or cannot be trained by several ranks.

    If a rank is lost, the running method raises RunError, and so do all later calls.
    """

    def __init__(self, ranks: Ranks, options: ShardOptions) -> None:
        self.leader = Leader(ranks)
        """Runs commands on all ranks; a critic on the same ranks uses it, too."""
        self.loss = make_loss(options.loss)
        self._report: ShardReport = self.leader.run(Build(options))

    @property
    def requirements(self) -> BatchRequirements:
        return self._report.requirements

    @property
    def context_length(self) -> int | None:
        return self._report.context_length

    @property
    def trains_adapter(self) -> bool:
        return self._report.trains_adapter

    def target_logprobs(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, reference: bool = False
    ) -> list[torch.Tensor]:
        """See `PassLearner.target_logprobs`."""
        return self.leader.measure(micro_batches, lambda mine, rounds: MeasureLogprobs(mine, rounds, reference), stop)

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[Targets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> UpdateSums:
        """See `PassLearner.accumulate`."""
        return self.leader.run_shared(
            micro_batches, lambda mine, rounds: Accumulate(mine, rounds, len(micro_batches)), stop, on_micro_batch
        )

    def step(self, lr: float) -> float:
        """See `PassLearner.step`."""
        return self.leader.run(OptimizerStep(lr))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Learner.weights`; in the CPU's memory of rank 0. The next update does not change the tensors."""
        gathered = self.leader.run(GatherWeights())
        return gathered if self.trains_adapter else published_weights(self.leader.rank.built.model, gathered)

    @torch.no_grad()
    def copy_weights(self, model: Any) -> None:
        """Give a complete model in this process, such as that of the embedded engine, the present weights."""
        tensors = model.state_dict()
        self.leader.rank.on_tensor = lambda name, full: tensors[name].copy_(full)
        self.leader.run(StreamWeights())

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self.leader.run(ComputeTokenLogprobs(list(token_ids)))

    def largest_logit(self, token_ids: Sequence[int]) -> float:
        return self.leader.run(FindLargestLogit(list(token_ids)))

    def mix_reference(self, share: float) -> None:
        self.leader.run(MixReference(share))

    def save(self, folder: Path) -> None:
        model, gathered = self.leader.rank.built.model, self.leader.run(GatherWeights())
        if self.trains_adapter:
            save_adapter(model, folder, gathered)
        else:
            model.save_pretrained(folder, state_dict=gathered)

    def state(self) -> dict[str, Any]:
        """Nothing: `save_shards` writes it."""
        return {}

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        self.leader.load_state(state, shards, "policy")

    def save_shards(self, folder: Path) -> None:
        self.leader.run(SaveShards(folder.absolute()))

    def fingerprint(self) -> str:
        return self.leader.run(Fingerprint())

    def base_fingerprint(self) -> str | None:
        return self.leader.rank.built.base_fingerprint

    def reference_fingerprint(self) -> str | None:
        return self.leader.run(Fingerprint(reference=True))

    def close(self) -> None:
        self.leader.close()
