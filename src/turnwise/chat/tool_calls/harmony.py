"""Harmony, the format of gpt-oss: a turn consists of messages with headers.

    <|start|>assistant<|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.search <|constrain|>json<|message|>{"query": "weather"}<|call|>

The text of a turn begins after the generation prompt `<|start|>assistant`. A message with a recipient (`to=`) is a call, on any
channel. Of the other messages, those on the channel `analysis` are reasoning, the others content.

Malformed calls: if `<|message|>` is missing or the body is no JSON object, the message is a malformed call, and parsing continues
with the next message. Text without a header is content.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from turnwise.chat.tool_calls.json_text import arguments_of, decode
from turnwise.chat.tool_calls.parsing import (
    MalformedCall,
    ParsedText,
    assign_ids,
    malformed_call,
    skip_space,
    well_formed_call,
)
from turnwise.chat.tool_calls.reasoning import KNOWN, ReasoningMarks, join_pieces
from turnwise.types import ToolCall, ToolSchema

__all__ = ["Harmony"]

_ENDS = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")
_PLAIN_TEXT_ENDS = re.compile(rf"{_ENDS.pattern}|(?=<\|channel\|>)")
_BEGINS = re.compile(r"\s*(?:<\|(?:start|channel|message)\|>|to=[^\s<]+\s*<\|)")
_HEADER = re.compile(r"[^<]*(?:<\|(?:start|channel|constrain)\|>[^<]*)*(?P<message><\|message\|>)?")
_TO = re.compile(r"\bto=(?:functions\.)?(?P<name>[^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>(?P<name>\w+)")
_AFTER = re.compile(r"\s*(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)")


class Harmony:
    """gpt-oss: messages with headers."""

    name = "harmony"
    example = "<|start|>assistant<|channel|>commentary to=functions.<tool> <|constrain|>json<|message|>{...}<|call|>"

    def parse(
        self,
        text: str,
        *,
        first_id: int = 0,
        thinking: bool = False,
        tools: Sequence[ToolSchema] = (),
        marks: ReasoningMarks = KNOWN,
    ) -> ParsedText:
        content: list[str] = [""]
        reasoning: list[str] = [""]
        channels = {
            "analysis",
            *(channel_mark["name"] for opening, _ in marks.own if (channel_mark := _CHANNEL.search(opening))),
        }
        calls: list[ToolCall] = []
        at = self._body(text, 0, reasoning) if thinking else 0
        while at < len(text):
            header = _HEADER.match(text, at) if _BEGINS.match(text, at) else None
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
            calls=assign_ids(calls, first_id),
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
                raise MalformedCall(f"{text[end : end + 20]!r} follows the JSON; write <|call|> there", end)
            return well_formed_call(name, arguments, text[begin:end]), after.end()
        except MalformedCall as problem:
            first, last = _end(text, begin)
            return malformed_call(problem, text[begin:first], example=self.example, name=name), last


def _end(text: str, at: int, ends: re.Pattern[str] = _ENDS) -> tuple[int, int]:
    """The start and the end of the closing mark of the message around `at`."""
    end = ends.search(text, at)
    return end.span() if end else (len(text), len(text))
