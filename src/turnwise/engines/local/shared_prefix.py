"""Finds the prefix that the requests of a decode step share: all of them, or those of each group (the samples of a prompt).

Knows tokens only. The attention reads the keys and values of such a prefix once for each group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["NOTHING_SHARED", "SharedPrefix", "shared_prefix"]

SHARED_READS = 2500
"""Tokens of the rows that need not be read from which on reading a prefix once pays for the copies that it needs (measured)."""
GROUP_READS = 1000
"""Reads that must be saved for each group, if there are several: each needs matrix products of its own."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `tokens` tokens are the same in all requests of a group. Each request of the step is in one group."""

    tokens: int
    groups: Sequence[np.ndarray]
    """Indices into the batch, in ascending order."""


NOTHING_SHARED = SharedPrefix(0, ())


def shared_prefix(tokens_BL: np.ndarray) -> SharedPrefix:
    """The prefix of the requests' tokens with which attention reads the fewest tokens; `NOTHING_SHARED` if no prefix pays."""
    num_requests, length = tokens_BL.shape
    common = _equal_tokens(tokens_BL, tokens_BL[:1])
    best = SharedPrefix(common, [np.arange(num_requests)])
    # a longer prefix, of groups: sought only where it could save enough
    if (length - common) * num_requests > SHARED_READS:
        order = np.array(sorted(range(num_requests), key=lambda index: tokens_BL[index].tobytes()))
        sorted_BL = tokens_BL[order]
        # in this order, requests are neighbours of those with which they share most
        shared_N = np.array(
            [_equal_tokens(pair, pair[:1]) for pair in np.stack((sorted_BL[1:], sorted_BL[:-1]), axis=1)]
        )
        candidates_X = np.unique(shared_N)
        breaks_X = (shared_N < candidates_X[:, None]).sum(axis=1)
        saved_X = (num_requests - 1 - breaks_X) * candidates_X - np.where(breaks_X, (breaks_X + 1) * GROUP_READS, 0)
        tokens = int(candidates_X[saved_X.argmax()])
        groups = np.split(order, np.flatnonzero(shared_N < tokens) + 1)
        best = SharedPrefix(tokens, [np.sort(group) for group in groups])
    return best if (num_requests - len(best.groups) + 1) * best.tokens >= SHARED_READS else NOTHING_SHARED


def _equal_tokens(tokens_BL: np.ndarray, other_1L: np.ndarray) -> int:
    """The number of leading tokens that are equal in all rows."""
    equal_L = (tokens_BL == other_1L).all(axis=0)
    return len(equal_L) if equal_L.all() else int(equal_L.argmin())
