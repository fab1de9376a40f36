"""The linear layers and norms of the fused pass: references to the model's parameters, and copies that are packed or joined.

A linear layer may have a LoRA adapter. Its product is added to that of the layer, as in the model's own forward; the weights are
not merged, because a merged bfloat16 weight would lose most of a small adapter by rounding. Does not know what a layer is for.

Axes: M tokens, I inputs, O or F outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from turnwise.models.cpu import PackedLayers, fewest_rows, is_packed, onednn_linear
from turnwise.models.lora import LinearAdapter, linear_adapter


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear layer, with or without an adapter."""

    weight_IO: torch.Tensor
    """The weight [O, I], transposed: a view, or a copy of several weights."""
    bias: torch.Tensor | None
    adapter: LinearAdapter | None
    onednn_rows: int
    """The number of rows from which on oneDNN is faster."""
    onednn_weight: torch.Tensor
    """The weight for oneDNN: in its own layout, or as it is."""

    @classmethod
    def of(cls, module: Any, packed: PackedLayers | None) -> FusedLinear:
        """The parameters of `nn.Linear`, or of peft's layer around it."""
        adapter = linear_adapter(module)
        base = module if adapter is None else module.get_base_layer()
        weight = base.weight
        rows = fewest_rows(weight, packed=packed is not None)
        onednn_weight = packed.of(weight) if packed is not None and is_packed(weight) else weight
        return cls(weight.t(), base.bias, adapter, rows, onednn_weight)

    def __call__(self, values_MD: torch.Tensor) -> torch.Tensor:
        if values_MD.size(0) >= self.onednn_rows:
            result_MF = onednn_linear(values_MD, self.onednn_weight, self.bias)
        elif self.bias is None:  # as F.linear, in fewer operations
            result_MF = torch.mm(values_MD, self.weight_IO)
        else:
            result_MF = torch.addmm(self.bias, values_MD, self.weight_IO)
        adapter = self.adapter
        if adapter is None:
            return result_MF
        low_MR = F.linear(values_MD.to(adapter.down.dtype), adapter.down)
        return (result_MF + F.linear(low_MR, adapter.up) * adapter.scale).to(result_MF.dtype)


@dataclass(frozen=True, slots=True)
class FusedLinears:
    """Linear layers with the same input. Packed weights are one matrix, because one large product is faster than several."""

    parts: Sequence[FusedLinear]
    """The layers; only one, if they are one matrix."""
    sizes: Sequence[int]
    """The outputs of each layer."""

    @classmethod
    def of(cls, modules: Sequence[Any], packed: PackedLayers | None) -> FusedLinears:
        """The parameters of these layers."""
        sizes = [module.out_features for module in modules]
        weights, biases = [module.weight for module in modules], [module.bias for module in modules]
        plain = all(type(module) is torch.nn.Linear for module in modules)
        if packed is None or not plain or len({bias is None for bias in biases}) > 1 or not is_packed(*weights):
            return cls([FusedLinear.of(module, packed) for module in modules], sizes)
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        rows, onednn_weight = fewest_rows(*weights, packed=True), packed.of(*weights)
        # large weights are left to oneDNN for any number of rows, and need no second copy
        weight_IO = onednn_weight if rows == 1 else torch.cat([weight.detach().t() for weight in weights], dim=1)
        return cls([FusedLinear(weight_IO, bias, None, rows, onednn_weight)], sizes)

    def joined(self, values_MD: torch.Tensor) -> torch.Tensor:
        """The results of all layers, one behind the other in each row."""
        results = [part(values_MD) for part in self.parts]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def __call__(self, values_MD: torch.Tensor) -> Sequence[torch.Tensor]:
        """The result of each layer."""
        if len(self.parts) < len(self.sizes):
            return torch.split_with_sizes(self.parts[0](values_MD), self.sizes, 1)
        return [part(values_MD) for part in self.parts]


class RMSNorm:
    """Root mean square norm, in few operations: a decode step of a small model spends most of its time in calls."""

    def __init__(self, eps: float, widths: Sequence[int], device: torch.device) -> None:
        self._eps = eps
        # for each width D: sqrt(D) and sqrt(D * eps)
        self._roots = {
            width: (torch.tensor(width**0.5, device=device), torch.tensor((width * eps) ** 0.5, device=device))
            for width in widths
        }

    def __call__(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if values.dtype != torch.float32:
            if weight.dtype == torch.float32:
                return self(values.float(), weight).to(values.dtype)
            if weight.dim() == 1:
                return F.rms_norm(values, weight.shape, weight, self._eps)
            return F.rms_norm(values, values.shape[-1:], None, self._eps) * weight  # a weight for each head
        # x / sqrt(mean(x^2) + eps) = sqrt(D) * x / sqrt(sum(x^2) + D * eps), and that root is hypot(|x|, sqrt(D * eps)):
        # half as many operations. The division is one for each row; addcdiv over all values takes twice as long
        root_width, root_eps = self._roots[values.shape[-1]]
        root = torch.hypot(torch.linalg.vector_norm(values, dim=-1, keepdim=True), root_eps)
        return (values * torch.div(root_width, root)).mul_(weight)
