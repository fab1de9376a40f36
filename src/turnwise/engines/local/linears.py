"""The linear layers and norms of the fused pass: references to the model's parameters, and copies that are packed or joined.

A linear layer may have a LoRA adapter. Its product is added to that of the layer, as in the model's own forward; the weights are
not merged, because a merged bfloat16 weight would lose most of a small adapter by rounding. Several models may share all other
weights; then each token of a pass has the adapter of its own model, and the product with the shared weight is computed once. Does
not know what a layer is for.

Axes: M tokens, I inputs, O or F outputs, X ranks of all adapters of a layer, one behind the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from turnwise.models.cpu import PackedLayers, fewest_rows, is_packed, onednn_linear
from turnwise.models.lora import LinearAdapter, linear_adapter


class ModelRows:
    """Which of the models that share their base weights each token of a pass belongs to: `models_M`, indices from 0."""

    def __init__(self, models_M: np.ndarray, device: torch.device) -> None:
        first = int(models_M[0])
        self.only = first if (models_M == first).all() else None
        """The model of all tokens; None if there are several."""
        self._models_M, self._device = models_M, device
        self._others: dict[tuple[int, ...], torch.Tensor] = {}

    def of_others(self, widths: tuple[int, ...]) -> torch.Tensor:
        """Which columns [M, X] are those of other models than the token's. `widths`: the number of columns of each model."""
        others_MX = self._others.get(widths)
        if others_MX is None:
            of_column_X = np.repeat(np.arange(len(widths)), widths)
            others_MX = torch.from_numpy(self._models_M[:, None] != of_column_X).to(self._device)
            self._others[widths] = others_MX
        return others_MX

    def groups(self) -> list[tuple[int, torch.Tensor]]:
        """For each model of the pass: its tokens."""
        return [
            (int(model), torch.from_numpy(np.flatnonzero(self._models_M == model)).to(self._device))
            for model in np.unique(self._models_M)
        ]


class SharedBase:
    """The models that a pass computes together. All have the base weights of the first, and adapters of their own."""

    def __init__(self, first: Any, source: Any, dtype: torch.dtype | None) -> None:
        """`first` is the model whose modules are read: `source`, or with copies of its weights of another `dtype`."""
        self._first, self._dtype = first, dtype
        self.source = source
        """The first model."""
        self._others: list[dict[int, Any]] = []  # of each further model: its modules, by the ids of those of the first
        self.rows: ModelRows | None = None
        """Of the present pass; None: all tokens are of the first model."""

    @property
    def count(self) -> int:
        """The number of models."""
        return 1 + len(self._others)

    def add(self, model: Any) -> None:
        """A further model, with modules of the same names."""
        modules = dict(model.named_modules())
        self._others.append(
            {id(module): modules[name] for name, module in self._first.named_modules() if name in modules}
        )

    def modules(self, module: Any) -> list[Any]:
        """A module of the first model, and those in the same place of the others."""
        return [module, *(others[id(module)] for others in self._others)]

    def adapters(self, module: Any) -> Sequence[LinearAdapter | None]:
        """The adapters of a linear layer in all models."""
        first, *others = (linear_adapter(each) for each in self.modules(module))
        if self._dtype is None:
            return [first, *others]
        return [
            first,
            *(
                None if each is None else LinearAdapter(each.down.to(self._dtype), each.up.to(self._dtype), each.scale)
                for each in others
            ),
        ]

    def has_adapter(self, module: Any) -> bool:
        """Whether a linear layer has an adapter in any of the models."""
        return any(linear_adapter(each) is not None for each in self.modules(module))


class FusedAdapters:
    """The adapters of a linear layer in several models."""

    def __init__(self, adapters: Sequence[LinearAdapter | None], base: SharedBase) -> None:
        self._adapters, self._base = adapters, base
        self._widths = tuple(0 if each is None else len(each.down) for each in adapters)
        self._joined: tuple[torch.Tensor, torch.Tensor] | None = None  # made in the first pass with several models

    def __call__(self, values_MI: torch.Tensor, result_MF: torch.Tensor) -> torch.Tensor:
        """The result of the layer, with the product of the adapter of each token's model."""
        rows = self._base.rows
        if rows is None or rows.only is not None:
            adapter = self._adapters[0 if rows is None else rows.only or 0]
            return result_MF if adapter is None else with_adapter(adapter, values_MI, result_MF)
        if self._joined is None:
            self._joined = _joined([each for each in self._adapters if each is not None])
        down_XI, up_XF = self._joined
        if len(up_XF) == 0:
            return self._by_model(rows, values_MI, result_MF)
        # all adapters see all tokens, which is cheap; a token keeps what its own adapter makes of it
        low_MX = F.linear(values_MI.to(down_XI.dtype), down_XI).masked_fill_(rows.of_others(self._widths), 0.0)
        if result_MF.dtype == low_MX.dtype:
            return torch.addmm(result_MF, low_MX, up_XF)
        return (result_MF + torch.mm(low_MX, up_XF)).to(result_MF.dtype)

    def _by_model(self, rows: ModelRows, values_MI: torch.Tensor, result_MF: torch.Tensor) -> torch.Tensor:
        """The same, one model after the other: what is not finite in one adapter stays in its own tokens."""
        for model, index_M in rows.groups():
            if (adapter := self._adapters[model]) is not None:
                own_MF = with_adapter(adapter, values_MI.index_select(0, index_M), result_MF.index_select(0, index_M))
                result_MF = result_MF.index_copy(0, index_M, own_MF)
        return result_MF


def _joined(adapters: Sequence[LinearAdapter]) -> tuple[torch.Tensor, torch.Tensor]:
    """The first matrices [X, I] of all adapters, and the second, with their scales [X, F]; that is empty if any of its values
    is not finite, because 0 * NaN would reach the tokens of all models."""
    down_XI = torch.cat([each.down.detach() for each in adapters])
    up_XF = torch.cat([each.up.detach().t() * each.scale for each in adapters])
    return down_XI, up_XF if bool(torch.isfinite(up_XF).all()) else up_XF[:0]


def with_adapter(adapter: LinearAdapter, values_MI: torch.Tensor, result_MF: torch.Tensor) -> torch.Tensor:
    """The result of a linear layer with the product of its adapter."""
    low_MR = F.linear(values_MI.to(adapter.down.dtype), adapter.down)
    return (result_MF + F.linear(low_MR, adapter.up) * adapter.scale).to(result_MF.dtype)


@dataclass(frozen=True, slots=True)
class LayerSource:
    """Where the linear layers of a pass come from."""

    packed: PackedLayers | None
    """Their packed weights; None: they are not packed."""
    base: SharedBase
    """The models whose adapters they have."""


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear layer, with or without adapters."""

    weight_IO: torch.Tensor
    """The weight [O, I], transposed: a view, or a copy of several weights."""
    bias: torch.Tensor | None
    adapter: LinearAdapter | FusedAdapters | None
    """Of one model, or of several."""
    onednn_rows: int
    """The number of rows from which on oneDNN is faster."""
    onednn_weight: torch.Tensor
    """The weight for oneDNN: in its own layout, or as it is."""

    @classmethod
    def of(cls, module: Any, source: LayerSource) -> FusedLinear:
        """The parameters of `nn.Linear`, or of peft's layer around it."""
        packed, adapters = source.packed, source.base.adapters(module)
        base = module if adapters[0] is None else module.get_base_layer()
        weight = base.weight
        rows = fewest_rows(weight, packed=packed is not None)
        onednn_weight = packed.of(weight) if packed is not None and is_packed(weight) else weight
        if all(each is None for each in adapters):
            adapter = None
        else:
            adapter = adapters[0] if len(adapters) == 1 else FusedAdapters(adapters, source.base)
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
        if isinstance(adapter, FusedAdapters):
            return adapter(values_MD, result_MF)
        return with_adapter(adapter, values_MD, result_MF)


@dataclass(frozen=True, slots=True)
class FusedLinears:
    """Linear layers with the same input. Packed weights are one matrix, because one large product is faster than several."""

    parts: Sequence[FusedLinear]
    """The layers; only one, if they are one matrix."""
    sizes: Sequence[int]
    """The outputs of each layer."""

    @classmethod
    def of(cls, modules: Sequence[Any], source: LayerSource) -> FusedLinears:
        """The parameters of these layers."""
        packed = source.packed
        sizes = [module.out_features for module in modules]
        weights, biases = [module.weight for module in modules], [module.bias for module in modules]
        plain = all(type(module) is torch.nn.Linear and not source.base.has_adapter(module) for module in modules)
        if packed is None or not plain or len({bias is None for bias in biases}) > 1 or not is_packed(*weights):
            return cls([FusedLinear.of(module, source) for module in modules], sizes)
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
