"""Tiny models of architectures whose layers keep something else than keys and values, or attend in chunks.

Weights are scaled up: with those of a fresh model, all logits are about 0 and a wrong state would hardly change them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from transformers import PreTrainedModel

from support import byte_tokenizer
from support.tiny import ends_of_turns

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 16,
}
_MAMBA1 = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 8, "use_mamba_kernels": False}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_SSM = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 16, "expand": 2}

CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_5": lambda: hf.Qwen3_5TextConfig(**_SIZES, **_LINEAR),
    "qwen3_5_moe": lambda: hf.Qwen3_5MoeTextConfig(**_SIZES, **_LINEAR, **_SHARED_EXPERT),
    "qwen3_next": lambda: hf.Qwen3NextConfig(**_SIZES, **_LINEAR, **_SHARED_EXPERT),
    "lfm2": lambda: hf.Lfm2Config(**_SIZES, **_CONV, block_multiple_of=8),
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(**_SIZES, **_CONV, **_EXPERTS, num_dense_layers=1),
    "granite_hybrid": lambda: hf.GraniteMoeHybridConfig(
        **_SIZES,
        **_MAMBA2,
        layers_block_type=["mamba", "attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "nemotron_h": lambda: hf.NemotronHConfig(
        **_SIZES,
        head_dim=16,
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        conv_kernel=4,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "falcon_h1": lambda: hf.FalconH1Config(**_SIZES, **_MAMBA2, head_dim=16, mamba_d_ssm=128),
    "olmo_hybrid": lambda: hf.OlmoHybridConfig(
        **_SIZES,
        layer_types=_LINEAR["layer_types"],
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "kimi_linear": lambda: hf.KimiLinearConfig(
        **{**_SIZES, "num_key_value_heads": 4},
        layer_types=_LINEAR["layer_types"],
        linear_num_heads=4,
        linear_head_dim=16,
        head_dim=16,
        kv_lora_rank=16,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
    ),
    "bamba": lambda: hf.BambaConfig(**_SIZES, **_MAMBA2, attn_layer_indices=[1, 3]),
    "jamba": lambda: hf.JambaConfig(
        **_SIZES,
        **_MAMBA1,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "zamba2": lambda: hf.Zamba2Config(
        **_SIZES,
        layers_block_type=["mamba", "hybrid"] * 2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        n_mamba_heads=8,
        mamba_ngroups=1,
        num_mem_blocks=1,
        use_mem_rope=True,
        chunk_size=16,
    ),
    "llama4": lambda: hf.Llama4TextConfig(
        **_SIZES,
        head_dim=16,
        attention_chunk_size=8,
        layer_types=["chunked_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=1,
        intermediate_size_mlp=96,
        floor_scale=4,  # the scale of queries changes with each fourth position, and not with each 8,192nd
    ),
    "mamba": lambda: hf.MambaConfig(**_SSM, conv_kernel=4),
    "mamba2": lambda: hf.Mamba2Config(**_SSM, num_heads=8, head_dim=16, n_groups=1, conv_kernel=4, chunk_size=16),
}
"""By name: the families that people train, and older ones of the same kinds."""


def forget_states(monkeypatch: pytest.MonkeyPatch) -> str:
    """Let the layers of a family begin with zeros where several tokens follow a state, as a kernel may. Returns its name."""
    from transformers.models.olmo_hybrid import modeling_olmo_hybrid as modeling

    own = modeling.torch_chunk_gated_delta_rule

    def forgetting(*arguments: Any, initial_state: object = None, **options: Any) -> Any:
        return own(*arguments, **options)

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", forgetting)
    return "olmo_hybrid"


def save_hybrid(path: Path, name: str) -> Path:
    """A model directory with a byte-level tokenizer, as `save_model` makes one of a dense model."""
    tokenizer = byte_tokenizer()
    model = hybrid(name, vocabulary=len(tokenizer))
    model.generation_config.eos_token_id = ends_of_turns(tokenizer)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def hybrid(name: str, *, seed: int = 0, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A model in evaluation mode, float32."""
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    config.vocab_size = vocabulary
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3)
    return model
