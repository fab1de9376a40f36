"""Base conversations: short conversations that end with a turn of the model, behind which new messages are rendered.

What the template writes behind that turn is the bridge to the next turn. A base conversation has the same features as the real
conversation, as far as a template may look at them: a system message, tools, an earlier round of tools. For templates that
count rounds or answers, the real messages are used instead (`PriorConversation.messages`). This module renders nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from turnwise.chat.probes import PLACEHOLDER, QUESTION, SYSTEM_WORD, TOOL, assistant_message, probe_call
from turnwise.types import Message, ToolSchema

__all__ = [
    "NO_CONVERSATION",
    "BaseTurn",
    "PriorConversation",
    "base_conversation",
    "longer_conversations",
    "simpler_conversations",
    "system_role",
]

BaseTurn = Literal["calls", "call", "text"]
"""What the model's turn at the end of a base conversation contains: a call for each tool message, a single call, or text."""

_ROUNDS = 7
"""Rounds by which a conversation is made longer, to see whether a template counts them. No small number divides it."""


@dataclass(frozen=True, slots=True)
class PriorConversation:
    """The features of a conversation that may change what a template writes behind the model's turn."""

    has_tool_messages: bool = False
    """Whether tools have answered before: some templates write the first answer differently."""
    system_role: str = ""
    """The role of the system message at the beginning (`system` or `developer`); empty if there is none."""
    has_tools: bool = False
    """Whether the conversation offers tools."""
    messages: Sequence[Message] = field(default=(), compare=False, repr=False)
    """All messages as the template receives them, the model's last turn included. Used only for templates that count."""

    @classmethod
    def from_messages(cls, messages: Sequence[Message], *, has_tools: bool = False) -> PriorConversation:
        """The features of `messages`, which are as the template receives them. The last message is the model's turn."""
        has_tool_messages = any(message["role"] == "tool" for message in messages)
        return cls(has_tool_messages, system_role(messages), has_tools, messages)

    @property
    def without_messages(self) -> PriorConversation:
        """The same features, to be rendered behind a base conversation of fixed length."""
        return replace(self, messages=())

    @property
    def probe_tools(self) -> Sequence[ToolSchema] | None:
        """The tools that the base conversation is rendered with; None means the default tools of a probe."""
        return (TOOL,) if self.has_tools else None


NO_CONVERSATION = PriorConversation()


def system_role(messages: Sequence[Message]) -> str:
    """The role of the system message at the beginning; empty if there is none."""
    return str(messages[0]["role"]) if messages and messages[0]["role"] in ("system", "developer") else ""


def simpler_conversations(prior: PriorConversation) -> Iterator[PriorConversation]:
    """`prior`, then the same with features left out: a template may refuse a feature, or write it into the bridge."""
    for has_tool_messages, role, has_tools in itertools.product(
        dict.fromkeys((prior.has_tool_messages, False)),
        dict.fromkeys((prior.system_role, "")),
        dict.fromkeys((prior.has_tools, False)),
    ):
        yield PriorConversation(has_tool_messages, role, has_tools)


def base_conversation(
    base: BaseTurn, messages: Sequence[Message], prior: PriorConversation, *, writes_calls: bool
) -> list[Message] | None:
    """The conversation to render in front of `messages`. Its last turn ends with the placeholder.

    None if there is no such conversation: calls, where the template writes none or `messages` hold no answers to them.
    """
    answers = [message for message in messages if message["role"] == "tool"]
    if base == "text":
        turn = assistant_message(PLACEHOLDER)
    elif not writes_calls or not answers:
        return None
    else:
        turn = probe_call(*[{"text": PLACEHOLDER}] * (len(answers) if base == "calls" else 1))
        for call, answer in zip(turn["tool_calls"], answers, strict=False):
            call["id"] = str(answer.get("tool_call_id") or call["id"])
            call["function"]["name"] = str(answer.get("name") or call["function"]["name"])
    if prior.messages:
        real = list(prior.messages[:-1])
        return [*(real[1:] if system_role(real) and not prior.system_role else real), turn]
    start: list[Message] = [{"role": prior.system_role, "content": SYSTEM_WORD}] if prior.system_role else []
    calls = writes_calls and (base != "text" or not answers)
    return [*start, QUESTION, *(_tool_round(0, calls=calls) if prior.has_tool_messages else []), turn]


def longer_conversations(conversation: Sequence[Message], prior: PriorConversation) -> Iterator[list[Message]]:
    """A base conversation with more rounds: rounds of questions, and rounds of tools if it has tool messages."""
    start = 1 if prior.system_role else 0
    yield [*conversation[:start], *[QUESTION, assistant_message("Words.")] * _ROUNDS, *conversation[start:]]
    if prior.has_tool_messages:
        calls = bool(conversation[start + 1].get("tool_calls"))
        rounds = [message for number in range(1, _ROUNDS + 1) for message in _tool_round(number, calls=calls)]
        yield [*conversation[: start + 1], *rounds, *conversation[start + 1 :]]


def _tool_round(number: int, *, calls: bool) -> list[Message]:
    """A turn, and the answer of a tool to it."""
    id = f"earlier{number:02}"  # nine letters and digits: some templates accept no other ids
    turn = probe_call({"text": "earlier"}) if calls else assistant_message("Words.")
    for call in turn.get("tool_calls") or ():
        call["id"] = id
    return [turn, {"role": "tool", "tool_call_id": id, "name": "probe_tool", "content": "An answer."}]
