"""Rank 0 of several ranks: a learner and a critic whose methods are commands that all ranks run.

The training loop and the state of the run do not know that there are several ranks: they see `Learner` and `Critic`. `Leader`
sends the commands, and finds out that a rank was lost. Knows commands. Does not know parameters or passes, which are in the
parts of the ranks (`shards.py`).
"""

from __future__ import annotations

import functools
import logging
import os
import posix
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnwise.errors import ConfigError, RunError, StartAgain
from turnwise.models.device import GpuMemory
from turnwise.models.loading import file_weights, save_model
from turnwise.models.streamed import StreamedWeights
from turnwise.training.batch import MicroBatch
from turnwise.training.checkpoint import CRITIC, SHARDS
from turnwise.training.learner import BatchRequirements, PackingRequirements, Writers
from turnwise.training.losses import Targets, make_loss
from turnwise.training.options import CriticOptions, ShardOptions
from turnwise.training.sharded.commands import (
    Accumulate,
    Build,
    BuildCritic,
    CompareMachines,
    ComputeTokenLogprobs,
    FindLargestLogit,
    Fingerprint,
    Finish,
    FinishShards,
    FreeMemory,
    GatherWeights,
    HoldShards,
    LoadComplete,
    LoadShards,
    MeasureEntropies,
    MeasureLogprobs,
    MeasureScores,
    MeasureValues,
    MixReference,
    OptimizerStep,
    Part,
    Rank,
    RankCommand,
    SaveShards,
    StartShards,
    StreamWeights,
    TeacherFingerprints,
    installed,
)
from turnwise.training.sharded.consolidation import of_layers, save_without_weights
from turnwise.training.sharded.ranks import LostRank, Ranks
from turnwise.training.sharded.remembered_bound import FILE, MicroBatchTooLarge, lasting
from turnwise.training.sharded.shards import HEAD_PREFIX, Shard, ShardReport, share_out
from turnwise.training.update import LearnerBase, StopFlag, UpdateSums
from turnwise.training.value_batch import StatePlaces, ValueTargets
from turnwise.training.value_model import CriticBase, CriticSums, save_critic

_log = logging.getLogger(__name__)

# Leader: sends commands to all ranks

_ABORT = 15.0
"""Seconds until an operation must have ended that was aborted."""


class Leader:
    """Runs commands on all `ranks`, one at a time.

    If a rank is lost, the running command raises RunError, and so do all later commands.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.rank = Rank(ranks)
        self._turn = threading.Lock()
        """A cancelled update still runs in its thread until its micro-batch ends; other commands wait for it."""
        self._lost: RunError | None = None
        ranks.liveness.on_lost = self._notice

    def _notice(self, rank: LostRank) -> None:
        """A rank gives no sign of life: end the operation that waits for it. Called in a thread of its own."""
        self._lost = self._lost or _error(rank)
        self.rank.ranks.abort()
        if self._turn.acquire(timeout=_ABORT):
            self._turn.release()  # the next command raises the error
            return
        print(f"turnwise: {self._lost}", file=sys.stderr, flush=True)
        posix._exit(self._lost.exit_status)  # the operation cannot be ended; nothing else may run with half of it done

    def run(self, command: RankCommand) -> Any:
        """Run a command on all ranks. Returns rank 0's result."""
        return self.run_each([command] * self.rank.ranks.size)

    def run_each(self, commands: Sequence[RankCommand]) -> Any:
        """Run a command on each rank: the same operation, on the data of the rank."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            try:
                result = self.rank.ranks.scatter(commands).run(self.rank)
                if isinstance(commands[0], Finish):  # before a thread that still reads weights has its turn
                    self._lost = RunError("the ranks have ended")
                return result
            except RunError as error:  # all ranks have it, and the others end
                self._lost = error
                raise
            except RuntimeError as error:  # torch's error for a lost connection and for a time limit
                if self._lost is None:
                    self._lost = self._reason(error)
                raise self._lost from error

    def _reason(self, error: RuntimeError) -> RunError:
        """Why a command has ended with an error of torch."""
        if (reason := lasting(error)) is not None:
            return RunError(f"trainer rank 0 has ended: {reason}. {_THEN_GO_ON}")
        if isinstance(error, MicroBatchTooLarge):
            return StartAgain(f"{error}\n{_GO_ON}")
        if (lost := self.rank.ranks.liveness.lost()) is not None:
            return _error(lost)
        return StartAgain(
            f"the ranks could not compute together: {error}. If a rank needed longer than cluster.timeout, raise it. {_GO_ON}"
        )

    def run_shared(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        command: Callable[[Sequence[MicroBatch[Any]], int], RankCommand],
        stop: StopFlag,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> Any:
        """Share micro-batches out, and run a command on each rank. `command` receives the micro-batches of the rank, and the
        number of rounds."""
        shares = self.shares(micro_batches)
        rounds = max(len(share) for share in shares)
        self.rank.stop, self.rank.on_micro_batch = stop, on_micro_batch
        sent = [_sent(micro) for micro in micro_batches]
        together = self.rank.ranks.mesh.set_size
        commands = [command([sent[index] for index in share], rounds) for share in shares]
        return self.run_each([one for one in commands for _ in range(together)])

    def measure(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        command: Callable[[Sequence[MicroBatch[Any]], int], RankCommand],
        stop: StopFlag,
        on_micro_batch: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """As `run_shared`, with a command that returns a result for each micro-batch of each rank: the results in the order of
        the micro-batches; an empty list if `stop` was set."""
        of_ranks = self.run_shared(micro_batches, command, stop, on_micro_batch)
        results = {
            index: result
            for share, of_rank in zip(self.shares(micro_batches), of_ranks, strict=True)
            for index, result in zip(share, of_rank, strict=False)
        }
        return [results[index] for index in range(len(micro_batches))] if len(results) == len(micro_batches) else []

    def shares(self, micro_batches: Sequence[MicroBatch[Any]]) -> list[list[int]]:
        """The indexes of the micro-batches of each set of ranks."""
        return share_out([micro.token_ids_BL.numel() for micro in micro_batches], self.rank.ranks.sets)

    def load_state(self, state: Mapping[str, Any], shards: Path | None, part: Part) -> None:
        """Resume from the directory that any number of ranks has written, or without one from the state of one process."""
        self.run(LoadComplete(dict(state), part) if shards is None else LoadShards(shards.absolute(), part))

    def save_shards(self, folder: Path, part: Part) -> Mapping[str, str]:
        """Write the parts of all ranks."""
        return self.run(SaveShards(folder.absolute(), part))

    def save_held(self, folder: Path, part: Part) -> Mapping[str, str]:
        """Write the copies that `HoldShards` has made, beside other commands: only start and end of the writing are commands."""
        self.run(StartShards(folder.absolute(), part))
        self.rank.saving[part].join()  # ends on all ranks at about the same time
        return self.run(FinishShards(part))

    def close(self) -> None:
        """End the other ranks. Nothing is done if a rank was lost."""
        if self._lost is None:
            self.run(Finish())
            self.rank.ranks.close()


def _sent(micro: MicroBatch[Any]) -> MicroBatch[Any]:
    """What a rank needs of a micro-batch: not the sequences, but their number, by which it says whether it can be divided."""
    numbers: Any = dict.fromkeys(micro.sequences)
    return replace(micro.to(torch.device("cpu")), sequences=numbers)


_GO_ON = (
    "Start the same command again with resume=auto, which continues after the newest checkpoint; cluster.restarts does that by "
    "itself"
)

_THEN_GO_ON = "Then start the command again with resume=auto, which continues after the newest checkpoint"


def _error(lost: LostRank) -> RunError:
    if lost.again:
        return StartAgain(f"{lost}. The other ranks cannot go on without it. {_GO_ON}")
    return RunError(f"{lost}. {_THEN_GO_ON}")


# Learner and critic


class ShardedLearner(LearnerBase):
    """A `Learner` on all `ranks`. Raises ConfigError if the model cannot be loaded, or cannot be trained by several ranks.

    If a rank is lost, the running method raises RunError, and so do all later calls.
    """

    def __init__(self, ranks: Ranks, options: ShardOptions) -> None:
        self.leader = Leader(ranks)
        """Runs commands on all ranks; a critic on the same ranks uses it, too."""
        self.loss = make_loss(options.loss, options.correction, options.teacher)
        self._compare_machines(options.folder)
        self._report: ShardReport = self.leader.run(Build(options))
        if (bound := self._report.requirements.most_tokens) is not None:
            _log.warning(
                "at most %d tokens in each micro-batch, because the memory of a rank ran out in an earlier start of this run "
                "(remembered in %s). The result is the same",
                bound,
                FILE,
            )

    def _compare_machines(self, folder: Path | None) -> None:
        """Raise ConfigError if a rank has other versions, or does not share the directory."""
        if folder is None:
            self.leader.run(CompareMachines(installed(), None))
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(prefix=".seen-by-all-ranks-", dir=folder)
        except OSError as error:
            raise ConfigError(f"output: the directory {folder} cannot be written: {error}") from error
        os.close(descriptor)
        try:
            self.leader.run(CompareMachines(installed(), Path(name)))
        finally:
            os.unlink(name)

    @property
    def requirements(self) -> BatchRequirements:
        return self._report.requirements

    @property
    def gpus(self) -> Sequence[GpuMemory]:
        """The memory of the ranks' GPUs before the model was loaded; empty if they compute on CPUs."""
        return self._report.gpus

    @property
    def context_length(self) -> int | None:
        return self._report.context_length

    @property
    def trains_adapter(self) -> bool:
        return self._report.trains_adapter

    def target_logprobs(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, reference: bool = False
    ) -> list[torch.Tensor]:
        """See `LearnerBase.target_logprobs`."""
        return self.leader.measure(micro_batches, lambda mine, rounds: MeasureLogprobs(mine, rounds, reference), stop)

    def target_entropies(self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag) -> list[torch.Tensor]:
        """See `LearnerBase.target_entropies`."""
        return self.leader.measure(micro_batches, MeasureEntropies, stop)

    def target_scores(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, teacher: str | None, top_k: int
    ) -> list[torch.Tensor]:
        """See `LearnerBase.target_scores`."""
        return self.leader.measure(
            micro_batches, lambda mine, rounds: MeasureScores(mine, rounds, teacher, top_k), stop
        )

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[Targets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> UpdateSums:
        """See `LearnerBase.accumulate`."""
        return self.leader.run_shared(
            micro_batches, lambda mine, rounds: Accumulate(mine, rounds, len(micro_batches)), stop, on_micro_batch
        )

    def step(self, lr: float) -> float:
        """See `LearnerBase.step`."""
        return self.leader.run(OptimizerStep(lr))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Learner.weights`; in the CPU's memory of rank 0. Without an adapter, a layer is there while it is read."""
        if self.trains_adapter:
            return self.leader.run(GatherWeights())
        model, tensors = self.leader.rank.built.model, self.leader.rank.built.distinct_tensors()
        layers = of_layers(tensors)
        empty = [
            {name: torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device="meta") for name in names}
            for names in layers
        ]
        return StreamedWeights(
            [file_weights(model, layer) for layer in empty],
            lambda number: file_weights(model, self.leader.run(GatherWeights(names=layers[number]))),
        )

    def trains(self, model: Any) -> bool:
        return False  # its parts are divided among the ranks

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
        self._writer()(folder)

    def hold(self) -> Writers:
        save = self._writer()
        self.leader.run(HoldShards())
        return Writers(save, functools.partial(self.leader.save_held, part="policy"))

    def _writer(self) -> Callable[[Path], None]:
        """A function that writes the adapter, as it is now, or of a model without an adapter all but the weights."""
        adapter = self.leader.run(GatherWeights()) if self.trains_adapter else {}
        return _writer_of(self.leader.rank.built, adapter, SHARDS)

    def free_memory(self) -> None:
        self.leader.run(FreeMemory())

    def state(self) -> dict[str, Any]:
        """Nothing: `save_shards` writes it."""
        return {}

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        self.leader.load_state(state, shards, "policy")

    def save_shards(self, folder: Path) -> Mapping[str, str]:
        return self.leader.save_shards(folder, "policy")

    def fingerprint(self) -> str:
        return self.leader.run(Fingerprint())

    def base_fingerprint(self) -> str | None:
        return self.leader.rank.built.base_fingerprint

    def reference_fingerprint(self) -> str | None:
        return self.leader.run(Fingerprint(reference=True))

    def teacher_fingerprints(self) -> Mapping[str, str]:
        return self.leader.run(TeacherFingerprints())

    def close(self) -> None:
        self.leader.close()


def _writer_of(shard: Shard, adapter: Mapping[str, torch.Tensor], parts: str) -> Callable[[Path], None]:
    """A function that writes a shard's adapter, or of a model without one all but the weights, which are in the directory `parts`
    of the checkpoint."""
    if shard.trains_adapter:
        return functools.partial(save_model, shard.model, weights=adapter)
    return functools.partial(save_without_weights, shard, parts=f"../{parts}")


class ShardedCritic(CriticBase):
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
        """See `CriticBase.measure`."""
        return self._leader.measure(
            micro_batches, lambda mine, rounds: MeasureValues(mine, rounds, len(micro_batches)), stop, on_micro_batch
        )

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[ValueTargets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> CriticSums:
        """See `CriticBase.accumulate`."""
        return self._leader.run_shared(
            micro_batches,
            lambda mine, rounds: Accumulate(mine, rounds, len(micro_batches), "critic"),
            stop,
            on_micro_batch,
        )

    def step(self, lr: float) -> float:
        """See `CriticBase.step`."""
        return self._leader.run(OptimizerStep(lr, "critic"))

    def free_memory(self) -> None:
        self._leader.run(FreeMemory("critic"))

    def save(self, folder: Path) -> None:
        self._writer()(folder)

    def hold(self) -> Writers:
        save = self._writer()
        self._leader.run(HoldShards("critic"))
        return Writers(save, functools.partial(self._leader.save_held, part="critic"))

    def _writer(self) -> Callable[[Path], None]:
        """As that of the learner, with the value head."""
        shard = self._leader.rank.critic
        head_only = [name for name in shard.state_tensors() if name.startswith(HEAD_PREFIX)]
        gathered = self._leader.run(GatherWeights("critic", None if shard.trains_adapter else head_only))
        weights = {name: tensor for name, tensor in gathered.items() if not name.startswith(HEAD_PREFIX)}
        head = {name.removeprefix(HEAD_PREFIX): gathered[name] for name in gathered.keys() - weights.keys()}
        save_body = _writer_of(shard, weights, f"{SHARDS}/{CRITIC}")
        return functools.partial(save_critic, save_body=save_body, head=head)

    def state(self) -> dict[str, Any]:
        """Nothing: `save_shards` writes it."""
        return {}

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        self._leader.load_state(state, shards, "critic")

    def save_shards(self, folder: Path) -> Mapping[str, str]:
        return self._leader.save_shards(folder, "critic")

    def base_fingerprint(self) -> str | None:
        return self._leader.rank.critic.base_fingerprint
