"""A tokenizer's chat template: renders messages, and the text between two turns of the model.

Templates differ: some refuse two user messages in a row or a system message in the middle, some leave such a message out
without an error, some want content in parts, arguments as JSON text, short ids of calls, or a tool message only after a call.
There is no table of model families. Short probe messages are rendered instead, and the result is the answer: once at start for
what depends on the template alone (`MessageFormat`, the shape of one message; `TemplateProfile`), once for each sequence of
roles for how messages are given to it one after another. For the latter, a `MessagePlan` renames roles and merges neighbors,
and the first plan is used with which every text is written. Invariant: no text of a message is left out without an error. Knows
texts and messages, and no token.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.probes import (
    DESCRIBED_TOOL,
    NO_CONVERSATION,
    PLACEHOLDER,
    QUESTION,
    ROLE_SEQUENCES,
    SYSTEM_WORD,
    TOOL,
    TOOL_WORD,
    BaseTurn,
    PriorConversation,
    RenderMessages,
    assistant_message,
    base_conversation,
    cached_by_content,
    longer_conversations,
    probe_call,
    probe_message,
    probe_messages,
    probe_word,
    probe_words_in,
    roles_of,
    simpler_conversations,
)
from turnwise.chat.reasoning import ReasoningFormat, find_reasoning_format
from turnwise.chat.template_arguments import refuse_unread_arguments
from turnwise.chat.tool_calls.describe import undescribed
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

# Shapes: messages written as a template insists on

PARTS = ("text", "image", "image_url", "video")


def with_calls(message: Message, *, as_text: bool, empty: str | None) -> Message:
    """An assistant message with its calls in the shape that a template takes."""
    calls: list[dict[str, Any]] = []
    for call in message["tool_calls"]:
        function = dict(call["function"])
        arguments = function.get("arguments")
        if as_text and not isinstance(arguments, str):
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls, "content": message.get("content") or empty}


def with_short_ids(message: Message) -> Message:
    """A message whose ids of calls are nine letters and digits, the same for the same id: `call_0` is `call00000`."""
    calls = [{**call, "id": _short(str(call.get("id") or ""))} for call in message.get("tool_calls") or ()]
    shortened = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool":
        shortened["tool_call_id"] = _short(str(message.get("tool_call_id") or ""))
    return shortened


def _short(id: str) -> str:
    if len(id) == 9 and id.isascii() and id.isalnum():
        return id
    number = id.removeprefix("call_")
    if number.isascii() and number.isdigit() and len(number) <= 5:
        return f"call{number:0>5}"
    return hashlib.blake2b(id.encode(), digest_size=5).hexdigest()[:9]


def with_named_ids(message: Message) -> Message:
    """A message whose ids of calls hold the tool's name as Kimi has it: `call_3` of `lookup` is `functions.lookup:3`."""
    calls = [
        {**call, "id": _named(str(call.get("id") or ""), str(call["function"]["name"]))}
        for call in message.get("tool_calls") or ()
    ]
    named = {**message, "tool_calls": calls} if calls else dict(message)
    if message.get("role") == "tool" and message.get("name"):
        named["tool_call_id"] = _named(str(message.get("tool_call_id") or ""), str(message["name"]))
    return named


def _named(id: str, name: str) -> str:
    if name in id:
        return id
    digits = id[len(id.rstrip("0123456789")) :]
    return f"functions.{name}:{int(digits[-9:] or 0)}"


def with_description(messages: Sequence[Message], text: str, *, accepts_system: bool) -> list[Message]:
    """The messages with a description of the tools at the end of the system message.

    Without one, it is a system message of its own, or the beginning of the first message if the template accepts none.
    """
    first = messages[0] if messages else None
    if first is not None and first.get("role") in ("system", "developer"):
        return [{**first, "content": joined(first.get("content"), text)}, *messages[1:]]
    if accepts_system or first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": joined(text, first.get("content"))}, *messages[1:]]


def joined(first: Any, second: Any) -> Any:
    """Two contents as one: texts with an empty line between them, or the parts of both."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    parts: list[Any] = []
    for content in (first, second):
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else list(content or [])
    return parts


def check_content(message: Message) -> None:
    """Raise TemplateError if the content of a message is neither a text nor a list of parts that templates know."""
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            _check_part(part, message)
    elif content is not None and not isinstance(content, str):
        raise TemplateError(
            f"the content of a {message.get('role')!r} message is a {type(content).__name__}; it must be a text, or a "
            f'list of parts such as {{"type": "text", "text": ...}} and {{"type": "image", "image": ...}}'
        )


def _check_part(part: Any, message: Message) -> None:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in PARTS or (kind == "text" and not isinstance(part.get("text"), str)):
        raise TemplateError(
            f"a {message.get('role')!r} message has a content part {part!r:.80}; parts are "
            f'{{"type": "text", "text": ...}}, {{"type": "image", "image": ...}} and {{"type": "video", "video": ...}}'
        )


# Format: which of the shapes a template takes

CallIds = Literal["any", "nine characters", "tool name"]
"""Which ids of tool calls a template takes: any; nine letters and digits (Mistral); `functions.<tool name>:<n>` (Kimi)."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How tool calls are given to a template in an assistant message."""

    json_arguments: bool
    """Whether arguments are given as JSON text, and not as an object."""
    empty_content: str | None
    """The content of a message that has calls and no text."""
    ids: CallIds
    requires_tools: bool
    """Whether the template writes calls only in conversations that offer tools."""


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The shape in which a template takes messages."""

    content_as_parts: bool = False
    """Whether the content must be a list of parts, for texts too."""
    requires_tools: bool = False
    """Whether the template refuses conversations without tools."""
    describes_tools: bool = False
    """Whether the template writes the names and the parameters of the tools on offer into the prompt."""
    calls: CallFormat | None = None
    """None if the template writes no tool calls."""

    def shaped(self, message: Message) -> Message:
        """A message in this shape. Raises TemplateError if its content is neither a text nor known parts."""
        check_content(message)
        content = message.get("content")
        if self.content_as_parts and isinstance(content, str):
            message = {**message, "content": [{"type": "text", "text": content}]}
        if self.calls is None:
            return message
        if message.get("tool_calls"):
            message = with_calls(message, as_text=self.calls.json_arguments, empty=self.calls.empty_content)
        if message.get("tool_calls") or message.get("role") == "tool":
            if self.calls.ids == "tool name":
                return with_named_ids(message)
            if self.calls.ids == "nine characters":
                return with_short_ids(message)
        return message

    def probe_tools(self, messages: Sequence[Message] = ()) -> Sequence[ToolSchema]:
        """The tools that probe messages are rendered with: none, or the probe tool where the template needs one."""
        has_calls = any(message.get("tool_calls") or message.get("role") == "tool" for message in messages)
        required = self.calls.requires_tools if has_calls and self.calls is not None else self.requires_tools
        return (TOOL,) if required else ()


def find_message_format(render: RenderMessages, where: str) -> MessageFormat:
    """Find out in which shape a template takes messages. `where` names it in error messages.

    Raises TemplateError if there is no shape in which it writes an assistant message's content unchanged.
    """
    base = _content_format(render, where)
    try:
        described = render([base.shaped(QUESTION)], add_generation_prompt=True, tools=[DESCRIBED_TOOL])
    except TemplateError:
        described = ""
    describes = not undescribed([DESCRIBED_TOOL], described)
    return MessageFormat(base.content_as_parts, base.requires_tools, describes, _call_format(render, base))


def _content_format(render: RenderMessages, where: str) -> MessageFormat:
    """Content as text or as parts, without tools or, where the template refuses that, with a tool."""
    first: TemplateError | None = None
    for requires_tools, as_parts in itertools.product((False, True), (False, True)):
        format = MessageFormat(as_parts, requires_tools)
        messages = [format.shaped(QUESTION), format.shaped(assistant_message(PLACEHOLDER))]
        try:
            if PLACEHOLDER in render(messages, add_generation_prompt=False, tools=format.probe_tools()):
                return format
        except TemplateError as error:
            if "no valid Jinja" in str(error):
                raise
            if as_parts:  # as text it was refused too, or written without its content
                first = first or error
    if first is not None:
        raise first
    written = render([QUESTION, assistant_message(PLACEHOLDER)], add_generation_prompt=False, tools=())
    raise TemplateError(
        f"the chat template of {where} does not write an assistant message's content as it is, so a conversation "
        f"cannot be continued without rendering it again. It wrote: {written[-200:]!r}"
    )


def _call_format(render: RenderMessages, base: MessageFormat) -> CallFormat | None:
    """How calls are given. Conversations without tools are tried first; some templates write calls only with tools."""
    turn = probe_call({"text": PLACEHOLDER})
    question = base.shaped(QUESTION)
    tool_choices = dict.fromkeys((base.requires_tools, True))
    for requires_tools, named_ids, as_text, empty in itertools.product(
        tool_choices, (False, True), (False, True), ("", None)
    ):
        ids: CallIds = "tool name" if named_ids else "any"
        calls = CallFormat(as_text, empty, ids, requires_tools)
        shaped = MessageFormat(base.content_as_parts, calls=calls).shaped(turn)
        try:
            text = render([question, shaped], add_generation_prompt=False, tools=(TOOL,) if requires_tools else ())
        except TemplateError:
            continue
        behind = text.partition(QUESTION["content"])[2]  # the tools are described in front of the question
        if PLACEHOLDER in text and turn["tool_calls"][0]["function"]["name"] in behind:
            if ids == "any" and _needs_short_ids(render, base, calls):
                return CallFormat(as_text, empty, "nine characters", requires_tools)
            return calls
    return None


def _needs_short_ids(render: RenderMessages, base: MessageFormat, calls: CallFormat) -> bool:
    """Whether the template refuses the id `call_0` and takes one of nine letters and digits."""
    turn = probe_call({"text": "x"})
    turn["tool_calls"][0]["id"] = "call_0"
    answer: Message = {"role": "tool", "tool_call_id": "call_0", "name": "probe_tool", "content": "An answer."}

    def accepts(ids: CallIds) -> bool:
        trial = CallFormat(calls.json_arguments, calls.empty_content, ids, calls.requires_tools)
        format = MessageFormat(base.content_as_parts, base.requires_tools, calls=trial)
        messages = [format.shaped(message) for message in (QUESTION, turn, answer)]
        try:
            render(messages, add_generation_prompt=True, tools=format.probe_tools(messages))
        except TemplateError:
            return False
        return True

    return not accepts("any") and accepts("nine characters")


# Plans: how messages are changed so that a template accepts them

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
    """Whether the text after the model's turn depends on the number of earlier rounds. If so, all of them are rendered."""

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


class PlanFinder:
    """Finds the plans of one template. `where` names the template in error messages."""

    def __init__(self, template: Template, where: str) -> None:
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
        # plans after which the model can speak again are preferred
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

        `must_continue`: it must also accept another turn of the model after the messages.
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
        """Whether the template accepts another turn of the model after the messages: some check that roles alternate."""
        try:
            continued = [*messages, assistant_message("Words.")]
            return self._text_after(continued, base, prior, add_generation_prompt=False) is not None
        except TemplateError:
            return False

    def _counts_rounds(self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation) -> bool:
        """Whether the text after the model's turn changes in a longer conversation."""
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


# Template: renders messages


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
        self.message_format: MessageFormat = find_message_format(self._render_as_given, where)
        self.reasoning_format: ReasoningFormat = find_reasoning_format(self.render, self.source)
        self._find_plan = functools.lru_cache(maxsize=ROLE_SEQUENCES)(PlanFinder(self, where).find)

    # rendering

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema] | None = None
    ) -> str:
        """The messages as one text, with the generation prompt of the next model turn if asked for.

        `tools` are those of the conversation; None for a probe. Raises TemplateError if the template refuses the messages.
        """
        if self._describe is not None and tools:
            messages = with_description(messages, self._describe(tools), accepts_system=self._accepts_system)
        shaped = [self.message_format.shaped(message) for message in messages]
        tools = self.message_format.probe_tools(messages) if tools is None else tools
        return self._render_shaped(shaped, add_generation_prompt=add_generation_prompt, tools=tools)

    def _render_as_given(
        self, messages: Sequence[Message], *, add_generation_prompt: bool, tools: Sequence[ToolSchema] | None = None
    ) -> str:
        import jinja2

        if not messages:
            raise TemplateError("a conversation without messages has no prompt: give at least one message")
        try:
            options = {"add_generation_prompt": add_generation_prompt, **self.arguments}
            return _written(self._tokenizer, list(messages), list(tools or ()) or None, options)
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
        tools = self.message_format.probe_tools([*before, message]) if tools is None else tools
        prompt = self.render(before, add_generation_prompt=True, tools=tools)
        text = self.render([*before, message], add_generation_prompt=False, tools=tools)
        # the opening mark of reasoning may be in the generation prompt only, and need not be written in the finished turn
        for start in (prompt, self.reasoning_format.marks.without_reasoning_opening(prompt)):
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
        return self.message_format.calls is not None

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
        """The text after the model's last words: the end of its turn, `messages`, the next generation prompt.

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
        """The rendered text after the last placeholder; None if the template does not write it."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, tools=tools)
        _, placeholder, after = text.rpartition(PLACEHOLDER)
        return after if placeholder else None

    def _text_after_base(self, messages: Sequence[Message], base: BaseTurn, prior: PriorConversation) -> str | None:
        """The text after the model's turn in a base conversation; None if the turn is not written."""
        conversation = base_conversation(base, messages, prior, writes_calls=self.writes_calls)
        if conversation is None:
            return None
        return self.text_after_placeholder([*conversation, *messages], tools=prior.probe_tools)


def _written(tokenizer: Any, messages: list[Message], tools: list[Any] | None, options: Mapping[str, Any]) -> str:
    """The text that the template of a tokenizer writes for the messages as given, with `options` as further arguments.

    This is transformers' own rendering without what `apply_chat_template` does to messages first, which differs between its
    versions: since 5.24 it removes keys whose value is None, although templates ask for them. That of DeepSeek R1 writes calls
    where `message['content'] is none`, and loses them where the key is missing. A tokenizer with an `apply_chat_template` of its
    own is called with it: there, the method is part of what its authors wrote.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.utils.chat_template_utils import render_jinja_template

    apply = tokenizer.apply_chat_template
    if getattr(apply, "__func__", None) is not PreTrainedTokenizerBase.apply_chat_template:
        return apply(messages, tools=tools, tokenize=False, **options)
    inherits = apply.__self__
    template = inherits.get_chat_template(None, tools)
    variables = {**inherits.special_tokens_map, **options}
    (text,), _ = render_jinja_template([messages], tools=tools, chat_template=template, **variables)
    return text


def _template_file(where: str) -> str:
    """The file with the template of a model directory, for error messages."""
    if Path(where, "chat_template.jinja").is_file():
        return f"{Path(where, 'chat_template.jinja')}"
    if Path(where, "tokenizer_config.json").is_file():
        return f"chat_template in {Path(where, 'tokenizer_config.json')}"
    return "chat_template.jinja (or chat_template in tokenizer_config.json)"
