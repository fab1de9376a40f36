"""Learned formats in which each argument is between marks.

<invoke name="f"><parameter name="key">value</parameter></invoke>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from turnwise.chat.tool_calls.learned.marks import (
    CallMarks,
    CallSpan,
    find_marks,
    flexible,
    is_mark,
    split_marks,
)
from turnwise.chat.tool_calls.learned.probe import FIRST, LEARNED, NUMBERS, TOOL, Arguments, ProbeWriter
from turnwise.chat.tool_calls.parsing import ToolFormat
from turnwise.chat.tool_calls.xml_formats import MarkedArguments

__all__ = ["learn_marked"]

_PARTS = re.compile(rf"{TOOL}|alpha|beta|value[a-d]|73[12]")
"""Name, keys and values of the probe calls."""


class _Marked(MarkedArguments):
    """An opening mark, the name, arguments between marks, a closing mark.

    `after_name` follows the name, `key_opening` precedes a key, `key_closings` follow it (for a string, for a number),
    `value_closing` follows a value, `call_closing` follows the last argument.
    """

    name = LEARNED

    def __init__(
        self,
        marks: CallMarks,
        *,
        after_name: str,
        key_opening: str,
        key_closings: Sequence[str],
        value_closing: str,
        call_closing: str,
    ) -> None:
        self.example, self.ignored_pattern = marks.example, marks.ignored_pattern
        self.closing_mark = call_closing.split()[0]
        key, end, value = flexible(key_opening), flexible(call_closing), flexible(value_closing.strip())
        key_end = "|".join(flexible(closing.rstrip(" \t\r\n")) for closing in key_closings)
        self.value_on_own_lines = all(closing.endswith("\n") for closing in key_closings) and value_closing.startswith(
            "\n"
        )
        self.opening_pattern = flexible(marks.opening)
        self.call_pattern = re.compile(rf"{self.opening_pattern}\s*(?P<name>[\w.\-]+)\s*{flexible(after_name)}")
        self.end_pattern = re.compile(rf"\s*{end}")
        self.argument_pattern = re.compile(rf"\s*{key}\s*(?P<key>[^<>\n\"]+?)\s*(?:{key_end})")
        self.value_end_pattern = re.compile(rf"{value}(?=\s*(?:{key}|{end}|\Z))")
        self.recovery_pattern = re.compile(rf"{end}|(?={self.opening_pattern})|\Z")


def learn_marked(written: ProbeWriter) -> ToolFormat | None:
    """The format, if each argument is between marks, after an opening mark and the name."""
    marks = find_marks(written, _find_call)
    if marks is None or not is_mark(marks.opening):
        return None
    before_key, before_value, before_second_key, before_second_value, after = _texts_between(written, FIRST)
    value_closing, key_opening = split_marks(before_key, before_second_key, after)
    closing = value_closing.strip()
    call_closing = marks.closing[len(closing) :].strip() if marks.closing.startswith(closing) else ""
    regular = before_value == before_second_value and is_mark(key_opening.strip())
    if not regular or not closing or not call_closing:
        return None
    # some templates write the type of the value after its key, so another text is there for numbers
    between_numbers = _texts_between(written, NUMBERS)
    key_closings = [before_value, between_numbers[1]] if len(between_numbers) > 1 else [before_value]
    example = written({"alpha": "valuea"}).replace(TOOL, "<tool>").replace("alpha", "<name>")
    return _Marked(
        replace(marks, example=example.replace("valuea", "<value>").strip()),
        after_name=before_key[: len(before_key) - len(key_opening)].strip(),
        key_opening=key_opening.strip(),
        key_closings=list(dict.fromkeys(key_closings)),
        value_closing=value_closing,
        call_closing=call_closing,
    )


def _find_call(text: str, at: int) -> CallSpan | None:
    parts = list(_PARTS.finditer(text, at))[:5]
    texts = [part[0] for part in parts]
    if texts[:1] != [TOOL] or texts[1::2] != ["alpha", "beta"]:
        return None
    return CallSpan(parts[0].start(), parts[4].end(), (parts[1].start(), parts[4].end()))


def _texts_between(written: ProbeWriter, arguments: Arguments) -> list[str]:
    """The texts after the name, first key, first value, second key and second value."""
    text = written(arguments)
    parts = list(_PARTS.finditer(text))[:5]
    ends = [*(part.start() for part in parts[1:]), len(text)]
    return [text[part.end() : end] for part, end in zip(parts, ends, strict=True)]
