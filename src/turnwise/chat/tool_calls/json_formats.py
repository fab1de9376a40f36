"""Formats whose arguments are JSON: Hermes and Qwen, Cohere, Mistral, DeepSeek, Kimi.

The JSON decides where a call ends, so that a closing mark inside a string does not.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import arguments_of, decode, named
from turnwise.chat.tool_calls.reading import Found, Problem, Tagged, skip_space, well_formed, with_written_id
from turnwise.types import ToolCall, ToolSchema

__all__ = ["Cohere2", "DeepSeek", "Hermes", "JsonTagged", "Kimi", "Mistral", "NameFirst"]


class JsonTagged(Tagged):
    """A mark, JSON, a closing mark. The closing one may be missing at the end of the text and before the next call."""

    close: str
    """Regular expression of the closing mark; one that never matches where there is none."""
    closing = ""
    """The closing mark as a message shows it."""
    name_key = "name"
    argument_keys: Sequence[str] = ("arguments",)
    refused_key = "parameters"
    id_key = ""
    """Where a call has its id; empty where it has none."""

    def read_json(self, text: str, begin: int) -> Found:
        """An object, or a list of objects, with name and arguments."""
        begin = skip_space(text, begin)
        if text.startswith("[", begin):
            return self._list(text, begin)
        try:
            value, end = decode(text, begin)
            name, arguments = self.named(value)
            after = self._after_json(text, end)
        except Problem as problem:
            return self._lost(text, begin, problem)
        return [well_formed(name, arguments, text[begin:end], self._id(value))], after

    def _id(self, value: Mapping[str, Any]) -> str:
        id = value.get(self.id_key) if self.id_key else None
        return str(id) if isinstance(id, str | int) else ""

    def read_arguments(self, text: str, begin: int, name: str) -> Found:
        """The arguments of a call whose name was said before."""
        begin = skip_space(text, begin)
        if missing := self._after.match(text, begin):
            return [well_formed(name, {}, "")], missing.end()
        try:
            value, end = decode(text, begin)
            arguments = arguments_of(value)
            after = self._after_json(text, end)
        except Problem as problem:
            return self._lost(text, begin, problem, name)
        return [well_formed(name, arguments, text[begin:end])], after

    def named(self, value: Any) -> tuple[str, dict[str, Any]]:
        """Name and arguments of a decoded call."""
        return named(value, name_key=self.name_key, keys=self.argument_keys, refused=self.refused_key)

    @functools.cached_property
    def _after(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?:{self.close}|(?={self.opening})|\Z)")

    @functools.cached_property
    def _stop(self) -> re.Pattern[str]:
        return re.compile(rf"{self.close}|(?={self.opening})|\Z")

    @functools.cached_property
    def _next_item(self) -> re.Pattern[str]:
        key = re.escape(self.name_key)
        return re.compile(rf",\s*(?=\{{\s*[\"']{key}[\"']\s*:)|(?={self.close}|{self.opening}|\Z)")

    def _after_json(self, text: str, end: int) -> int:
        after = self._after.match(text, end)
        if after is None:
            follows = text[skip_space(text, end) :][:20]
            raise Problem(f"{follows!r} follows the JSON where {self.closing} should", end)
        return after.end()

    def _lost(self, text: str, begin: int, problem: Problem, name: str = "") -> Found:
        """A call that cannot be read: it goes on to its closing mark, or to the next call."""
        stop = self._stop.search(text, begin)
        first, last = stop.span() if stop else (len(text), len(text))
        return [self.bad(problem, text[begin:first], name)], last

    def _list(self, text: str, begin: int) -> Found:
        calls, at = self._items(text, begin + 1)
        if not calls:
            return self._lost(text, begin, Problem("the list is empty", begin))
        try:
            return calls, self._after_json(text, at)
        except Problem as problem:
            rest, at = self._lost(text, at, problem)
            return [*calls, *rest], at

    def _items(self, text: str, at: int) -> tuple[list[ToolCall], int]:
        """The calls of a list whose first one begins at `at`, and where the list ends."""
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
                    raise Problem(f"{text[after : after + 20]!r} follows it in the list", after)
            except Problem as problem:
                item = None if problem.hopeless else self._next_item.search(text, at)
                end, after = item.span() if item else (len(text), len(text))
                written = text[at:end].rstrip()
                calls.append(self.bad(problem, written.removesuffix("]")))
                at = after
                if item is None or not item[0]:
                    return calls, at
                continue
            try:
                name, arguments = self.named(value)
                calls.append(well_formed(name, arguments, text[at:end], self._id(value)))
            except Problem as problem:
                calls.append(self.bad(problem, text[at:end]))
            at = after + 1 if text.startswith(",", after) else after


class Hermes(JsonTagged):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text before and between allowed."""

    name = "hermes"
    how = '<tool_call>{"name": "<tool>", "arguments": {...}}</tool_call>'
    opening, close, closing = "<tool_call>", "</tool_call>", "</tool_call>"

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        return self.read_json(text, mark.end())


class Cohere2(JsonTagged):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": ..., "parameters": {...}}]<|END_ACTION|>`."""

    name = "cohere2"
    how = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "<tool>", "parameters": {...}}]<|END_ACTION|>'
    opening, close, closing = r"<\|START_ACTION\|>", r"<\|END_ACTION\|>", "<|END_ACTION|>"
    name_key, argument_keys, refused_key = "tool_name", ("parameters",), "arguments"
    id_key = "tool_call_id"

    @functools.cached_property
    def _next_item(self) -> re.Pattern[str]:
        return re.compile(rf",\s*(?=\{{\s*[\"']tool_(?:call_id|name)[\"']\s*:)|(?={self.close}|{self.opening}|\Z)")

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        return self.read_json(text, mark.end())


class Mistral(JsonTagged):
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}]`, and since 2025 `[TOOL_CALLS]name[ARGS]{...}`."""

    name = "mistral"
    how = '[TOOL_CALLS][{"name": "<tool>", "arguments": {...}}] or [TOOL_CALLS]<tool>[ARGS]{...}'
    opening, close = r"\[TOOL_CALLS\]", r"(?!)"
    id_key = "id"
    _HEAD = re.compile(r"(?P<name>[^\s\[\]{}\"']+)\s*(?:\[CALL_ID\](?P<id>[^\[{\s]*))?\s*(?:\[ARGS\])?")

    def _after_json(self, text: str, end: int) -> int:
        return end  # there is no closing mark: whatever follows is said

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        begin = skip_space(text, mark.end())
        head = self._HEAD.match(text, begin)
        if head is None:
            return self.read_json(text, begin)
        return with_written_id(self.read_arguments(text, head.end(), head["name"]), head["id"])


class NameFirst(JsonTagged):
    """A mark, the name, JSON, a closing mark."""

    head: re.Pattern[str]

    def read(self, text: str, mark: re.Match[str], tools: Sequence[ToolSchema]) -> Found:
        head = self.head.match(text, mark.end())
        if head is None:
            return self._lost(text, mark.end(), Problem("its name is missing", mark.end()))
        return with_written_id(self.read_arguments(text, head.end(), head["name"]), head.groupdict().get("id"))


class DeepSeek(NameFirst):
    """DeepSeek: V3 and R1 write `function`, the name and fenced JSON, V3.1 the name and JSON.

    `<｜tool▁call▁begin｜>function<｜tool▁sep｜>name`, a fence and `<｜tool▁call▁end｜>`; or
    `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`. All of a turn's calls stand between
    `<｜tool▁calls▁begin｜>` and `<｜tool▁calls▁end｜>`, which may be missing.
    """

    name = "deepseek"
    how = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜><tool><｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    opening = "<｜tool▁call▁begin｜>"
    close, closing = "(?:```\\s*)?(?:<｜tool▁call▁end｜>|(?=<｜tool▁calls▁end｜>))|```\\s*\\Z", "<｜tool▁call▁end｜>"
    scaffold = "<｜tool▁calls▁(?:begin|end)｜>"
    head = re.compile(
        r"\s*(?:function<｜tool▁sep｜>\s*)?(?P<name>[^\s<{}`\"']+)\s*(?:<｜tool▁sep｜>)?\s*(?:```(?:json)?)?"
    )


class Kimi(NameFirst):
    """`<|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section of calls."""

    name = "kimi"
    how = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.<tool>:0<|tool_call_argument_begin|>{...}"
        "<|tool_call_end|><|tool_calls_section_end|>"
    )
    opening = r"<\|tool_call_begin\|>"
    close, closing = r"(?:<\|tool_call_end\|>|(?=<\|tool_calls_section_end\|>))", "<|tool_call_end|>"
    scaffold = r"<\|tool_calls_section_(?:begin|end)\|>"
    head = re.compile(
        r"\s*(?P<id>(?:functions\.)?(?P<name>[^\s<{}:\"']+)(?::\d+)?)"
        r"\s*(?:<\|tool_call_argument_begin\|>|(?=<\|tool_call_end\|>))"
    )
