"""The memory of the KV cache: one row of fixed capacity for each resident sequence, in tensors that grow within a byte budget.

Knows shapes and bytes. Does not know which conversation or which tokens a row holds, or how the model attends to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.models.allocator import long_lived, trim

__all__ = ["KVCache", "KVShape"]

INITIAL_ROWS, INITIAL_CAPACITY = 8, 256


@dataclass(frozen=True, slots=True)
class KVShape:
    """The numbers that one cache tensor holds for one token."""

    parts: int
    """2: keys and values are in one tensor. 1: the tensor holds only the keys or only the values of a layer."""
    heads: int
    """Key-value heads."""
    head_dim: int

    @property
    def numbers_per_token(self) -> int:
        """Numbers that one token takes."""
        return self.parts * self.heads * self.head_dim


class KVCache:
    """Tensors [parts, rows, heads, capacity, head_dim]; all have the same rows and the same capacity (tokens per row)."""

    def __init__(
        self, shapes: Sequence[KVShape], *, dtype: torch.dtype, device: torch.device, budget_bytes: int
    ) -> None:
        self._shapes, self._dtype, self._device = tuple(shapes), dtype, device
        self.budget_bytes = budget_bytes
        self.token_bytes = sum(shape.numbers_per_token for shape in shapes) * dtype.itemsize
        """Bytes that one token takes in all tensors together."""
        self.num_rows = 0
        self.capacity = 0
        self.tensors = [self._zeros(shape, 0, 0) for shape in shapes]

    @property
    def bytes(self) -> int:
        """Bytes that the tensors take now."""
        return self.num_rows * self.capacity * self.token_bytes

    def max_rows(self, capacity: int) -> int:
        """The number of rows of `capacity` tokens that fit into the budget."""
        return self.budget_bytes // (capacity * self.token_bytes)

    def max_capacity(self) -> int:
        """The capacity of a single row that uses the entire budget."""
        return self.budget_bytes // self.token_bytes

    def resize(self, num_rows: int, capacity: int) -> None:
        """Reallocate to `num_rows` rows of `capacity` tokens. Contents outside the new bounds are lost.

        Tensors are replaced one at a time, so at most one of them exists twice at any moment.
        """
        kept_rows, kept_tokens = min(num_rows, self.num_rows), min(capacity, self.capacity)
        for index, shape in enumerate(self._shapes):
            tensor = self._zeros(shape, num_rows, capacity)
            if kept_rows and kept_tokens:
                tensor[:, :kept_rows, :, :kept_tokens] = self.tensors[index][:, :kept_rows, :, :kept_tokens]
            self.tensors[index] = tensor
        self.num_rows, self.capacity = num_rows, capacity
        trim()  # the old tensors would divide the memory that is kept

    def copy_rows(self, sources_N: Sequence[int], targets_N: Sequence[int], stop: int, *, start: int = 0) -> None:
        """Copy the tokens from `start` to `stop` of each source row over those of its target row, all at the same time."""
        if set(sources_N).isdisjoint(targets_N):
            # slice by slice: an index would first copy all sources to new memory, which takes four times as long
            runs = _runs(sources_N, targets_N)
            for tensor in self.tensors:
                tokens = tensor[:, :, :, start:stop]
                for source, first, end in runs:
                    tokens[:, first:end] = tokens[:, source : source + 1]
            return
        sources, targets = self._index(sources_N), self._index(targets_N)
        for tensor in self.tensors:
            # not index_select: from a tensor that is sliced at `stop`, it would copy the entire tensor first
            tensor[:, targets, :, start:stop] = tensor[:, sources, :, start:stop]

    def swap_rows(self, left_N: Sequence[int], right_N: Sequence[int], tokens: int) -> None:
        """Exchange the first `tokens` tokens of each left row with those of its right row."""
        self.copy_rows([*left_N, *right_N], [*right_N, *left_N], tokens)

    def _index(self, rows_N: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(rows_N, dtype=np.int64)).to(self._device)

    def _zeros(self, shape: KVShape, num_rows: int, capacity: int) -> torch.Tensor:
        # zeros, not empty: attention multiplies masked tokens by 0, and 0 * uninitialised memory may be NaN
        size = (shape.parts, num_rows, shape.heads, capacity, shape.head_dim)
        with long_lived():
            return torch.zeros(size, dtype=self._dtype, device=self._device)


def _runs(sources_N: Sequence[int], targets_N: Sequence[int]) -> list[tuple[int, int, int]]:
    """(source, first target, end) of neighbouring targets that have the same source."""
    runs: list[tuple[int, int, int]] = []
    for target, source in sorted(zip(targets_N, sources_N, strict=True)):
        if runs and runs[-1][0] == source and runs[-1][2] == target:
            runs[-1] = (source, runs[-1][1], target + 1)
        else:
            runs.append((source, target, target + 1))
    return runs
