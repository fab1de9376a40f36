"""Formats with marks around each argument and values without a type: Qwen3-Coder, GLM, Muse Glimmer.

Such a format cannot escape its own marks inside a value. Rule: a value ends at the first closing mark of a value that is
followed by another argument, by the closing mark of the call, or by the end of the text. So a value may hold any single mark,
but not `</parameter></function>` in a row, and not the opening of another call. The tool's schema decides the type of a value.

    <tool_call>
    <function=search>
    <parameter=query>
    how to write </parameter> in a value
    </parameter>
    </function>
    </tool_call>                            search(query="how to write </parameter> in a value")

Malformed calls: if the name or the closing mark of a call is missing, or a value is not closed, the call becomes a `ToolCall`
with an error; parsing continues after its closing mark or before the next call. The arguments of such a call are not used,
because more arguments may have been about to follow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.parsing import MalformedCall, MarkedFormat, ParsedCalls, skip_space, well_formed_call
from turnwise.chat.tool_calls.untyped import properties, typed
from turnwise.types import ToolSchema

__all__ = ["Glm", "MarkedArguments", "MuseGlimmer", "Qwen3Coder"]

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
                raise MalformedCall(f"{self.closing_mark} is missing", limit)
            shown = min(begin + _SHOWN, limit)
            closing = self.end_pattern.search(text, begin, shown + len(self.closing_mark))
            other = text[begin : closing.start() if closing and closing.start() > begin else shown].rstrip()
            raise MalformedCall(f"{other!r} is not an argument; write an argument or {self.closing_mark} there", at)
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
