"""Probe words: what a chat template is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from turnwise.types import Message, ToolSchema

__all__ = [
    "PLACEHOLDER",
    "QUESTION",
    "SYSTEM_WORD",
    "TOOL",
    "TOOL_WORD",
    "asked",
    "probe",
    "probe_call",
    "probe_message",
    "probe_words",
    "roles_of",
    "words",
]

PLACEHOLDER = "placeholder-7f3a91"  # letters and digits: no template trims, escapes or splits it
QUESTION: Message = {"role": "user", "content": "A question."}

SYSTEM_WORD = "system-5c81d4"
TOOL_WORD = "tool-5c81d4"
"""What the system message of a base conversation says, and the description of the probe tool."""

TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": TOOL_WORD,
        "parameters": {"type": "object", "properties": {"text": {"type": "string", "description": "A text."}}},
    },
}


def words(text: str) -> Message:
    """An assistant message."""
    return {"role": "assistant", "content": text}


def probe_call(*arguments: Mapping[str, Any], name: str = "probe_tool") -> Message:
    """An assistant message that calls a tool once for each `arguments`."""
    calls = [
        # nine letters and digits: some templates insist on them
        {"type": "function", "id": f"callprob{number}", "function": {"name": name, "arguments": dict(one)}}
        for number, one in enumerate(arguments)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def roles_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The roles of messages; a turn that calls tools is `calls`."""
    return tuple("calls" if message.get("tool_calls") else str(message["role"]) for message in messages)


def asked(roles: Sequence[str]) -> list[Message]:
    """Messages of these roles with probe words for content; `calls` is a turn that calls the tools that answer it."""
    messages: list[Message] = []
    for number, role in enumerate(roles):
        if role != "calls":
            messages.append(probe_message(role, number))
            continue
        answers = next((n for n, after in enumerate(roles[number + 1 :]) if after != "tool"), len(roles) - number - 1)
        turn = probe_call(*[{"text": "x"}] * max(1, answers))
        for offset, call in enumerate(turn["tool_calls"], 1):
            call["id"] = f"callprob{number + offset}"
        messages.append(turn)
    return messages


def probe_message(role: str, number: int) -> Message:
    """A message of a role with a probe word for content."""
    extra = {"tool_call_id": f"callprob{number}", "name": "probe_tool"} if role == "tool" else {}
    return {"role": role, "content": probe(number), **extra}


def probe(number: int) -> str:
    """A word that stands in no template."""
    return f"probe-{number}-5c81d4"


def probe_words(messages: Sequence[Message]) -> Iterator[str]:
    """The probe words in messages, those of merged ones apart."""
    for message in messages:
        for word in str(message["content"]).split():
            if word.startswith("probe-"):
                yield word
