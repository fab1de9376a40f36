"""A tiny model with random weights, saved the way that users have theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from support import byte_tokenizer


def tiny_model(seed: int = 0, vocabulary: int = 260, **options: Any) -> Qwen3ForCausalLM:
    """A Qwen3 of 40,000 parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": vocabulary,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 1024,
            "tie_word_embeddings": True,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "bos_token_id": None,
            **options,
        }
    )
    return Qwen3ForCausalLM(config).eval()


def save_model(path: Path, *, seed: int = 0, **options: Any) -> Path:
    """A model directory: random weights, byte-level tokenizer, ChatML template. `options` are of the model's configuration."""
    tokenizer = byte_tokenizer()
    model = tiny_model(seed, vocabulary=len(tokenizer), **options)
    model.generation_config.eos_token_id = ends_of_turns(tokenizer)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def ends_of_turns(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Stop tokens for random weights, which hardly ever say one certain token: with a quarter of the vocabulary, turns do end.

    Not with a blank or a line end, which stand inside turns.
    """
    inside = tokenizer.encode(" \n", add_special_tokens=False)
    return [2, *(one for one in range(188, len(tokenizer)) if one not in inside)]


BLOCKS_OF_4_BITS = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
"""Options of a model whose linear layers can all be quantized."""


def save_rows(path: Path, count: int = 8) -> Path:
    """Rows like `{"prompt": "1+1?", "answer": "2"}`."""
    lines = [json.dumps({"prompt": f"{n}+1?", "answer": str(n + 1)}) for n in range(count)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path
