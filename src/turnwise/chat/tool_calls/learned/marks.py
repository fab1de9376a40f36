"""Finds the marks around calls by comparing a turn with one probe call and a turn with two.

one     <calls> <call> CALL </call> </calls>
two     <calls> <call> CALL </call> <call> CALL </call> </calls>
                            ^^^^^^^^^^^^^^ between
opening <call>, closing </call>, around (<calls>, </calls>)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from turnwise.chat.tool_calls.learned.probe import FIRST, SECOND, TOOL, ProbeWriter

__all__ = ["NEVER", "CallMarks", "CallSpan", "find_marks", "flexible", "is_mark", "split_marks"]

NEVER = r"(?!)"
"""A regular expression that matches nothing."""
_BRACKETS = tuple("<[{(|｜◁")


@dataclass(frozen=True, slots=True)
class CallSpan:
    """Where a call is in a text, without its marks: indices `start` to `end`."""

    start: int
    end: int
    arguments: tuple[int, int]
    """Start and end of the arguments."""


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The texts around calls."""

    opening: str
    closing: str
    around: tuple[str, ...]
    """Texts before the first call and after the last call of a turn."""
    example: str
    """A call as the template writes it."""

    @property
    def ignored_pattern(self) -> str:
        """For `MarkedFormat.ignored_pattern`."""
        return "|".join(flexible(text) for text in self.around if text.strip())


def find_marks(written: ProbeWriter, find: Callable[[str, int], CallSpan | None]) -> CallMarks | None:
    """The marks around the calls that `find(text, start)` finds; None if there is no call."""
    single = written(FIRST)
    call = find(single, 0)
    if call is None:
        return None
    example = _example(single, call)
    two = written(FIRST, SECOND)
    first = find(two, 0) if two else None
    second = find(two, first.end) if first is not None else None
    if first is not None and second is not None:
        before, between, after = two[: first.start], two[first.end : second.start], two[second.end :]
        closing, opening = split_marks(before, between, after)
        if opening.strip():
            around = (before[: len(before) - len(opening)].strip(), after[len(closing) :].strip())
            return CallMarks(opening.strip(), closing.strip(), around, example)
    # the template takes one call only, or writes all calls between one pair of marks
    return CallMarks(single[: call.start].strip(), single[call.end :].strip(), (), example)


def _example(text: str, call: CallSpan) -> str:
    start, end = call.arguments
    example = (
        text[:start].replace(TOOL, "<tool>")
        + ("{...}" if text[start] == "{" else text[start:end])
        + text[end:].replace(TOOL, "<tool>")
    )
    return example.replace("alpha", "<name>").replace("valuea", "<value>").strip()


def split_marks(before: str, between: str, after: str) -> tuple[str, str]:
    """Split the text between two calls into the closing mark of the first, which `after` begins with too, and the opening mark
    of the second, which `before` ends with too.

    If the two overlap, because both begin with the same bracket, the second mark begins after white space or at a bracket.
    """
    longest_closing = len(_common_start(between, after))
    earliest_opening = len(between) - len(_common_end(before, between))
    if longest_closing < earliest_opening:  # there is a separator between the two marks
        return between[:longest_closing], between[earliest_opening:]
    candidates = range(longest_closing, earliest_opening - 1, -1)
    split = next((n for n in candidates if between[n - 1 : n].isspace()), None)
    if split is None:
        split = next((n for n in reversed(candidates) if between[n : n + 1] in _BRACKETS), earliest_opening)
    return between[:split], between[split:]


def _common_start(left: str, right: str) -> str:
    length = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    return left[:length]


def _common_end(left: str, right: str) -> str:
    return _common_start(left[::-1], right[::-1])[::-1]


def is_mark(text: str) -> bool:
    """Whether a text can mark calls: it has letters or digits, and characters that are not used in prose."""
    return bool(re.search(r"\w", text) and re.search(r"[^\w\s,.;:!?'\"()-]", text))


def flexible(text: str) -> str:
    """A regular expression for a text with any amount of white space in place of its white space."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+", text))
