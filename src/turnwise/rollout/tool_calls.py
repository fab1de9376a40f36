"""How models write tool calls, and how their text is read back.

A format takes the text of one turn apart into what was said and what was called. A call that cannot be read becomes a
`ToolCall` with an error, which goes back to the model: nothing is lost, and a good call is not lost because its neighbour is
bad. Calls inside a thinking block are not calls. There is one format so far, `hermes` (Qwen, Hermes and many others);
which one a template writes is found out by `detect`, from the template itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.types import ToolCall, ToolSchema

__all__ = ["FORMATS", "Hermes", "Reading", "ToolFormat", "detect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A turn's text, taken apart."""

    content: str
    """What was said to the other side: neither thoughts nor calls, where the format has marks for them."""
    reasoning: str = ""
    """What was only thought."""
    calls: tuple[ToolCall, ...] = ()
    """The calls in order, those that cannot be read included."""


class ToolFormat(Protocol):
    """Reads the tool calls out of a turn's text."""

    name: str

    def parse(
        self, text: str, *, first_id: int = 0, thinking: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> Reading:
        """Take a turn apart. The ids of calls are `call_<n>`, counted from `first_id`.

        `thinking` says that the text begins inside a thinking block, because the template's cue has opened it. `tools` are
        those on offer, for formats that do not say of which type a value is.
        """
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, text before and between allowed."""

    name = "hermes"
    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def parse(
        self, text: str, *, first_id: int = 0, thinking: bool = False, tools: Sequence[ToolSchema] = ()
    ) -> Reading:
        if self._OPEN not in text:
            return Reading(content=text.strip("\n"))
        calls: list[ToolCall] = []
        said: list[str] = []
        at = 0
        for opening in re.finditer(re.escape(self._OPEN), text):
            if opening.start() < at or _inside_thinking(text, opening.start(), thinking):
                continue  # inside the arguments of the call before, or only thought of
            said.append(text[at : opening.start()])
            call, at = self._one(text, opening.end(), f"call_{first_id + len(calls)}")
            calls.append(call)
        said.append(text[at:])
        return Reading(content="".join(said).strip("\n"), calls=tuple(calls))

    def _one(self, text: str, start: int, call_id: str) -> tuple[ToolCall, int]:
        """The call whose JSON begins at `start`, and where the text goes on after it."""
        begin = start + len(text[start:]) - len(text[start:].lstrip())
        try:
            # the JSON decides where the call ends, so that a closing tag inside a string does not
            value, json_end = _DECODER.raw_decode(text, begin)
            after = text[json_end:].lstrip()
            if after and not after.startswith(self._CLOSE):
                raise ValueError(f"{after[:20]!r} follows the JSON object where {self._CLOSE} should")
            end = len(text) - len(after) + (len(self._CLOSE) if after else 0)
            name, arguments = _named(value)
            return ToolCall(id=call_id, name=name, arguments=arguments, text=text[begin:json_end]), end
        except (ValueError, RecursionError) as problem:  # the latter from a thousand opening brackets
            written, close, _ = text[begin:].partition(self._CLOSE)
            if self._OPEN in written:  # it was not closed: the next call is not its own
                written, close = written.partition(self._OPEN)[0], ""
            end = begin + len(written) + len(close)
            written = written.strip()
            error = (
                f"this tool call cannot be read: {problem}. Write it as "
                f'{self._OPEN}{{"name": "<tool>", "arguments": {{...}}}}{self._CLOSE}'
            )
            return ToolCall(id=call_id, name="", arguments={}, text=written, error=error), end


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, strict=False)


def _named(value: Any) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a decoded call; arguments may be missing, or JSON in a string as OpenAI has them."""
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object")
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError('its "name" is missing')
    if isinstance(arguments, str):
        arguments = _DECODER.decode(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(f'its "arguments" are a {type(arguments).__name__}, not an object')
    return name, arguments


def _inside_thinking(text: str, position: int, thinking: bool) -> bool:
    opened, closed = text.rfind("<think>", 0, position), text.rfind("</think>", 0, position)
    return opened > closed or (thinking and closed < 0)


FORMATS: tuple[ToolFormat, ...] = (Hermes(),)


def detect(write: Callable[[str, dict[str, Any]], str]) -> ToolFormat | None:
    """The format in which a template writes calls: the one that reads a probe back.

    `write(name, arguments)` renders an assistant message with that call through the template.
    """
    name, arguments = "probe_tool", {"text": 'a "b" </x>', "number": 3, "nested": {"list": [1, None]}}
    written = write(name, arguments)
    for candidate in FORMATS:
        calls = candidate.parse(written).calls
        if len(calls) == 1 and calls[0].name == name and dict(calls[0].arguments) == arguments:
            return candidate
    return None
