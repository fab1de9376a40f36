"""Tiny models with experts, of architectures whose routers differ.

Weights are random and large enough that the experts of a token differ, and that another expert gives other logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers import PreTrainedModel

from support import hybrids

VOCABULARY = hybrids.VOCABULARY
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CHOICE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
}
_HEADS = {"head_dim": 16}
_ROUTED = {**_CHOICE, "first_k_dense_replace": 1}

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(**_SIZES, **_HEADS, **_CHOICE, num_experts=8),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_SIZES,
        **_HEADS,
        num_experts_per_tok=2,
        num_local_experts=8,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "mixtral": lambda: hf.MixtralConfig(**_SIZES, num_experts_per_tok=2, num_local_experts=8),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **{**_SIZES, **_LATENT}, **_CHOICE, n_routed_experts=8, n_group=2, topk_group=1
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(
        **{**_SIZES, **_LATENT},
        **_CHOICE,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        topk_method="group_limited_greedy",
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(**_SIZES, **_HEADS, **_ROUTED, n_routed_experts=8, n_group=1, topk_group=1),
    "ernie4_5_moe": lambda: hf.Ernie4_5_MoeConfig(**_SIZES, moe_num_experts=8, moe_k=2, moe_intermediate_size=32),
    "minimax_m2": lambda: hf.MiniMaxM2Config(**_SIZES, **_HEADS, num_experts_per_tok=2, num_local_experts=8),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **_SIZES,
        **_HEADS,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32,
        enable_moe_block=True,
        layer_types=["full_attention"] * 3,
    ),
    **{
        name: hybrids.CONFIGS[name]
        for name in ("qwen3_5_moe", "lfm2_moe", "granite_hybrid", "nemotron_h", "jamba", "llama4")
    },
}
"""By name: softmax before and after the choice, sigmoid with and without a bias, groups of experts, one expert, hybrids."""


def mixture(name: str, *, seed: int = 0) -> PreTrainedModel:
    """A model in evaluation mode, float32."""
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(0.06 * torch.randn_like(parameter))
    return model


def disturb_routers(model: PreTrainedModel, *, scale: float = 0.05) -> None:
    """Change the weights of the routers, so that many tokens would get other experts."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and len(parameter) <= 8 and any(part in name for part in ("gate.", "router.")):
                parameter.add_(scale * torch.randn_like(parameter))
