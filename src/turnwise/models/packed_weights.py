"""Copies of the weights of linear layers in the layout in which oneDNN computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from turnwise.models.allocator import long_lived
from turnwise.models.autocast import parameter_state
from turnwise.models.fast_linear import NEVER, fewest_rows

__all__ = ["PackedLayers", "is_packed", "packed", "packed_bytes"]

MOST_BYTES = 2**30
"""The weights of larger models are not packed: the memory is worth more than the time."""
_PACKED_ROWS = 32
"""The number of rows for which a weight is packed. oneDNN uses the same layout for all others but 1."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [O, I] in the layout in which oneDNN computes, for `onednn_linear` only.

    With 32 rows, a product takes 0.75 to 0.85 times as long; with hundreds of rows, there is no difference.
    """
    with torch.no_grad(), long_lived():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)


def packed_bytes(model: Any) -> int:
    """The memory for the packed weights of a model that the fused pass runs: 0 if they are not packed."""
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name:
            layer, _, kind = name.rpartition(".")
            groups.setdefault(f"{layer}.{_TOGETHER.get(kind, kind)}", {})[id(module.weight)] = module.weight
    total = sum(
        4 * weight.numel() for group in groups.values() if is_packed(*group.values()) for weight in group.values()
    )
    return total if total <= MOST_BYTES else 0


_TOGETHER = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
"""Linear layers that the fused pass computes as one, unless they have an adapter."""


def is_packed(*weights: torch.Tensor) -> bool:
    """Whether a copy in oneDNN's layout makes the product with a weight, or with several weights as one, faster for some number
    of rows."""
    return fewest_rows(*weights, packed=True) < NEVER


class PackedLayers:
    """The packed weights of a model, made when they are first asked for.

    A decoding step reads each weight for a few rows only. Bringing it into oneDNN's layout in each call takes up to a third of
    the time of the product.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ...], _PackedCopy] = {}

    def of(self, *weights: torch.Tensor) -> torch.Tensor:
        """The packed weight with the present values, as far as torch knows of changes. Several weights [O, I] of the same inputs
        are packed as one [sum of O, I]."""
        key = tuple(map(id, weights))
        copy = self._copies.get(key)
        if copy is None or copy.states != [parameter_state(weight) for weight in weights]:
            copy = self._copies[key] = _PackedCopy(weights)
        return copy.values

    def clear(self) -> None:
        """The weights have changed, possibly without torch's knowledge."""
        self._copies.clear()


class _PackedCopy:
    """A packed copy of weights, and the states of the weights when they were copied."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.sources = weights  # kept, so that their ids are not given to other tensors
        self.states = [parameter_state(weight) for weight in weights]
        self.values = packed(weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights]))
