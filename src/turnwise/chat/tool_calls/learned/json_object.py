"""Learned formats in which a call is a JSON object that holds the name.

<TOOLCALL>[{"name": "f", "arguments": {...}}, {"name": "g", "arguments": {...}}]</TOOLCALL>
<call>{"function": {"name": "f", "parameters": {...}}}</call>
<call>{"f": {...}}</call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.tool_calls.json_formats import JsonFormat
from turnwise.chat.tool_calls.json_text import arguments_of, decode, name_and_arguments
from turnwise.chat.tool_calls.learned.json_values import equals_arguments, json_values
from turnwise.chat.tool_calls.learned.marks import NEVER, CallMarks, CallSpan, find_marks, flexible, is_mark
from turnwise.chat.tool_calls.learned.probe import FIRST, LEARNED, TOOL, Arguments, ProbeWriter
from turnwise.chat.tool_calls.llama3 import Llama3
from turnwise.chat.tool_calls.parsing import MalformedCall, ParsedCalls, ToolFormat, skip_space
from turnwise.types import ToolCall, ToolSchema

__all__ = ["learn_json_object"]

_NEXT_OBJECT = re.compile(r"\s*,?\s*(?=\{)")


@dataclass(frozen=True, slots=True)
class _Shape:
    """Where name and arguments are in a decoded call."""

    inside: str | None
    """The key of the object that holds them; None if it is the call itself."""
    name: str | None
    """The key of the name; None if the name is the only key, and the arguments are its value."""
    arguments: str
    """The key of the arguments."""

    def name_and_arguments(self, value: Any) -> tuple[str, Arguments]:
        """Name and arguments of a decoded call. Raises MalformedCall."""
        if self.inside is not None and isinstance(value, dict):
            value = value.get(self.inside, value)
        if self.name is not None:
            wrong_key = "arguments" if self.arguments == "parameters" else "parameters"
            return name_and_arguments(value, name_key=self.name, argument_keys=(self.arguments,), wrong_key=wrong_key)
        if not isinstance(value, dict) or len(value) != 1:
            raise MalformedCall("the call must be an object with the tool's name as its only key", 0)
        ((name, arguments),) = value.items()
        return name, arguments_of(arguments)


def _find_shape(value: Any, inside: str | None = None) -> _Shape | None:
    """The shape of a decoded probe call with the arguments `FIRST`."""
    if not isinstance(value, dict):
        return None
    if list(value) == [TOOL]:
        return _Shape(inside, None, "")
    name = next((key for key, item in value.items() if item == TOOL), None)
    arguments = next((key for key, item in value.items() if equals_arguments(item, FIRST)), None)
    if name is not None and arguments is not None:
        return _Shape(inside, name, arguments)
    if inside is None:
        return next((shape for key, item in value.items() if (shape := _find_shape(item, key))), None)
    return None


class _JsonObjects(JsonFormat):
    """Objects that hold the name, one after the other or in a list, between marks."""

    name = LEARNED

    def __init__(self, marks: CallMarks, shape: _Shape) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.opening_pattern, self.closing_mark = flexible(marks.opening), marks.closing
        self.closing_pattern = flexible(marks.closing) if marks.closing else NEVER
        self.name_key = shape.name or "name"
        self._shape = shape
        super().__init__()

    def name_and_arguments(self, value: Any) -> tuple[str, Arguments]:
        return self._shape.name_and_arguments(value)

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        at = skip_space(text, mark.end())
        calls: list[ToolCall] = []
        while True:
            new_calls, end = self.read_json(text, at)
            calls += new_calls
            following = _NEXT_OBJECT.match(text, end) if new_calls and new_calls[-1].error is None else None
            if following is None:
                return calls, end
            at = following.end()

    def _end_of_call(self, text: str, end: int) -> int:
        following = _NEXT_OBJECT.match(text, end)
        return end if following or not self.closing_mark else super()._end_of_call(text, end)


def learn_json_object(written: ProbeWriter) -> ToolFormat | None:
    """The format, if calls are JSON objects that hold the name. Without an opening mark it is Llama 3's format."""

    def find(text: str, at: int) -> CallSpan | None:
        for start, end, value in json_values(text, at):
            items = value if isinstance(value, list) else [value]
            if items and all(isinstance(item, dict) for item in items) and TOOL in text[start:end]:
                return CallSpan(start, end, (start, start))
        return None

    text = written(FIRST)
    call = find(text, 0)
    marks = None if call is None else find_marks(written, find)
    if call is None or marks is None:
        return None
    value, _ = decode(text, call.start)
    shape = _find_shape(value[0] if isinstance(value, list) else value)
    if shape is None:
        return None
    example = re.sub(r"\{[^{}]*\bvaluea\b[^{}]*\}", "{...}", text).replace(TOOL, "<tool>").strip()
    return _JsonObjects(replace(marks, example=example), shape) if is_mark(marks.opening) else Llama3(example)
