"""The commands that rank 0 sends to all ranks, and the ranks that follow them.

Each rank runs the same command on its own part of the learner, because the passes are collective operations. A command is sent
with pickle, from one process of the training to the others. Knows the parts that a rank has (`shards.py`). Does not know
conversations or the loop over training steps, which only rank 0 runs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import operator
import posix
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch.distributed.tensor import DTensor

from turnwise.errors import NOT_AGAIN, ConfigError, RunError
from turnwise.models.allocator import free_device_blocks
from turnwise.options.engines import ClusterSection
from turnwise.training.batch import MicroBatch
from turnwise.training.learner import PackingRequirements
from turnwise.training.options import CriticOptions, ShardOptions
from turnwise.training.sharded import shards
from turnwise.training.sharded.ranks import LostRank, Ranks
from turnwise.training.sharded.remembered_bound import lasting
from turnwise.training.sharded.sharded_model import complete
from turnwise.training.sharded.shards import CriticShard, ModelShard, ShardReport
from turnwise.training.update import StopFlag, UpdateSums
from turnwise.training.value_batch import StatePlaces
from turnwise.training.value_model import CriticSums
from turnwise.version import source_version

Part = Literal["policy", "critic"]
"""The model that a command is for."""


class Rank:
    """A rank between two commands: its part of the learner, and of the critic if there is one, once they are built."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.shard: ModelShard | None = None
        self.critic_shard: CriticShard | None = None
        self.saving: dict[Part, shards.Saving] = {}
        """What is being written while other commands run."""
        # of rank 0 only
        self.stop = StopFlag()
        self.on_micro_batch: Callable[[], None] = lambda: None
        self.on_tensor: Callable[[str, torch.Tensor], object] = lambda name, tensor: None

    @property
    def built(self) -> ModelShard:
        """This rank's part of the learner."""
        assert self.shard is not None
        return self.shard

    @property
    def critic(self) -> CriticShard:
        """This rank's part of the critic."""
        assert self.critic_shard is not None
        return self.critic_shard

    def part(self, name: Part) -> ModelShard | CriticShard:
        """This rank's part of the learner or of the critic."""
        return self.built if name == "policy" else self.critic

    def on_round(self, total: int) -> Callable[[], None]:
        """A function that counts the micro-batches of a round, of `total` micro-batches of all ranks."""
        done = 0

        def count() -> None:
            nonlocal done
            # a round has a micro-batch for each set of ranks, the last one perhaps fewer: 5 on 2 sets are 2, 2 and 1
            of_round = min(self.ranks.sets, total - done)
            done += of_round
            for _ in range(of_round):
                self.on_micro_batch()

        return count


class RankCommand(Protocol):
    """Something that all ranks do together."""

    def run(self, rank: Rank) -> Any:
        """Do the part of a rank. The result of rank 0 is the result of the command."""
        ...


_PACKAGES = ("torch", "transformers", "peft", "safetensors")
"""Those of which all ranks need the same version, beside Python and the source of turnwise."""
_SIGHT = 10.0
"""Seconds until a file that was written on one machine is seen on all: shared file systems keep lists of files for a while."""


def installed() -> dict[str, str]:
    """The versions of this process."""
    found = {"python": ".".join(map(str, sys.version_info[:3])), "turnwise": source_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@dataclass(frozen=True, slots=True)
class CompareMachines:
    """Raises ConfigError on all ranks if one of them has other versions than rank 0, or does not see a file of it."""

    versions: Mapping[str, str]
    file: Path | None

    def run(self, rank: Rank) -> None:
        problems = [problem for problem in rank.ranks.share(self._problem(rank.ranks.rank)) if problem is not None]
        if problems:
            raise ConfigError(problems[0])

    def _problem(self, rank: int) -> str | None:
        own, place = installed(), f"trainer rank {rank} ({socket.gethostname()})"
        for name in sorted({*own, *self.versions}):
            versions = [of_rank.get(name, "none") for of_rank in (own, self.versions)]
            if versions[0] != versions[1]:
                return (
                    f"{place} has {name} {versions[0]}, and rank 0 has {versions[1]}: install the same on all machines"
                )
        deadline = time.monotonic() + _SIGHT
        while self.file is not None and not self.file.exists():
            if time.monotonic() > deadline:
                return (
                    f"{place} does not see what rank 0 writes into {self.file.parent}: output must be in a directory that all "
                    f"machines share, because each rank writes its part of a checkpoint"
                )
            time.sleep(_SIGHT / 50)
        return None


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
class MeasureEntropies:
    """Compute log-probabilities and entropies of this rank's micro-batches."""

    mine: Sequence[MicroBatch[Any]]
    rounds: int

    def run(self, rank: Rank) -> list[list[torch.Tensor]]:
        return rank.ranks.gather(rank.built.target_entropies(self.mine, self.rounds, rank.stop))


@dataclass(frozen=True, slots=True)
class MeasureScores:
    """Compute the scores of this rank's micro-batches by a teacher, or by the present weights."""

    mine: Sequence[MicroBatch[Any]]
    rounds: int
    teacher: str | None
    top_k: int

    def run(self, rank: Rank) -> list[list[torch.Tensor]]:
        scores = rank.built.target_scores(self.mine, self.rounds, rank.stop, teacher=self.teacher, top_k=self.top_k)
        return rank.ranks.gather(scores)


@dataclass(frozen=True, slots=True)
class BuildCritic:
    """Load the value model and divide it."""

    options: CriticOptions

    def run(self, rank: Rank) -> PackingRequirements:
        rank.critic_shard = CriticShard(self.options, rank.ranks)
        return rank.critic.requirements


@dataclass(frozen=True, slots=True)
class MeasureValues:
    """Compute the values of this rank's micro-batches."""

    mine: Sequence[MicroBatch[StatePlaces]]
    rounds: int
    total: int
    """The number of micro-batches of all ranks."""

    def run(self, rank: Rank) -> list[list[torch.Tensor]]:
        values = rank.critic.measure(self.mine, self.rounds, rank.stop, rank.on_round(self.total))
        return rank.ranks.gather(values)


@dataclass(frozen=True, slots=True)
class Accumulate:
    """Compute the gradients of a batch, of which this rank has some micro-batches."""

    mine: Sequence[MicroBatch[Any]]
    rounds: int
    total: int
    """The number of micro-batches of all ranks."""
    part: Part = "policy"

    def run(self, rank: Rank) -> UpdateSums | CriticSums:
        shard = rank.part(self.part)
        sums = shard.accumulate(self.mine, self.rounds, rank.stop, rank.on_round(self.total))
        gathered, paces = rank.ranks.gather(sums), rank.ranks.gather_each(shard.take_pace())
        total = functools.reduce(operator.add, gathered) if gathered else sums
        return replace(total, paces=tuple(paces)) if isinstance(total, UpdateSums) else total


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Take an optimizer step."""

    lr: float
    part: Part = "policy"

    def run(self, rank: Rank) -> float:
        return rank.part(self.part).optimizer.step(self.lr)


@dataclass(frozen=True, slots=True)
class GatherWeights:
    """Bring the complete weights into the CPU's memory of rank 0, by the names of the checkpoint, or of the adapter by peft's.

    On the devices, one tensor at a time is complete.
    """

    part: Part = "policy"
    names: Sequence[str] | None = None
    """Some of the weights; None: all."""

    def run(self, rank: Rank) -> dict[str, torch.Tensor]:
        tensors = rank.part(self.part).state_tensors()
        if self.names is not None:
            tensors = {name: tensors[name] for name in self.names}
        gathered: dict[str, torch.Tensor] = {}
        names: dict[tuple[int, torch.Size], str] = {}
        for name, tensor in tensors.items():
            full = complete(tensor)  # collective: all ranks call it for each tensor, and only rank 0 keeps the result
            if rank.ranks.leads:  # tied weights stay one tensor
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                first = names.setdefault((local.data_ptr(), tensor.shape), name)
                # a tensor that is not divided is the model's own, which changes while the copy is written
                gathered[name] = (
                    gathered[first] if first in gathered else full.to("cpu", copy=full.data_ptr() == local.data_ptr())
                )
        return gathered


@dataclass(frozen=True, slots=True)
class StreamWeights:
    """Call `Rank.on_tensor` of rank 0 with each complete parameter and buffer, by its name in the model. One tensor at a time is
    complete, on the device."""

    def run(self, rank: Rank) -> None:
        for name, tensor in rank.built.named_tensors().items():
            full = complete(tensor)  # collective, so all ranks call it for each tensor
            if rank.ranks.leads:
                rank.on_tensor(name, full)


@dataclass(frozen=True, slots=True)
class ComputeTokenLogprobs:
    """See `Learner.token_logprobs`."""

    token_ids: Sequence[int]

    def run(self, rank: Rank) -> list[float]:
        return rank.built.token_logprobs(self.token_ids)


@dataclass(frozen=True, slots=True)
class FindLargestLogit:
    """See `Learner.largest_logit`."""

    token_ids: Sequence[int]

    def run(self, rank: Rank) -> float:
        return rank.built.largest_logit(self.token_ids)


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """See `Learner.free_memory`; on the devices of all ranks."""

    part: Part = "policy"

    def run(self, rank: Rank) -> None:
        rank.part(self.part).optimizer.leave()
        free_device_blocks()


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
class TeacherFingerprints:
    """See `Learner.teacher_fingerprints`."""

    def run(self, rank: Rank) -> dict[str, str | None]:
        return rank.built.teacher_fingerprints()


@dataclass(frozen=True, slots=True)
class SaveShards:
    """Write the state of this rank into a directory that all ranks share. The result: the SHA-256 of each file, computed by the
    rank that wrote it. Raises OSError, on rank 0 only, if a rank could not write."""

    folder: Path
    part: Part = "policy"

    def run(self, rank: Rank) -> dict[str, str]:
        return shards.of_all(shards.save(rank.part(self.part), self.folder), rank.ranks)


@dataclass(frozen=True, slots=True)
class HoldShards:
    """Copy what `SaveShards` would write to the CPU's memory."""

    part: Part = "policy"

    def run(self, rank: Rank) -> None:
        rank.saving[self.part] = shards.Saving(rank.part(self.part))


@dataclass(frozen=True, slots=True)
class StartShards:
    """Begin to write the copies."""

    folder: Path
    part: Part = "policy"

    def run(self, rank: Rank) -> None:
        rank.saving[self.part].start(self.folder)


@dataclass(frozen=True, slots=True)
class FinishShards:
    """Wait until they are written. The result is that of `SaveShards`."""

    part: Part = "policy"

    def run(self, rank: Rank) -> dict[str, str]:
        return shards.of_all(rank.saving.pop(self.part).finish(), rank.ranks)


@dataclass(frozen=True, slots=True)
class LoadShards:
    """Resume from what any number of ranks has written."""

    folder: Path
    part: Part = "policy"

    def run(self, rank: Rank) -> None:
        shards.load(rank.part(self.part), self.folder)


@dataclass(frozen=True, slots=True)
class LoadComplete:
    """Resume from the state of a learner in one process, which all ranks get."""

    state: dict[str, Any]
    part: Part = "policy"

    def run(self, rank: Rank) -> None:
        shards.load_complete(rank.part(self.part), self.state)


@dataclass(frozen=True, slots=True)
class Finish:
    """End the loop of `follow`."""

    def run(self, rank: Rank) -> None:
        pass


# A rank that follows rank 0, from its start to its end


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


def follow_rank_0(options: ClusterSection, *, device: str) -> int:
    """Connect to rank 0 and run its commands until it ends the training. Returns the exit status."""
    ranks = Ranks(options, device=device)

    def lost(rank: LostRank) -> None:
        _say(f"rank {ranks.rank} ends: {rank}")
        # the main thread may wait in a collective operation. Not os._exit: a run replaces it for user code
        posix._exit(1)

    ranks.liveness.on_lost = lost
    try:
        follow(ranks)
    except (ConfigError, RunError):
        return 1  # rank 0 has the same error, and reports it
    except RuntimeError as error:
        reason = lasting(error)
        ranks.liveness.report(reason or f"{type(error).__name__}: {error}", again=reason is None)
        _say(f"rank {ranks.rank} ends: {reason or error}")
        return 1 if reason is None else NOT_AGAIN
    ranks.close()
    return 0


def _say(text: str) -> None:
    print(f"turnwise: {text}", file=sys.stderr, flush=True)
