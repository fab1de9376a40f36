"""Messages in the form of the OpenAI protocol: those that are sent to an endpoint, and the message that it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.tool_calls.json_text import arguments_of
from turnwise.chat.tool_calls.parsing import MalformedCall, assign_ids, malformed_call, well_formed_call
from turnwise.chat.turn_messages import call_field
from turnwise.types import Message, ToolCall, Turn

__all__ = ["ParsedMessage", "parse_message", "request_messages"]

_SENT = ("role", "content", "name", "tool_calls", "tool_call_id")
"""The keys of a message that the protocol has. Reasoning is not sent: the server's chat template would leave it out, or the
server would refuse it."""
_REASONING_KEYS = ("reasoning_content", "reasoning")
"""Where servers put the reasoning: vLLM and SGLang, and newer versions of vLLM."""
_REASONING = re.compile(r"\A\s*(?:<think>)?(?P<reasoning>.*?)</think>\s*", re.DOTALL)
_EXAMPLE = 'arguments in the form of a JSON object, such as {"name": "value"}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """An endpoint's answer."""

    message: Message
    """The assistant message as it is recorded: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    text: str
    """The content without reasoning."""
    reasoning: str
    calls: tuple[ToolCall, ...]
    """All calls, also those that cannot be read (with `error` set). The message has only those that can."""


def parse_message(message: Mapping[str, Any], *, first_call: int) -> ParsedMessage:
    """Read an endpoint's message; the ids of its calls count from `first_call`.

    Reasoning is read from the field of the server, or from the beginning of the content up to `</think>`. Text of any kind is
    accepted. Raises ValueError if the content or the calls have another type than the protocol says.
    """
    content = message.get("content")
    if isinstance(content, list):  # some servers send parts
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    if content is not None and not isinstance(content, str):
        raise ValueError(f"the content of an endpoint's message must be a text or null; got {content!r:.80}")
    text = content or ""
    reasoning = next((str(message[key]) for key in _REASONING_KEYS if message.get(key)), "")
    if not reasoning and (block := _REASONING.match(text)) is not None:
        reasoning, text = block["reasoning"].strip("\n"), text[block.end() :]
    calls = _calls(message.get("tool_calls"), first_call)
    parsed: Message = {"role": "assistant", "content": text}
    if reasoning:
        parsed["reasoning_content"] = reasoning
    if readable := [call for call in calls if call.error is None]:
        parsed["tool_calls"] = [call_field(call) for call in readable]
    return ParsedMessage(message=parsed, text=text, reasoning=reasoning, calls=calls)


def _calls(value: Any, first_call: int) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise ValueError(f"tool_calls of an endpoint's message must be a list or null; got {value!r:.80}")
    return assign_ids((_call(item) for item in value), first_call)


def _call(item: Any) -> ToolCall:
    match item:
        case {"function": {"name": str(name), **function}} if name:
            arguments = function.get("arguments") or {}
        case _:
            return malformed_call("it has no function name", json.dumps(item, default=str), example=_EXAMPLE)
    id = item.get("id")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    try:
        return well_formed_call(name, arguments_of(arguments), text, id if isinstance(id, str) else "")
    except MalformedCall as problem:
        return malformed_call(problem, text, example=_EXAMPLE, name=name)


def request_messages(messages: Sequence[Message], turns: Sequence[Turn] = (), *, history: int = 0) -> list[Message]:
    """The messages of a conversation as an endpoint receives them. `turns` are its turns and `history` the number of the present
    history, as in `Turn.history`.

    The arguments of calls become JSON texts. A call that could not be read is sent too, with empty arguments: servers refuse
    the result of a call that is in no message. A result whose call the environment has removed becomes a user message.
    """
    calls_at = {turn.message_index: turn.calls for turn in turns if turn.history == history}
    sent: list[Message] = []
    known: set[str] = set()
    for index, message in enumerate(messages):
        kept: Message = {key: message[key] for key in _SENT if key in message}
        turn_calls = calls_at.get(index, ())
        calls = [call_field(call) for call in turn_calls] if turn_calls else message.get("tool_calls")
        if calls:
            kept["tool_calls"] = [_request_call(call) for call in calls]
            known.update(str(call.get("id")) for call in calls)
            kept["content"] = kept.get("content") or None
        if message["role"] == "tool":
            kept.pop("name", None)
            if str(message.get("tool_call_id")) not in known:
                kept = {"role": "user", "content": kept.get("content")}
        sent.append(kept)
    return sent


def _request_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", {})
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call.get("id"), "type": "function", "function": {"name": function.get("name"), "arguments": text}}
