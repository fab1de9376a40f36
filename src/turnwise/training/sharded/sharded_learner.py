"""The learner on rank 0 of several ranks: it implements `Learner` by commands that all ranks run.

The training loop and the state of the run do not know that there are several ranks.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from turnwise.errors import RunError
from turnwise.models.lora import save_adapter
from turnwise.training.background import StopFlag
from turnwise.training.learner import BatchRequirements
from turnwise.training.loss import make_loss
from turnwise.training.packing import MicroBatch
from turnwise.training.policy_update import PassLearner
from turnwise.training.published_weights import published_weights
from turnwise.training.sharded.commands import (
    Accumulate,
    Build,
    ComputeTokenLogprobs,
    Fingerprint,
    Finish,
    GatherWeights,
    LoadComplete,
    LoadShards,
    MeasureLogprobs,
    MixReference,
    OptimizerStep,
    Rank,
    RankCommand,
    SaveShards,
)
from turnwise.training.sharded.liveness import LostRank
from turnwise.training.sharded.model_shard import ShardReport
from turnwise.training.sharded.options import ShardOptions
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.rounds import share_out
from turnwise.training.targets import Targets
from turnwise.training.update_sums import UpdateSums

__all__ = ["ShardedLearner"]

_ABORT = 15.0
"""Seconds until an operation must have ended that was aborted."""


class ShardedLearner(PassLearner):
    """A `Learner` on all `ranks`. Raises ConfigError if the model cannot be loaded, or cannot be trained by several ranks.

    If a rank is lost, the running method raises RunError, and so do all later calls.
    """

    def __init__(self, ranks: Ranks, options: ShardOptions) -> None:
        self._rank = Rank(ranks)
        self._turn = threading.Lock()
        """A cancelled update still runs in its thread until its micro-batch ends; other commands wait for it."""
        self._lost: RunError | None = None
        self.loss = make_loss(options.loss)
        ranks.liveness.on_lost = self._notice
        self._report: ShardReport = self._run(Build(options))

    def _notice(self, rank: LostRank) -> None:
        """A rank gives no sign of life: end the operation that waits for it. Called in a thread of its own."""
        self._lost = self._lost or _error(rank)
        self._rank.ranks.abort()
        if self._turn.acquire(timeout=_ABORT):
            self._turn.release()  # the next command raises the error
            return
        print(f"turnwise: {self._lost}", file=sys.stderr, flush=True)
        os._exit(1)  # the operation cannot be ended; nothing else may run with half of it done

    def _run(self, command: RankCommand) -> Any:
        """Run a command on all ranks. Returns rank 0's result."""
        return self._run_each([command] * self._rank.ranks.size)

    def _run_each(self, commands: Sequence[RankCommand]) -> Any:
        """Run a command on each rank: the same operation, on the data of the rank."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            try:
                return self._rank.ranks.scatter(commands).run(self._rank)
            except RuntimeError as error:  # torch's error for a lost connection and for a time limit
                if self._lost is not None:
                    raise self._lost from error
                lost = self._rank.ranks.liveness.lost()
                self._lost = _error(lost) if lost is not None else RunError(_unknown(error))
                raise self._lost from error

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
        shares, rounds = self._share_out(micro_batches)
        self._rank.stop = stop
        of_ranks = self._run_each(
            [MeasureLogprobs([micro_batches[index] for index in share], rounds, reference) for share in shares]
        )
        found = {
            index: logprob_N
            for share, of_rank in zip(shares, of_ranks, strict=True)
            for index, logprob_N in zip(share, of_rank, strict=False)
        }
        return [found[index] for index in range(len(micro_batches))] if len(found) == len(micro_batches) else []

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[Targets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> UpdateSums:
        """See `PassLearner.accumulate`."""
        shares, rounds = self._share_out(micro_batches)
        self._rank.stop, self._rank.on_micro_batch = stop, on_micro_batch
        return self._run_each(
            [Accumulate([micro_batches[index] for index in share], rounds, len(micro_batches)) for share in shares]
        )

    def _share_out(self, micro_batches: Sequence[MicroBatch[Any]]) -> tuple[list[list[int]], int]:
        """The indexes of the micro-batches of each rank, and the number of rounds."""
        shares = share_out([micro.token_ids_BL.numel() for micro in micro_batches], self._rank.ranks.size)
        return shares, max(len(share) for share in shares)

    def step(self, lr: float) -> float:
        """See `PassLearner.step`."""
        return self._run(OptimizerStep(lr))

    def weights(self) -> Mapping[str, torch.Tensor]:
        """See `Learner.weights`; in the CPU's memory of rank 0. The next update does not change the tensors."""
        gathered = self._run(GatherWeights())
        return gathered if self.trains_adapter else published_weights(self._rank.built.model, gathered)

    @torch.no_grad()
    def copy_weights(self, model: Any) -> None:
        """Give a complete model in this process, such as that of the embedded engine, the present weights."""
        gathered = self._run(GatherWeights(internal=True))
        for name, tensor in model.state_dict().items():
            tensor.copy_(gathered[name])

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self._run(ComputeTokenLogprobs(list(token_ids)))

    def mix_reference(self, share: float) -> None:
        self._run(MixReference(share))

    def save(self, folder: Path) -> None:
        model, gathered = self._rank.built.model, self._run(GatherWeights())
        if self.trains_adapter:
            save_adapter(model, folder, gathered)
        else:
            model.save_pretrained(folder, state_dict=gathered)

    def state(self) -> dict[str, Any]:
        """Nothing: `save_shards` writes it."""
        return {}

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        if shards is not None:
            self._run(LoadShards(shards.absolute()))
        else:
            self._run(LoadComplete(dict(state)))

    def save_shards(self, folder: Path) -> None:
        self._run(SaveShards(folder.absolute()))

    def fingerprint(self) -> str:
        return self._run(Fingerprint())

    def base_fingerprint(self) -> str | None:
        return self._rank.built.base_fingerprint

    def reference_fingerprint(self) -> str | None:
        return self._run(Fingerprint(reference=True))

    def close(self) -> None:
        """End the other ranks. Nothing is done if a rank was lost."""
        if self._lost is None:
            self._run(Finish())
            self._rank.ranks.close()


def _error(lost: LostRank) -> RunError:
    return RunError(
        f"{lost}. The other ranks cannot go on without it: start the same command again with resume=auto, which continues after "
        f"the newest checkpoint"
    )


def _unknown(error: RuntimeError) -> str:
    return (
        f"the ranks could not compute together: {error}. If a rank needed longer than cluster.timeout, raise it; start the same "
        f"command again with resume=auto"
    )
