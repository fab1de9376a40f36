"""A tokenizer's chat template: renders messages, and the text between two turns of the model.

Templates differ: some refuse two user messages in a row or a system message in the middle, some leave such a message out
without an error, some want content in parts, arguments as JSON text, or a tool message only behind a call. There is no table
of model families. Short probe messages are rendered instead, and the result is the answer: once at start for what depends on
the template alone (`TemplateProfile`), once for each sequence of roles for how messages are given to it (`plan`). This module
knows texts and messages, and no token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from turnwise.chat.base_conversations import NO_CONVERSATION, BaseTurn, PriorConversation, base_conversation
from turnwise.chat.caches import RenderMessages, cached_by_content, cached_by_roles
from turnwise.chat.message_format import MessageFormat, find_message_format
from turnwise.chat.message_plans import MessagePlan, PlanFinder
from turnwise.chat.message_shapes import with_description
from turnwise.chat.probes import PLACEHOLDER, QUESTION, SYSTEM_WORD, probe_message, probe_word, roles_of
from turnwise.chat.reasoning_format import ReasoningFormat, find_reasoning_format
from turnwise.chat.template_arguments import refuse_unread_arguments
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["Template"]


class Template:
    """The chat template of one tokenizer. `where` names the tokenizer in error messages.

    `arguments` are further arguments of the template, such as `{"enable_thinking": False}`. They are given in every rendering,
    those of probes included: what is found out about the template holds for these arguments.

    Raises TemplateError if the tokenizer has no chat template, the template cannot be used, or never reads an argument.
    """

    def __init__(self, tokenizer: Any, where: str, arguments: Mapping[str, Any] = {}) -> None:
        self._tokenizer = tokenizer
        self.where = where
        self.arguments = arguments
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{where} has no chat template, so messages cannot be turned into tokens. Put a chat_template.jinja into "
                f"the model directory, or use the instruction-tuned variant of the model"
            )
        self.source = str(tokenizer.chat_template)
        refuse_unread_arguments(arguments, self.source, where)
        # a template that writes the date gives another text tomorrow
        dated = "strftime_now" in self.source
        self._render_shaped: RenderMessages = (
            self._render_as_given if dated else cached_by_content(self._render_as_given)
        )
        self._describe: Callable[[Sequence[ToolSchema]], str] | None = None
        """Describes tools in the system message; None if the template does it."""
        # these two are what rendering itself needs; they are fields of TemplateProfile too
        self.messages: MessageFormat = find_message_format(self._render_as_given, where)
        self.reasoning: ReasoningFormat = find_reasoning_format(self.render, self.source)
        self._find_plan = cached_by_roles(PlanFinder(self, where).find)

    # rendering

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema] | None = None
    ) -> str:
        """The messages as one text, with the generation prompt of the next model turn if asked for.

        `tools` are those of the conversation; None for a probe. Raises TemplateError if the template refuses the messages.
        """
        if self._describe is not None and tools:
            messages = with_description(messages, self._describe(tools), accepts_system=self._accepts_system)
        shaped = [self.messages.shaped(message) for message in messages]
        tools = self.messages.probe_tools(messages) if tools is None else tools
        return self._render_shaped(shaped, add_generation_prompt=add_generation_prompt, tools=tools)

    def _render_as_given(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema]
    ) -> str:
        import jinja2

        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self.arguments,
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template of {self.where} is no valid Jinja: {error.message} in line {error.lineno}. Correct "
                f"{_template_file(self.where)}"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # a template that adds None to a text, or takes the first element of an empty list, refuses its input
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            raise TemplateError(f"the chat template refuses messages of the roles [... {roles}]: {error}") from error

    def completion_text(
        self, message: Message, *, before: Sequence[Message] = (QUESTION,), tools: Sequence[ToolSchema] | None = None
    ) -> str:
        """The text that the model must generate, end of turn included, for the template to write this assistant message."""
        tools = self.messages.probe_tools([*before, message]) if tools is None else tools
        prompt = self.render(before, add_generation_prompt=True, tools=tools)
        text = self.render([*before, message], add_generation_prompt=False, tools=tools)
        # the opening mark of reasoning may be in the generation prompt only, and need not be written in the finished turn
        for start in (prompt, self.reasoning.marks.without_reasoning_opening(prompt)):
            if text.startswith(start):
                return text[len(start) :]
        pairs = zip(prompt, text, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(prompt), len(text)))
        return text[same:]

    def describe_tools_by(self, describe: Callable[[Sequence[ToolSchema]], str]) -> None:
        """Write the text of `describe` into the system message of each conversation that offers tools."""
        self._describe = describe

    @functools.cached_property
    def _accepts_system(self) -> bool:
        """Whether the template writes a system message at the beginning."""
        try:
            text = self.render([{"role": "system", "content": SYSTEM_WORD}, QUESTION], add_generation_prompt=True)
        except TemplateError:
            return False
        return SYSTEM_WORD in text

    # what messages must look like

    @property
    def writes_calls(self) -> bool:
        """Whether the template writes tool calls."""
        return self.messages.calls is not None

    def planned_opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[Message]:
        """The opening messages as this template accepts them.

        Raises TemplateError if it does not accept them in any form.
        """
        try:
            plan = self._find_plan(roles_of(messages), opening=True, prior=PriorConversation(has_tools=bool(tools)))
        except TemplateError:
            # the template's own error for these messages says more
            self.render(messages, add_generation_prompt=True, tools=tools)
            raise
        return plan.apply(messages)

    def plan(self, messages: Sequence[Message], prior: PriorConversation = NO_CONVERSATION) -> MessagePlan:
        """How messages after a model turn are given to the template, in a conversation with the features `prior`.

        Raises TemplateError if the template does not accept them in any form.
        """
        try:
            return self._find_plan(roles_of(messages), opening=False, prior=prior.without_messages)
        except TemplateError:
            self.text_after_turn(messages, "text")  # the template's own error for these messages says more
            raise

    # the text between two turns

    def text_after_turn(
        self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation = NO_CONVERSATION
    ) -> str:
        """The text behind the model's last words: the end of its turn, `messages`, the next generation prompt.

        `messages` are as `plan` has them. The conversation in front is short, so the cost is that of the messages; for
        templates that count rounds (`MessagePlan.base_for`) it is the real one. Raises TemplateError if the template does not
        accept `base`.
        """
        if prior.messages:
            try:
                if (after := self._text_after_base(messages, base, prior)) is not None:
                    return after
            except TemplateError:
                pass  # the template refuses the complete real conversation; the sanity check reports that
        after = self._text_after_base(messages, base, prior.without_messages)
        if after is None:
            raise TemplateError(f"the chat template of {self.where} loses the model's turn")
        return after

    def text_before_content(
        self, roles: Sequence[str], base: BaseTurn, prior: PriorConversation = NO_CONVERSATION
    ) -> str:
        """The part of `text_after_turn` in front of the first message's content, for messages of these roles."""
        probes = [probe_message(role, number) for number, role in enumerate(roles)]
        return self.text_after_turn(probes, base, prior).partition(probe_word(0))[0]

    def text_after_placeholder(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[ToolSchema] | None = None,
    ) -> str | None:
        """The rendered text behind the last placeholder; None if the template does not write it."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        _, placeholder, after = text.rpartition(PLACEHOLDER)
        return after if placeholder else None

    def _text_after_base(self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation) -> str | None:
        """The text behind the model's turn in a base conversation; None if the turn is not written."""
        conversation = base_conversation(base, messages, prior, writes_calls=self.writes_calls)
        if conversation is None:
            return None
        return self.text_after_placeholder([*conversation, *messages], tools=prior.probe_tools)


def _template_file(where: str) -> str:
    """The file with the template of a model directory, for error messages."""
    if Path(where, "chat_template.jinja").is_file():
        return f"{Path(where, 'chat_template.jinja')}"
    if Path(where, "tokenizer_config.json").is_file():
        return f"chat_template in {Path(where, 'tokenizer_config.json')}"
    return "chat_template.jinja (or chat_template in tokenizer_config.json)"
