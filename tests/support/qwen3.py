"""The configurations of Qwen3's models, as their config.json on the hub have them: the shapes of models that users train."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_SAME: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


def _dense(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        **_SAME,
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }


QWEN3: dict[str, dict[str, Any]] = {
    "0.6B": _dense(1024, 3072, 28, 16, tied=True),
    "1.7B": _dense(2048, 6144, 28, 16, tied=True),
    "4B": _dense(2560, 9728, 36, 32, tied=True),
    "8B": _dense(4096, 12288, 36, 32, tied=False),
    "14B": _dense(5120, 17408, 40, 40, tied=False),
    "30B-A3B": {
        **_SAME,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}

# Models for several machines

LARGE: dict[str, dict[str, Any]] = {
    "32B": _dense(5120, 25600, 64, 64, tied=False),
    "235B-A22B": {
        **_SAME,
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def save_config(folder: Path, size: str) -> Path:
    """Write the config.json of Qwen3 of a size of `QWEN3` or `LARGE` into a new directory, without weights."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps((QWEN3 | LARGE)[size]))
    return folder
