"""Encodes plain text with the tokenizer's Rust backend, without the work of `tokenizer.encode` for what is not asked for:
offsets, masks and padding take a third of its time, and most of it for short texts. The token ids are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["text_encoder"]

_STEPS_OF_ENCODE = frozenset({"encode", "__call__", "_encode_plus", "set_truncation_and_padding", "_convert_encoding"})
"""The methods that transformers calls to encode a text."""


def text_encoder(tokenizer: Any) -> Callable[[str], Sequence[int]]:
    """A function that returns the token ids of a text, without special tokens around it, as `tokenizer.encode` does."""

    def encode(text: str) -> Sequence[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    if not _encodes_as_its_backend(tokenizer):
        return encode
    backend = tokenizer.backend_tokenizer

    def encode_in_backend(text: str) -> Sequence[int]:
        # other users of the tokenizer can leave these settings; transformers' own method removes them
        if backend.truncation or backend.padding or backend.encode_special_tokens or tokenizer.split_special_tokens:
            return encode(text)
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return encode_in_backend


def _encodes_as_its_backend(tokenizer: Any) -> bool:
    """Whether the tokenizer is transformers' class around the Rust backend, or a subclass that encodes in the same way."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not _STEPS_OF_ENCODE.isdisjoint(vars(tokenizer)):
        return False
    classes = type(tokenizer).__mro__
    subclasses = classes[: classes.index(PreTrainedTokenizerFast)]
    return all(_STEPS_OF_ENCODE.isdisjoint(vars(each)) for each in subclasses)
