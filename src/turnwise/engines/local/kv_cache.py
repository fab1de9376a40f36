"""The memory of the key-value cache: planes of rows that are grown, copied and swapped, within a bound in bytes.

It knows shapes and bytes. It refuses to know which conversation lives in a row, which tokens it has seen, or what a plane
means to the model's attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["KVCache", "PlaneShape"]

FIRST_ROWS, FIRST_CAPACITY = 8, 256


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """What one layer keeps of one token: `groups` (keys and values, or one of them) of `heads` vectors of `dim` numbers."""

    groups: int
    heads: int
    dim: int

    @property
    def numbers(self) -> int:
        """How many numbers a token takes."""
        return self.groups * self.heads * self.dim


class KVCache:
    """One tensor [groups, rows, heads, capacity, dim] for each plane; all planes have the same rows and capacity."""

    def __init__(self, shapes: Sequence[PlaneShape], *, dtype: torch.dtype, device: torch.device, budget: int) -> None:
        self._shapes, self._dtype, self._device, self._budget = tuple(shapes), dtype, device, budget
        self.token_bytes = sum(shape.numbers for shape in shapes) * dtype.itemsize
        self.count = 0
        self.capacity = 0
        self.planes = [self._zeros(shape, 0, 0) for shape in shapes]

    @property
    def bytes(self) -> int:
        """What the planes take now."""
        return self.count * self.capacity * self.token_bytes

    def most_rows(self, capacity: int) -> int:
        """How many rows of `capacity` tokens the bound allows."""
        return self._budget // (capacity * self.token_bytes)

    def most_tokens(self) -> int:
        """How long a row may be if it is the only one."""
        return self._budget // self.token_bytes

    def resize(self, count: int, capacity: int) -> None:
        """Make room for `count` rows of `capacity` tokens; what lies outside of the new bounds is lost.

        Plane after plane, so that no more than one of them exists twice at any moment.
        """
        rows, tokens = min(count, self.count), min(capacity, self.capacity)
        for index, shape in enumerate(self._shapes):
            plane = self._zeros(shape, count, capacity)
            if rows and tokens:
                plane[:, :rows, :, :tokens] = self.planes[index][:, :rows, :, :tokens]
            self.planes[index] = plane
        self.count, self.capacity = count, capacity

    def copy(self, sources_N: Sequence[int], targets_N: Sequence[int], tokens: int) -> None:
        """Copy the first `tokens` tokens of each source row over those of its target row."""
        sources, targets = self._index(sources_N), self._index(targets_N)
        for plane in self.planes:
            # not index_select: of a plane that is cut at `tokens` it would first copy the whole
            plane[:, targets, :, :tokens] = plane[:, sources, :, :tokens]

    def swap(self, left_N: Sequence[int], right_N: Sequence[int], tokens: int) -> None:
        """Exchange the first `tokens` tokens of each left row with those of its right row."""
        self.copy([*left_N, *right_N], [*right_N, *left_N], tokens)

    def _index(self, rows_N: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(np.asarray(rows_N, dtype=np.int64)).to(self._device)

    def _zeros(self, shape: PlaneShape, count: int, capacity: int) -> torch.Tensor:
        # zeros, not empty: a masked score times whatever was in that memory must not become NaN
        size = (shape.groups, count, shape.heads, capacity, shape.dim)
        return torch.zeros(size, dtype=self._dtype, device=self._device)
