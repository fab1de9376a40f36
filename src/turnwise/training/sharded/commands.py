"""The commands that rank 0 sends to all ranks. Each rank runs the same command on its own part of the learner.

A command is sent with pickle, from one process of the training to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from turnwise.training.background import StopFlag
from turnwise.training.packing import MicroBatch
from turnwise.training.sharded import checkpoint
from turnwise.training.sharded.model_shard import ModelShard, ShardReport
from turnwise.training.sharded.options import ShardOptions
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_model import complete
from turnwise.training.targets import Targets
from turnwise.training.update_sums import UpdateSums

__all__ = ["Rank", "RankCommand", "follow"]


class Rank:
    """A rank between two commands: its part of the learner, once it is built."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shard: ModelShard | None = None
        # of rank 0 only
        self.stop = StopFlag()
        self.on_micro_batch: Callable[[], None] = lambda: None

    @property
    def built(self) -> ModelShard:
        """This rank's part of the learner."""
        assert self.shard is not None
        return self.shard


class RankCommand(Protocol):
    """Something that all ranks do together."""

    def run(self, rank: Rank) -> Any:
        """Do the part of a rank. The result of rank 0 is the result of the command."""
        ...


@dataclass(frozen=True, slots=True)
class Build:
    """Load the model and divide it."""

    options: ShardOptions

    def run(self, rank: Rank) -> ShardReport:
        rank.shard = ModelShard(self.options, rank.ranks)
        return ShardReport(rank.shard)


@dataclass(frozen=True, slots=True)
class MeasureLogprobs:
    """Compute log-probabilities of this rank's micro-batches."""

    mine: Sequence[MicroBatch[Any]]
    rounds: int
    reference: bool

    def run(self, rank: Rank) -> list[list[torch.Tensor]]:
        logprobs = rank.built.target_logprobs(self.mine, self.rounds, rank.stop, reference=self.reference)
        return rank.ranks.gather(logprobs)


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Compute the gradients of a batch, of which this rank has some micro-batches."""

    mine: Sequence[MicroBatch[Targets]]
    rounds: int
    total: int
    """The number of micro-batches of all ranks."""

    def run(self, rank: Rank) -> UpdateSums:
        done = 0

        def on_round() -> None:
            nonlocal done
            count = min(rank.ranks.size, self.total - done)
            done += count
            for _ in range(count):
                rank.on_micro_batch()

        sums = rank.built.accumulate(self.mine, self.rounds, rank.stop, on_round)
        return sum(rank.ranks.gather(sums), UpdateSums())


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Take an optimizer step."""

    lr: float

    def run(self, rank: Rank) -> float:
        return rank.built.optimizer.step(self.lr)


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Bring the complete weights into the CPU's memory of rank 0. On the devices, one tensor at a time is complete.

    `internal`: by the names in the model, with buffers; else those of the checkpoint, or the adapter's by peft's names.
    """

    internal: bool = False

    def run(self, rank: Rank) -> dict[str, torch.Tensor]:
        tensors = rank.built.named_tensors() if self.internal else rank.built.state_tensors()
        gathered: dict[str, torch.Tensor] = {}
        names: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in tensors.items():
            full = complete(tensor)
            if rank.ranks.leads:  # tied weights stay one tensor
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                first = names.setdefault((local.data_ptr(), tensor.shape), name)
                gathered[name] = gathered[first] if first in gathered else full.cpu()
        return gathered


@dataclass(frozen=True, slots=True)
class ComputeTokenLogprobs:
    """See `Learner.token_logprobs`."""

    token_ids: Sequence[int]

    def run(self, rank: Rank) -> list[float]:
        return rank.built.token_logprobs(self.token_ids)


@dataclass(frozen=True, slots=True)
class MixReference:
    """See `Learner.mix_reference`."""

    share: float

    def run(self, rank: Rank) -> None:
        rank.built.mix_reference(self.share)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fingerprint of the model, or of the reference model."""

    reference: bool = False

    def run(self, rank: Rank) -> str | None:
        return rank.built.reference_fingerprint() if self.reference else rank.built.fingerprint()


@dataclass(frozen=True, slots=True)
class SaveShards:
    """Write the state of this rank into a directory that all ranks share."""

    folder: Path

    def run(self, rank: Rank) -> None:
        checkpoint.save(rank.built, self.folder)


@dataclass(frozen=True, slots=True)
class LoadShards:
    """Resume from what any number of ranks has written."""

    folder: Path

    def run(self, rank: Rank) -> None:
        checkpoint.load(rank.built, self.folder)


@dataclass(frozen=True, slots=True)
class LoadComplete:
    """Resume from the state of a learner in one process, which all ranks get."""

    state: dict[str, Any]

    def run(self, rank: Rank) -> None:
        checkpoint.load_complete(rank.built, self.state)


@dataclass(frozen=True, slots=True)
class Finish:
    """End the loop of `follow`."""

    def run(self, rank: Rank) -> None:
        pass


def follow(ranks: Ranks) -> None:
    """Run rank 0's commands until it sends `Finish`: the main loop of all other ranks.

    Raises RuntimeError if the connection to rank 0 is lost, and what a command raises.
    """
    rank = Rank(ranks)
    while True:
        command: RankCommand = ranks.scatter(None)
        if isinstance(command, Finish):
            return
        command.run(rank)
