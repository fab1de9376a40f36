"""The JSON values in a rendered probe call."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from turnwise.chat.tool_calls.json_text import decode
from turnwise.chat.tool_calls.learned.probe import Arguments
from turnwise.chat.tool_calls.parsing import MalformedCall

__all__ = ["equals_arguments", "json_values"]

_OPENING = re.compile(r"[\[{\"]")


def json_values(text: str, at: int) -> Iterator[tuple[int, int, Any]]:
    """(start, end, value) of the JSON lists, objects and strings in a text, outer values before the values inside them."""
    while (opening := _OPENING.search(text, at)) is not None:
        start = at = opening.start()
        at += 1
        try:
            value, end = decode(text, start)
        except MalformedCall:
            continue
        yield start, end, value


def equals_arguments(value: Any, arguments: Arguments) -> bool:
    """Whether the value is these arguments, as an object or as JSON in a string."""
    if isinstance(value, str):
        try:
            value, _ = decode(value, 0)
        except MalformedCall:
            return False
    return value == arguments
