"""Predicts the memory of the embedded engine's KV cache."""

from __future__ import annotations

from typing import Any

from turnwise.config.schema import Config, LocalEngineSection
from turnwise.engines.remote.kv_memory import KV_FACTS, kv_token_bytes

__all__ = ["kv_cache_bytes"]


def kv_cache_bytes(config: Config, model_config: Any, *, conversations: int, tokens: int) -> float:
    """The cache of the embedded engine with these conversations, each of up to `tokens` tokens; 0 for another engine."""
    engine = config.engine
    if not isinstance(engine, LocalEngineSection):
        return 0
    rows = min(engine.slots, config.max_concurrent, conversations)
    rows = 1 << (rows - 1).bit_length()  # rows and their capacity grow by doubling
    capacity = max(256, 1 << (tokens - 1).bit_length())
    text = model_config.get_text_config()  # reads a fact under any name that the architecture gives it
    token = kv_token_bytes(
        {name: getattr(text, name, None) for name in KV_FACTS}, "float32" if config.model.exact else "bfloat16"
    )
    return min(engine.memory_gb * 2**30, float(token * rows * capacity))
