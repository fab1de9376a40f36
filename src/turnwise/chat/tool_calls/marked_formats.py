"""Formats with marks around keys and values: Qwen3-Coder, GLM, Muse Glimmer, Gemma.

The first three write values without a type, and cannot escape their own marks inside a value. Rule: a value ends at the first
closing mark of a value that is followed by another argument, by the closing mark of the call, or by the end of the text. So a
value may hold any single mark, but not `</parameter></function>` in a row, and not the opening of another call. The tool's JSON
schema decides the type of a value.

    <tool_call>
    <function=search>
    <parameter=query>
    how to write </parameter> in a value
    </parameter>
    </function>
    </tool_call>                            search(query="how to write </parameter> in a value")

If the name or the closing mark of a call is missing, or a value is not closed, the call becomes a `ToolCall` with an error;
parsing continues after its closing mark or before the next call. The arguments of such a call are not used, because more
arguments may have been about to follow.

Gemma writes `call:name{key:value,...}` between marks, with unquoted keys and with marks around strings:

    <|tool_call>call:search{query:<|"|>weather<|"|>,days:3}<tool_call|>

A string cannot hold its own mark. JSON strings are accepted too. After a malformed call, parsing continues after the closing
mark, or before the next call if there is no closing mark before it. A call without arguments and without a closing mark is
malformed.

Knows the text of a turn and the schemas of the tools on offer. Does not know templates or tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    MarkedFormat,
    ParsedCalls,
    decode,
    decode_all,
    skip_space,
    well_formed_call,
)
from turnwise.types import ToolSchema

# Types: the tool's JSON schema decides the type of a value that is written as plain text

_PYTHON_CONSTANTS = {"True": True, "False": False, "None": None}  # templates write values with Jinja's `string` filter
_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "array": list,
    "object": dict,
}


def properties(tools: Sequence[ToolSchema], name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters, by name; empty if the tool is not on offer or declares no parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            declared = parameters.get("properties") if isinstance(parameters, dict) else None
            return declared if isinstance(declared, dict) else {}
    return {}


def typed(text: str, schema: Any) -> Any:
    """The value that a text stands for, by the schema of its parameter.

    - The schema declares a string: the text itself, also if it looks like `null` or `3`.
    - Otherwise: the value if the text is JSON or Python's True, False or None; the text itself if not.
    - The schema declares a string among other types: JSON counts only if its value has one of the declared types.
    """
    declared = _declared(schema)
    if declared == {"string"}:
        return text
    stripped = text.strip()
    if stripped in _PYTHON_CONSTANTS:
        value = _PYTHON_CONSTANTS[stripped]
    else:
        try:
            value = decode_all(stripped)
        except MalformedCall:
            return text
    if "string" in declared and not any(_is_a(value, kind) for kind in declared):
        return text
    return value


def _is_a(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return kind in _TYPES and isinstance(value, _TYPES[kind])


def _declared(schema: Any) -> set[str]:
    """The types that a schema allows, by their JSON schema names; empty if it declares none."""
    if not isinstance(schema, dict):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else {kind for kind in kinds or [] if isinstance(kind, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or []:
            types |= _declared(choice)
    choices = schema.get("enum")
    if not types and isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        types = {"string"}
    if types and schema.get("nullable"):
        types.add("null")
    return types


# Values without a type: Qwen3-Coder, GLM, Muse Glimmer

_SHOWN = 20


class MarkedArguments(MarkedFormat):
    """An opening mark with the name, arguments between marks, a closing mark."""

    call_pattern: re.Pattern[str]
    """The beginning of a call up to its name, the group `name`. Stricter than `opening_pattern`."""
    end_pattern: re.Pattern[str]
    """The closing mark of a call, with the white space before it."""
    argument_pattern: re.Pattern[str]
    """The opening mark of an argument, with its name as the group `key`."""
    value_end_pattern: re.Pattern[str]
    """The closing mark of a value, if another argument, the end of the call or the end of the text follows."""
    recovery_pattern: re.Pattern[str]
    """The end of a malformed call: its closing mark, or the position before the next call."""
    closing_mark = ""
    """The closing mark of a call, for error messages."""
    value_on_own_lines = False
    """Whether a value is written on lines of its own: one line break before and one after it do not belong to it."""

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        call = self.call_pattern.match(text, mark.start())
        if call is None:
            return self._skip_malformed(
                text, mark.start(), mark.end(), MalformedCall("the name of the tool is missing", mark.end())
            )
        name = call["name"].strip()
        following = self.call_pattern.search(text, call.end())
        limit = following.start() if following else len(text)
        try:
            arguments, end = self._arguments(text, call.end(), limit, properties(tools, name))
        except MalformedCall as problem:
            return self._skip_malformed(text, mark.start(), problem.at, problem, name, limit)
        return [well_formed_call(name, arguments, text[mark.start() : end])], end

    def _arguments(self, text: str, at: int, limit: int, schemas: Any) -> tuple[dict[str, Any], int]:
        """The arguments that begin at `at`, and the index after the call. Raises MalformedCall."""
        arguments: dict[str, Any] = {}
        while argument := self.argument_pattern.match(text, at, limit):
            key = argument["key"].strip()
            value_ends = self.value_end_pattern.search(text, argument.end(), limit)
            if value_ends is None:
                raise MalformedCall(f"the value of {key!r} is not closed", argument.end())
            value = text[argument.end() : value_ends.start()]
            if self.value_on_own_lines:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, schemas.get(key))
            at = value_ends.end()
        closing = self.end_pattern.match(text, at, limit)
        if closing is None:
            begin = skip_space(text, at)
            if begin >= limit:
                raise MalformedCall("the end of the call is missing", limit)
            shown = min(begin + _SHOWN, limit)
            closing = self.end_pattern.search(text, begin, shown + len(self.closing_mark))
            other = text[begin : closing.start() if closing and closing.start() > begin else shown].rstrip()
            raise MalformedCall(f"{other!r} is not an argument; write an argument or close the call there", at)
        return arguments, closing.end()

    def _skip_malformed(
        self, text: str, start: int, at: int, problem: MalformedCall, name: str = "", limit: int | None = None
    ) -> ParsedCalls:
        limit = len(text) if limit is None else limit
        stop = self.recovery_pattern.search(text, at, limit)
        first, last = stop.span() if stop else (limit, limit)
        return [self.malformed(problem, text[start:first], name)], last


class Qwen3Coder(MarkedArguments):
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3:
    `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    `<tool_call>` may be missing, because the models often leave it out.
    """

    name = "qwen3_coder"
    example = "<tool_call>\n<function=<tool>>\n<parameter=<name>>\n<value>\n</parameter>\n</function>\n</tool_call>"
    opening_pattern = r"<tool_call>|<function=[^<>\n]+>"
    call_pattern = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>")
    end_pattern = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
    argument_pattern = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>")
    value_end_pattern = re.compile(r"</parameter>(?=\s*(?:<parameter=[^<>\n]+>|</function>|\Z))")
    recovery_pattern = re.compile(r"</tool_call>|(?=<tool_call>|<function=)|\Z")
    closing_mark = "</function>"
    value_on_own_lines = True


class Glm(MarkedArguments):
    """GLM 4.5 and later: `<tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>`."""

    name = "glm"
    example = "<tool_call><tool>\n<arg_key><name></arg_key>\n<arg_value><value></arg_value>\n</tool_call>"
    opening_pattern = "<tool_call>"
    call_pattern = re.compile(r"<tool_call>\s*(?P<name>[^\s<>{}\[\]\"']+)(?=\s*(?:<arg_key>|</tool_call>|\Z))")
    end_pattern = re.compile(r"\s*</tool_call>")
    argument_pattern = re.compile(r"\s*<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>")
    value_end_pattern = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")
    recovery_pattern = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
    closing_mark = "</tool_call>"


class MuseGlimmer(MarkedArguments):
    """Muse Glimmer (ATEM): `<atem:invoke name="f"><atem:parameter name="key">value</atem:parameter></atem:invoke>`."""

    name = "muse_glimmer"
    example = (
        '<atem:function_calls>\n<atem:invoke name="<tool>">\n<atem:parameter name="<name>"><value></atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    opening_pattern = "<atem:invoke\\b"
    ignored_pattern = r"</?atem:function_calls>| to=[^\s<]+<\|message\|>|<\|eom\|>"
    call_pattern = re.compile(r'<atem:invoke\s+name="(?P<name>[^"<>\n]+)">')
    end_pattern = re.compile(r"\s*</atem:invoke>")
    argument_pattern = re.compile(r'\s*<atem:parameter\s+name="(?P<key>[^"<>\n]+)">')
    value_end_pattern = re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter\s|</atem:invoke>|\Z))")
    recovery_pattern = re.compile(r"</atem:invoke>|(?=<atem:invoke\b)|\Z")
    closing_mark = "</atem:invoke>"


# Gemma

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_HEAD = re.compile(r"\s*call:(?P<name>[^\s{}<>:]+)\s*")
_KEY = re.compile(r"\s*(?P<key>[^\s:,{}\[\]<>\"'][^:,{}\[\]<>\"']*):")
_WORD = re.compile(r"[A-Za-z]+")
_MAX_DEPTH = 100  # of lists and objects inside each other


class _Gemma(MarkedFormat):
    quote: str
    """The mark before and after a string."""
    closing_mark: str

    def read_calls(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> ParsedCalls:
        begin, name = mark.end(), ""
        try:
            head = _HEAD.match(text, begin)
            if head is None:
                raise MalformedCall("call:<tool> does not follow", begin)
            name = head["name"]
            at = head.end()
            arguments: dict[str, Any] = {}
            if text.startswith("{", at):
                arguments, at = self._object(text, at + 1, 0)
            end = skip_space(text, at)
            if text.startswith(self.closing_mark, end):
                return [well_formed_call(name, arguments, text[begin:at])], end + len(self.closing_mark)
            if end < len(text) and not self._opening.match(text, end):
                raise MalformedCall(f"{text[end : end + 20]!r} follows the arguments; close the call there", end)
            if at == head.end():
                raise MalformedCall("the arguments are missing", at)
            return [well_formed_call(name, arguments, text[begin:at])], end
        except MalformedCall as problem:
            opens = self._opening.search(text, begin)
            limit = opens.start() if opens else len(text)
            close = text.find(self.closing_mark, begin, limit)
            stop = close if close >= 0 else limit
            return [self.malformed(problem, text[begin:stop], name)], stop + len(
                self.closing_mark
            ) if close >= 0 else limit

    @property
    def _opening(self) -> re.Pattern[str]:
        return re.compile(self.opening_pattern)  # cached by re

    # each method parses what begins at `at`, and returns it with the index after it; raises MalformedCall

    def _object(self, text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
        members: dict[str, Any] = {}
        at = skip_space(text, at)
        while not text.startswith("}", at):
            key, at = self._key(text, at)
            members[key], at = self._value(text, at, depth)
            at = self._next(text, at, "}")
        return members, at + 1

    def _list(self, text: str, at: int, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at = skip_space(text, at)
        while not text.startswith("]", at):
            value, at = self._value(text, at, depth)
            items.append(value)
            at = self._next(text, at, "]")
        return items, at + 1

    def _next(self, text: str, at: int, end: str) -> int:
        at = skip_space(text, at)
        if text.startswith(",", at):
            return skip_space(text, at + 1)
        if not text.startswith(end, at):
            raise MalformedCall(_unexpected(text, at, f", or {end}"), at)
        return at

    def _key(self, text: str, at: int) -> tuple[str, int]:
        if text.startswith((self.quote, '"'), at):
            key, at = self._string(text, at)
            at = skip_space(text, at)
            if not text.startswith(":", at):
                raise MalformedCall(_unexpected(text, at, ":"), at)
            return key, at + 1
        key = _KEY.match(text, at)
        if key is None:
            raise MalformedCall(_unexpected(text, at, "<name>:"), at)
        return key["key"].rstrip(), key.end()

    def _string(self, text: str, at: int) -> tuple[str, int]:
        if text.startswith('"', at):
            return decode(text, at)
        begin = at + len(self.quote)
        end = text.find(self.quote, begin)
        if end < 0:
            raise MalformedCall("a string is not closed", at)
        return text[begin:end], end + len(self.quote)

    def _value(self, text: str, at: int, depth: int) -> tuple[Any, int]:
        if depth > _MAX_DEPTH:
            raise MalformedCall("the arguments are nested too deeply", at)
        at = skip_space(text, at)
        if text.startswith((self.quote, '"'), at):
            return self._string(text, at)
        if text.startswith("{", at):
            return self._object(text, at + 1, depth + 1)
        if text.startswith("[", at):
            return self._list(text, at + 1, depth + 1)
        word = _WORD.match(text, at)
        if word and word[0] in _WORDS:
            return _WORDS[word[0]], word.end()
        if word or text[at : at + 1] not in set("-0123456789"):
            raise MalformedCall(_unexpected(text, at, f"a value, strings as {self.quote}text{self.quote}"), at)
        return decode(text, at)


def _unexpected(text: str, at: int, expected: str) -> str:
    actual = f"{text[at : at + 20]!r} is wrong" if at < len(text) else "the text ends"
    return f"{actual}; {expected} must be there"


class Gemma4(_Gemma):
    """Gemma 4: `<|tool_call>call:name{key:<|"|>text<|"|>,other:3}<tool_call|>`."""

    name = "gemma4"
    example = '<|tool_call>call:<tool>{<name>:<|"|><text><|"|>,<name>:<number>}<tool_call|>'
    opening_pattern, closing_mark, quote = r"<\|tool_call>", "<tool_call|>", '<|"|>'


class FunctionGemma(_Gemma):
    """FunctionGemma: `<start_function_call>call:name{key:<escape>text<escape>,other:3}<end_function_call>`."""

    name = "functiongemma"
    example = "<start_function_call>call:<tool>{<name>:<escape><text><escape>,<name>:<number>}<end_function_call>"
    opening_pattern, closing_mark, quote = "<start_function_call>", "<end_function_call>", "<escape>"
