"""Base conversations: the short conversations behind which a template is asked what it writes between two turns.

A base conversation has what the real one has and what a template may look at: a system message, tools, an earlier round of
tools. Templates that count rounds or answers are asked behind the real messages instead (`Before.messages`). This module
knows messages, and no template.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from turnwise.chat.probes import PLACEHOLDER, QUESTION, SYSTEM_WORD, TOOL, probe_call, words
from turnwise.types import Message, ToolSchema

__all__ = ["NOTHING", "Base", "Before", "base_conversation", "less", "longer", "system_role"]

Base = Literal["calls", "call", "words"]
"""What the model's turn is rendered as, to see what follows it: one call for each answer, a single call, or plain words."""

_ROUNDS = 7
"""By how many rounds a conversation is longer, to see whether a template counts. No small number divides it."""


@dataclass(frozen=True, slots=True)
class Before:
    """What stands in a conversation before a bridge, as far as a template may write the bridge differently for it."""

    again: bool = False
    """Whether tools have answered before: some templates write the first answer differently."""
    system: str = ""
    """The role of the system message at the beginning (`system` or `developer`); empty where there is none."""
    tools: bool = False
    """Whether the conversation has tools."""
    messages: Sequence[Message] = field(default=(), compare=False, repr=False)
    """All messages as the template is given them, the model's last turn included. Read only for templates that count."""

    @classmethod
    def of(cls, messages: Sequence[Message], *, tools: bool = False) -> Before:
        """What stands in `messages`, as the template is given them. The last one is the model's turn."""
        return cls(any(one["role"] == "tool" for one in messages), system_role(messages), tools, messages)

    @property
    def short(self) -> Before:
        """The same without the messages: behind a base conversation of fixed length."""
        return replace(self, messages=())

    @property
    def offered(self) -> Sequence[ToolSchema] | None:
        """The tools that the base conversation is rendered with; None: those of any probe."""
        return (TOOL,) if self.tools else None


NOTHING = Before()


def system_role(messages: Sequence[Message]) -> str:
    """The role of the system message at the beginning; empty where there is none."""
    return str(messages[0]["role"]) if messages and messages[0]["role"] in ("system", "developer") else ""


def less(before: Before) -> Iterator[Before]:
    """`before`, then with parts of it left out: a template may refuse a part, or write it into the bridge."""
    for again, system, tools in itertools.product(
        dict.fromkeys((before.again, False)), dict.fromkeys((before.system, "")), dict.fromkeys((before.tools, False))
    ):
        yield Before(again, system, tools)


def base_conversation(
    base: Base, messages: Sequence[Message], before: Before, *, writes_calls: bool
) -> list[Message] | None:
    """The conversation in front of `messages`; its last turn ends in the placeholder. None where there is none with `base`."""
    answers = [message for message in messages if message["role"] == "tool"]
    if base == "words":
        turn = words(PLACEHOLDER)
    elif not writes_calls or not answers:
        return None
    else:
        turn = probe_call(*[{"text": PLACEHOLDER}] * (len(answers) if base == "calls" else 1))
        for call, answer in zip(turn["tool_calls"], answers, strict=False):
            call["id"] = str(answer.get("tool_call_id") or call["id"])
            call["function"]["name"] = str(answer.get("name") or call["function"]["name"])
    if before.messages:
        real = list(before.messages[:-1])
        return [*(real[1:] if system_role(real) and not before.system else real), turn]
    start: list[Message] = [{"role": before.system, "content": SYSTEM_WORD}] if before.system else []
    calls = writes_calls and (base != "words" or not answers)
    return [*start, QUESTION, *(_tool_round(0, calls=calls) if before.again else []), turn]


def longer(conversation: Sequence[Message], before: Before) -> Iterator[list[Message]]:
    """A base conversation with more rounds in it: rounds of questions, and of tools where they have answered before."""
    start = 1 if before.system else 0
    yield [*conversation[:start], *[QUESTION, words("Words.")] * _ROUNDS, *conversation[start:]]
    if before.again:
        calls = bool(conversation[start + 1].get("tool_calls"))
        rounds = [one for number in range(1, _ROUNDS + 1) for one in _tool_round(number, calls=calls)]
        yield [*conversation[: start + 1], *rounds, *conversation[start + 1 :]]


def _tool_round(number: int, *, calls: bool) -> list[Message]:
    """A turn, and the answer of a tool to it."""
    id = f"earlier{number:02}"  # nine letters and digits: some templates insist on them
    turn = probe_call({"text": "earlier"}) if calls else words("Words.")
    for call in turn.get("tool_calls") or ():
        call["id"] = id
    return [turn, {"role": "tool", "tool_call_id": id, "name": "probe_tool", "content": "An answer."}]
