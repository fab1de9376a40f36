"""Probe words: what a chat template is asked, and the ways in which messages can be handed to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.types import Message, ToolSchema

__all__ = [
    "PLACEHOLDER",
    "QUESTION",
    "TOOL",
    "Base",
    "Plan",
    "asked",
    "plans",
    "probe",
    "probe_call",
    "probe_message",
    "probe_words",
    "roles_of",
    "with_calls",
    "with_named_ids",
    "with_short_ids",
    "words",
]

PLACEHOLDER = "placeholder-7f3a91"  # letters and digits: no template trims, escapes or splits it
QUESTION: Message = {"role": "user", "content": "A question."}

Base = Literal["calls", "call", "words"]
"""What the model's turn is rendered as, to see what follows it: one call for each answer, a single call, or plain words."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How messages of certain roles are handed to the template, so that it takes them and loses none."""

    roles: tuple[tuple[str, str], ...] = ()
    """Which roles become which others: `("system", "user")`."""
    merge: bool = False
    """Whether neighbours of one role become one message."""
    bases: tuple[Base, ...] = ("words",)
    """As what the model's turn before them may be rendered, best first; of an opening, nothing."""

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template is given them."""
        named = [_renamed(message, dict(self.roles).get(message["role"])) for message in messages]
        if not self.merge:
            return named
        merged: list[Message] = []
        for message in named:
            if merged and merged[-1]["role"] == message["role"] != "tool":
                both = _joined(merged[-1].get("content"), message.get("content"))
                merged[-1] = {**merged[-1], "content": both}
            else:
                merged.append(message)
        return merged


TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "probe_tool",
        "description": "A tool.",
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


def with_calls(message: Message, *, as_text: bool, empty: str | None) -> Message:
    """An assistant message with its calls in the shape that a template takes."""
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls, "content": message.get("content") or empty}


def with_short_ids(message: Message) -> Message:
    """A message whose ids of calls are nine letters and digits, the same for the same id: `call_0` is `call00000`."""
    calls = [{**call, "id": _short(str(call.get("id") or ""))} for call in message.get("tool_calls") or ()]
    shortened = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool":
        shortened["tool_call_id"] = _short(str(message.get("tool_call_id") or ""))
    return shortened


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    number = id.removeprefix("call_")
    if number.isascii() and number.isdigit() and len(number) <= 5:
        return f"call{number:0>5}"
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def with_named_ids(message: Message) -> Message:
    """A message whose ids of calls hold the tool's name as Kimi has it: `call_3` of `lookup` is `functions.lookup:3`."""
    calls = [
        {**call, "id": _named(str(call.get("id") or ""), str(call["function"]["name"]))}
        for call in message.get("tool_calls") or ()
    ]
    named = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool" and message.get("name"):
        named["tool_call_id"] = _named(str(message.get("tool_call_id") or ""), str(message["name"]))
    return named


def _named(id: str, name: str) -> str:
    if name in id:
        return id
    digits = id[len(id.rstrip("0123456789")) :]
    return f"functions.{name}:{int(digits[-9:] or 0)}"


def plans(roles: Sequence[str]) -> Iterator[Plan]:
    """The ways to hand over messages of these roles, the most faithful first."""
    fixed: list[tuple[tuple[str, str], ...]] = [()]
    system = tuple((role, "user") for role in ("system", "developer") if role in roles)
    if system:
        fixed.append(system)
    if "tool" in roles:
        fixed += [(*chosen, ("tool", "user")) for chosen in list(fixed)]
    for renamed in fixed:
        yield Plan(renamed)
        if len(roles) > 1:
            yield Plan(renamed, merge=True)


def _renamed(message: Message, role: str | None) -> Message:
    if role is None:
        return message
    content = message.get("content") or ""
    if message["role"] == "tool" and isinstance(content, str):
        content = f"<tool_response>\n{content}\n</tool_response>"
    return {"role": role, "content": content}


def _joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, parts one after the other."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[Any] = []
    for content in (first, second):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    return parts


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
