"""Rank 0 among the ranks: it sends commands to all ranks, and finds out that a rank was lost. Knows nothing of models."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import RunError
from turnwise.training.background import StopFlag
from turnwise.training.packing import MicroBatch
from turnwise.training.sharded.commands import Finish, LoadComplete, LoadShards, Part, Rank, RankCommand
from turnwise.training.sharded.liveness import LostRank
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.rounds import share_out

__all__ = ["Leader"]

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
        os._exit(1)  # the operation cannot be ended; nothing else may run with half of it done

    def run(self, command: RankCommand) -> Any:
        """Run a command on all ranks. Returns rank 0's result."""
        return self.run_each([command] * self.rank.ranks.size)

    def run_each(self, commands: Sequence[RankCommand]) -> Any:
        """Run a command on each rank: the same operation, on the data of the rank."""
        with self._turn:
            if self._lost is not None:
                raise self._lost
            try:
                return self.rank.ranks.scatter(commands).run(self.rank)
            except RuntimeError as error:  # torch's error for a lost connection and for a time limit
                if self._lost is not None:
                    raise self._lost from error
                lost = self.rank.ranks.liveness.lost()
                self._lost = _error(lost) if lost is not None else RunError(_unknown(error))
                raise self._lost from error

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
        return self.run_each([command([micro_batches[index] for index in share], rounds) for share in shares])

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
        """The indexes of the micro-batches of each rank."""
        return share_out([micro.token_ids_BL.numel() for micro in micro_batches], self.rank.ranks.size)

    def load_state(self, state: Mapping[str, Any], shards: Path | None, part: Part) -> None:
        """Resume from the directory that any number of ranks has written, or without one from the state of one process."""
        self.run(LoadComplete(dict(state), part) if shards is None else LoadShards(shards.absolute(), part))

    def close(self) -> None:
        """End the other ranks. Nothing is done if a rank was lost."""
        if self._lost is None:
            self.run(Finish())
            self.rank.ranks.close()


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
