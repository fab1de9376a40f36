"""Shares the micro-batches of a batch out among ranks.

All ranks compute the same number of passes, because each pass is a collective operation: a *round* is one pass on each rank. A
rank without a micro-batch in a round computes a pass of weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["share_out"]


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
