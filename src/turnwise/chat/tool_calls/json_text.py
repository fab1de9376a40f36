"""JSON as models write it: where a value ends, what it says, and what is wrong with it.

Strict about what would be something else elsewhere (NaN, Infinity, half a character), lenient about line breaks in strings.
Nothing is repaired: a call that is almost JSON is told to the model as what it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.parsing import MalformedCall, skip_space

__all__ = ["arguments_of", "decode", "decode_all", "name_and_arguments", "refuse_unwritable"]

_SHOWN = 20  # characters of what is wrong
_PIECE = 512  # characters that are decoded at first
_TAIL = 16  # characters at the end of a piece in which an error or an end may be due to the cut
_FIRST = frozenset(
    '{["-0123456789tfnNI'
)  # what a value begins with, NaN and Infinity included, which are refused by name


def decode(text: str, begin: int) -> tuple[Any, int]:
    """The JSON value that begins at `begin`, and where it ends.

    Raises MalformedCall.
    """
    if text[begin : begin + 1] not in _FIRST:
        raise MalformedCall(f"Expecting value at {text[begin : begin + _SHOWN]!r}", begin)
    try:
        value, end = _decode_in_pieces(text, begin)
    except RecursionError:
        raise MalformedCall("it is nested too deep", begin, give_up=True) from None
    except ValueError as error:  # NaN, an infinite number, one of too many digits
        raise MalformedCall(str(error), begin) from None
    if "\\u" in text[begin:end]:
        refuse_unwritable(value, begin)
    return value, end


def _decode_in_pieces(text: str, begin: int) -> tuple[Any, int]:
    """The value at `begin` and where it ends, at a cost that depends on the value and not on the text around it.

    The decoder counts the lines in front of an error from the beginning of what it was given. So it is given a piece, which
    grows while the error may come from its end.

    Raises MalformedCall, RecursionError and ValueError.
    """
    size = _PIECE
    while True:
        piece = text[begin : begin + size]
        whole = begin + size >= len(text)
        try:
            value, end = _DECODER.raw_decode(piece)
        except json.JSONDecodeError as error:
            if not whole and (error.pos > size - _TAIL or error.msg.startswith("Unterminated string")):
                size *= 4
                continue
            at = begin + error.pos
            rest = text[at : at + _SHOWN]
            where = f"at {rest!r}" if rest else "at the end"
            raise MalformedCall(f"{error.msg} {where}", at) from None
        if whole or end < size - _TAIL:  # a number might go on behind the end
            return value, begin + end
        size *= 4


def decode_all(text: str) -> Any:
    """The JSON value that a text is.

    Raises MalformedCall.
    """
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
        raise MalformedCall(f"it is a JSON {type(value).__name__}, not an object", 0)
    name = value.get(name_key)
    if not isinstance(name, str) or not name:
        raise MalformedCall(f'its "{name_key}" is missing', 0)
    key = next((key for key in argument_keys if key in value), None)
    if key is None and wrong_key in value:
        raise MalformedCall(f'its arguments are called "{wrong_key}" where they should be "{argument_keys[0]}"', 0)
    return name, arguments_of(value[key], key) if key is not None else {}


def arguments_of(value: Any, key: str = "arguments") -> dict[str, Any]:
    """Decoded arguments, which may be JSON in a string, as OpenAI has them.

    Raises MalformedCall.
    """
    if isinstance(value, str):
        value = decode_all(value)
    if not isinstance(value, dict):
        raise MalformedCall(f'its "{key}" are a {type(value).__name__}, not an object', 0)
    return value


def refuse_unwritable(value: Any, at: int) -> None:
    """Refuse what no JSON file can hold: a surrogate without its other half, NaN, something endless.

    Raises MalformedCall.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise MalformedCall(f"it holds half a character, {error.object[error.start]!r}", at) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise MalformedCall(f"it is not JSON: {error}", at) from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits} is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, strict=False)
