"""The round trip of a turn: template, tokens, parser. What comes back must be what the template was given.

A written turn of each kind (an answer, reasoning and an answer, a call, words and a call, ...) is rendered, cut after the first
stop token as a sampled turn is, decoded and parsed. What a parser loses here, it loses in training without a word: rewards see
marks in an answer, a call that is taken for reasoning is never run. `turnwise doctor` and the start of each run use the check.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from turnwise.chat.probes import QUESTION, TOOL, assistant_message, probe_call
from turnwise.chat.template import Template
from turnwise.chat.template_profile import TemplateProfile
from turnwise.chat.turn_messages import ParsedTurn
from turnwise.chat.turn_parser import TurnParser
from turnwise.errors import TemplateError
from turnwise.types import Message, ToolSchema

__all__ = ["LostTurn", "TurnCoder", "WrittenTurn", "lost_in_round_trip", "written_turns"]

_WORDS, _REASONING = "It is twelve.", "The tree is old."
_ARGUMENTS = {"text": 'a "quoted" text,\nwith a line end, an ä and a </tag>'}
_OTHER_ARGUMENTS = {"text": "another text"}
_IN_ARGUMENTS = "with a line end"
_SHOWN = 160


class TurnCoder(Protocol):
    """The part of a `Renderer` that turns go through: template, tokens and parser."""

    template: Template
    profile: TemplateProfile
    turn_parser: TurnParser

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end a turn."""
        ...

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenTurn:
    """A turn of the model as a message, with the parts that must come back."""

    kind: str
    """Names the turn in messages: `reasoning and a call`."""
    words: str = ""
    reasoning: str = ""
    calls: Sequence[dict[str, str]] = ()
    """The arguments of each call of `probe_tool`."""

    def message(self, reasoning_key: str | None) -> Message:
        """The turn as a template receives it."""
        turn = probe_call(*self.calls) if self.calls else assistant_message("")
        fields = {reasoning_key: self.reasoning} if self.reasoning and reasoning_key is not None else {}
        return {**turn, "content": self.words, **fields}


@dataclass(frozen=True, slots=True, kw_only=True)
class LostTurn:
    """A turn that does not come back unchanged."""

    kind: str
    """The kind of the turn: `reasoning and a call`."""
    sampled: str
    """The text that the model samples for the turn."""
    parts: Sequence[str]
    """What was lost or changed: `the call is read as no call`."""
    by_template: bool = False
    """Whether the template itself does not write the turn as the model does. The sampled tokens are kept and parsed, but a server
    would show the model another text in later prompts."""

    def __str__(self) -> str:
        if self.by_template:
            return f"{self.kind}: the template {' and '.join(self.parts)}"
        shown = self.sampled if len(self.sampled) <= _SHOWN else f"{self.sampled[:_SHOWN]}..."
        return f"{self.kind}: the model writes {shown!r}, and {' and '.join(self.parts)}"


def written_turns(*, tools: bool) -> Sequence[WrittenTurn]:
    """The turns that are tried. Those with calls only if there are `tools`."""
    answers = [
        WrittenTurn(kind="an answer", words=_WORDS),
        WrittenTurn(kind="reasoning and an answer", words=_WORDS, reasoning=_REASONING),
    ]
    if not tools:
        return answers
    call = [_ARGUMENTS]
    return [
        *answers,
        WrittenTurn(kind="a call", calls=call),
        WrittenTurn(kind="words and a call", words=_WORDS, calls=call),
        WrittenTurn(kind="reasoning and a call", reasoning=_REASONING, calls=call),
        WrittenTurn(kind="two calls", calls=[_ARGUMENTS, _OTHER_ARGUMENTS]),
    ]


def lost_in_round_trip(coder: TurnCoder, *, tools: bool) -> list[LostTurn]:
    """The written turns that do not come back unchanged from template, tokens and parser; empty if all do.

    With `tools`, turns with calls are tried too, if the template writes the format that is parsed. Raises TemplateError if the
    format of tool calls is unknown.
    """
    return [lost for turn in written_turns(tools=tools) if (lost := _lost_turn(coder, turn, tools=tools)) is not None]


def _lost_turn(coder: TurnCoder, turn: WrittenTurn, *, tools: bool) -> LostTurn | None:
    profile = coder.profile
    writes_calls = (
        profile.turn.accepts_calls(len(turn.calls)) and profile.written_format_name == profile.tool_format_name
    )
    if (turn.calls and not writes_calls) or (turn.reasoning and not profile.reasoning.supported):
        return None  # the template writes no such turn
    offered = [TOOL] if tools else coder.template.messages.probe_tools()
    try:
        text, opening = _sampled(coder, turn, offered)
    except TemplateError:
        return None  # the template accepts no such turn
    ids = coder.encode(text)
    stops = frozenset(coder.stop_token_ids)
    end = next((place for place, token in enumerate(ids, 1) if token in stops), len(ids))
    parsed = coder.turn_parser.parse(ids[:end], tools=offered if tools else (), reasoning_opening=opening)
    if changed := _changed_by_template(turn, text, parsed):
        return LostTurn(kind=turn.kind, sampled=text, parts=[changed], by_template=True)
    parts = list(_differences(coder, turn, parsed))
    return LostTurn(kind=turn.kind, sampled=text, parts=parts) if parts else None


def _changed_by_template(turn: WrittenTurn, text: str, parsed: ParsedTurn) -> str:
    """What the template does with the words beside a call if it does not write them in front of it; otherwise empty."""
    if not (turn.words and turn.calls):
        return ""
    words, call = text.find(turn.words), text.find(_IN_ARGUMENTS)
    if words < 0:
        return "leaves out the words"
    if call < 0:
        return "leaves out the call"
    if parsed.reasoning == turn.words and not turn.reasoning:
        return "writes the words as reasoning"
    return "writes the words behind the call" if words > call else ""


def _sampled(coder: TurnCoder, turn: WrittenTurn, tools: Sequence[ToolSchema]) -> tuple[str, str]:
    """The text that the model samples for a turn, and the reasoning opening of its generation prompt.

    Raises TemplateError if the template refuses the turn.
    """
    template, marks = coder.template, coder.profile.reasoning.marks
    prompt = template.render([QUESTION], add_generation_prompt=True, tools=tools)
    opening = marks.reasoning_opening(prompt) if coder.profile.reasoning.supported else ""
    message = turn.message(template.reasoning.key)
    text = template.completion_text(message, before=[QUESTION], tools=tools)
    opened, closed = next(iter(marks.own), ("", ""))
    if turn.reasoning and turn.reasoning not in text and opened:
        # the template leaves it out of such a turn, or has no field for it; a model writes it all the same
        text = f"{opened}\n{turn.reasoning}\n{closed}\n\n{_without_opening(text, opened, closed)}"
    if opening:
        if text.lstrip().startswith(opening.strip()):  # the finished turn repeats what the generation prompt has opened
            text = text.lstrip()[len(opening.strip()) :]
        elif not turn.reasoning and closed not in text:
            text = f"{closed}\n\n{text}"  # a model that is put inside reasoning ends it first
    return text, opening


def _without_opening(text: str, opening: str, closing: str) -> str:
    """The text of a turn without an empty reasoning block, or the end of one, at its beginning."""
    return text.lstrip().removeprefix(opening).lstrip().removeprefix(closing).lstrip()


def _differences(coder: TurnCoder, turn: WrittenTurn, parsed: ParsedTurn) -> Iterator[str]:
    """What of a turn did not come back."""
    content = str(parsed.message["content"] or "")
    if _spelled(coder, content) != _spelled(coder, turn.words):
        yield f"the answer is read as {content!r} instead of {turn.words!r}"
    if _spelled(coder, parsed.reasoning) != _spelled(coder, turn.reasoning):
        yield f"its reasoning is read as {parsed.reasoning!r} instead of {turn.reasoning!r}"
    calls = [(call.name, dict(call.arguments)) for call in parsed.calls if call.error is None]
    if calls != [("probe_tool", arguments) for arguments in turn.calls] or len(calls) != len(parsed.calls):
        shown = ", ".join(f"{call.name} with {dict(call.arguments)}" for call in parsed.calls) or "no call"
        yield f"{'the call is' if len(turn.calls) == 1 else 'its calls are'} read as {shown}"


def _spelled(coder: TurnCoder, text: str) -> str:
    """A text as the tokenizer gives it back: some put a space in front, or know no upper case. White space at its ends is left
    out: it belongs to the marks."""
    return coder.decode(coder.encode(text.strip())).strip() if text.strip() else ""
