"""What all formats of tool calls share: the interface, the result, the scan of a turn's text, and JSON written by a model.

A turn is scanned once, from left to right, for the next mark. The opening mark of reasoning begins a reasoning block, in which
nothing is a call. The opening mark of a call passes control to the format, which returns the index after the call, so marks
inside arguments do not count. All other text is content. Invariant: no text is scanned twice, so the cost is linear in its
length, also for hostile text.

    Let me see.<tool_call>{"name": "f", "arguments": {}}</tool_call>
    content "Let me see.", calls (f)

JSON is decoded at any position of a text, with error messages for the model. NaN, Infinity and unpaired surrogates are refused,
because other programs could not read them from a JSON file. Line breaks in strings are accepted. Nothing is repaired: JSON with
an error is a malformed call. Does not know any single format.
"""

from __future__ import annotations

import abc
import functools
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.reasoning import KNOWN, ReasoningMarks, join_pieces
from turnwise.types import Message, ToolCall, ToolSchema

# Formats: interface, result and scan

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


class ToolFormat(abc.ABC):
    """Parses the text of a turn. A subclass defines `read`."""

    name: str
    example: str
    """A well-formed call, for the error message of a malformed call."""

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
        parsed = self.read(text, thinking=thinking, tools=tools, marks=marks)
        return replace(parsed, calls=assign_ids(parsed.calls, first_id))

    @abc.abstractmethod
    def read(self, text: str, *, thinking: bool, tools: Sequence[ToolSchema], marks: ReasoningMarks) -> ParsedText:
        """What `parse` returns, before the calls get their ids."""

    def malformed(self, problem: MalformedCall | str, text: str, name: str = "") -> ToolCall:
        """A malformed call, with an error message for the model."""
        return malformed_call(problem, text, example=self.example, name=name)


class MalformedCall(ValueError):
    """Why a call is malformed. `at` is the index in the text where the defect was found."""

    def __init__(self, message: str, at: int, *, give_up: bool = False) -> None:
        super().__init__(message)
        self.at = at
        self.give_up = give_up
        """Whether parsing should not look for another call nearby, because that could take quadratic time."""


class MarkedFormat(ToolFormat):
    """A format whose calls begin with an opening mark. A subclass defines the mark and parses a call from there."""

    opening_pattern: str
    """Regular expression of the opening mark of a call."""
    ignored_pattern: str = ""
    """Regular expression of marks that are neither content nor part of a call, such as those around all calls of a turn."""

    def read(self, text: str, *, thinking: bool, tools: Sequence[ToolSchema], marks: ReasoningMarks) -> ParsedText:
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
            calls=tuple(calls),
        )

    @abc.abstractmethod
    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        """The calls that begin with the opening mark `mark`, and the index after them."""


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
    error = f"{_UNREADABLE}{problem}{_WRITE_IT}{example}"
    return ToolCall(id="", name=name, arguments={}, text=text.strip(), error=error)


_UNREADABLE = "this tool call cannot be parsed: "
_WRITE_IT = ". Write it as "


def example_at_end(message: Message, format: ToolFormat) -> str:
    """The example of a call with which a message with the error of a malformed call ends; empty for any other message."""
    content = message.get("content")
    if not isinstance(content, str) or not content.startswith(f"Error: {_UNREADABLE}"):
        return ""
    return format.example if content.endswith(f"{_WRITE_IT}{format.example}") else ""


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


# JSON that a model has written

_SPACE: Callable[[str, int], re.Match[str] | None] = re.compile(r"\s*").match


def skip_space(text: str, at: int) -> int:
    """The index of the first character from `at` on that is not white space."""
    space = _SPACE(text, at)
    return space.end() if space else at


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
