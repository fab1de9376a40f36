"""Learned formats in which calls are written as in Python, between marks: `<functions>[f(key="value")]</functions>`."""

from __future__ import annotations

import re
from dataclasses import replace

from turnwise.chat.tool_calls.learned.marks import NEVER, CallMarks, CallSpan, find_marks, flexible, is_mark
from turnwise.chat.tool_calls.learned.probe import LEARNED, TOOL, ProbeWriter
from turnwise.chat.tool_calls.parsing import ToolFormat
from turnwise.chat.tool_calls.pythonic import PythonCalls

__all__ = ["learn_python"]

_CALL = re.compile(rf"{TOOL}\s*\(\s*alpha\s*=.*?value[bd]['\"]?\s*\)", re.DOTALL)


class _Python(PythonCalls):
    name = LEARNED

    def __init__(self, marks: CallMarks) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.opening_pattern = flexible(marks.opening.removesuffix("[").rstrip())
        self.closing_pattern = flexible(marks.closing.removeprefix("]").lstrip()) or NEVER
        super().__init__()


def learn_python(written: ProbeWriter) -> ToolFormat | None:
    """The format, if calls are written as in Python between two marks."""

    def find(text: str, at: int) -> CallSpan | None:
        call = _CALL.search(text, at)
        return call and CallSpan(call.start(), call.end(), (call.end() - 1, call.end() - 1))

    marks = find_marks(written, find)
    if marks is None or not is_mark(marks.opening.removesuffix("[")) or not marks.closing.removeprefix("]"):
        return None
    return _Python(replace(marks, example=re.sub(r"\(.*\)", "(<name>=<value>, ...)", marks.example, flags=re.DOTALL)))
