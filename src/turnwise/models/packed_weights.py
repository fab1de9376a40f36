"""Copies of the weights of linear layers in the layout in which oneDNN computes."""

from __future__ import annotations

from typing import Any

import torch

from turnwise.models.autocast import parameter_state
from turnwise.models.fast_linear import fewest_rows

__all__ = ["PackedLayers", "packed", "packed_bytes"]

MOST_BYTES = 2**30
"""The weights of larger models are not packed: the memory is worth more than the time."""
_PACKED_ROWS = 32
"""The number of rows for which a weight is packed. oneDNN uses the same layout for all others but 1."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [O, I] in the layout in which oneDNN computes, for `onednn_linear` only.

    With 32 rows, a product takes 0.75 to 0.85 times as long; with hundreds of rows, there is no difference.
    """
    with torch.no_grad():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)


def packed_bytes(model: Any) -> int:
    """The memory for the packed weights of a model that the fused pass runs: 0 if they are not packed."""
    weights = {id(each.weight): each.weight for each in model.modules() if isinstance(each, torch.nn.Linear)}
    total = sum(4 * weight.numel() for weight in weights.values() if _is_packed(weight))
    return total if total <= MOST_BYTES else 0


def _is_packed(weight: torch.Tensor) -> bool:
    """Weights that oneDNN reads faster for any number of rows. Smaller ones stay in the cache of the processor: packing them
    gains nothing (measured)."""
    return fewest_rows(weight) == 1


class PackedLayers:
    """The packed weights of a model, made when they are first asked for.

    A decoding step reads each weight for a few rows only. Bringing it into oneDNN's layout in each call takes up to a third of
    the time of the product.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, tuple[int, int], torch.Tensor]] = {}

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The packed weight with the present values, as far as torch knows of changes; `weight` if it is not packed."""
        if not _is_packed(weight):
            return weight
        source, state, copy = self._copies.get(id(weight), (None, None, None))
        if copy is None or source is not weight or state != parameter_state(weight):
            copy = packed(weight)
            # the weight is kept, so that its id is not given to another tensor
            self._copies[id(weight)] = weight, parameter_state(weight), copy
        return copy

    def clear(self) -> None:
        """The weights have changed, possibly without torch's knowledge."""
        self._copies.clear()
