"""Finds shared prefixes: which cached sequence shares the longest prefix with a prompt, by hashes of blocks of tokens, and
which prefix the requests of a decode step share.

Knows tokens and hashes only. A hash covers all tokens up to the end of its block, so equal hashes mean (up to collisions,
which `PrefixCache` rules out by comparing tokens) equal prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["BLOCK", "NOTHING_SHARED", "PrefixIndex", "SharedPrefix", "shared_prefix"]

BLOCK = 16
"""Tokens in a block."""
SHARED_READS = 2500
"""Tokens of the rows that need not be read from which on reading a prefix once pays for the copies that it needs (measured)."""
GROUP_READS = 1200
"""Reads that must be saved for each group, if there are several: each needs matrix products of its own (measured)."""
_PRIME = np.uint64(0x9E3779B97F4A7C55)


class PrefixIndex:
    """The block hashes of each slot: a table [slots, blocks], where 0 means that the block is empty."""

    def __init__(self, num_slots: int) -> None:
        self._hashes_SK = np.zeros((num_slots, 0), dtype=np.uint64)
        self._powers_C = np.zeros(0, dtype=np.uint64)

    def set(self, slot: int, tokens_N: np.ndarray) -> None:
        """The slot holds these tokens from now on."""
        hashes_K = self._hash_blocks(tokens_N)
        self._hashes_SK[slot, : len(hashes_K)] = hashes_K
        self._hashes_SK[slot, len(hashes_K) :] = 0

    def clear(self, slot: int) -> None:
        """The slot is empty from now on."""
        self._hashes_SK[slot] = 0

    def grow(self, capacity: int) -> None:
        """Make room for sequences of `capacity` tokens."""
        hashes_SK = np.zeros((len(self._hashes_SK), capacity // BLOCK), dtype=np.uint64)
        hashes_SK[:, : self._hashes_SK.shape[1]] = self._hashes_SK
        self._hashes_SK = hashes_SK

    def shared_tokens(self, tokens_N: np.ndarray) -> np.ndarray:
        """The number of leading tokens [S] that each slot shares with `tokens_N`, in complete blocks."""
        hashes_K = self._hash_blocks(tokens_N)[: self._hashes_SK.shape[1]]
        # a prefix ends at the first block that differs, and no later hash is equal then: counting is enough
        return (self._hashes_SK[:, : len(hashes_K)] == hashes_K).sum(axis=1) * BLOCK

    def _hash_blocks(self, tokens_N: np.ndarray) -> np.ndarray:
        """One hash [K] for each complete block: a polynomial in _PRIME over all tokens up to the end of the block."""
        if len(tokens_N) > len(self._powers_C):
            self._powers_C = np.full(2 * len(tokens_N), _PRIME, dtype=np.uint64).cumprod()
        terms_N = (tokens_N.astype(np.uint64) + np.uint64(1)) * self._powers_C[: len(tokens_N)]
        return terms_N.cumsum()[BLOCK - 1 :: BLOCK]


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """The first `tokens` tokens are the same in all requests of a group. Each request of the step is in one group."""

    tokens: int
    groups: Sequence[np.ndarray]
    """Indices into the batch, in ascending order."""


NOTHING_SHARED = SharedPrefix(0, ())


def shared_prefix(tokens_BL: np.ndarray) -> SharedPrefix:
    """The prefix of the requests' tokens with which attention reads the fewest tokens; `NOTHING_SHARED` if no prefix pays."""
    common, num_requests = _equal_tokens(tokens_BL), len(tokens_BL)
    best = SharedPrefix(common, [np.arange(num_requests)])
    if (tokens_BL.shape[1] - common) * num_requests > SHARED_READS:
        best = _of_groups(tokens_BL)
    return best if (num_requests - len(best.groups) + 1) * best.tokens >= SHARED_READS else NOTHING_SHARED


def _of_groups(tokens_BL: np.ndarray) -> SharedPrefix:
    """The prefix of all requests, or a longer one of groups of them, with which the fewest tokens are read."""
    num_requests = len(tokens_BL)
    order = np.array(sorted(range(num_requests), key=lambda index: tokens_BL[index].tobytes()))
    sorted_BL = tokens_BL[order]
    # in this order, requests are neighbours of those with which they share most
    differs_NL = sorted_BL[1:] != sorted_BL[:-1]
    shared_N = np.where(differs_NL.any(axis=1), differs_NL.argmax(axis=1), sorted_BL.shape[1])
    candidates_X = np.unique(shared_N)
    breaks_X = (shared_N < candidates_X[:, None]).sum(axis=1)
    saved_X = (num_requests - 1 - breaks_X) * candidates_X - np.where(breaks_X, (breaks_X + 1) * GROUP_READS, 0)
    tokens = int(candidates_X[saved_X.argmax()])
    groups = np.split(order, np.flatnonzero(shared_N < tokens) + 1)
    return SharedPrefix(tokens, [np.sort(group) for group in groups])


def _equal_tokens(tokens_BL: np.ndarray) -> int:
    """The number of leading tokens that are equal in all rows."""
    equal_L = (tokens_BL == tokens_BL[:1]).all(axis=0)
    return len(equal_L) if equal_L.all() else int(equal_L.argmin())
