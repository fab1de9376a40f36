"""Weights of a model that is divided among ranks, which become complete a layer at a time, while they are read.

Knows names and layers. Does not know ranks, and imports no torch, because servers read this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


class StreamedWeights(Mapping[str, Any]):
    """Tensors by names. Only the layer that was read last is in memory, so they are to be read in their order, and before the
    weights change."""

    def __init__(self, layers: Sequence[Mapping[str, Any]], gather: Callable[[int], Mapping[str, Any]]) -> None:
        """`layers` has the tensors of each layer without memory (on torch's meta device), `gather` returns those of a layer."""
        self.empty = {name: tensor for layer in layers for name, tensor in layer.items()}
        """All tensors, without memory."""
        self._layer = {name: number for number, layer in enumerate(layers) for name in layer}
        self._gather = gather
        self._present: tuple[int, Mapping[str, Any]] = (-1, {})

    def __getitem__(self, name: str) -> Any:
        number = self._layer[name]
        if number != self._present[0]:
            self._present = (-1, {})  # frees it, before the next one is gathered
            self._present = (number, self._gather(number))
        return self._present[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.empty)

    def __len__(self) -> int:
        return len(self.empty)
