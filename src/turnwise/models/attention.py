"""Options of a model's attention that `sdpa` ignores.

transformers passes the options of a layer to the attention function as keyword arguments, and `sdpa` silently drops those that
it does not support: the soft cap of Gemma 2 and VaultGemma, the attention sinks of gpt-oss, the token selection of sparse
attention. The model then computes something else than it was trained with. The trainer and the embedded engine both use this
module to refuse such a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["ignored_by_sdpa", "narrow_window", "set_text_attention", "unsupported"]

_NAME = "turnwise_recorder"
"""The name of an attention that records its options."""

_ARGUMENTS = {"kwargs", "module", "query", "key", "value"}
_SUPPORTED = frozenset(inspect.signature(sdpa_attention_forward).parameters) - _ARGUMENTS
_WITHOUT_EFFECT = frozenset(
    (
        # contained in the mask
        *("sliding_window", "attention_mask"),
        # options of the sequence, the cache or the output: the attention scores do not depend on them
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "token_type_ids"),
        *("mm_token_type_ids", "hidden_states", "layer_idx", "deterministic"),
        # options of packed sequences, which turnwise does not use
        *("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx"),
    )
)

_recorded: ContextVar[set[str] | None] = ContextVar("recorded", default=None)


def unsupported(options: dict[str, Any], *, known: Collection[str] = _SUPPORTED) -> list[str]:
    """Names of the options that change attention scores and are not in `known`. An option with the value None is not set."""
    return sorted(
        name for name, value in options.items() if value is not None and name not in {*known, *_WITHOUT_EFFECT}
    )


def ignored_by_sdpa(model: Any) -> list[str]:
    """Names of the options that the model's layers pass to their attention and that `sdpa` ignores, such as `softcap`.

    Runs two tokens through the model with an attention function that records its options. Empty for a model whose attention
    cannot be replaced.
    """
    original = model.config.get_text_config()._attn_implementation
    AttentionInterface.register(_NAME, _record)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    names: set[str] = set()
    token = _recorded.set(names)
    try:
        set_text_attention(model, _NAME)
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return []  # its attention cannot be replaced
    finally:
        _recorded.reset(token)
        if model.config.get_text_config()._attn_implementation != original:
            set_text_attention(model, original)
    return sorted(names)


@contextmanager
def narrow_window(config: Any, tokens: int) -> Iterator[None]:
    """Inside, the sliding windows of a model with this text configuration have at most `tokens` tokens.

    The test of an attention on a few tokens then includes what is outside the window.
    """
    window = getattr(config, "sliding_window", None)
    if window is None:
        yield
        return
    config.sliding_window = min(window, tokens)
    try:
        yield
    finally:
        config.sliding_window = window


def set_text_attention(model: Any, name: str) -> None:
    """Set the attention implementation of the text part of the model; a vision part keeps its own.

    Raises ValueError if the model's attention cannot be replaced.
    """
    text = model.config.get_text_config()
    parts = [part for part in model.config.sub_configs if getattr(model.config, part, None) is text]
    model.set_attn_implementation(dict.fromkeys(parts, name) or name)


def _record(module: Any, *tensors: Any, **options: Any) -> Any:
    if (names := _recorded.get()) is not None:
        names.update(unsupported(options))
    return sdpa_attention_forward(module, *tensors, **options)
