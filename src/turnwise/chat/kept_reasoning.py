"""Which earlier reasoning a template leaves out when the conversation continues, found with conversations of several turns.

A single turn is not enough: a template that keeps only the last assistant turn's reasoning keeps that of a conversation with one
turn. So three turns are rendered, each followed by a message of the same role, and the text shows which of the three turns
still have their reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.chat.base_conversations import PriorConversation
from turnwise.chat.probes import QUESTION
from turnwise.chat.template import Template
from turnwise.chat.turn_format import TurnFormat
from turnwise.chat.turn_messages import ParsedTurn, template_message
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolCall

__all__ = ["Kept", "KeptReasoning", "find_kept_reasoning"]

Kept = Literal["all", "last", "none", "some"]
"""Whose reasoning is written, of three turns: all, only the last turn's, none, or another selection."""
TURNS = 3


@dataclass(frozen=True, slots=True)
class KeptReasoning:
    """What a template keeps of earlier reasoning, by the role of the messages that follow the turns."""

    user: Kept = "all"
    tool: Kept = "all"

    @property
    def stripped_before(self) -> tuple[str, ...]:
        """The roles of messages before which earlier reasoning is left out."""
        return tuple(role for role, kept in (("user", self.user), ("tool", self.tool)) if kept != "all")

    def __str__(self) -> str:
        """For people: `at messages of user (all but the last turn's) and tool`."""
        kept = {"user": self.user, "tool": self.tool}
        named = [f"{role} (all but the last turn's)" if kept[role] == "last" else role for role in self.stripped_before]
        return f"at messages of {' and '.join(named)}" if named else "nowhere"


def find_kept_reasoning(template: Template, format: TurnFormat) -> KeptReasoning:
    """Find out which earlier reasoning the template leaves out."""
    if not template.reasoning.supported:
        return KeptReasoning()

    def turn(reasoning: str, calls: bool, number: int) -> Message:
        return template_message(_sample_turn(template, reasoning, calls, number), format, template.reasoning)

    return KeptReasoning(user=_kept(template, turn, "user"), tool=_kept(template, turn, "tool"))


def _sample_turn(template: Template, reasoning: str, calls: bool, number: int) -> ParsedTurn:
    opening, closing = next(iter(template.reasoning.marks.own), ("", ""))
    call = ToolCall(id=f"callprob{number}", name="probe_tool", arguments={"text": "x"}, text="")
    return ParsedTurn(
        text=f"{opening}\n{reasoning}\n{closing}\n\nSaid.",
        message={"role": "assistant", "content": "Said."},
        reasoning=reasoning,
        calls=(call,) if calls else (),
    )


def _kept(template: Template, turn: Callable[[str, bool, int], Message], role: str) -> Kept:
    for turns in (TURNS, 1):
        for calls in (True, False) if role == "tool" and template.writes_calls else (False,):
            try:
                written = _written(template, [turn(_probe_reasoning(n), calls, n) for n in range(turns)], role)
            except TemplateError:
                continue  # the template accepts no such conversation
            if all(written):
                return "all"
            if not any(written):
                return "none"
            return "last" if written == [False] * (turns - 1) + [True] else "some"
    return "all"  # the template accepts no such message, so it cannot leave anything out before one


def _written(template: Template, turns: Sequence[Message], role: str) -> list[bool]:
    """For each turn, whether its reasoning is written in a conversation where a message of `role` follows every turn."""
    messages: list[Message] = [QUESTION]
    for number, turn in enumerate(turns):
        message: Message = {"role": role, "content": f"Go on, {number}."}
        if role == "tool":
            message |= {"tool_call_id": f"callprob{number}", "name": "probe_tool"}
        prior = PriorConversation.from_messages([*messages, turn])
        messages += [turn, *template.plan([message], prior).apply([message])]
    text = template.render(messages, add_generation_prompt=True)
    return [_probe_reasoning(number) in text for number in range(len(turns))]


def _probe_reasoning(number: int) -> str:
    return f"reasoning-{number}-4b9e27"
