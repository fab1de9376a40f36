"""Plain text to token ids, and back.

Text is encoded with the tokenizer's Rust backend, without the work of `tokenizer.encode` for what is not asked for: offsets,
masks and padding take a third of its time, and most of it for short texts. The token ids are the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.types import Message, ToolSchema

_TRIED = 32
"""Special tokens that are tried to see whether a tokenizer puts spaces after them."""
_STEPS_OF_ENCODE = frozenset({"encode", "__call__", "_encode_plus", "set_truncation_and_padding", "_convert_encoding"})
"""The methods that transformers calls to encode a text."""


def text_size(messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> int:
    """About how many characters the texts of messages and tools have. Images count as nothing."""
    size = sum(len(str(tool)) for tool in tools)
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
        size += sum(len(text) for text in texts if isinstance(text, str)) + len(
            str(message.get("reasoning_content", ""))
        )
        size += sum(len(str(call["function"])) for call in message.get("tool_calls") or ())
    return size


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


def decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of token ids as the tokenizer gives it, special tokens included, without any clean-up of spaces."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def text_decoder(
    tokenizer: Any, encode: Callable[[str], Sequence[int]], special: frozenset[int]
) -> Callable[[Sequence[int]], str]:
    """A function that returns the text that was encoded to token ids.

    SentencePiece tokenizers with a prefix for each piece (`legacy`, `prepend_scheme=always`) put a space in front of the text
    after each special token, and show it when they decode: `<|channel>thought` comes back as `<|channel> thought`, in which no
    mark of a template is found. The space is left out.
    """

    @functools.cache
    def is_followed_by_space(token: int) -> bool:
        mark = decode(tokenizer, [token])
        return bool(mark.strip()) and decode(tokenizer, encode(f"{mark}a")) == f"{mark} a"

    if not any(is_followed_by_space(token) for token in sorted(special)[:_TRIED]):
        return functools.partial(decode, tokenizer)

    def decode_pieces(token_ids: Sequence[int]) -> str:
        pieces: list[str] = []
        start = 0
        for end, token in enumerate(token_ids, 1):
            if end == len(token_ids) or (token in special and is_followed_by_space(token)):
                # at its beginning, a piece is decoded without the space
                pieces.append(decode(tokenizer, token_ids[start:end]))
                start = end
        return "".join(pieces)

    return decode_pieces
