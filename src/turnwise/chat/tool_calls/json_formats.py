"""Formats whose arguments are JSON: Hermes and Qwen, Cohere, Mistral, DeepSeek, Kimi, Llama 3, Harmony.

A call ends where its JSON value ends, so a closing mark inside a string does not end it. If the JSON cannot be decoded, or the
name is missing, the call becomes a `ToolCall` with an error, and parsing continues after the next closing mark or before the
next opening mark, whichever comes first; in a list of calls, with the next item. A missing closing mark is accepted at the end
of the text and before the next call.

Llama 3 writes a JSON object with name and parameters, without marks:

    {"name": "search", "parameters": {"query": "weather"}}

Every JSON object in the text is examined. It is a call if it has a name and no keys but those of a call, or if its name is that
of a tool on offer. OpenAI's shape, `{"type": "function", "function": {...}}`, is read as the object inside. An object inside
any other value is content. Text that is no JSON is a malformed call only if it begins like a call (`{"name":`); otherwise it is
content. Parsing continues at the next line, `;` or `<|python_tag|>` that is followed by the beginning of a call.

Harmony, the format of gpt-oss, writes a turn as messages with headers:

    <|start|>assistant<|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "weather"}<|call|>

The text of a turn begins after the generation prompt `<|start|>assistant`. A message with a recipient (`to=`) is a call, on any
channel. Of the other messages, those on the channel `analysis` are reasoning, the others content. If `<|message|>` is missing
or the body is no JSON object, the message is a malformed call, and parsing continues with the next message. Text without a
header is content.

Knows the text of a turn and the tools on offer. Does not know templates or tokens, and repairs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turnwise.chat.reasoning import ReasoningMarks, join_pieces
from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    MarkedFormat,
    ParsedCalls,
    ParsedText,
    ToolFormat,
    arguments_of,
    decode,
    name_and_arguments,
    skip_space,
    tool_names,
    well_formed_call,
    with_written_id,
)
from turnwise.types import ToolCall, ToolSchema

# JSON between marks: Hermes and Qwen, Cohere, Mistral, DeepSeek, Kimi


class JsonFormat(MarkedFormat):
    """An opening mark, JSON, a closing mark. A subclass that sets attributes in `__init__` calls `super().__init__` after."""

    closing_pattern: str
    """Regular expression of the closing mark; one that never matches if the format has none."""
    closing_mark = ""
    """The closing mark, for error messages."""
    name_key = "name"
    argument_keys: Sequence[str] = ("arguments",)
    """Keys that may hold the arguments, the format's own first."""
    wrong_key = "parameters"
    """A key that other formats use for the arguments: an error message names it."""
    id_key = ""
    """The key of the call's id; empty if the format has no ids."""
    item_pattern = ""
    """Regular expression of the beginning of a call in a list; empty: an object whose first key is `name_key`."""

    def __init__(self) -> None:
        opening, closing = self.opening_pattern, self.closing_pattern
        item = self.item_pattern or rf"\{{\s*[\"']{re.escape(self.name_key)}[\"']\s*:"
        self._end_pattern = re.compile(rf"\s*(?:{closing}|(?={opening})|\Z)")
        self._recovery_pattern = re.compile(rf"{closing}|(?={opening})|\Z")
        self._next_item_pattern = re.compile(rf",\s*(?={item})|(?={closing}|{opening}|\Z)")

    def read_json(self, text: str, begin: int) -> ParsedCalls:
        """An object `{"name": ..., "arguments": {...}}`, or a list of such objects, that begins at `begin`."""
        begin = skip_space(text, begin)
        if text.startswith("[", begin):
            return self._list(text, begin)
        try:
            value, end = decode(text, begin)
            name, arguments = self.name_and_arguments(value)
            after = self._end_of_call(text, end)
        except MalformedCall as problem:
            return self._skip_malformed(text, begin, problem)
        return [well_formed_call(name, arguments, text[begin:end], self._id(value))], after

    def _id(self, value: Mapping[str, Any]) -> str:
        id = value.get(self.id_key) if self.id_key else None
        return str(id) if isinstance(id, str | int) else ""

    def read_arguments(self, text: str, begin: int, name: str) -> ParsedCalls:
        """The arguments of the call `name`, as a JSON object that begins at `begin`; no arguments if the call ends there."""
        begin = skip_space(text, begin)
        if missing := self._end_pattern.match(text, begin):
            return [well_formed_call(name, {}, "")], missing.end()
        try:
            value, end = decode(text, begin)
            arguments = arguments_of(value)
            after = self._end_of_call(text, end)
        except MalformedCall as problem:
            return self._skip_malformed(text, begin, problem, name)
        return [well_formed_call(name, arguments, text[begin:end])], after

    def name_and_arguments(self, value: Any) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a decoded call."""
        return name_and_arguments(
            value, name_key=self.name_key, argument_keys=self.argument_keys, wrong_key=self.wrong_key
        )

    def _end_of_call(self, text: str, end: int) -> int:
        """The index after the call whose JSON ends at `end`. Raises MalformedCall if other text follows."""
        after = self._end_pattern.match(text, end)
        if after is None:
            follows = text[skip_space(text, end) :][:20]
            raise MalformedCall(f"{follows!r} follows the JSON; close the call there", end)
        return after.end()

    def _skip_malformed(self, text: str, begin: int, problem: MalformedCall, name: str = "") -> ParsedCalls:
        """The malformed call at `begin`, up to its closing mark or to the next call."""
        stop = self._recovery_pattern.search(text, begin)
        first, last = stop.span() if stop else (len(text), len(text))
        return [self.malformed(problem, text[begin:first], name)], last

    def _list(self, text: str, begin: int) -> ParsedCalls:
        calls, at = self._items(text, begin + 1)
        if not calls:
            return self._skip_malformed(text, begin, MalformedCall("the list is empty", begin))
        try:
            return calls, self._end_of_call(text, at)
        except MalformedCall as problem:
            rest, at = self._skip_malformed(text, at, problem)
            return [*calls, *rest], at

    def _items(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """The calls of a list whose first item begins at `at`, and the index after the list."""
        calls: list[ToolCall] = []
        while True:
            at = skip_space(text, at)
            if text.startswith("]", at):
                return calls, at + 1
            if at == len(text):
                return calls, at
            try:
                value, end = decode(text, at)
                after = skip_space(text, end)
                if text[after : after + 1] not in ("", ",", "]"):
                    raise MalformedCall(
                        f"{text[after : after + 20]!r} follows a call in the list, where a comma or the end of the list must be",
                        after,
                    )
            except MalformedCall as problem:
                item = None if problem.give_up else self._next_item_pattern.search(text, at)
                end, after = item.span() if item else (len(text), len(text))
                written = text[at:end].rstrip()
                calls.append(self.malformed(problem, written.removesuffix("]")))
                at = after
                if item is None or not item[0]:
                    return calls, at
                continue
            try:
                name, arguments = self.name_and_arguments(value)
                calls.append(well_formed_call(name, arguments, text[at:end], self._id(value)))
            except MalformedCall as problem:
                calls.append(self.malformed(problem, text[at:end]))
            at = after + 1 if text.startswith(",", after) else after


class Hermes(JsonFormat):
    """Qwen2.5, Qwen3, Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

    Several calls may follow each other, with text before and between them.
    """

    name = "hermes"
    example = '<tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>'
    opening_pattern, closing_pattern, closing_mark = "<tool_call>", "</tool_call>", "</tool_call>"

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        return self.read_json(text, mark.end())


class Cohere2(JsonFormat):
    """Command A and R7B: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`."""

    name = "cohere2"
    example = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "<tool>", "parameters": {...}}]<|END_ACTION|>'
    opening_pattern, closing_pattern, closing_mark = r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", "<|END_ACTION|>"
    name_key, argument_keys, wrong_key = "tool_name", ("parameters",), "arguments"
    id_key = "tool_call_id"
    item_pattern = r"\{\s*[\"']tool_(?:call_id|name)[\"']\s*:"

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        return self.read_json(text, mark.end())


class Mistral(JsonFormat):
    """Mistral, Magistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, since 2025 `[TOOL_CALLS]name[ARGS]{...}`."""

    name = "mistral"
    example = '[TOOL_CALLS][{"name": "<tool>", "arguments": {...}}] or [TOOL_CALLS]<tool>[ARGS]{...}'
    opening_pattern, closing_pattern = r"\[TOOL_CALLS\]", r"(?!)"
    id_key = "id"
    _HEAD = re.compile(r"(?P<name>[^\s\[\]{}\"']+)\s*(?:\[CALL_ID\](?P<id>[^\[{\s]*))?\s*(?:\[ARGS\])?")

    def _end_of_call(self, text: str, end: int) -> int:
        return end  # there is no closing mark: the text that follows is content

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        begin = skip_space(text, mark.end())
        head = self._HEAD.match(text, begin)
        if head is None:
            return self.read_json(text, begin)
        return with_written_id(self.read_arguments(text, head.end(), head["name"]), head["id"])


class NameThenJson(JsonFormat):
    """An opening mark, the name, the arguments as JSON, a closing mark.

    Every opening mark in a turn is a call or a malformed call: a mark that also stands in other text (`<<` in `1 << 2`) needs a
    look-ahead for the name.
    """

    head_pattern: re.Pattern[str]
    """The text from the opening mark to the arguments, with the group `name`, and the group `id` if the format has ids."""

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        head = self.head_pattern.match(text, mark.end())
        if head is None:
            return self._skip_malformed(text, mark.end(), MalformedCall("the name of the tool is missing", mark.end()))
        return with_written_id(self.read_arguments(text, head.end(), head["name"]), head.groupdict().get("id"))


class DeepSeek(NameThenJson):
    """DeepSeek V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, fenced JSON, `<｜tool▁call▁end｜>`.
    V3.1: `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`.

    All calls of a turn are between `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, which may be missing.
    """

    name = "deepseek"
    example = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><tool><｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    )
    opening_pattern = "<｜tool▁call▁begin｜>"
    closing_pattern, closing_mark = (
        "(?:```\\s*)?(?:<｜tool▁call▁end｜>|(?=<｜tool▁calls▁end｜>))|```\\s*\\Z",
        "<｜tool▁call▁end｜>",
    )
    ignored_pattern = "<｜tool▁calls▁(?:begin|end)｜>"
    head_pattern = re.compile(
        r"\s*(?:function<｜tool▁sep｜>\s*)?(?P<name>[^\s<{}`\"']+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?"
    )


class Kimi(NameThenJson):
    """Kimi K2: `<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`.

    All calls of a turn are between `<|tool_calls_section_begin|>` and `<|tool_calls_section_end|>`, which may be missing.
    """

    name = "kimi"
    example = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.<tool>:0<|tool_call_argument_begin|>{...}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    opening_pattern = r"<\|tool_call_begin\|>"
    closing_pattern, closing_mark = r"(?:<\|tool_call_end\|>|(?=<\|tool_calls_section_end\|>))", "<|tool_call_end|>"
    ignored_pattern = r"<\|tool_calls_section_(?:begin|end)\|>"
    head_pattern = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{}:\"']+)(?::\d+)?)"
        r"\s*(?:<\|tool_call_argument_begin\|>|(?=<\|tool_call_end\|>))"
    )


# Llama 3: JSON objects without marks

_LLAMA3_BEGINS = r"\{\s*[\"'](?:name|type|function)[\"']\s*:"
_CALL = re.compile(_LLAMA3_BEGINS)
# possessive and with a look-behind, so that a run of white space is scanned once and not from each of its characters
_NEXT = re.compile(rf"(?:(?<!\s)[^\S\n]*+\n|;|<\|python_tag\|>)\s*+(?={_LLAMA3_BEGINS})")
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


# Harmony: messages with headers

_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
_PLAIN_TEXT_ENDS = re.compile(rf"{_ENDS.pattern}|(?=<\|channel\|>)")
_HARMONY_BEGINS = re.compile(r"\s*(?:<\|(?:start|channel|message)\|>|to=[^\s<]+\s*<\|)")
_HEADER = re.compile(r"[^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*(?P<message><\|message\|>)?")
_TO = re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(?P<name>\w+)")
_AFTER = re.compile(r"\s*(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)")


class Harmony(ToolFormat):
    """gpt-oss: messages with headers."""

    name = "harmony"
    example = "<|start|>assistant<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"

    def read(self, text: str, *, thinking: bool, tools: Sequence[ToolSchema], marks: ReasoningMarks) -> ParsedText:
        content: list[str] = [""]
        reasoning: list[str] = [""]
        channels = {
            "analysis",
            *(channel_mark["name"] for opening, _ in marks.own if (channel_mark := _CHANNEL.search(opening))),
        }
        calls: list[ToolCall] = []
        at = self._body(text, 0, reasoning) if thinking else 0
        while at < len(text):
            header = _HEADER.match(text, at) if _HARMONY_BEGINS.match(text, at) else None
            if header is None:  # text without a header
                at = self._body(text, at, content, ends=_PLAIN_TEXT_ENDS)
                continue
            to, channel = _TO.search(header[0]), _CHANNEL.search(header[0])
            if to is not None:
                call, at = self._call(text, header, to["name"])
                calls.append(call)
            else:
                is_reasoning = channel is not None and channel["name"] in channels
                at = self._body(text, header.end(), reasoning if is_reasoning else content)
        return ParsedText(
            content=join_pieces([*content, ""]),
            reasoning=join_pieces([*reasoning, ""]),
            calls=tuple(calls),
        )

    def _body(self, text: str, at: int, into: list[str], *, ends: re.Pattern[str] = _ENDS) -> int:
        """Append the text of the message at `at` to `into`, and return the index of the next message."""
        first, last = _end(text, at, ends)
        into.append(text[at:first])
        return last

    def _call(self, text: str, header: re.Match[str], name: str) -> tuple[ToolCall, int]:
        begin = header.end()
        try:
            if header["message"] is None:
                raise MalformedCall("<|message|> is missing after the header", begin)
            if missing := _AFTER.match(text, begin):
                return well_formed_call(name, {}, ""), missing.end()
            value, end = decode(text, skip_space(text, begin))
            arguments = arguments_of(value)
            after = _AFTER.match(text, end)
            if after is None:
                raise MalformedCall(f"{text[end : end + 20]!r} follows the JSON; close the call there", end)
            return well_formed_call(name, arguments, text[begin:end]), after.end()
        except MalformedCall as problem:
            first, last = _end(text, begin)
            return self.malformed(problem, text[begin:first], name), last


def _end(text: str, at: int, ends: re.Pattern[str] = _ENDS) -> tuple[int, int]:
    """The start and the end of the closing mark of the message around `at`."""
    end = ends.search(text, at)
    return end.span() if end else (len(text), len(text))
