"""The parameters that the fused pass reads: references to those of the model, or of its bfloat16 copy.

A linear layer may have a LoRA adapter. The product of the adapter is added to that of the layer, as in the model's own forward;
the weights are not merged, because a merged bfloat16 weight would lose most of a small adapter by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from turnwise.models.fast_linear import fewest_rows, onednn_linear
from turnwise.models.lora import LinearAdapter, linear_adapter

__all__ = ["FusedLayer", "FusedLinear", "FusedParameters", "unsupported_reason"]

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the length of the sequence."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the fused pass cannot run this model; None if it can."""
    if type(model) not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(family.__name__ for family in FAMILIES)}"
    config = model.config
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if type(model) is MistralForCausalLM and config.sliding_window is not None:
        return f"it has a sliding window of {config.sliding_window} tokens"
    if type(model) in (Qwen2ForCausalLM, Qwen3ForCausalLM) and set(config.layer_types) != {"full_attention"}:
        return "some of its layers have a sliding window"
    if config.rope_parameters["rope_type"] not in STATIC_ROPE:
        return f"its rotary embedding of type {config.rope_parameters['rope_type']} depends on the length"
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    if any(type(module) is not nn.Linear and linear_adapter(module) is None for module in [*linears, model.lm_head]):
        return "its projections are neither plain linear layers nor such layers with a LoRA adapter (DoRA, quantised weights)"
    if type(model.model.embed_tokens) is not nn.Embedding:
        return "its embedding is not a plain embedding layer (an adapter)"
    return None


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear layer, with or without an adapter."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    adapter: LinearAdapter | None
    onednn_rows: int
    """The number of rows from which on oneDNN is faster."""

    @classmethod
    def of(cls, module: Any) -> FusedLinear:
        """The parameters of `nn.Linear`, or of peft's layer around it."""
        adapter = linear_adapter(module)
        base = module if adapter is None else module.get_base_layer()
        return cls(base.weight, base.bias, adapter, fewest_rows(base.weight))

    def __call__(self, values_MD: torch.Tensor) -> torch.Tensor:
        product = F.linear if values_MD.size(0) < self.onednn_rows else onednn_linear
        result_MF = product(values_MD, self.weight, self.bias)
        adapter = self.adapter
        if adapter is None:
            return result_MF
        low_MR = F.linear(values_MD.to(adapter.down.dtype), adapter.down)
        return (result_MF + F.linear(low_MR, adapter.up) * adapter.scale).to(result_MF.dtype)


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The parameters of one layer."""

    norm: torch.Tensor
    q: FusedLinear
    k: FusedLinear
    v: FusedLinear
    o: FusedLinear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: FusedLinear
    up: FusedLinear
    down: FusedLinear


@dataclass(frozen=True, slots=True)
class FusedParameters:
    """The parameters of the model, as references."""

    embedding: torch.Tensor
    layers: Sequence[FusedLayer]
    norm: torch.Tensor
    head: FusedLinear

    @classmethod
    def of(cls, model: PreTrainedModel) -> FusedParameters:
        """Look up the parameters of a model of one of `FAMILIES`."""
        inner, has_qk_norm = model.model, isinstance(model, Qwen3ForCausalLM)
        layers = [
            FusedLayer(
                norm=layer.input_layernorm.weight,
                q=FusedLinear.of(layer.self_attn.q_proj),
                k=FusedLinear.of(layer.self_attn.k_proj),
                v=FusedLinear.of(layer.self_attn.v_proj),
                o=FusedLinear.of(layer.self_attn.o_proj),
                q_norm=layer.self_attn.q_norm.weight if has_qk_norm else None,
                k_norm=layer.self_attn.k_norm.weight if has_qk_norm else None,
                mlp_norm=layer.post_attention_layernorm.weight,
                gate=FusedLinear.of(layer.mlp.gate_proj),
                up=FusedLinear.of(layer.mlp.up_proj),
                down=FusedLinear.of(layer.mlp.down_proj),
            )
            for layer in inner.layers
        ]
        return cls(inner.embed_tokens.weight, layers, inner.norm.weight, FusedLinear.of(model.lm_head))
