"""Gemma's format: `call:name{key:value,...}` between marks, with unquoted keys and with marks around strings.

    <|tool_call>call:search{query:<|"|>weather<|"|>,days:3}<tool_call|>

A string cannot hold its own mark. JSON strings are accepted too.

Malformed calls: parsing continues after the closing mark, or before the next call if there is no closing mark before it. A call
without arguments and without a closing mark is malformed, because its arguments may have been about to follow.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from turnwise.chat.tool_calls.json_text import decode
from turnwise.chat.tool_calls.parsing import MalformedCall, MarkedFormat, ParsedCalls, skip_space, well_formed_call
from turnwise.types import ToolSchema

__all__ = ["FunctionGemma", "Gemma4"]

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
                raise MalformedCall(
                    f"{text[end : end + 20]!r} follows the arguments; write {self.closing_mark} there", end
                )
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
