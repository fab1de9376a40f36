"""Probes: the short messages and marker words with which a chat template is examined.

A probe word is rendered inside a message, and its place in the rendered text shows what the template writes around it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.types import Message, ToolSchema

__all__ = [
    "DESCRIBED_TOOL",
    "PLACEHOLDER",
    "QUESTION",
    "SYSTEM_WORD",
    "TOOL",
    "TOOL_WORD",
    "assistant_message",
    "probe_call",
    "probe_message",
    "probe_messages",
    "probe_word",
    "probe_words_in",
    "roles_of",
]

PLACEHOLDER = "placeholder-7f3a91"  # letters and digits: no template trims, escapes or splits it
"""Stands for the last words of the model's turn."""

QUESTION: Message = {"role": "user", "content": "A question."}

SYSTEM_WORD = "system-5c81d4"
"""The content of the system message of a base conversation."""

TOOL_WORD = "tool-5c81d4"
"""The description of the probe tool."""

TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": TOOL_WORD,
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}},
    },
}

DESCRIBED_TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "tool_5c81d4",
        "description": TOOL_WORD,
        "parameters": {
            "type": "object",
            "properties": {"parameter_5c81d4": {"type": "string", "description": "A text."}},
        },
    },
}
"""A tool whose name and parameter no template contains, to see whether a template shows tools."""


def assistant_message(text: str) -> Message:
    """An assistant message with this content."""
    return {"role": "assistant", "content": text}


def probe_call(*arguments: Mapping[str, Any], name: str = "probe_tool") -> Message:
    """An assistant message that calls a tool once for each of `arguments`."""
    calls = [
        # nine letters and digits: some templates accept no other ids
        {"type": "function", "id": f"callprob{number}", "function": {"name": name, "arguments": dict(values)}}
        for number, values in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def roles_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The roles of messages; an assistant message with tool calls has the role `calls`."""
    return tuple("calls" if message.get("tool_calls") else str(message["role"]) for message in messages)


def probe_messages(roles: Sequence[str]) -> list[Message]:
    """Messages of these roles (`roles_of`) with probe words as content.

    A turn of the role `calls` has a call for each tool message that follows it.
    """
    messages: list[Message] = []
    for number, role in enumerate(roles):
        if role != "calls":
            messages.append(probe_message(role, number))
            continue
        following = enumerate(roles[number + 1 :])
        answers = next((count for count, after in following if after != "tool"), len(roles) - number - 1)
        turn = probe_call(*[{"text": "x"}] * max(1, answers))
        for offset, call in enumerate(turn["tool_calls"], 1):
            call["id"] = f"callprob{number + offset}"
        messages.append(turn)
    return messages


def probe_message(role: str, number: int) -> Message:
    """A message of a role with a probe word as content."""
    extra = {"tool_call_id": f"callprob{number}", "name": "probe_tool"} if role == "tool" else {}
    return {"role": role, "content": probe_word(number), **extra}


def probe_word(number: int) -> str:
    """A word that no template contains."""
    return f"probe-{number}-5c81d4"


def probe_words_in(messages: Sequence[Message]) -> Iterator[str]:
    """The probe words in messages, in order. A merged message may hold several."""
    for message in messages:
        for word in str(message["content"]).split():
            if word.startswith("probe-"):
                yield word
