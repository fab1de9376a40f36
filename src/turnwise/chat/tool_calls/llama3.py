"""Llama 3's format: a JSON object with name and parameters, without marks.

    {"name": "search", "parameters": {"query": "weather"}}

Every JSON object in the text is examined. It is a call if it has a name and no keys but those of a call, or if its name is that
of a tool on offer. OpenAI's shape, `{"type": "function", "function": {...}}`, is read as the object inside. An object inside any
other value is content.

Malformed calls: text that is no JSON is a malformed call only if it begins like a call (`{"name":`); otherwise it is content.
Parsing continues at the next line, `;` or `<|python_tag|>` that is followed by the beginning of a call.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import decode, name_and_arguments
from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    MarkedFormat,
    ParsedCalls,
    skip_space,
    tool_names,
    well_formed_call,
)
from turnwise.types import ToolCall, ToolSchema

__all__ = ["Llama3"]

_BEGINS = r"\{\s*[\"'](?:name|type|function)[\"']\s*:"
_CALL = re.compile(_BEGINS)
# possessive and with a look-behind, so that a run of white space is scanned once and not from each of its characters
_NEXT = re.compile(rf"(?:(?<!\s)[^\S\n]*+\n|;|<\|python_tag\|>)\s*+(?={_BEGINS})")
_SEPARATOR = re.compile(r"\s*;\s*(?=\{)|(?:\s*<\|e(?:om|ot)_id\|>)?")
_ARGUMENTS = ("parameters", "arguments")
_OF_A_CALL = {"name", "type", "id", "index", *_ARGUMENTS}
_AROUND_A_CALL = {"type", "id", "index", "function"}
_NESTED = 1000
"""Characters to skip when a value is nested too deep: scanning again after each bracket would take quadratic time."""


class Llama3(MarkedFormat):
    """Llama 3.1 and later: `{"name": ..., "parameters": {...}}`.

    Several calls are separated by `;`, or are in a list; `<|python_tag|>` may precede them.
    """

    name = "llama3"
    example = '{"name": "<tool>", "parameters": {...}}'

    def __init__(self, example: str | None = None) -> None:
        """`example` replaces the call in error messages, if a template writes another shape."""
        if example is not None:
            self.example = example

    opening_pattern = r"<\|python_tag\|>\s*(?=[\[{])|\{(?=\s*[\"'])|\[(?=\s*\{)"

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        begin = mark.end() if mark[0][0] == "<" else mark.start()
        try:
            value, end = decode(text, begin)
        except MalformedCall as problem:
            return self._skip_malformed(text, begin, problem)
        items = value if isinstance(value, list) else [value]
        known = tool_names(tools)
        items = [_inner(item) for item in items]
        if not items or not all(_is_call(item, known) for item in items):
            return [], end  # content; objects inside it are not examined
        return [self._call(item, text[begin:end]) for item in items], self._separated(text, end)

    def _call(self, value: Any, written: str) -> ToolCall:
        try:
            if (key := next((key for key in value if key not in _OF_A_CALL), None)) and not _has_arguments(value):
                raise MalformedCall(f'"parameters" is missing: put {key!r} into "parameters"', 0)
            return well_formed_call(*name_and_arguments(value, argument_keys=_ARGUMENTS), written)
        except MalformedCall as problem:
            return self.malformed(problem, written)

    def _skip_malformed(self, text: str, begin: int, problem: MalformedCall) -> ParsedCalls:
        inside = skip_space(text, begin + 1) if text.startswith("[", begin) else begin
        further = begin + (_NESTED if problem.give_up else 1)
        if not _CALL.match(text, inside):
            return [], max(problem.at, further)
        if inside > begin:
            return [], further if problem.give_up else inside  # a list with a malformed call: parse each item by itself
        following = _NEXT.search(text, further)
        end = following.start() if following else len(text)
        return [self.malformed(problem, text[begin:end])], following.end() if following else end

    def _separated(self, text: str, end: int) -> int:
        """The index after a call and after the separator that may follow it."""
        separator = _SEPARATOR.match(text, end)
        return separator.end() if separator else end


def _inner(value: Any) -> Any:
    """The object inside OpenAI's shape; any other value unchanged."""
    if isinstance(value, dict) and value.keys() <= _AROUND_A_CALL and isinstance(value.get("function"), dict):
        return value["function"]
    return value


def _is_call(value: Any, known: Collection[str]) -> bool:
    if not isinstance(value, dict) or "name" not in value:
        return False
    if value.keys() <= _OF_A_CALL:
        return True
    name = value["name"]
    return name in known if known and isinstance(name, str) else _has_arguments(value)


def _has_arguments(value: Mapping[str, Any]) -> bool:
    return any(key in value for key in _ARGUMENTS)
