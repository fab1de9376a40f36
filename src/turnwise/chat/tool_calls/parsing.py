"""What all formats of tool calls share: the interface, the result, and the scan of a turn's text.

A turn is scanned once, from left to right, for the next mark. The opening mark of reasoning begins a reasoning block, in which
nothing is a call. The opening mark of a call passes control to the format, which returns the index after the call, so marks
inside arguments do not count. All other text is content. No text is scanned twice, so the cost is linear in its length, also
for hostile text.

    Let me see.<tool_call>{"name": "f", "arguments": {}}</tool_call>
    content "Let me see.", calls (f)
"""

from __future__ import annotations

import abc
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turnwise.chat.tool_calls.reasoning import KNOWN, ReasoningMarks, join_pieces
from turnwise.types import ToolCall, ToolSchema

__all__ = [
    "MalformedCall",
    "MarkedFormat",
    "ParsedCalls",
    "ParsedText",
    "ToolFormat",
    "assign_ids",
    "malformed_call",
    "skip_space",
    "tool_names",
    "well_formed_call",
    "with_written_id",
]

ParsedCalls = tuple[Sequence[ToolCall], int]
"""The calls that begin at an opening mark, and the index after them. No calls: the text is content after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedText:
    """The parts of a turn's text."""

    content: str
    """Text that is neither reasoning nor a call."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """The calls in order, malformed calls included (`ToolCall.error`)."""


class ToolFormat(Protocol):
    """Parses the text of a turn."""

    name: str
    example: str
    """A well-formed call."""

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ReasoningMarks = KNOWN,
    ) -> ParsedText:
        """Parse the text of a turn. Never raises for malformed text: a malformed call has an error.

        Calls without an id get `call_<n>`, counted from `first_id`. `thinking`: the text begins inside a reasoning block,
        because the generation prompt has opened it. `tools` are the tools on offer, for formats in which values have no type.
        `marks` are the marks around reasoning.
        """
        ...


class MalformedCall(ValueError):
    """Why a call is malformed. `at` is the index in the text where the defect was found."""

    def __init__(self, message: str, at: int, *, give_up: bool = False) -> None:
        super().__init__(message)
        self.at = at
        self.give_up = give_up
        """Whether parsing should not look for another call nearby, because that could take quadratic time."""


class MarkedFormat(abc.ABC):
    """A format whose calls begin with an opening mark. A subclass defines the mark and parses a call from there."""

    name: str
    example: str
    """A well-formed call, for the error message of a malformed call."""
    opening_pattern: str
    """Regular expression of the opening mark of a call."""
    ignored_pattern: str = ""
    """Regular expression of marks that are neither content nor part of a call, such as those around all calls of a turn."""

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ReasoningMarks = KNOWN,
    ) -> ParsedText:
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[ToolCall] = []
        at = 0
        if thinking:
            block = marks.opened_block(text)
            reasoning.append(block.text)
            content.append("")
            at = block.end
        begin = at  # of the current piece of content
        pattern = _next_mark(marks, self.ignored_pattern, self.opening_pattern)
        while mark := pattern.search(text, at):
            if mark["reasoning"] is not None:
                block = marks.block_at(text, mark.start())
                reasoning.append(block.text)
                at = block.end
            elif mark["ignored"] is not None:
                at = mark.end()
            else:
                new_calls, at = self.read_calls(text, mark, tools)
                at = max(at, mark.start() + 1)  # always move on, whatever a format returns
                if not new_calls:
                    continue  # the text stays content
                calls.extend(new_calls)
            content.append(text[begin : mark.start()])
            begin = at
        content.append(text[begin:])
        return ParsedText(
            content=join_pieces(content).strip("\n"),
            reasoning=join_pieces(["", *reasoning, ""]),
            calls=assign_ids(calls, first_id),
        )

    @abc.abstractmethod
    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        """The calls that begin with the opening mark `mark`, and the index after them."""

    def malformed(self, problem: MalformedCall | str, text: str, name: str = "") -> ToolCall:
        """A malformed call, with an error message for the model."""
        return malformed_call(problem, text, example=self.example, name=name)


@functools.lru_cache(maxsize=64)
def _next_mark(marks: ReasoningMarks, ignored: str, call: str) -> re.Pattern[str]:
    """A pattern of all marks in a turn: the opening of reasoning, an ignored mark or header, the opening of a call."""
    headers = f"{marks.scaffold}|{ignored}" if ignored else marks.scaffold
    return re.compile(f"(?P<reasoning>{marks.opening})|(?P<ignored>{headers})|(?P<call>{call})")


def well_formed_call(name: str, arguments: dict[str, Any], text: str, written_id: str = "") -> ToolCall:
    """A call; `assign_ids` sets its id."""
    return ToolCall(id="", name=name, arguments=arguments, text=text.strip(), written_id=written_id)


def malformed_call(problem: MalformedCall | str, text: str, *, example: str, name: str = "") -> ToolCall:
    """A malformed call, with an error message for the model: the defect, and an example of a well-formed call."""
    error = f"this tool call cannot be parsed: {problem}. Write it as {example}"
    return ToolCall(id="", name=name, arguments={}, text=text.strip(), error=error)


def assign_ids(calls: Iterable[ToolCall], first_id: int) -> tuple[ToolCall, ...]:
    """The calls with ids: the id that the model wrote if it is short, plain and unique in the turn, otherwise `call_<n>`."""
    with_ids: list[ToolCall] = []
    taken: set[str] = set()
    for number, call in enumerate(calls, first_id):
        id = call.written_id
        if not _USABLE_ID.fullmatch(id) or id in taken:
            id = f"call_{number}"
        while id in taken:  # the model wrote `call_<n>` for an earlier call
            id += "x"
        taken.add(id)
        with_ids.append(replace(call, id=id))
    return tuple(with_ids)


# templates print the id in front of a tool's answer: the model must not be able to inject other text there
_USABLE_ID = re.compile(r"[\w.:/-]{1,64}", re.ASCII)


def with_written_id(parsed: ParsedCalls, id: str | None) -> ParsedCalls:
    """The same calls, the first with the id that the model wrote for it."""
    calls, end = parsed
    return ([replace(calls[0], written_id=id), *calls[1:]], end) if calls and id else parsed


def tool_names(tools: Sequence[ToolSchema]) -> frozenset[str]:
    """The names of the tools on offer."""
    functions = (tool.get("function", tool) for tool in tools)
    return frozenset(
        str(function["name"]) for function in functions if isinstance(function, dict) and "name" in function
    )


_SPACE: Callable[[str, int], re.Match[str] | None] = re.compile(r"\s*").match


def skip_space(text: str, at: int) -> int:
    """The index of the first character from `at` on that is not white space."""
    space = _SPACE(text, at)
    return space.end() if space else at
