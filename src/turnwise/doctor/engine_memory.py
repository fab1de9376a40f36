"""Predicts the memory of the embedded engine's KV cache."""

from __future__ import annotations

from typing import Any

from turnwise.config.schema import Config, LocalEngineSection

__all__ = ["kv_cache_bytes"]


def kv_cache_bytes(config: Config, model_config: Any, *, conversations: int, tokens: int) -> float:
    """The cache of the embedded engine with these conversations, each of up to `tokens` tokens; 0 for another engine."""
    engine, text = config.engine, model_config.get_text_config()
    if not isinstance(engine, LocalEngineSection):
        return 0
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    rows = min(engine.slots, config.max_concurrent, conversations)
    rows = 1 << (rows - 1).bit_length()  # rows and their capacity grow by doubling
    capacity = max(256, 1 << (tokens - 1).bit_length())
    size = 4 if config.model.exact else 2
    return min(engine.memory_gb * 2**30, 2.0 * text.num_hidden_layers * heads * width * size * rows * capacity)
