"""The TemplateProfile: everything about a model's chat template that does not depend on a conversation.

It is found once, when a `Renderer` is made, by rendering probe messages. All other modules of this folder read its fields.
What depends on a sequence of message roles as well is found when needed, and cached (`caches`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.chat.kept_reasoning import KeptReasoning, find_kept_reasoning
from turnwise.chat.message_format import MessageFormat
from turnwise.chat.probes import PLACEHOLDER, assistant_message, probe_call
from turnwise.chat.reasoning_format import ReasoningFormat
from turnwise.chat.stop_tokens import StopTokens, find_stop_tokens, special_tokens
from turnwise.chat.template import Template
from turnwise.chat.text_encoder import decode
from turnwise.chat.tool_calls import FromResponseTemplate, ToolFormat, by_name, find_format
from turnwise.chat.turn_format import TurnFormat, find_turn_format
from turnwise.errors import TemplateError

__all__ = ["TemplateProblem", "TemplateProfile", "find_profile"]


@dataclass(frozen=True, slots=True)
class TemplateProblem:
    """Why a question about the template has no answer. It is an error only where the answer is needed."""

    reason: str
    """The rest of a sentence that begins with "the chat template": `writes no tool calls`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateProfile:
    """What a chat template does, with the tokenizer and the stop tokens of its model. Two profiles compare with `==`."""

    messages: MessageFormat
    """The shape in which messages are given to the template: content, tool calls, ids of calls, tools."""
    reasoning: ReasoningFormat
    """The field and the marks of reasoning."""
    kept_reasoning: KeptReasoning
    """Which earlier reasoning is left out when the conversation continues."""
    turn: TurnFormat
    """How a turn of the model is given to the template, and what is written at its beginning and end."""
    stop_tokens: StopTokens
    """The tokens that end a turn."""
    tool_format_name: str
    """The name of `tool_format`; empty if there is none."""
    written_format_name: str
    """The name of the format in which the template writes calls; empty if it writes none, or in an unknown format. It is not
    `tool_format_name` if the recipe names another format."""
    tool_format: ToolFormat | TemplateProblem = field(compare=False, repr=False)
    """How tool calls are parsed. A problem is raised only where a conversation has tools."""

    def __str__(self) -> str:
        """A line for each property: its name, two spaces or more, its value."""
        rows = self.describe()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:{width}}  {value}" for name, value in rows)

    def describe(self) -> list[tuple[str, str]]:
        """The name and the value of each property, for people. Texts of the template are quoted as in Python."""
        starts = f", begins with {self.turn.leading_space!r}" if self.turn.leading_space else ""
        marks = [mark for mark in (self.turn.answer_opening, self.turn.answer_closing) if mark]
        starts += f", answers marked with {' and '.join(map(repr, marks))}" if marks else ""
        return [
            ("content", "a list of parts" if self.messages.content_as_parts else "text"),
            ("tools", self._tools()),
            ("tool calls", self._calls()),
            ("call text", repr(self.turn.call_text) if self.turn.call_text else "none"),
            ("model turn", f"given as {self.turn.content}{starts}"),
            ("turn ends with", f"{self.turn.closing!r}, stop tokens {list(self.stop_tokens.token_ids)}"),
            ("reasoning", self._reasoning()),
        ]

    def _tools(self) -> str:
        described = "described in the prompt" if self.messages.describes_tools else "not described in the prompt"
        return f"{described}, {'required' if self.messages.requires_tools else 'optional'}"

    def _calls(self) -> str:
        parsed = f"parsed as {self.tool_format_name}" if self.tool_format_name else "in a format that cannot be parsed"
        calls = self.messages.calls
        if calls is None:
            return f"not written, {parsed}" if self.tool_format_name else "not written"
        arguments = f"arguments as {'JSON text' if calls.json_arguments else 'an object'}"
        limit = "one in a turn" if self.turn.max_calls == 1 else "any number in a turn"
        required = ["only in conversations with tools"] if calls.requires_tools else []
        return ", ".join([parsed, arguments, f"ids: {calls.ids}", limit, *required])

    def _reasoning(self) -> str:
        if not self.reasoning.supported:
            return "not supported"
        marks = " or ".join(f"{opening} ... {closing}" for opening, closing in self.reasoning.marks.own) or "no marks"
        field = f"field {self.reasoning.key}" if self.reasoning.key else "part of the content"
        return f"{marks}, {field}, left out {self.kept_reasoning}"


def find_profile(
    tokenizer: Any, template: Template, *, generation_config: Sequence[int], tool_format: str
) -> TemplateProfile:
    """Find out what a template does. `generation_config` are the stop tokens that it names.

    `tool_format` is the name of a format of tool calls, or `auto`. Raises TemplateError if the template cannot be continued
    turn by turn, no token ends a turn, or there is no format of that name.
    """
    named = None if tool_format == "auto" else _named_format(tokenizer, template, tool_format)
    turn = find_turn_format(template)
    stop_tokens = find_stop_tokens(tokenizer, template, turn, generation_config)
    turn = replace(turn, answer_closing=_answer_closing(tokenizer, turn, stop_tokens))
    written = _find_tool_format(tokenizer, template, turn, stop_tokens)
    parser = named or written
    return TemplateProfile(
        messages=template.messages,
        reasoning=template.reasoning,
        kept_reasoning=find_kept_reasoning(template, turn),
        turn=turn,
        stop_tokens=stop_tokens,
        tool_format_name="" if isinstance(parser, TemplateProblem) else parser.name,
        written_format_name="" if isinstance(written, TemplateProblem) else written.name,
        tool_format=parser,
    )


def _answer_closing(tokenizer: Any, turn: TurnFormat, stop_tokens: StopTokens) -> str:
    """The mark in front of the first stop token that the template writes behind an answer."""
    places = [turn.closing.find(decode(tokenizer, [token])) for token in stop_tokens.token_ids]
    return turn.closing[: min((place for place in places if place >= 0), default=0)].rstrip()


def _response_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """The tokenizer's own description of how its model's turns are parsed; tokenizers of other libraries have none."""
    return getattr(tokenizer, "response_template", None)


def _own_format(tokenizer: Any) -> ToolFormat | None:
    spec = _response_template(tokenizer)
    return None if spec is None else FromResponseTemplate(spec)


def _named_format(tokenizer: Any, template: Template, name: str) -> ToolFormat:
    if name != FromResponseTemplate.name:
        return by_name(name)
    own = _own_format(tokenizer)
    if own is None:
        raise TemplateError(
            f"tool_format={name}: the tokenizer of {template.where} has no response_template; leave tool_format out, or name "
            f"a format (tool_format=hermes, say)"
        )
    return own


def _find_tool_format(
    tokenizer: Any, template: Template, turn: TurnFormat, stop_tokens: StopTokens
) -> ToolFormat | TemplateProblem:
    """The format in which the template writes calls, and in which the model is expected to write them."""
    own = _own_format(tokenizer)  # read even if the template writes no calls: one that cannot be read is an error
    if not template.writes_calls:
        return TemplateProblem("writes no tool calls")
    # the text in front of all of the model's words: for example the end of reasoning that the generation prompt opens
    start = template.completion_text(assistant_message(PLACEHOLDER)).partition(PLACEHOLDER)[0].rstrip()

    def write(calls: Sequence[Mapping[str, Any]]) -> str:
        try:
            return template.completion_text(probe_call(*calls)).removeprefix(start)
        except TemplateError:
            if len(calls) > 1:
                return ""  # the template accepts one call in a turn
            raise

    special = special_tokens(tokenizer)
    stops = [decode(tokenizer, [token]) for token in stop_tokens.token_ids if token in special]
    try:
        tool_format = find_format(
            write,
            own=[] if own is None else [own],
            ends=[turn.closing.strip(), *stops],
            marks=template.reasoning.marks,
        )
    except TemplateError as error:
        return TemplateProblem(f"writes tool calls that cannot be examined ({error})")
    return tool_format or TemplateProblem("writes tool calls in a format that cannot be read back")
