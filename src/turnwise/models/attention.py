"""What a model asks of its attention besides scores and a mask, and whether `sdpa` computes it.

transformers hands a layer's further options to the attention function as arguments, and `sdpa` drops those that it does not
know: the soft cap of Gemma 2 and VaultGemma, the attention sinks of gpt-oss, the token selection of sparse attention. The
model then computes something else than it was trained with. The trainer and the embedded engine both ask here.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

__all__ = ["ignored_by_sdpa", "set_text_attention", "unsupported"]

_NAME = "turnwise_recorder"

_ASKED = {"kwargs", "module", "query", "key", "value"}
_SUPPORTED = frozenset(inspect.signature(sdpa_attention_forward).parameters) - _ASKED
_ELSEWHERE = frozenset(
    (
        # the mask holds it
        *("sliding_window", "attention_mask"),
        # about the sequence, the cache or the output: the scores do not depend on them
        *("position_ids", "position_embeddings", "cache_position", "past_key_values", "use_cache", "return_dict"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep", "token_type_ids"),
        *("mm_token_type_ids", "hidden_states", "layer_idx", "deterministic"),
        # of packed sequences, which nobody here hands over
        *("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx"),
    )
)

_recorded: ContextVar[set[str] | None] = ContextVar("recorded", default=None)


def unsupported(options: dict[str, Any], *, known: Collection[str] = _SUPPORTED) -> list[str]:
    """Names of the options that change the scores of attention and are not among `known`; None is no option."""
    return sorted(name for name, value in options.items() if value is not None and name not in {*known, *_ELSEWHERE})


def ignored_by_sdpa(model: Any) -> list[str]:
    """Names of the options that the model's layers hand to their attention and that `sdpa` ignores, such as `softcap`.

    Found by running two tokens through the model. Empty for a model with an attention of its own, which nobody exchanges.
    """
    former = model.config.get_text_config()._attn_implementation
    AttentionInterface.register(_NAME, _record)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    found: set[str] = set()
    token = _recorded.set(found)
    try:
        set_text_attention(model, _NAME)
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return []  # its attention cannot be exchanged
    finally:
        _recorded.reset(token)
        if model.config.get_text_config()._attn_implementation != former:
            set_text_attention(model, former)
    return sorted(found)


def set_text_attention(model: Any, name: str) -> None:
    """Exchange the attention of the part that reads tokens; a part that looks at images keeps its own.

    Raises ValueError if the model's attention cannot be exchanged.
    """
    text = model.config.get_text_config()
    parts = [part for part in model.config.sub_configs if getattr(model.config, part, None) is text]
    model.set_attn_implementation(dict.fromkeys(parts, name) or name)


def _record(module: Any, *tensors: Any, **options: Any) -> Any:
    if (found := _recorded.get()) is not None:
        found.update(unsupported(options))
    return sdpa_attention_forward(module, *tensors, **options)
