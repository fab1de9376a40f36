"""Which earlier thoughts a template leaves out when the conversation goes on, found with conversations of several turns.

One turn does not tell enough: a template that keeps only the last assistant turn's thought keeps the thought of a
conversation with one turn. So three turns are rendered, each followed by a message of the same role, and it is read off which
of the three thoughts are still written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.chat.base_conversations import Before
from turnwise.chat.probes import QUESTION
from turnwise.chat.template import Template
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["Kept", "StripRule", "find_strips"]

Kept = Literal["all", "last", "none", "some"]
"""Which thoughts of three turns are written: all, only the last turn's, none, or another selection."""
TURNS = 3


@dataclass(frozen=True, slots=True)
class StripRule:
    """What a template keeps of earlier thoughts, by the role of the messages that follow the turns."""

    user: Kept = "all"
    tool: Kept = "all"

    @property
    def at(self) -> tuple[str, ...]:
        """The roles of messages at which thoughts are left out."""
        return tuple(role for role, kept in (("user", self.user), ("tool", self.tool)) if kept != "all")

    def __str__(self) -> str:
        """For people: `at messages of user (all but the last turn's) and tool`."""
        kept = {"user": self.user, "tool": self.tool}
        named = [f"{role} (all but the last turn's)" if kept[role] == "last" else role for role in self.at]
        return f"at messages of {' and '.join(named)}" if named else "nowhere"


def find_strips(template: Template, turn: Callable[[str, bool, int], Message]) -> StripRule:
    """Ask a template. `turn(thought, calls, number)` is a turn as the template is given it, with a tool call or without."""
    return StripRule(user=_kept(template, turn, "user"), tool=_kept(template, turn, "tool"))


def _kept(template: Template, turn: Callable[[str, bool, int], Message], role: str) -> Kept:
    for turns in (TURNS, 1):
        for calls in (True, False) if role == "tool" and template.call_shape is not None else (False,):
            try:
                found = _written(template, [turn(_thought(n), calls, n) for n in range(turns)], role)
            except TemplateError:
                continue  # it takes no such conversation
            if all(found):
                return "all"
            if not any(found):
                return "none"
            return "last" if found == [False] * (turns - 1) + [True] else "some"
    return "all"  # it takes no such message, so there is nothing that it would leave out


def _written(template: Template, turns: Sequence[Message], role: str) -> list[bool]:
    messages: list[Message] = [QUESTION]
    for number, said in enumerate(turns):
        asked: Message = {"role": role, "content": f"Go on, {number}."}
        if role == "tool":
            asked |= {"tool_call_id": f"callprob{number}", "name": "probe_tool"}
        messages += [said, *template.plan([asked], Before.of([*messages, said])).apply([asked])]
    whole = template.render(messages, cue=True)
    return [_thought(number) in whole for number in range(len(turns))]


def _thought(number: int) -> str:
    return f"thought-{number}-4b9e27"
