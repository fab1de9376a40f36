"""Learned formats in which the arguments are a JSON object after the name.

<|call|>f<|args|>{...}<|end|>           between marks
f                                       without marks (GLM-4): the first line of the turn is the name of a tool on offer
{...}
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise.chat.tool_calls.json_formats import NameThenJson
from turnwise.chat.tool_calls.learned.json_values import equals_arguments, json_values
from turnwise.chat.tool_calls.learned.marks import NEVER, CallMarks, CallSpan, find_marks, flexible, is_mark
from turnwise.chat.tool_calls.learned.probe import FIRST, LEARNED, SECOND, TOOL, ProbeWriter
from turnwise.chat.tool_calls.parsing import ParsedCalls, ToolFormat, tool_names
from turnwise.types import ToolSchema

__all__ = ["learn_name_first", "learn_unmarked_name"]


class _NameFirst(NameThenJson):
    """An opening mark, the name, a separator, the arguments as JSON, and perhaps a closing mark."""

    name = LEARNED

    def __init__(self, marks: CallMarks, separator: str) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.opening_pattern, self.closing_mark = flexible(marks.opening), marks.closing
        self.closing_pattern = flexible(marks.closing) if marks.closing else NEVER
        self.head_pattern = re.compile(rf"\s*(?P<name>[\w.\-]+)\s*{flexible(separator.strip())}")
        super().__init__()

    def _end_of_call(self, text: str, end: int) -> int:
        return super()._end_of_call(text, end) if self.closing_mark else end


def learn_name_first(written: ProbeWriter) -> ToolFormat | None:
    """The format, if calls are the name and then a JSON object, after an opening mark."""

    def find(text: str, at: int) -> CallSpan | None:
        for start, end, value in json_values(text, at):
            name = text.rfind(TOOL, at, start)
            if name >= 0 and (equals_arguments(value, FIRST) or equals_arguments(value, SECOND)):
                return CallSpan(name, end, (start, end))
        return None

    text = written(FIRST)
    call, marks = find(text, 0), find_marks(written, find)
    if call is None or marks is None or not is_mark(marks.opening):
        return None
    return _NameFirst(marks, text[call.start + len(TOOL) : call.arguments[0]])


class _UnmarkedName(NameThenJson):
    """The name of a tool on offer on the first line of the turn, then the arguments as a JSON object. One call in a turn."""

    name = LEARNED
    example = "<tool>\n{...}"
    opening_pattern = r"\A\s*(?=[\w.\-]+[^\S\n]*\n\s*\{)"
    closing_pattern, closing_mark = NEVER, ""
    head_pattern = re.compile(r"(?<![\w.\-])(?P<name>[\w.\-]+)[^\S\n]*\n\s*(?=\{)")

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        known = tool_names(tools)
        head = self.head_pattern.match(text, mark.end())
        if head is None or head["name"] not in known:
            return [], mark.end()  # content
        calls, end = super().read_calls(text, mark, tools)
        second = next((match for match in self.head_pattern.finditer(text, end) if match["name"] in known), None)
        if second is None:
            return calls, end
        return [*calls, self.malformed("only one call in a turn is allowed", text[end:], second["name"])], len(text)

    def _end_of_call(self, text: str, end: int) -> int:
        return end


def learn_unmarked_name(written: ProbeWriter) -> ToolFormat | None:
    """The format, if the first line of the turn is the name and a JSON object follows."""
    return _UnmarkedName() if re.match(rf"\s*{TOOL}[^\S\n]*\n\s*\{{", written(FIRST)) else None
