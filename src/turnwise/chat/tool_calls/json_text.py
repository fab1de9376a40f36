"""Decodes JSON that a model has written, at any position of a text, with error messages for the model.

NaN, Infinity and unpaired surrogates are refused, because other programs could not read them from a JSON file. Line breaks in
strings are accepted. Nothing is repaired: JSON with an error is a malformed call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.parsing import MalformedCall, skip_space

__all__ = ["arguments_of", "decode", "decode_all", "name_and_arguments", "refuse_unwritable"]

_SHOWN = 20  # characters of the text in an error message
_PIECE = 512  # characters that are decoded first
_TAIL = 16  # an error, or the end of a value, in the last characters of a piece may be caused by the cut
_FIRST = frozenset(
    '{["-0123456789tfnNI'
)  # first characters of a value, also of NaN and Infinity, which get their own error


def decode(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that begins at `begin`, and the index after it. Raises MalformedCall."""
    if text[begin : begin + 1] not in _FIRST:
        raise MalformedCall(f"Expecting value at {text[begin : begin + _SHOWN]!r}", begin)
    try:
        value, end = _decode_in_pieces(text, begin)
    except RecursionError:
        raise MalformedCall("the arguments are nested too deeply", begin, give_up=True) from None
    except ValueError as error:  # NaN, an infinite number, one of too many digits
        raise MalformedCall(str(error), begin) from None
    if "\\u" in text[begin:end]:
        refuse_unwritable(value, begin)
    return value, end


def _decode_in_pieces(text: str, begin: int) -> tuple[Any, int]:
    """The value at `begin` and the index after it, in time that depends on the value and not on the rest of the text.

    For an error, Python's decoder counts the lines from the beginning of its input. So its input is a piece of the text, which
    grows as long as the error may be caused by the end of the piece.

    Raises MalformedCall, RecursionError and ValueError.
    """
    size = _PIECE
    while True:
        piece = text[begin : begin + size]
        at_end = begin + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(piece)
        except json.JSONDecodeError as error:
            if not at_end and (error.pos > size - _TAIL or error.msg.startswith("Unterminated string")):
                size *= 4
                continue
            at = begin + error.pos
            rest = text[at : at + _SHOWN]
            where = f"at {rest!r}" if rest else "at the end"
            raise MalformedCall(f"{error.msg} {where}", at) from None
        if at_end or end < size - _TAIL:  # a number may continue after the end of the piece
            return value, begin + end
        size *= 4


def decode_all(text: str) -> Any:
    """The JSON value that the entire text is. Raises MalformedCall."""
    value, end = decode(text, skip_space(text, 0))
    end = skip_space(text, end)
    if end < len(text):
        raise MalformedCall(f"{text[end : end + _SHOWN]!r} follows the JSON", end)
    return value


def name_and_arguments(
    value: Any, *, name_key: str = "name", argument_keys: Sequence[str] = ("arguments",), wrong_key: str = "parameters"
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a decoded call. `keys` are those that may hold the arguments, the format's own first.

    Raises MalformedCall.
    """
    if not isinstance(value, dict):
        raise MalformedCall(f"the call must be a JSON object, but is a {type(value).__name__}", 0)
    name = value.get(name_key)
    if not isinstance(name, str) or not name:
        raise MalformedCall(f'the "{name_key}" is missing', 0)
    key = next((key for key in argument_keys if key in value), None)
    if key is None and wrong_key in value:
        raise MalformedCall(f'the key "{wrong_key}" must be "{argument_keys[0]}"', 0)
    return name, arguments_of(value[key], key) if key is not None else {}


def arguments_of(value: Any, key: str = "arguments") -> dict[str, Any]:
    """Decoded arguments, which may also be JSON in a string, as in OpenAI's API. Raises MalformedCall."""
    if isinstance(value, str):
        value = decode_all(value)
    if not isinstance(value, dict):
        raise MalformedCall(f'"{key}" must be an object, but is a {type(value).__name__}', 0)
    return value


def refuse_unwritable(value: Any, at: int) -> None:
    """Raises MalformedCall if the value cannot be written to a JSON file: unpaired surrogates, NaN, too deep nesting."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise MalformedCall(f"the text contains half a character, {error.object[error.start]!r}", at) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCall(f"the text is not JSON: {error}", at) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits} is too large")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)
