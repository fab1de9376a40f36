"""Finds which cached sequence shares the longest prefix with a prompt, by hashes of blocks of tokens.

Knows tokens and hashes only. A hash covers all tokens up to the end of its block, so equal hashes mean (up to collisions,
which `PrefixCache` rules out by comparing tokens) equal prefixes.
"""

from __future__ import annotations

import numpy as np

__all__ = ["BLOCK", "PrefixIndex"]

BLOCK = 16
"""Tokens in a block."""
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
