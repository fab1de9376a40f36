"""Which models the fused pass can run."""

from __future__ import annotations

from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from turnwise.models.lora import linear_adapter

__all__ = ["unsupported_reason"]

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
