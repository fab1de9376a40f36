"""Facts of a model's config.json that do not need the model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["context_length", "vocabulary_size"]


def context_length(config: Mapping[str, Any]) -> int | None:
    """The longest context in a model's config.json, under the name that the architecture uses; None if there is none."""
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        if isinstance(config.get(name), int):
            return config[name]
    text = config.get("text_config")
    return context_length(text) if isinstance(text, Mapping) else None


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """The number of token ids in a model's config.json; None if there is none."""
    if isinstance(config.get("vocab_size"), int):
        return config["vocab_size"]
    text = config.get("text_config")
    return vocabulary_size(text) if isinstance(text, Mapping) else None
