"""A chat template, asked what it writes: which messages it takes, in which shape, and what it puts between them.

Templates differ: some refuse two user turns in a row or a system turn in the middle, some lose such a message without a
word, some want content in parts, arguments as JSON text, or a tool's answer only behind a call. None of that is looked up
in a table of model families. Short conversations of probe words are rendered, and what comes out is the answer; each
question is asked once. This module knows texts and messages, and no token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.base_conversations import NOTHING, Base, Before, base_conversation
from turnwise.chat.message_plans import Plan, PlanFinder
from turnwise.chat.message_shapes import check_content, with_calls, with_named_ids, with_short_ids
from turnwise.chat.probes import (
    PLACEHOLDER,
    QUESTION,
    TOOL,
    probe,
    probe_call,
    probe_message,
    roles_of,
    words,
)
from turnwise.chat.thoughts import ThoughtProfile, find_thoughts
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["Template"]

Shape = Literal["text", "thoughts apart", "fields"]
"""Of a turn: its text as said; its text with the thoughts in a field of their own; or content, calls and thoughts in fields."""


@dataclass(frozen=True, slots=True)
class _CallForm:
    """How an assistant message with calls is given to a template."""

    as_text: bool
    """Whether arguments are JSON text."""
    empty: str | None
    """What its empty content is."""
    named_ids: bool
    """Whether the template writes the tool's name only as a part of the call's id (Kimi's)."""
    tools: Sequence[ToolSchema]
    """The tools that probes with calls are rendered with."""


class Template:
    """The template of one tokenizer. `where` names it in messages.

    Raises TemplateError if there is none, or it cannot be read.
    """

    def __init__(self, tokenizer: Any, where: str) -> None:
        self._tokenizer = tokenizer
        self._where = where
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{where} has no chat template, so messages cannot be turned into tokens. Put a chat_template.jinja into "
                f"the model directory, or use the instruction-tuned variant of the model"
            )
        self.source = str(tokenizer.chat_template)
        self.probe_tools: Sequence[ToolSchema] = ()
        """The tools that probes without calls are rendered with: none, or one where the template works only with tools."""
        self._in_parts = False
        if not self._find_content():
            raise TemplateError(
                f"the chat template of {where} does not write an assistant message's content as it is, so a conversation "
                f"cannot be continued without rendering it again. It wrote: "
                f"{self.render([QUESTION, words(PLACEHOLDER)], cue=False)[-200:]!r}"
            )
        self._plan = functools.lru_cache(maxsize=1024)(PlanFinder(self, where).find)
        self._check_closing()

    # what it writes

    def render(self, messages: Sequence[Message], *, cue: bool, tools: Sequence[ToolSchema] | None = None) -> str:
        """The messages as one text, with the cue for the next model turn if asked for.

        `tools` are those of the conversation; None for a probe. Raises TemplateError if the template refuses them.
        """
        return self._write([self._shaped(message) for message in messages], cue=cue, tools=tools)

    def _write(self, messages: Sequence[Message], *, cue: bool, tools: Sequence[ToolSchema] | None = None) -> str:
        import jinja2

        tools = self._tools_for(messages) if tools is None else tools
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=cue, tokenize=False
            )
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template of {self._where} is no valid Jinja: {error.message} in line {error.lineno}. Correct "
                f"{_file(self._where)}"
            ) from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            # a template that adds None to a text, or takes the first of nothing, refuses what it was given
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            raise TemplateError(f"the chat template refuses messages of the roles [... {roles}]: {error}") from error

    def said(
        self, message: Message, *, before: Sequence[Message] = (QUESTION,), tools: Sequence[ToolSchema] | None = None
    ) -> str:
        """What the model has to say, end of turn included, for the template to write this assistant message."""
        tools = self._tools_for([*before, message]) if tools is None else tools
        cue = self.render(before, cue=True, tools=tools)
        whole = self.render([*before, message], cue=False, tools=tools)
        for begun in (
            cue,
            self.thoughts.marks.without_open_thought(cue),
        ):  # a thought that the cue opens need not stand in the written turn
            if whole.startswith(begun):
                return whole[len(begun) :]
        same = next((n for n, (a, b) in enumerate(zip(cue, whole, strict=False)) if a != b), min(len(cue), len(whole)))
        return whole[same:]

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> list[Message]:
        """The opening messages as this template takes them.

        Raises TemplateError if there is no way to hand them over.
        """
        try:
            plan = self._plan(roles_of(messages), opening=True, before=Before(tools=bool(tools)))
        except TemplateError:
            self.render(messages, cue=True, tools=tools)  # the template's own words say it better
            raise
        return plan.apply(messages)

    def plan(self, messages: Sequence[Message], before: Before = NOTHING) -> Plan:
        """How messages after a model turn are handed over, where `before` stands in the conversation.

        Raises TemplateError if there is no way.
        """
        try:
            return self._plan(roles_of(messages), opening=False, before=before.short)
        except TemplateError:
            self.after_turn(messages, "words")  # the template's own words say it better
            raise

    def after_turn(self, messages: Sequence[Message], base: Base, before: Before = NOTHING) -> str:
        """What stands behind the model's words: the end of its turn, the messages (as `plan` has them), the next cue.

        The conversation in front is short, so the cost is that of the messages; for templates that count (`Plan.behind`) it is
        the real one. Raises TemplateError if the template does not take `base`.
        """
        if before.messages:
            try:
                if (after := self._behind(messages, base, before)) is not None:
                    return after
            except TemplateError:
                pass  # the real conversation is refused as a whole: the sanity check tells so
        after = self._behind(messages, base, before.short)
        if after is None:
            raise TemplateError(f"the chat template of {self._where} loses the model's turn")
        return after

    def head(self, roles: Sequence[str], base: Base, before: Before = NOTHING) -> str:
        """The part of `after_turn` that comes before the first message's content, for messages of these roles."""
        probes = [probe_message(role, number) for number, role in enumerate(roles)]
        return self.after_turn(probes, base, before).partition(probe(0))[0]

    # what it is like

    @property
    def in_parts(self) -> bool:
        """Whether it takes content as a list of parts only, texts too."""
        return self._in_parts

    @functools.cached_property
    def closing(self) -> str:
        """What stands behind the model's last words when nothing follows them."""
        after = self.after([QUESTION, words(PLACEHOLDER)], cue=False)
        assert after is not None, "seen to by __init__"
        return after

    @functools.cached_property
    def lead(self) -> str:
        """White space that the template writes in front of the model's words and leaves to the model: a cue `Assistant:`."""
        before, _, _ = self.said(words(PLACEHOLDER)).partition(PLACEHOLDER)
        return before if before.isspace() else ""

    @functools.cached_property
    def call_shape(self) -> tuple[bool, str | None] | None:
        """How an assistant message with calls is given: whether arguments are JSON text, and what its empty content is.

        None where the template writes no calls.
        """
        return None if self._call_form is None else (self._call_form.as_text, self._call_form.empty)

    @functools.cached_property
    def _call_form(self) -> _CallForm | None:
        """How calls are given, first tried without tools; some templates write calls only where tools are given."""
        turn = probe_call({"text": PLACEHOLDER})
        ways = itertools.product((self.probe_tools, (TOOL,)), (False, True), (False, True), ("", None))
        for tools, named_ids, as_text, empty in ways:
            shaped = with_calls(with_named_ids(turn) if named_ids else turn, as_text=as_text, empty=empty)
            try:
                whole = self._write([QUESTION, shaped], cue=False, tools=tools)
            except TemplateError:
                continue
            behind = whole.partition(QUESTION["content"])[2]  # the tools stand in front
            if PLACEHOLDER in whole and turn["tool_calls"][0]["function"]["name"] in behind:
                return _CallForm(as_text, empty, named_ids, tools)
        return None

    def _tools_for(self, messages: Sequence[Message]) -> Sequence[ToolSchema]:
        """The tools that a probe of these messages is rendered with."""
        calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        return self._call_form.tools if calls and self._call_form is not None else self.probe_tools

    @functools.cached_property
    def thoughts(self) -> ThoughtProfile:
        """How the template writes thoughts: the field, the marks, the headers."""
        return find_thoughts(self.render, self.source)

    @property
    def reasoning_key(self) -> str | None:
        """Under which name the template writes an assistant message's reasoning, or None."""
        return self.thoughts.key

    @functools.cached_property
    def takes(self) -> Shape:
        """In which shape a turn of the model is given, so that the template writes it as it was said."""
        sample = words("Said.")
        if self.reasoning_key is not None:
            sample[self.reasoning_key] = "Thought."
        said = self.said(sample).partition("Said.")[0] + "Said."
        raw = words(self.thoughts.marks.open_thought(self.render([QUESTION], cue=True)) + said)
        try:
            alike = all(
                self.render([QUESTION, raw, *after], cue=False) == self.render([QUESTION, sample, *after], cue=False)
                for after in ([], [QUESTION])  # in its history too, where thoughts may be left out
            )
        except TemplateError:
            return "fields"
        if self.call_shape is not None:
            answer: Message = {"role": "tool", "tool_call_id": "callprob0", "name": "probe_tool", "content": probe(0)}
            plan = self.plan([answer])
            if "words" not in plan.bases:
                return "fields"
            try:  # some count whose turn it is, and turns of calls apart
                self.render([QUESTION, words("Said."), *plan.apply([answer]), words("Said.")], cue=False)
            except TemplateError:
                return "fields"
        return "text" if alike else "thoughts apart"

    def takes_calls(self, count: int) -> bool:
        """Whether the template writes this many calls in one turn."""
        return count > 0 and self.call_shape is not None and (count == 1 or self._writes_both)

    @functools.cached_property
    def _writes_both(self) -> bool:
        """Whether it writes all calls of a turn; some refuse more than one, or write the first only."""
        try:
            whole = self.render([QUESTION, probe_call({"text": probe(0)}, {"text": probe(1)})], cue=False)
        except TemplateError:
            return False
        return probe(0) in whole and probe(1) in whole

    @functools.cached_property
    def call_ends(self) -> tuple[str, str]:
        """What the template writes behind the only call of a turn, and between two calls ("" where it takes only one)."""
        if self.call_shape is None:
            return "", ""
        alone = self.after([QUESTION, probe_call({"text": PLACEHOLDER})], cue=False) or ""
        try:
            two = self.after([QUESTION, probe_call({"text": PLACEHOLDER}, {"text": probe(1)})], cue=False) or ""
        except TemplateError:
            return alone, ""
        between, second, _ = two.partition(probe(1))
        return alone, between if second else ""

    # how it is found out

    def _behind(self, messages: Sequence[Message], base: Base, before: Before) -> str | None:
        """What is written behind the model's turn in a base conversation; None where the turn is lost."""
        conversation = base_conversation(base, messages, before, writes_calls=self.call_shape is not None)
        return None if conversation is None else self.after([*conversation, *messages], tools=before.offered)

    def after(
        self, messages: Sequence[Message], *, cue: bool = True, tools: Sequence[ToolSchema] | None = None
    ) -> str | None:
        """What is written behind the placeholder's last occurrence, or None where it is lost."""
        _, found, after = self.render(messages, cue=cue, tools=tools).rpartition(PLACEHOLDER)
        return after if found else None

    def _find_content(self) -> bool:
        """Whether it writes a content as it is: as text or in parts, without tools or, where it refuses that, with a tool."""
        first: TemplateError | None = None
        for tools in ((), (TOOL,)):
            for in_parts in (False, True):
                self.probe_tools, self._in_parts = tools, in_parts
                try:
                    if self._writes_content():
                        return True
                except TemplateError as error:
                    if "no valid Jinja" in str(error):
                        raise
                    first = first or error
        self.probe_tools, self._in_parts = (), False
        if first is not None:
            raise first
        return False

    def _writes_content(self) -> bool:
        try:
            return PLACEHOLDER in self.render([QUESTION, words(PLACEHOLDER)], cue=False)
        except TemplateError as error:
            if self._in_parts or "no valid Jinja" in str(error):
                raise
            return False

    def _check_closing(self) -> None:
        """A turn that is cut out of a short conversation must end as it does in a longer one."""
        try:
            later = self.after([QUESTION, words("x"), QUESTION, words(PLACEHOLDER)], cue=False)
        except TemplateError:
            return  # it will be told where it matters: not every environment speaks as a user
        if later != self.closing:
            raise TemplateError(
                f"the chat template of {self._where} closes the second assistant turn with {later!r} and the first with "
                f"{self.closing!r}; such a template cannot be continued turn by turn"
            )

    def _shaped(self, message: Message) -> Message:
        """A message in the shape that this template reads."""
        check_content(message)
        content = message.get("content")
        if self._in_parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if message.get("tool_calls") and self.call_shape is not None:
            as_text, empty = self.call_shape
            message = with_calls(message, as_text=as_text, empty=empty)
        if message.get("tool_calls") or message.get("role") == "tool":
            if self._call_form is not None and self._call_form.named_ids:
                return with_named_ids(message)
            if not self._takes_any_id:
                return with_short_ids(message)
        return message

    @functools.cached_property
    def _takes_any_id(self) -> bool:
        """Whether the id of a call may be what it is; Mistral's insist on nine letters and digits."""
        if self.call_shape is None:
            return True
        as_text, empty = self.call_shape
        turn = with_calls(probe_call({"text": "x"}), as_text=as_text, empty=empty)
        answer: Message = {"role": "tool", "tool_call_id": "callprob0", "name": "probe_tool", "content": "An answer."}

        def takes(*messages: Message) -> bool:
            try:
                self._write([QUESTION, *messages], cue=True)
            except TemplateError:
                return False
            return True

        turn["tool_calls"][0]["id"] = "call_0"
        return takes(turn, {**answer, "tool_call_id": "call_0"}) or not takes(*map(with_short_ids, (turn, answer)))


def _file(where: str) -> str:
    """Where the template of a model directory is written, for messages."""
    if Path(where, "chat_template.jinja").is_file():
        return f"{Path(where, 'chat_template.jinja')}"
    if Path(where, "tokenizer_config.json").is_file():
        return f"chat_template in {Path(where, 'tokenizer_config.json')}"
    return "chat_template.jinja (or chat_template in tokenizer_config.json)"
