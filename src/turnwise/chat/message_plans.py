"""How messages must be changed so that a chat template accepts them, and behind which base conversation it is asked.

Templates refuse some messages, or leave their text out: two user messages in a row, a system message in the middle, a tool
message. A `MessagePlan` renames roles and merges neighbors. The first plan is used with which every text is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from turnwise.chat.base_conversations import (
    BaseTurn,
    PriorConversation,
    base_conversation,
    longer_conversations,
    simpler_conversations,
)
from turnwise.chat.message_shapes import joined
from turnwise.chat.probes import SYSTEM_WORD, TOOL, TOOL_WORD, assistant_message, probe_messages, probe_words_in
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["MessagePlan", "PlanFinder", "candidate_plans"]

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class MessagePlan:
    """How messages of certain roles are given to the template, so that it accepts them and leaves out none."""

    renamed_roles: tuple[tuple[str, str], ...] = ()
    """Pairs of a role and the role that replaces it: `("system", "user")`."""
    merge: bool = False
    """Whether neighbors of one role become one message."""
    base_turns: tuple[BaseTurn, ...] = ("text",)
    """What the model's turn in front of the messages may contain, best first. Without meaning for an opening."""
    base_features: PriorConversation = field(default_factory=PriorConversation)
    """The features of the real conversation that the base conversation has."""
    needs_history: bool = False
    """Whether the text behind the model's turn depends on the number of earlier rounds. If so, all of them are rendered."""

    def base_for(self, prior: PriorConversation) -> PriorConversation:
        """What to render in front of the messages, in a conversation with `prior`."""
        return replace(self.base_features, messages=prior.messages if self.needs_history else ())

    def apply(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template receives them."""
        renamed = [_renamed(message, dict(self.renamed_roles).get(message["role"])) for message in messages]
        if not self.merge:
            return renamed
        merged: list[Message] = []
        for message in renamed:
            if merged and merged[-1]["role"] == message["role"] != "tool":
                both = joined(merged[-1].get("content"), message.get("content"))
                merged[-1] = {**merged[-1], "content": both}
            else:
                merged.append(message)
        return merged


def candidate_plans(roles: Sequence[str]) -> Iterator[MessagePlan]:
    """The plans for messages of these roles. The plan that changes least comes first."""
    renamings: list[tuple[tuple[str, str], ...]] = [()]
    system = tuple((role, "user") for role in ("system", "developer") if role in roles)
    if system:
        renamings.append(system)
    if "tool" in roles:
        renamings += [(*renamed, ("tool", "user")) for renamed in list(renamings)]
    for renamed in renamings:
        yield MessagePlan(renamed)
        if len(roles) > 1:
            yield MessagePlan(renamed, merge=True)


def _renamed(message: Message, role: str | None) -> Message:
    if role is None:
        return message
    content = message.get("content") or ""
    if message["role"] == "tool" and isinstance(content, str):
        content = f"<tool_response>\n{content}\n</tool_response>"
    return {"role": role, "content": content}


class ProbedTemplate(Protocol):
    """The part of a template that plans are found with. All methods raise TemplateError if the template refuses the messages."""

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls."""
        ...

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema] | None = None
    ) -> str:
        """The messages as one text."""
        ...

    def text_after_placeholder(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolSchema] | None = None,
    ) -> str | None:
        """The rendered text behind the placeholder; None if the template does not write the placeholder."""
        ...


class PlanFinder:
    """Finds the plans of one template. `where` names the template in error messages."""

    def __init__(self, template: ProbedTemplate, where: str) -> None:
        self._template = template
        self._where = where

    def find(self, roles: tuple[str, ...], *, opening: bool, prior: PriorConversation) -> MessagePlan:
        """The first plan for messages of these roles with which the template writes every text.

        Raises TemplateError if there is none.
        """
        probes = probe_messages(roles)
        candidates = [(plan, plan.apply(probes)) for plan in candidate_plans(roles)]
        for plan, planned in candidates:
            if opening and self._writes_opening(planned, prior.has_tools):
                return plan
        # plans behind which the model can speak again are preferred
        for must_continue in () if opening else (True, False):
            for plan, planned in candidates:
                plan_with_base = self._with_base(planned, plan, prior, must_continue=must_continue)
                if plan_with_base is not None:
                    return plan_with_base
        unknown = [role for role in roles if role not in ROLES]
        hint = (
            f"; {unknown[0]!r} is a role that it does not know: use system, user, assistant or tool" if unknown else ""
        )
        place = "at the beginning" if opening else "after the model's turn"
        raise TemplateError(
            f"the chat template of {self._where} refuses or leaves out messages of the roles [{', '.join(roles)}] {place}{hint}"
        )

    def _writes_opening(self, messages: Sequence[Message], has_tools: bool) -> bool:
        tools = [TOOL] if has_tools else []
        try:
            text = self._template.render(messages, add_generation_prompt=True, tools=tools)
        except TemplateError:
            return False
        return all(word in text for word in probe_words_in(messages))

    def _with_base(
        self, planned: Sequence[Message], plan: MessagePlan, prior: PriorConversation, *, must_continue: bool
    ) -> MessagePlan | None:
        """The plan with the base conversations that the template accepts; None if it accepts none.

        `must_continue`: it must also accept another turn of the model behind the messages.
        """
        has_answers = any(message["role"] == "tool" for message in planned)
        wanted: list[BaseTurn] = ["calls", "call", "text"] if has_answers else ["text"]
        best: tuple[BaseTurn, ...] = ()
        features = prior
        for simpler in simpler_conversations(prior):
            accepted: tuple[BaseTurn, ...] = tuple(
                base for base in wanted if self._writes_after(planned, base, simpler)
            )
            if len(accepted) > len(best):
                best, features = accepted, simpler
            if len(accepted) == len(wanted):
                break
        if not best or (must_continue and not any(self._continues(planned, base, features) for base in best)):
            return None
        needs_history = any(self._counts_rounds(planned, base, features) for base in best)
        return replace(plan, base_turns=best, base_features=features, needs_history=needs_history)

    def _writes_after(self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation) -> bool:
        """Whether the template writes all messages behind this base conversation, and nothing of its beginning."""
        try:
            after = self._text_after(messages, base, prior)
        except TemplateError:
            return False
        if after is None or (prior.system_role and SYSTEM_WORD in after) or (prior.has_tools and TOOL_WORD in after):
            return False
        at = 0
        for word in probe_words_in(messages):
            at = after.find(word, at)
            if at < 0:
                return False
        return True

    def _continues(self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation) -> bool:
        """Whether the template accepts another turn of the model behind the messages: some check that roles alternate."""
        try:
            continued = [*messages, assistant_message("Words.")]
            return self._text_after(continued, base, prior, add_generation_prompt=False) is not None
        except TemplateError:
            return False

    def _counts_rounds(self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation) -> bool:
        """Whether the text behind the model's turn changes in a longer conversation."""
        conversation = self._conversation(base, messages, prior)
        assert conversation is not None, "_writes_after has checked this"
        tools = prior.probe_tools
        short = self._template.text_after_placeholder([*conversation, *messages], tools=tools)
        for longer in longer_conversations(conversation, prior):
            try:
                if self._template.text_after_placeholder([*longer, *messages], tools=tools) != short:
                    return True
            except TemplateError:
                continue  # the template accepts no such conversation
        return False

    def _conversation(
        self, base: BaseTurn, messages: Sequence[Message], prior: PriorConversation
    ) -> list[Message] | None:
        return base_conversation(base, messages, prior, writes_calls=self._template.writes_calls)

    def _text_after(
        self,
        messages: Sequence[Message],
        base: BaseTurn,
        prior: PriorConversation,
        *,
        add_generation_prompt: bool = True,
    ) -> str | None:
        conversation = self._conversation(base, messages, prior)
        if conversation is None:
            return None
        return self._template.text_after_placeholder(
            [*conversation, *messages], add_generation_prompt=add_generation_prompt, tools=prior.probe_tools
        )
