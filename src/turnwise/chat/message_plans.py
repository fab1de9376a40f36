"""The ways in which messages can be handed to a chat template, and which of them it takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turnwise.chat.base_conversations import Base, Before, base_conversation, less, longer
from turnwise.chat.probes import SYSTEM_WORD, TOOL, TOOL_WORD, asked, probe_words, words
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["Plan", "PlanFinder", "plans"]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class Plan:
    """How messages of certain roles are handed to the template, so that it takes them and loses none."""

    roles: tuple[tuple[str, str], ...] = ()
    """Which roles become which others: `("system", "user")`."""
    merge: bool = False
    """Whether neighbours of one role become one message."""
    bases: tuple[Base, ...] = ("words",)
    """As what the model's turn before them may be rendered, best first; of an opening, nothing."""
    base_has: Before = field(default_factory=Before)
    """What the base conversation has of the real one."""
    counts: bool = False
    """Whether the text behind the model's turn depends on how many rounds came before: it is then asked behind all of them."""

    def behind(self, before: Before) -> Before:
        """What the template is asked behind, where `before` stands in the conversation."""
        return replace(self.base_has, messages=before.messages if self.counts else ())

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


class Writer(Protocol):
    """A template, as far as plans are found with it. All raise TemplateError if the template refuses the messages."""

    @property
    def call_shape(self) -> object | None:
        """None where the template writes no calls."""
        ...

    def render(self, messages: Sequence[Message], *, cue: bool, tools: Sequence[ToolSchema] | None = None) -> str:
        """The messages as one text, with the generation prompt if `cue`."""
        ...

    def after(
        self, messages: Sequence[Message], *, cue: bool = True, tools: Sequence[ToolSchema] | None = None
    ) -> str | None:
        """The text behind the placeholder; None where it is lost."""
        ...


class PlanFinder:
    """Finds the plans of one template, which `where` names in messages."""

    def __init__(self, template: Writer, where: str) -> None:
        self._template = template
        self._where = where

    def find(self, roles: tuple[str, ...], *, opening: bool, before: Before) -> Plan:
        """The first way to hand over messages of these roles that the template neither refuses nor loses."""
        wanted = asked(roles)
        ways = [(plan, plan.apply(wanted)) for plan in plans(roles)]
        for plan, handed in ways:
            if opening and self._takes(handed, before.tools):
                return plan
        for goes_on in () if opening else (True, False):
            for plan, handed in ways:
                if (found := self._find_base(handed, plan, before, goes_on=goes_on)) is not None:
                    return found
        strange = [role for role in roles if role not in ROLES]
        hint = (
            f"; {strange[0]!r} is a role that it does not know: use system, user, assistant or tool" if strange else ""
        )
        place = "at the beginning" if opening else "after the model's turn"
        raise TemplateError(
            f"the chat template of {self._where} refuses or leaves out messages of the roles [{', '.join(roles)}] {place}{hint}"
        )

    def _takes(self, messages: Sequence[Message], tools: bool) -> bool:
        offered = [TOOL] if tools else []
        try:
            whole = self._template.render(messages, cue=True, tools=offered)
        except TemplateError:
            return False
        return all(text in whole for text in probe_words(messages))

    def _find_base(self, handed: Sequence[Message], plan: Plan, before: Before, *, goes_on: bool) -> Plan | None:
        """The plan with the base conversations that the template takes; None where it takes none.

        `goes_on`: only where it takes another turn of the model behind the messages, too.
        """
        every: list[Base] = ["calls", "call", "words"] if any(one["role"] == "tool" for one in handed) else ["words"]
        best, has = (), before
        for one in less(before):
            taken: tuple[Base, ...] = tuple(base for base in every if self._follows(handed, base, one))
            if len(taken) > len(best):
                best, has = taken, one
            if len(taken) == len(every):
                break
        if not best or (goes_on and not any(self._goes_on(handed, base, has) for base in best)):
            return None
        counts = any(self._counts(handed, base, has) for base in best)
        return replace(plan, bases=best, base_has=has, counts=counts)

    def _follows(self, messages: Sequence[Message], base: Base, before: Before) -> bool:
        """Whether the template writes all messages behind this base conversation, and nothing of its beginning."""
        try:
            after = self._behind(messages, base, before)
        except TemplateError:
            return False
        if after is None or (before.system and SYSTEM_WORD in after) or (before.tools and TOOL_WORD in after):
            return False
        at = 0
        for text in probe_words(messages):
            at = after.find(text, at)
            if at < 0:
                return False
        return True

    def _goes_on(self, messages: Sequence[Message], base: Base, before: Before) -> bool:
        """Whether the template takes another turn of the model behind the messages: some count whose turn it is."""
        try:
            return self._behind([*messages, words("Words.")], base, before, cue=False) is not None
        except TemplateError:
            return False

    def _counts(self, messages: Sequence[Message], base: Base, before: Before) -> bool:
        """Whether the text behind the model's turn is another one in a longer conversation."""
        conversation = self._conversation(base, messages, before)
        assert conversation is not None, "seen to by _follows"
        tools = before.offered
        short = self._template.after([*conversation, *messages], tools=tools)
        for more in longer(conversation, before):
            try:
                if self._template.after([*more, *messages], tools=tools) != short:
                    return True
            except TemplateError:
                continue  # it takes no such conversation
        return False

    def _conversation(self, base: Base, messages: Sequence[Message], before: Before) -> list[Message] | None:
        return base_conversation(base, messages, before, writes_calls=self._template.call_shape is not None)

    def _behind(self, messages: Sequence[Message], base: Base, before: Before, *, cue: bool = True) -> str | None:
        conversation = self._conversation(base, messages, before)
        if conversation is None:
            return None
        return self._template.after([*conversation, *messages], cue=cue, tools=before.offered)
