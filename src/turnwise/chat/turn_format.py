"""How a turn of the model is given to a template, what the template writes around it, and a sampled turn in this form.

Found by rendering probes: the text after a turn, how many calls a turn may hold, and in which fields of a message text,
reasoning and calls must be, so that the template writes the turn as it was sampled. A sampled turn after parsing
(`ParsedTurn`) becomes such a message. Knows texts and messages. Does not know tokens or other turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from turnwise.chat.probes import (
    PLACEHOLDER,
    QUESTION,
    assistant_message,
    probe_call,
    probe_message,
    probe_word,
)
from turnwise.chat.reasoning import ReasoningFormat
from turnwise.chat.template import Template
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolCall

# Format: found by rendering probes

TurnContent = Literal["text", "text and reasoning", "fields"]
"""How a turn of the model is given to the template, so that the template writes it as it was sampled.

`text`: the sampled text is the content. `text and reasoning`: the sampled text without its reasoning is the content, and the
reasoning is in a field of its own. `fields`: content, calls and reasoning are in fields, since the template does not write
a sampled text unchanged.
"""


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """How a template writes a turn of the model."""

    content: TurnContent
    leading_space: str
    """White space that the template writes in front of the model's words and not in the generation prompt (`Assistant:`)."""
    closing: str
    """The text after the model's last words when no message follows."""
    max_calls: int | None
    """How many tool calls the template writes in one turn: 0, 1, or None for any number."""
    call_text: str = ""
    """The text that the model must generate for the call `probe_tool(text="x")`, end of turn included."""
    after_call: str = ""
    """The text after the arguments of the only call of a turn; empty if the template writes no calls."""
    between_calls: str = ""
    """The text between the arguments of two calls of a turn; empty if the template writes only one."""
    answer_opening: str = ""
    """A mark in front of the words of an answer, which the model must sample: `<|START_TEXT|>`."""
    answer_closing: str = ""
    """A mark between the last words of an answer and the token that ends the turn: `<|END_TEXT|>`."""

    def without_answer_marks(self, content: str) -> str:
        """The words of an answer without the marks around them."""
        if self.answer_opening and content.lstrip().startswith(self.answer_opening):
            content = content.lstrip()[len(self.answer_opening) :]
        if self.answer_closing and content.rstrip().endswith(self.answer_closing):
            content = content.rstrip()[: -len(self.answer_closing)]
        return content

    def accepts_calls(self, count: int) -> bool:
        """Whether the template writes this many calls in one turn."""
        return count > 0 and (self.max_calls is None or count <= self.max_calls)


def find_turn_format(template: Template) -> TurnFormat:
    """Find out how a template writes a turn of the model.

    Raises TemplateError if it closes the second turn of a conversation otherwise than the first.
    """
    closing = template.text_after_placeholder([QUESTION, assistant_message(PLACEHOLDER)], add_generation_prompt=False)
    assert closing is not None, "find_message_format has checked that the placeholder is written"
    _check_closing(template, closing)
    before, _, _ = template.completion_text(assistant_message(PLACEHOLDER)).partition(PLACEHOLDER)
    leading_space = before if before.isspace() else ""
    answer_opening = template.reasoning_format.without_reasoning(before).lstrip()
    for _, mark in template.reasoning_format.marks.own:  # the end of reasoning that the generation prompt opens
        answer_opening = answer_opening.removeprefix(mark).lstrip()
    content = _turn_content(template)
    if not template.writes_calls:
        return TurnFormat(content, leading_space, closing, max_calls=0, answer_opening=answer_opening)
    call = probe_call({"text": PLACEHOLDER})
    after_call = template.text_after_placeholder([QUESTION, call], add_generation_prompt=False) or ""
    max_calls, between = _several_calls(template)
    return TurnFormat(
        content, leading_space, closing, max_calls, _call_text(template), after_call, between, answer_opening
    )


def _check_closing(template: Template, closing: str) -> None:
    """A turn that is cut out of a short conversation must end as it does in a longer one."""
    longer = [QUESTION, assistant_message("x"), QUESTION, assistant_message(PLACEHOLDER)]
    try:
        later = template.text_after_placeholder(longer, add_generation_prompt=False)
    except TemplateError:
        return  # no error here: not every environment sends a user message, and the first that does gets the error
    if later != closing:
        raise TemplateError(
            f"the chat template of {template.where} closes the second assistant turn with {later!r} and the first with "
            f"{closing!r}; such a template cannot be continued turn by turn"
        )


def _turn_content(template: Template) -> TurnContent:
    key = template.reasoning_format.key
    sample = assistant_message("Said.")
    if key is not None:
        sample[key] = "Thought."
    prompt = template.render([QUESTION], add_generation_prompt=True)
    sampled = template.completion_text(sample).partition("Said.")[0] + "Said."
    raw = assistant_message(template.reasoning_format.marks.reasoning_opening(prompt) + sampled)
    try:
        same_text = all(
            template.render([QUESTION, raw, *after], add_generation_prompt=False)
            == template.render([QUESTION, sample, *after], add_generation_prompt=False)
            for after in ([], [QUESTION])  # as an earlier turn too, where reasoning may be left out
        )
    except TemplateError:
        return "fields"
    if template.writes_calls and not _accepts_answers_behind_text(template):
        return "fields"
    return "text" if same_text else "text and reasoning"


def _accepts_answers_behind_text(template: Template) -> bool:
    """Whether a tool message may follow a turn whose calls are in its text."""
    answer = probe_message("tool", 0)
    try:
        plan = template.plan([answer])
        if "text" not in plan.base_turns:
            return False
        # some templates check that roles alternate, and treat turns with calls differently
        following = assistant_message("Said.")
        template.render([QUESTION, following, *plan.apply([answer]), following], add_generation_prompt=False)
    except TemplateError:
        return False
    return True


def _several_calls(template: Template) -> tuple[int | None, str]:
    """`max_calls` and `between_calls`: some templates refuse a second call, or write only the first."""
    calls = probe_call({"text": PLACEHOLDER}, {"text": probe_word(1)})
    try:
        text = template.render([QUESTION, calls], add_generation_prompt=False)
    except TemplateError:
        return 1, ""
    between, second, _ = text.rpartition(PLACEHOLDER)[2].partition(probe_word(1))
    if PLACEHOLDER not in text or not second:
        return 1, ""
    return None, between


def _call_text(template: Template) -> str:
    try:
        return template.completion_text(probe_call({"text": "x"}))
    except TemplateError:
        return ""


# A sampled turn, and the message with which the template is given it


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A sampled turn, parsed."""

    text: str
    """The sampled text without the stop token."""
    message: Message
    """The assistant message: `content`, and `tool_calls` and `reasoning_content` if there are any."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    """All calls in order, also those that cannot be read (with `error` set). The message has only those that can."""
    reasoning_opening: str = ""
    """The text with which the generation prompt opens reasoning, so that the turn begins inside it; empty if it opens none."""


def template_message(turn: ParsedTurn, format: TurnFormat, reasoning: ReasoningFormat) -> Message:
    """A turn in the form in which the template receives it when the complete conversation is rendered.

    Calls are passed as calls, as a server passes them after parsing: the text that a template writes after a turn may depend on
    whether the turn has calls. All other text is passed as it was sampled, if the template writes it unchanged.
    """
    calls = _calls_given(turn, format)
    has_text_form = format.content != "fields"
    text = turn.text.removeprefix(format.leading_space)
    if calls and has_text_form:
        text = _text_without_calls(turn, text, reasoning)
    if format.content == "text":  # the template writes its own marks around an answer
        message: Message = {"role": "assistant", "content": turn.reasoning_opening + format.without_answer_marks(text)}
    elif format.content == "text and reasoning":
        content = reasoning.without_reasoning(text, bool(turn.reasoning_opening))
        message = {"role": "assistant", "content": format.without_answer_marks(content)}
    else:
        message = {"role": "assistant", "content": turn.message["content"]}
    if format.content != "text" and turn.reasoning and reasoning.key is not None:
        message[reasoning.key] = turn.reasoning
    if calls:
        message["tool_calls"] = [call_field(call) for call in calls]
    return message


def call_field(call: ToolCall) -> dict[str, Any]:
    """A call as an element of a message's `tool_calls`."""
    function = {"name": call.name or "unknown", "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _calls_given(turn: ParsedTurn, format: TurnFormat) -> Sequence[ToolCall]:
    """The calls that are given to the template as calls; none if they are given as part of the text."""
    if format.content == "fields":
        return turn.calls  # unreadable calls too: such a template refuses a tool message without a call in front
    readable = all(call.error is None for call in turn.calls)
    return turn.calls if readable and format.accepts_calls(len(turn.calls)) else ()


def _text_without_calls(turn: ParsedTurn, text: str, reasoning: ReasoningFormat) -> str:
    """The reasoning at the beginning of a turn, as sampled, and its content."""
    content = str(turn.message["content"] or "")
    blocks = reasoning.marks.reasoning_blocks(text, opened=bool(turn.reasoning_opening)) if reasoning.supported else []
    if not blocks or text[: blocks[0].start].strip():
        return content
    rest = text[blocks[0].end :]
    return text[: blocks[0].end] + rest[: len(rest) - len(rest.lstrip())] + content
