"""Formats whose arguments are written one by one between marks, and untyped: Qwen3-Coder, GLM, Muse Glimmer.

Such a format has no way to write its own marks inside a value, so a rule has to decide: a value reaches to the first of its
closing marks that is followed by another argument or by the closing mark of the call, and the call ends there. So a value may
hold the closing marks of values and of calls, and the opening mark of an argument, but no closing mark of a value directly
before one of those, and no opening of another call. Words and thoughts after a call may hold anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.reading import Found, Problem, Tagged, skip_space, well_formed
from turnwise.chat.tool_calls.untyped import properties, typed
from turnwise.types import ToolSchema

__all__ = ["Glm", "MarkedArguments", "MuseGlimmer", "Qwen3Coder"]

_SHOWN = 20


class MarkedArguments(Tagged):
    """A mark with the name, arguments between marks, closing marks."""

    begins: re.Pattern[str]
    """A call that is certainly one, from its opening mark on; the group `name` is the tool's."""
    ends: re.Pattern[str]
    """What closes a call, with the white space in front."""
    argument: re.Pattern[str]
    """What opens an argument; the group `key` is its name."""
    value_ends: re.Pattern[str]
    """What closes an argument: its closing mark, where another argument, the end of the call or the end of the text follows."""
    gives_up: re.Pattern[str]
    """Where a call that cannot be read ends: at its closing mark, or before the next one opens."""
    says = ""
    """The closing marks, as a message shows them."""
    a_line = False
    """Whether a value stands on lines of its own: the line breaks around it are not its own."""

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        begins = self.begins.match(text, mark.start())
        if begins is None:
            return self._lost(text, mark.start(), mark.end(), Problem("its name is missing", mark.end()))
        name = begins["name"].strip()
        following = self.begins.search(text, begins.end())
        limit = following.start() if following else len(text)
        try:
            arguments, end = self._arguments(text, begins.end(), limit, properties(tools, name))
        except Problem as problem:
            return self._lost(text, mark.start(), problem.at, problem, name, limit)
        return [well_formed(name, arguments, text[mark.start() : end])], end

    def _arguments(self, text: str, at: int, limit: int, schemas: Any) -> tuple[dict[str, Any], int]:
        """The arguments that begin at `at`, and where the call ends. Raises Problem."""
        arguments: dict[str, Any] = {}
        while argument := self.argument.match(text, at, limit):
            key = argument["key"].strip()
            value_ends = self.value_ends.search(text, argument.end(), limit)
            if value_ends is None:
                raise Problem(f"the value of {key!r} is not closed", argument.end())
            value = text[argument.end() : value_ends.start()]
            if self.a_line:
                value = value.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed(value, schemas.get(key))
            at = value_ends.end()
        closing = self.ends.match(text, at, limit)
        if closing is None:
            begin = skip_space(text, at)
            if begin >= limit:
                raise Problem(f"{self.says} is missing", limit)
            shown = min(begin + _SHOWN, limit)
            closing = self.ends.search(text, begin, shown + len(self.says))
            stands = text[begin : closing.start() if closing and closing.start() > begin else shown].rstrip()
            raise Problem(f"{stands!r} stands where an argument or {self.says} should", at)
        return arguments, closing.end()

    def _lost(
        self, text: str, start: int, at: int, problem: Problem, name: str = "", limit: int | None = None
    ) -> Found:
        limit = len(text) if limit is None else limit
        stop = self.gives_up.search(text, at, limit)
        first, last = stop.span() if stop else (limit, limit)
        return [self.bad(problem, text[start:first], name)], last


class Qwen3Coder(MarkedArguments):
    """Qwen3-Coder, Qwen3.5 and later, Nemotron 3: `<tool_call>`, `<function=name>`, `<parameter=key>` and a value on its lines.

    `<tool_call>` may be missing, as the models forget it.
    """

    name = "qwen3_coder"
    how = "<tool_call>\n<function=<tool>>\n<parameter=<name>>\n<value>\n</parameter>\n</function>\n</tool_call>"
    opening = r"<tool_call>|<function=[^<>\n]+>"
    begins = re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^<>\n]+)>")
    ends = re.compile(r"\s*</function>(?:\s*</tool_call>)?")
    argument = re.compile(r"\s*<parameter=(?P<key>[^<>\n]+)>")
    value_ends = re.compile(r"</parameter>(?=\s*(?:<parameter=[^<>\n]+>|</function>|\Z))")
    gives_up = re.compile(r"</tool_call>|(?=<tool_call>|<function=)|\Z")
    says = "</function>"
    a_line = True


class Glm(MarkedArguments):
    """GLM 4.5 and later: `<tool_call>name`, `<arg_key>key</arg_key>`, `<arg_value>value</arg_value>`, `</tool_call>`."""

    name = "glm"
    how = "<tool_call><tool>\n<arg_key><name></arg_key>\n<arg_value><value></arg_value>\n</tool_call>"
    opening = "<tool_call>"
    begins = re.compile(r"<tool_call>\s*(?P<name>[^\s<>{}\[\]\"']+)(?=\s*(?:<arg_key>|</tool_call>|\Z))")
    ends = re.compile(r"\s*</tool_call>")
    argument = re.compile(r"\s*<arg_key>(?P<key>[^<>]+)</arg_key>\s*<arg_value>")
    value_ends = re.compile(r"</arg_value>(?=\s*(?:<arg_key>|</tool_call>|\Z))")
    gives_up = re.compile(r"</tool_call>|(?=<tool_call>)|\Z")
    says = "</tool_call>"


class MuseGlimmer(MarkedArguments):
    """Muse Glimmer's ATEM: `<atem:invoke name="name">`, `<atem:parameter name="key">value</atem:parameter>`, `</atem:invoke>`."""

    name = "muse_glimmer"
    how = (
        '<atem:function_calls>\n<atem:invoke name="<tool>">\n<atem:parameter name="<name>"><value></atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls>"
    )
    opening = "<atem:invoke\\b"
    scaffold = r"</?atem:function_calls>| to=[^\s<]+<\|message\|>|<\|eom\|>"
    begins = re.compile(r'<atem:invoke\s+name="(?P<name>[^"<>\n]+)">')
    ends = re.compile(r"\s*</atem:invoke>")
    argument = re.compile(r'\s*<atem:parameter\s+name="(?P<key>[^"<>\n]+)">')
    value_ends = re.compile(r"</atem:parameter>(?=\s*(?:<atem:parameter\s|</atem:invoke>|\Z))")
    gives_up = re.compile(r"</atem:invoke>|(?=<atem:invoke\b)|\Z")
    says = "</atem:invoke>"
