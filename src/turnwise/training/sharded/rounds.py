"""Shares the micro-batches of a batch out among ranks.

All ranks compute the same number of passes, because each pass is a collective operation: a *round* is one pass on each rank. A
rank without a micro-batch in a round computes a pass of weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from turnwise.training.background import StopFlag
from turnwise.training.packing import MicroBatch
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.targets import Targets

__all__ = ["dummy_micro_batch", "rounds_of", "share_out"]


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
        if ranks.agree(stop.is_set):
            return
        yield mine[number] if number < len(mine) else None


def dummy_micro_batch() -> MicroBatch[Targets]:
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
