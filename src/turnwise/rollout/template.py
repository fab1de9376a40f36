"""A chat template, asked what it writes: which messages it takes, in which shape, and what it puts between them.

Templates differ: some refuse two user turns in a row or a system turn in the middle, some lose such a message without a
word, some want content in parts, arguments as JSON text, or a tool's answer only behind a call. None of that is looked up
in a table of model families. Short conversations of probe words are rendered, and what comes out is the answer; each
question is asked once. This module knows texts and messages, and no token.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import TemplateError
from turnwise.rollout.probes import (
    PLACEHOLDER,
    QUESTION,
    TOOL,
    Base,
    Plan,
    asked,
    plans,
    probe,
    probe_call,
    probe_message,
    probe_words,
    roles_of,
    with_calls,
    with_named_ids,
    with_short_ids,
    words,
)
from turnwise.rollout.thoughts import ThoughtProfile, find_thoughts
from turnwise.types import Message, ToolSchema

__all__ = ["Template"]

Shape = Literal["text", "thoughts apart", "fields"]
"""Of a turn: its text as said; its text with the thoughts in a field of their own; or content, calls and thoughts in fields."""
ROLES = ("system", "developer", "user", "assistant", "tool")
PARTS = ("text", "image", "image_url", "video")


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
        """The tools that probes are rendered with: none, or one where the template works only with tools."""
        self._in_parts = False
        if not self._find_content():
            raise TemplateError(
                f"the chat template of {where} does not write an assistant message's content as it is, so a conversation "
                f"cannot be continued without rendering it again. It wrote: "
                f"{self.render([QUESTION, words(PLACEHOLDER)], cue=False)[-200:]!r}"
            )
        self._plan = functools.lru_cache(maxsize=1024)(self._find_plan)
        self._check_closing()

    # what it writes

    def render(self, messages: Sequence[Message], *, cue: bool, tools: Sequence[ToolSchema] | None = None) -> str:
        """The messages as one text, with the cue for the next model turn if asked for.

        `tools` are those of the conversation; None for a probe. Raises TemplateError if the template refuses them.
        """
        return self._write([self._shaped(message) for message in messages], cue=cue, tools=tools)

    def _write(self, messages: Sequence[Message], *, cue: bool, tools: Sequence[ToolSchema] | None = None) -> str:
        import jinja2

        tools = self.probe_tools if tools is None else tools
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
            plan = self._plan(roles_of(messages), opening=True, again=False, tools=bool(tools))
        except TemplateError:
            self.render(messages, cue=True, tools=tools)  # the template's own words say it better
            raise
        return plan.apply(messages)

    def plan(self, messages: Sequence[Message], *, again: bool = False) -> Plan:
        """How messages after a model turn are handed over. `again`: tools have answered in this conversation before.

        Raises TemplateError if there is no way.
        """
        try:
            return self._plan(roles_of(messages), opening=False, again=again, tools=False)
        except TemplateError:
            self.after_turn(messages, "words")  # the template's own words say it better
            raise

    def after_turn(self, messages: Sequence[Message], base: Base, *, again: bool = False) -> str:
        """What stands behind the model's words: the end of its turn, the messages (as `plan` has them), the next cue.

        The history in front is fixed and short, so the cost is that of the messages. Raises TemplateError if the template
        does not take `base`.
        """
        history = self._history(base, messages, again=again)
        after = None if history is None else self._after([*history, *messages])
        if after is None:
            raise TemplateError(f"the chat template of {self._where} loses the model's turn")
        return after

    def head(self, roles: Sequence[str], base: Base, *, again: bool = False) -> str:
        """The part of `after_turn` that comes before the first message's content, for messages of these roles."""
        probes = [probe_message(role, number) for number, role in enumerate(roles)]
        return self.after_turn(probes, base, again=again).partition(probe(0))[0]

    # what it is like

    @property
    def in_parts(self) -> bool:
        """Whether it takes content as a list of parts only, texts too."""
        return self._in_parts

    @functools.cached_property
    def closing(self) -> str:
        """What stands behind the model's last words when nothing follows them."""
        after = self._after([QUESTION, words(PLACEHOLDER)], cue=False)
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
        return None if self._call_form is None else self._call_form[:2]

    @functools.cached_property
    def _call_form(self) -> tuple[bool, str | None, bool] | None:
        """`call_shape`, and whether the template writes the tool's name only as a part of the call's id (Kimi's)."""
        turn = probe_call({"text": PLACEHOLDER})
        for named_ids, as_text, empty in itertools.product((False, True), (False, True), ("", None)):
            try:
                whole = self._render_as(with_named_ids(turn) if named_ids else turn, as_text=as_text, empty=empty)
            except TemplateError:
                continue
            if PLACEHOLDER in whole and turn["tool_calls"][0]["function"]["name"] in whole:
                return as_text, empty, named_ids
        return None

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
        alone = self._after([QUESTION, probe_call({"text": PLACEHOLDER})], cue=False) or ""
        try:
            two = self._after([QUESTION, probe_call({"text": PLACEHOLDER}, {"text": probe(1)})], cue=False) or ""
        except TemplateError:
            return alone, ""
        between, second, _ = two.partition(probe(1))
        return alone, between if second else ""

    # how it is found out

    def _find_plan(self, roles: tuple[str, ...], *, opening: bool, again: bool, tools: bool) -> Plan:
        """The first way to hand over messages of these roles that the template neither refuses nor loses."""
        wanted = asked(roles)
        for plan in plans(roles):
            handed = plan.apply(wanted)
            if opening:
                if self._takes(handed, tools):
                    return plan
                continue
            bases: list[Base] = ["calls", "call", "words"] if "tool" in roles else ["words"]
            taken: tuple[Base, ...] = tuple(base for base in bases if self._follows(handed, base, again))
            if taken:
                return Plan(plan.roles, plan.merge, taken)
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
            whole = self.render(messages, cue=True, tools=offered)
        except TemplateError:
            return False
        return all(text in whole for text in probe_words(messages))

    def _follows(self, messages: Sequence[Message], base: Base, again: bool) -> bool:
        history = self._history(base, messages, again=again)
        try:
            after = None if history is None else self._after([*history, *messages])
        except TemplateError:
            return False
        if after is None:
            return False
        at = 0
        for text in probe_words(messages):
            at = after.find(text, at)
            if at < 0:
                return False
        return True

    def _history(self, base: Base, messages: Sequence[Message], *, again: bool) -> list[Message] | None:
        """A question, an earlier round of tools where there was one, and the turn that ends in the placeholder."""
        answers = [message for message in messages if message["role"] == "tool"]
        if base == "words":
            turn = words(PLACEHOLDER)
        elif self.call_shape is None or not answers:
            return None
        else:
            turn = probe_call(*[{"text": PLACEHOLDER}] * (len(answers) if base == "calls" else 1))
            for call, answer in zip(turn["tool_calls"], answers, strict=False):
                call["id"] = str(answer.get("tool_call_id") or call["id"])
                call["function"]["name"] = str(answer.get("name") or call["function"]["name"])
        history = [QUESTION, turn]
        if again and answers:
            earlier = words("Words.") if base == "words" else probe_call({"text": "earlier"})
            answer: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "An answer."}
            history[1:1] = [earlier, answer]
        return history

    def _after(self, messages: Sequence[Message], *, cue: bool = True) -> str | None:
        """What is written behind the placeholder's last occurrence, or None where it is lost."""
        _, found, after = self.render(messages, cue=cue).rpartition(PLACEHOLDER)
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
            later = self._after([QUESTION, words("x"), QUESTION, words(PLACEHOLDER)], cue=False)
        except TemplateError:
            return  # it will be told where it matters: not every environment speaks as a user
        if later != self.closing:
            raise TemplateError(
                f"the chat template of {self._where} closes the second assistant turn with {later!r} and the first with "
                f"{self.closing!r}; such a template cannot be continued turn by turn"
            )

    def _render_as(self, message: Message, *, as_text: bool, empty: str | None) -> str:
        return self._write([QUESTION, with_calls(message, as_text=as_text, empty=empty)], cue=False)

    def _shaped(self, message: Message) -> Message:
        """A message in the shape that this template reads."""
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                _check_part(part, message)
        elif content is not None and not isinstance(content, str):
            raise TemplateError(
                f"the content of a {message.get('role')!r} message is a {type(content).__name__}; it must be a text, or a "
                f'list of parts such as {{"type": "text", "text": ...}} and {{"type": "image", "image": ...}}'
            )
        if self._in_parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if message.get("tool_calls") and self.call_shape is not None:
            as_text, empty = self.call_shape
            message = with_calls(message, as_text=as_text, empty=empty)
        if message.get("tool_calls") or message.get("role") == "tool":
            if self._call_form is not None and self._call_form[2]:
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


def _check_part(part: Any, message: Message) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
        raise TemplateError(
            f"a {message.get('role')!r} message has a content part {part!r:.80}; parts are "
            f'{{"type": "text", "text": ...}}, {{"type": "image", "image": ...}} and {{"type": "video", "video": ...}}'
        )
