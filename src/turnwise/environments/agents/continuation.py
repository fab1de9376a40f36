"""How a request continues the conversation: it extends what is held, changes the last answer a little, or begins a new segment.

The messages of a request are compared with those of the request before, and with the answer to that request. Clients write an
answer in their own form when they send it back, so two messages also count as equal if only their form differs: white space at
the ends of the content, the formatting of JSON, missing reasoning, ids of calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from turnwise.types import EarlierHistory, Edit, Message, ToolSchema

__all__ = ["Continuation", "LiveHistories", "LiveHistory", "Relation", "continuation"]

_MOST_LIVE = 64
"""Histories that are compared with a request."""


class Relation(StrEnum):
    """How the messages of a request relate to the conversation that is held. The values are names in metrics."""

    EXTENDED = "extended"
    """They repeat the conversation exactly, and new messages follow."""
    REALIGNED = "realigned"
    """They repeat the conversation but for the last answer, which the client wrote a little differently."""
    RETURNED = "returned"
    """They continue an earlier history of the conversation, such as that of another agent."""
    FORKED = "forked"
    """They are another history. A new segment begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """The relation of a request to the conversation, and what follows from it."""

    relation: Relation
    new: int = 0
    """Index of the first new message; 0 with a fork."""
    edit: Edit | None = None
    """With REALIGNED, the change of the last turn. None if only the form of the answer differs: the sampled tokens stay."""
    reason: str = ""
    """What differs, for the record; empty with EXTENDED."""


def continuation(held: Sequence[Message], messages: Sequence[Message], text: str) -> Continuation:
    """Compare the messages of a request with the conversation `held`, whose last message is the answer of the last turn.

    `text` is the sampled text of that turn.
    """
    last = len(held) - 1
    for index, (before, now) in enumerate(zip(held[:last], messages, strict=False)):
        if not _same_form(before, now):
            return _fork(f"message {index} ({now['role']}) differs")
    if len(messages) <= len(held):
        return _fork(f"the request has {len(messages)} messages, and the conversation had {len(held)}")
    answer, repeated = held[last], messages[last]
    if repeated["role"] != "assistant":
        return _fork(f"message {last} is not the last answer: its role is {repeated['role']}")
    if _same(answer, repeated):
        return Continuation(relation=Relation.EXTENDED, new=len(held))
    if _same_form(answer, repeated):
        return Continuation(relation=Relation.REALIGNED, new=len(held), reason="the form of the last answer differs")
    edit = _edit(answer, repeated, text)
    if edit is None:
        return _fork("the last answer differs")
    return Continuation(
        relation=Relation.REALIGNED, new=len(held), edit=edit, reason="the text of the last answer differs"
    )


@dataclass(frozen=True, slots=True)
class LiveHistory:
    """A history of a conversation, its last answer included."""

    messages: Sequence[Message]
    tools: Sequence[ToolSchema]
    arguments: Mapping[str, Any]
    """The arguments of the chat template (`chat_template_kwargs`)."""
    text: str
    """The sampled text of the last turn."""


class LiveHistories:
    """The histories of a conversation that a later request may continue, besides the present one."""

    def __init__(self) -> None:
        self._replaced = 0
        """How often the history was replaced: the index of the next history in `Trajectory.previous_histories`."""
        self._live: dict[int, LiveHistory] = {}
        """By their index; the latest last."""

    def replace(self, present: LiveHistory, returned: int | None) -> None:
        """The present history is replaced: by the history `returned`, or by a new history."""
        self._live[self._replaced] = present
        self._replaced += 1
        if returned is not None:
            del self._live[returned]
        while len(self._live) > _MOST_LIVE:
            del self._live[next(iter(self._live))]

    def find(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], arguments: Mapping[str, Any]
    ) -> EarlierHistory | None:
        """The latest history that these messages continue with no other text in its answers, and whose prompts were written with
        the same tools and template arguments; None if there is none."""
        for index, live in reversed(self._live.items()):
            if list(live.tools) == list(tools) and live.arguments == arguments:
                found = continuation(live.messages, messages, live.text)
                if found.new and found.edit is None:
                    return EarlierHistory(index=index, first_new=found.new)
        return None


def _fork(reason: str) -> Continuation:
    return Continuation(relation=Relation.FORKED, reason=reason)


def _edit(answer: Message, repeated: Message, text: str) -> Edit | None:
    """The change of the turn's text that makes the answer the client's. None if at least half of the client's text is new, if
    there are tool calls, or if the content is not in the sampled text."""
    old, new = answer["content"], repeated["content"]
    if answer.get("tool_calls") or repeated.get("tool_calls") or not isinstance(new, str) or not old:
        return None
    common = 0
    while common < min(len(old), len(new)) and old[common] == new[common]:
        common += 1
    start = text.rfind(old)
    if start < 0 or old == new or 2 * common <= len(new):
        return None
    return Edit(keep=start + common, add=new[common:])


def _same(first: Message, second: Message) -> bool:
    names = ("role", "content", "tool_calls", "tool_call_id")
    return _reasoning(first) == _reasoning(second) and all(
        (first.get(name) or "") == (second.get(name) or "") for name in names
    )


def _same_form(first: Message, second: Message) -> bool:
    """Whether two messages differ in their form only."""
    reasoning = _reasoning(second)
    return (
        first["role"] == second["role"]
        and _bare(first["content"]) == _bare(second["content"])
        and _calls(first) == _calls(second)
        and first.get("tool_call_id") == second.get("tool_call_id")
        and (not reasoning or not _reasoning(first) or reasoning.strip() == _reasoning(first).strip())
    )


def _reasoning(message: Message) -> str:
    return str(message.get("reasoning_content") or "")


def _bare(content: Any) -> Any:
    return content.strip() if isinstance(content, str) else content


def _calls(message: Message) -> list[tuple[str, Any]]:
    """The names and arguments of a message's calls; arguments that are not JSON as text."""
    return [
        (call["function"]["name"], _json(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    ]


def _json(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return text
