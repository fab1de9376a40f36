"""Everything about a model's chat template that does not depend on a conversation (`TemplateProfile`).

It is found once, when a `Renderer` is made, by rendering probe messages, and is immutable; all other modules of this folder
read its fields. What depends on a sequence of message roles as well is found when needed, and cached (`probes.py`).

Kept reasoning: a single turn is not enough, because a template that keeps only the last assistant turn's reasoning keeps that
of a conversation with one turn. So three turns are rendered, each followed by a message of the same role, and the text shows
which of the three turns still have their reasoning. Stop tokens are those of the template, of the tokenizer and of the model's
generation config; each is checked against the text that the template writes for reasoning, for calls and for an answer of
several lines: a token inside a turn does not end it. Does not know conversations, rows or engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.probes import (
    PLACEHOLDER,
    QUESTION,
    TOOL,
    PriorConversation,
    assistant_message,
    probe_call,
    probe_word,
)
from turnwise.chat.reasoning import ReasoningFormat
from turnwise.chat.template import MessageFormat, Template
from turnwise.chat.text_encoder import decode
from turnwise.chat.tool_calls import FORMATS, FromResponseTemplate, ToolFormat, find_format, format_by_name
from turnwise.chat.tool_calls.learned import ProbeWriter
from turnwise.chat.turn_format import ParsedTurn, TurnFormat, find_turn_format, template_message
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolCall

# Kept reasoning: which earlier reasoning a template leaves out when the conversation continues

Kept = Literal["all", "last", "none", "some"]
"""Whose reasoning is written, of three turns: all, only the last turn's, none, or another selection."""
TURNS = 3


@dataclass(frozen=True, slots=True)
class KeptReasoning:
    """What a template keeps of earlier reasoning, by the role of the messages that follow the turns."""

    user: Kept = "all"
    tool: Kept = "all"

    @property
    def stripped_before(self) -> tuple[str, ...]:
        """The roles of messages before which earlier reasoning is left out."""
        return tuple(role for role, kept in (("user", self.user), ("tool", self.tool)) if kept != "all")

    def __str__(self) -> str:
        """For people: `at messages of user (all but the last turn's) and tool`."""
        kept = {"user": self.user, "tool": self.tool}
        named = [f"{role} (all but the last turn's)" if kept[role] == "last" else role for role in self.stripped_before]
        return f"at messages of {' and '.join(named)}" if named else "nowhere"


def find_kept_reasoning(template: Template, format: TurnFormat) -> KeptReasoning:
    """Find out which earlier reasoning the template leaves out."""
    if not template.reasoning_format.supported:
        return KeptReasoning()

    def turn(reasoning: str, calls: bool, number: int) -> Message:
        return template_message(_sample_turn(template, reasoning, calls, number), format, template.reasoning_format)

    return KeptReasoning(user=_kept(template, turn, "user"), tool=_kept(template, turn, "tool"))


def _sample_turn(template: Template, reasoning: str, calls: bool, number: int) -> ParsedTurn:
    opening, closing = next(iter(template.reasoning_format.marks.own), ("", ""))
    call = ToolCall(id=f"callprob{number}", name="probe_tool", arguments={"text": "x"}, text="")
    return ParsedTurn(
        text=f"{opening}\n{reasoning}\n{closing}\n\nSaid.",
        message={"role": "assistant", "content": "Said."},
        reasoning=reasoning,
        calls=(call,) if calls else (),
    )


def _kept(template: Template, turn: Callable[[str, bool, int], Message], role: str) -> Kept:
    for turns in (TURNS, 1):
        for calls in (True, False) if role == "tool" and template.writes_calls else (False,):
            try:
                written = _written(template, [turn(_probe_reasoning(n), calls, n) for n in range(turns)], role)
            except TemplateError:
                continue  # the template accepts no such conversation
            if all(written):
                return "all"
            if not any(written):
                return "none"
            return "last" if written == [False] * (turns - 1) + [True] else "some"
    return "all"  # the template accepts no such message, so it cannot leave anything out before one


def _written(template: Template, turns: Sequence[Message], role: str) -> list[bool]:
    """For each turn, whether its reasoning is written in a conversation where a message of `role` follows every turn."""
    messages: list[Message] = [QUESTION]
    for number, turn in enumerate(turns):
        message: Message = {"role": role, "content": f"Go on, {number}."}
        if role == "tool":
            message |= {"tool_call_id": f"callprob{number}", "name": "probe_tool"}
        prior = PriorConversation.from_messages([*messages, turn])
        messages += [turn, *template.plan([message], prior).apply([message])]
    text = template.render(messages, add_generation_prompt=True)
    return [_probe_reasoning(number) in text for number in range(len(turns))]


def _probe_reasoning(number: int) -> str:
    return f"reasoning-{number}-4b9e27"


# Stop tokens: the tokens that end a turn

_LINES = "First, a line: 1 + 1 = 2.\nThen another one,\n\n1. a list,\n   * of two (or so).\n\n"
_TWO_CALLS = "a turn of two calls"


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The tokens that end a turn, and the tokens that are configured as such and do not."""

    token_ids: tuple[int, ...]
    """The template's own token comes first: scripted turns end with it."""
    inside_turns: Mapping[int, str] = field(default_factory=dict)
    """Configured tokens that are written inside a turn, with the part of the turn: `{7: "reasoning"}`. They do not stop it."""
    unknown_ids: tuple[int, ...] = ()
    """Ids in the generation config that the tokenizer does not have."""


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that no plain text is encoded to: the tokenizer's special tokens, and the tokens that were added to it."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def control_tokens(tokenizer: Any, template: Template, encode: Callable[[str], Sequence[int]]) -> frozenset[int]:
    """The special tokens that mean something to a model: those with the flag `special`, and those that the template writes.

    Other added tokens, such as Gemma's `<table>` and runs of line ends, are shorter spellings of text.
    """
    added = tokenizer.added_tokens_decoder
    flagged = frozenset(tokenizer.all_special_ids) | {token for token, what in added.items() if what.special}
    texts: list[str] = []
    answer = {"role": "tool", "tool_call_id": "callprob0", "name": "probe_tool", "content": "It is."}
    for turn in ([], [assistant_message("Said.")], [probe_call({"text": "x"}), answer]):
        with contextlib.suppress(TemplateError):
            messages = [QUESTION, *turn]
            texts.append(template.render(messages, tools=[TOOL], add_generation_prompt=turn[-1:] != [answer]))
            texts.append(template.render([*messages, QUESTION], tools=[TOOL], add_generation_prompt=True))
    return flagged | (frozenset(token for text in texts for token in encode(text)) & special_tokens(tokenizer))


def token_normalizer(tokenizer: Any) -> Callable[[str], str] | None:
    """What is done with a text before added tokens are looked for in it; None if they are looked for in the text itself."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    normalizer = None if backend is None else backend.normalizer
    if normalizer is None or not any(token.normalized for token in tokenizer.added_tokens_decoder.values()):
        return None
    return normalizer.normalize_str


def find_stop_tokens(
    tokenizer: Any, template: Template, turn_format: TurnFormat, generation_config: Sequence[int]
) -> StopTokens:
    """Find the tokens that end a turn. `generation_config` are the stop tokens that it names.

    Raises TemplateError if no token ends a turn.
    """
    unknown = tuple(token for token in dict.fromkeys(generation_config) if not _is_token(tokenizer, token))
    configured = [token for token in generation_config if token not in unknown]
    if tokenizer.eos_token_id is not None:
        configured.insert(0, tokenizer.eos_token_id)
    own = _template_stops(tokenizer, template, turn_format, configured)
    candidates = tuple(dict.fromkeys([*own, *configured]))
    inside = _inside_turns(tokenizer, template, turn_format, candidates, own)
    if stops := tuple(token for token in candidates if token not in inside):
        return StopTokens(stops, inside, unknown)
    if inside:
        places = "; ".join(
            f"{tokenizer.decode([token])!r} ({token}) occurs in {part}" for token, part in inside.items()
        )
        raise TemplateError(
            f"{template.where} has no stop token, because all configured stop tokens also occur inside a turn: {places}. Set "
            f"eos_token_id in generation_config.json to the token that ends the model's turns"
        )
    raise TemplateError(
        f"{template.where} has no stop token: the tokenizer has no eos_token, the template closes a turn with "
        f"{turn_format.closing[:20]!r}, which is not a special token, and the generation config has no eos_token_id. Set "
        f"eos_token in tokenizer_config.json"
    )


def _template_stops(
    tokenizer: Any, template: Template, turn_format: TurnFormat, configured: Sequence[int]
) -> list[int]:
    """The tokens with which the template itself ends a turn; `configured` decides if it writes several."""
    special = special_tokens(tokenizer)

    def special_in(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in special]

    closing = _leading_special(tokenizer, turn_format.closing, special)
    # other text may stand in front of the token that ends the turn
    named = [token for token in (closing or special_in(turn_format.closing)) if token in configured]
    own = (named or closing)[:1]
    if not own:  # only the header of the next message ends a turn
        headers = (_header(template, role) for role in ("user", "tool"))
        own = [token for header in headers for token in _leading_special(tokenizer, header, special)[:1]]
    after_call, between_calls = special_in(turn_format.after_call), special_in(turn_format.between_calls)
    if after_call and after_call[-1] not in between_calls:  # it ends the turn with calls, and not a single call
        own.append(after_call[-1])
    return own


def _is_token(tokenizer: Any, token: int) -> bool:
    try:
        return token >= 0 and tokenizer.convert_ids_to_tokens(token) is not None
    except (IndexError, OverflowError, ValueError):  # tokenizers written in Python raise for unknown ids
        return False


def _inside_turns(
    tokenizer: Any, template: Template, turn_format: TurnFormat, stops: Sequence[int], own: Sequence[int]
) -> dict[int, str]:
    """The candidates that are written inside a turn, before its end, with the part of the turn.

    The template's `own` tokens may be written between two calls, since some templates write each call as a turn.
    """
    inside: dict[int, str] = {}
    for part, text in _turn_parts(template, turn_format):
        ids = frozenset(tokenizer.encode(text, add_special_tokens=False))
        for token in stops:
            if token in ids and not (part == _TWO_CALLS and token in own):
                inside.setdefault(token, part)
    return inside


def _turn_parts(template: Template, turn_format: TurnFormat) -> Iterator[tuple[str, str]]:
    """Completions of several kinds, each up to its last word, with the name of the kind."""
    for marked in _marked_reasoning(template, turn_format):
        yield "reasoning", marked
    key = template.reasoning_format.key
    reasoning: Message = {} if key is None else {key: _LINES + probe_word(0)}
    kinds: list[tuple[str, Message]] = [("an answer of several lines", assistant_message(_LINES + PLACEHOLDER))]
    if reasoning:
        kinds.append(("reasoning", {**assistant_message(PLACEHOLDER), **reasoning}))
    if template.writes_calls:
        call, calls = probe_call({"text": PLACEHOLDER}), probe_call({"text": probe_word(0)}, {"text": PLACEHOLDER})
        kinds += [("a call", call), ("a turn of words and a call", {**call, "content": probe_word(1)})]
        kinds += [("a reasoning before a call", {**call, **reasoning}), (_TWO_CALLS, calls)]
    for part, message in kinds:
        try:
            before, placeholder, _ = template.completion_text(message).rpartition(PLACEHOLDER)
        except TemplateError:
            continue  # the template accepts no such turn
        if placeholder:
            yield part, before


def _marked_reasoning(template: Template, turn_format: TurnFormat) -> Iterator[str]:
    """Thoughts between the marks that the template removes from a content."""
    for opening, closing in template.reasoning_format.marks.own:
        if not turn_format.closing.startswith(closing):
            yield f"{opening}\n{_LINES}\n{closing}\n\n"


def _leading_special(tokenizer: Any, text: str, special: frozenset[int]) -> list[int]:
    """The special tokens that a text begins with."""
    leading: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in special:
            break
        leading.append(token)
    return leading


def _header(template: Template, role: str) -> str:
    try:
        return template.text_before_content([role], "text")
    except TemplateError:
        return ""


def generation_config_stops(path: str | Path) -> list[int]:
    """The stop tokens in a model's generation config; empty if it has no such file.

    Raises TemplateError if the file cannot be read.
    """
    from transformers import GenerationConfig

    file = Path(path).expanduser() / "generation_config.json"
    try:
        stops = GenerationConfig.from_pretrained(str(path)).eos_token_id
    except (OSError, TypeError) as error:
        if file.is_file():
            raise TemplateError(f"{file} cannot be read: {error}. Correct it, or remove it") from error
        return []
    return stops if isinstance(stops, list) else [] if stops is None else [stops]


# Profile


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
    tokenizer: Any, template: Template, *, generation_config: Sequence[int], tool_format: str | ToolFormat
) -> TemplateProfile:
    """Find out what a template does. `generation_config` are the stop tokens that it names.

    `tool_format` is a format of tool calls, the name of one, or `auto`. Raises TemplateError if the template cannot be continued
    turn by turn, no token ends a turn, or there is no format of that name.
    """
    given = [tool_format] if isinstance(tool_format, ToolFormat) else []
    named = None if tool_format == "auto" else _named_format(tokenizer, template, tool_format)
    turn = find_turn_format(template)
    stop_tokens = find_stop_tokens(tokenizer, template, turn, generation_config)
    turn = replace(turn, answer_closing=_answer_closing(tokenizer, turn, stop_tokens))
    written = _find_tool_format(tokenizer, template, turn, stop_tokens, given)
    parser = named or written
    return TemplateProfile(
        messages=template.message_format,
        reasoning=template.reasoning_format,
        kept_reasoning=find_kept_reasoning(template, turn),
        turn=turn,
        stop_tokens=stop_tokens,
        tool_format_name="" if isinstance(parser, TemplateProblem) else parser.name,
        written_format_name="" if isinstance(written, TemplateProblem) else written.name,
        tool_format=parser,
    )


def _answer_closing(tokenizer: Any, turn: TurnFormat, stop_tokens: StopTokens) -> str:
    """The mark in front of the first stop token that the template writes after an answer."""
    places = [turn.closing.find(decode(tokenizer, [token])) for token in stop_tokens.token_ids]
    return turn.closing[: min((place for place in places if place >= 0), default=0)].rstrip()


def _response_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """The tokenizer's own description of how its model's turns are parsed; tokenizers of other libraries have none."""
    return getattr(tokenizer, "response_template", None)


def _own_format(tokenizer: Any) -> ToolFormat | None:
    spec = _response_template(tokenizer)
    return None if spec is None else FromResponseTemplate(spec)


def _named_format(tokenizer: Any, template: Template, name: str | ToolFormat) -> ToolFormat:
    if isinstance(name, ToolFormat):
        return name
    if name != FromResponseTemplate.name:
        return format_by_name(name)
    own = _own_format(tokenizer)
    if own is None:
        raise TemplateError(
            f"tool_format={name}: the tokenizer of {template.where} has no response_template; leave tool_format out, or name "
            f"a format (tool_format=hermes, say)"
        )
    return own


def _find_tool_format(
    tokenizer: Any, template: Template, turn: TurnFormat, stop_tokens: StopTokens, given: Sequence[ToolFormat]
) -> ToolFormat | TemplateProblem:
    """The format in which the template writes calls, and in which the model is expected to write them. Those of the recipe
    (`given`) are tried first."""
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
            first=given,
            own=[] if own is None else [own],
            ends=[turn.closing.strip(), *stops],
            marks=template.reasoning_format.marks,
        )
    except TemplateError as error:
        return TemplateProblem(f"writes tool calls that cannot be examined ({error})")
    if tool_format is not None:
        return tool_format
    tried = [*(format.name for format in (*given, *FORMATS)), *([] if own is None else [own.name]), "learned from it"]
    call = ProbeWriter(write, [turn.closing.strip(), *stops])({"text": "x"}).strip()
    return TemplateProblem(
        f"writes tool calls in a format that cannot be read back ({call!r:.120}; tried: {', '.join(tried)})"
    )
