"""Shares the micro-batches of a batch out among ranks.

All ranks compute the same number of passes, because each pass is a collective operation: a *round* is one pass on each rank. A
rank without a micro-batch in a round computes a pass of weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from turnwise.training.background import StopFlag
from turnwise.training.packing import MicroBatch
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.sharded_model import ShardedModel
from turnwise.training.targets import Targets

__all__ = ["accumulate_rounds", "measure_rounds", "rounds_of", "share_out"]

S = TypeVar("S")


def share_out(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The indexes of the micro-batches of each rank. `sizes` are their tokens.

    The number of rounds is the smallest possible. The micro-batches of a round have similar sizes, because all ranks wait for
    the largest; over all rounds, each rank has about the same number of tokens.

    Example: sizes `8 3 7 2 1` on 2 ranks give the rounds `8 7`, `3 2`, `1`: `[0, 3, 4]` and `[2, 1]`.
    """
    ordered = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0] * ranks
    for start in range(0, len(ordered), ranks):
        # the largest of the round goes to the rank with the fewest tokens so far
        free = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, index in zip(free, ordered[start : start + ranks], strict=False):
            shares[rank].append(index)
            totals[rank] += sizes[index]
    return shares


def rounds_of(
    ranks: Ranks, mine: Sequence[MicroBatch[Any]], rounds: int, stop: StopFlag
) -> Iterator[MicroBatch[Any] | None]:
    """A micro-batch of this rank for each round, or None if it has no more. All ranks end together if rank 0 stops."""
    for number in range(rounds):
        if ranks.agree(stop.is_set()):
            return
        yield mine[number] if number < len(mine) else None


def measure_rounds(
    ranks: Ranks,
    mine: Sequence[MicroBatch[Any]],
    rounds: int,
    stop: StopFlag,
    compute: Callable[[MicroBatch[Any]], torch.Tensor],
    on_round: Callable[[], None] = lambda: None,
) -> list[torch.Tensor]:
    """The results [N] of `compute` for this rank's micro-batches, without gradients, on the CPU; fewer if rank 0 stops."""
    results: list[torch.Tensor] = []
    with torch.no_grad():
        for micro in rounds_of(ranks, mine, rounds, stop):
            result_N = compute((micro or _dummy_micro_batch()).to(ranks.device))
            if micro is not None:
                results.append(result_N.cpu())
            on_round()
    return results


def accumulate_rounds(
    ranks: Ranks,
    mine: Sequence[MicroBatch[Any]],
    rounds: int,
    stop: StopFlag,
    *,
    sharded: ShardedModel,
    compute: Callable[[MicroBatch[Any]], torch.Tensor],
    loss_of: Callable[[int, MicroBatch[Any]], tuple[torch.Tensor, Callable[[], S]]],
    on_round: Callable[[], None],
) -> list[S]:
    """Add the gradients of a batch up, of which this rank computes `mine`. Returns the metrics of each of them.

    `loss_of` gives the loss of a micro-batch, and a function that computes its metrics; its first argument is the index in
    `mine`. `compute` gives the outputs of the model for a round in which the rank has no micro-batch.
    """
    sums: list[S] = []
    for number, micro in enumerate(rounds_of(ranks, mine, rounds, stop)):
        sharded.sync_gradients(last=number == rounds - 1)
        if micro is None:
            (compute(_dummy_micro_batch().to(ranks.device)).sum() * 0.0).backward()
        else:
            loss, metrics = loss_of(number, micro.to(ranks.device))
            loss.backward()
            with torch.no_grad():
                sums.append(metrics())
        on_round()
    return sums


def _dummy_micro_batch() -> MicroBatch[Targets]:
    """A micro-batch with one target, for a rank without a micro-batch in a round. Its loss is not used."""
    zero_N = torch.zeros(1)
    index_N = torch.zeros(1, dtype=torch.int64)
    return MicroBatch(
        token_ids_BL=torch.zeros((1, 2), dtype=torch.int64),
        position_BL=torch.arange(2)[None],
        tree=None,
        row_U=index_N,
        column_U=index_N,
        token_U=index_N,
        prediction_N=index_N,
        targets=Targets(
            token_N=index_N,
            sequence_N=index_N,
            turn_N=index_N,
            version_N=index_N,
            behaviour_logprob_N=zero_N,
            known_N=torch.ones(1, dtype=torch.bool),
            advantage_N=zero_N,
            weight_N=zero_N,
        ),
    )
