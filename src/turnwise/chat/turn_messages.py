"""A sampled turn after parsing (`ParsedTurn`), and the message with which the template is given it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.reasoning_format import ReasoningFormat
from turnwise.chat.turn_format import TurnFormat
from turnwise.types import Message, ToolCall

__all__ = ["ParsedTurn", "call_field", "template_message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A sampled turn, parsed."""

    text: str
    """The sampled text without the stop token."""
    message: Message
    """The assistant message: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """All calls in order, also those that cannot be read (with `error` set). The message has only those that can."""
    reasoning_opening: str = ""
    """The text with which the generation prompt opens reasoning, so that the turn begins inside it; empty if it opens none."""


def template_message(turn: ParsedTurn, format: TurnFormat, reasoning: ReasoningFormat) -> Message:
    """A turn in the form in which the template receives it when the complete conversation is rendered.

    Calls are passed as calls, as a server passes them after parsing: the text that a template writes after a turn may depend on
    whether the turn has calls. All other text is passed as it was sampled, if the template writes it unchanged.
    """
    calls = _calls_given(turn, format)
    has_text_form = format.content != "fields"
    text = turn.text.removeprefix(format.leading_space)
    if calls and has_text_form:
        text = _text_without_calls(turn, text, reasoning)
    if format.content == "text":  # the template writes its own marks around an answer
        message: Message = {"role": "assistant", "content": turn.reasoning_opening + format.without_answer_marks(text)}
    elif format.content == "text and reasoning":
        content = reasoning.without_reasoning(text, bool(turn.reasoning_opening))
        message = {"role": "assistant", "content": format.without_answer_marks(content)}
    else:
        message = {"role": "assistant", "content": turn.message["content"]}
    if format.content != "text" and turn.reasoning and reasoning.key is not None:
        message[reasoning.key] = turn.reasoning
    if calls:
        message["tool_calls"] = [call_field(call) for call in calls]
    return message


def call_field(call: ToolCall) -> dict[str, Any]:
    """A call as an element of a message's `tool_calls`."""
    function = {"name": call.name or "unknown", "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _calls_given(turn: ParsedTurn, format: TurnFormat) -> Sequence[ToolCall]:
    """The calls that are given to the template as calls; none if they are given as part of the text."""
    if format.content == "fields":
        return turn.calls  # unreadable calls too: such a template refuses a tool message without a call in front
    readable = all(call.error is None for call in turn.calls)
    return turn.calls if readable and format.accepts_calls(len(turn.calls)) else ()


def _text_without_calls(turn: ParsedTurn, text: str, reasoning: ReasoningFormat) -> str:
    """The reasoning at the beginning of a turn, as sampled, and its content."""
    content = str(turn.message["content"] or "")
    blocks = reasoning.marks.reasoning_blocks(text, opened=bool(turn.reasoning_opening)) if reasoning.supported else []
    if not blocks or text[: blocks[0].start].strip():
        return content
    rest = text[blocks[0].end :]
    return text[: blocks[0].end] + rest[: len(rest) - len(rest.lstrip())] + content
