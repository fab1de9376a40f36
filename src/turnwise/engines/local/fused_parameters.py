"""The parameters that the fused pass reads: references to those of the model or of its bfloat16 copy, and copies that are packed
or joined.

A linear layer may have a LoRA adapter. The product of the adapter is added to that of the layer, as in the model's own forward;
the weights are not merged, because a merged bfloat16 weight would lose most of a small adapter by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, Qwen3ForCausalLM

from turnwise.models.fast_linear import fewest_rows, onednn_linear
from turnwise.models.lora import LinearAdapter, linear_adapter
from turnwise.models.packed_weights import PackedLayers, is_packed

__all__ = ["FusedLayer", "FusedLinear", "FusedLinears", "FusedParameters"]


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


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The parameters of one layer."""

    norm: torch.Tensor
    qkv: FusedLinears
    o: FusedLinear
    qk_norm: torch.Tensor | None
    """The weights [H + K, D] of the norms of queries and keys, if it has any."""
    mlp_norm: torch.Tensor
    gate_up: FusedLinears
    down: FusedLinear


@dataclass(frozen=True, slots=True)
class FusedParameters:
    """The parameters of the model: references, and copies of those that are packed or joined."""

    embedding: torch.Tensor
    layers: Sequence[FusedLayer]
    norm: torch.Tensor
    head: FusedLinear

    @classmethod
    def of(cls, model: PreTrainedModel, packed: PackedLayers | None = None) -> FusedParameters:
        """Look up the parameters of a model that the fused pass supports, and make the copies."""
        inner, has_qk_norm = model.model, isinstance(model, Qwen3ForCausalLM)
        layers = [
            FusedLayer(
                norm=layer.input_layernorm.weight,
                qkv=FusedLinears.of((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj), packed),
                o=FusedLinear.of(layer.self_attn.o_proj, packed),
                qk_norm=_qk_norm(layer.self_attn, model.config) if has_qk_norm else None,
                mlp_norm=layer.post_attention_layernorm.weight,
                gate_up=FusedLinears.of((layer.mlp.gate_proj, layer.mlp.up_proj), packed),
                down=FusedLinear.of(layer.mlp.down_proj, packed),
            )
            for layer in inner.layers
        ]
        return cls(inner.embed_tokens.weight, layers, inner.norm.weight, FusedLinear.of(model.lm_head, packed))


def _qk_norm(attention: Any, config: Any) -> torch.Tensor:
    """The weights [H + K, D] of the norms of all heads, queries first."""
    q_norm_HD = attention.q_norm.weight.expand(config.num_attention_heads, -1)
    k_norm_KD = attention.k_norm.weight.expand(config.num_key_value_heads, -1)
    return torch.cat((q_norm_HD, k_norm_KD)).detach()
