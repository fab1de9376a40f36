"""The one border between messages and tokens: opening, bridge, continuation, and a sampled turn parsed back.

Everything comes from the model's own chat template (`Template`, `TemplateProfile`); there is no table of model families. The
opening is rendered once. After that only the *bridge* is encoded: the text between the model's words and its next generation
prompt, found by rendering the new messages behind a short base conversation. So the cost of a turn does not grow with the
conversation. Invariant: sampled tokens are never rendered or encoded again. The text after a base conversation begins with
what is the model's own (the rest of a probe call, and the stop token that it has sampled); `TurnBoundary` finds the length of
that part.

The round trip of a turn (template, tokens, parser) must give back what the template was given. A written turn of each kind is
rendered, cut after the first stop token as a sampled turn is, decoded and parsed. What a parser loses here, it loses in
training without a word: rewards see marks in an answer, a call that is taken for reasoning is never run. `turnwise doctor` and
the start of each run use the check. Knows no engine and no environment.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.constraints import FREE, CallTexts, Constrained, turn_constraint
from turnwise.chat.control_text import ControlText, EscapedRoles
from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import refuse_media
from turnwise.chat.probes import (
    ARGUMENT_SETS,
    LONGEST_TEXT,
    NO_CONVERSATION,
    QUESTION,
    ROLE_SEQUENCES,
    TOOL,
    BaseTurn,
    PriorConversation,
    TokenCache,
    assistant_message,
    probe_call,
    probe_message,
    probe_word,
)
from turnwise.chat.template import Template
from turnwise.chat.template_arguments import argument_text
from turnwise.chat.template_profile import (
    TemplateProblem,
    TemplateProfile,
    control_tokens,
    find_profile,
    generation_config_stops,
    special_tokens,
    token_normalizer,
)
from turnwise.chat.text_encoder import text_decoder, text_encoder
from turnwise.chat.token_differences import SanityMode
from turnwise.chat.tool_calls import ToolFormat, describe_tools, undescribed
from turnwise.chat.tool_calls.parsing import example_at_end
from turnwise.chat.turn_format import ParsedTurn, call_field, template_message
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.local_paths import A_MODEL, refuse_other_than_model, unreadable
from turnwise.models.grammar import TokenMasks
from turnwise.types import Constraint, Media, Message, SamplingChange, ToolCall, ToolSchema, common_length

__all__ = [
    "EncodedMessages",
    "LostTurn",
    "Renderer",
    "SanityMode",
    "Thinking",
    "TurnBoundary",
    "TurnParser",
    "WrittenTurn",
    "lost_in_round_trip",
    "written_turns",
]


# Boundary: where the model's turn ends in the text that the template writes after it


@dataclass(frozen=True, slots=True)
class _SpecialToken:
    """A special token in a text, and its place: `text[start:end]`."""

    token: int
    start: int
    end: int


class TurnBoundary:
    """Finds the end of the model's own part in the text of a bridge.

    `special` are the tokens that no plain text is encoded to.
    """

    def __init__(
        self,
        template: Template,
        profile: TemplateProfile,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        special: frozenset[int],
    ) -> None:
        self._template = template
        self._profile = profile
        self._encode = encode
        self._decode = decode
        self._special = special
        self._stops = frozenset(profile.stop_tokens.token_ids)
        self._find_cached = functools.lru_cache(maxsize=ROLE_SEQUENCES)(self._find)

    def find(
        self, roles: tuple[str, ...], bases: Sequence[BaseTurn], prior: PriorConversation, last_token: int
    ) -> tuple[BaseTurn, int]:
        """The base to use, and how many characters of its `text_after_turn` are the model's own. `bases`: best first.

        `prior` describes the conversation (`MessagePlan.base_for`). `last_token` is the last token that the model sampled, a
        stop token or not.
        """
        # with messages in it, `prior` is different each time
        find = self._find if prior.messages else self._find_cached
        return find(roles, tuple(bases), prior, last_token)

    def _find(
        self, roles: tuple[str, ...], bases: tuple[BaseTurn, ...], prior: PriorConversation, last_token: int
    ) -> tuple[BaseTurn, int]:
        for base in bases:
            length = self._regular_end(roles, base, prior, last_token)
            if length is not None:
                return base, length
        return bases[-1], self._irregular_end(roles, bases[-1], prior, last_token)

    def _regular_end(
        self, roles: tuple[str, ...], base: BaseTurn, prior: PriorConversation, last_token: int
    ) -> int | None:
        """The end of a turn that ended with `last_token`; None if a base with calls does not write that token."""
        text = self._template.text_before_content(roles, base, prior)
        if last_token not in self._stops:
            # the turn was stopped by a text of the user's, for example: the template's own end of turn must be appended
            return 0 if base == "text" else None
        stop = self._decode([last_token])
        call = 0 if base == "text" else self._call_end(text, self._special_tokens(text))
        if last_token not in self._special:
            # the token is a word and may occur anywhere: it is the end of the turn only directly after it
            return call + len(stop) if text.startswith(stop, call) else 0 if base == "text" else None
        end = text.find(stop, call)
        if end >= 0:
            return end + len(stop)
        if base != "text":
            return None
        tokens = self._special_tokens(text) if self._profile.turn.closing.startswith(stop) else []
        # a last turn ends with `stop`, and an earlier turn with the special token that is in its place here
        return tokens[0].end if tokens and tokens[0].start == 0 else 0

    def _irregular_end(self, roles: tuple[str, ...], base: BaseTurn, prior: PriorConversation, last_token: int) -> int:
        """The end of a turn with calls that did not end as the template ends it.

        The probe call is the model's. The template's own stop token is left out after the model's, unless it opens the answer
        too (Gemma 4 writes `<|tool_response>` before each answer).
        """
        text = self._template.text_before_content(roles, base, prior)
        tokens = self._special_tokens(text)
        call = self._call_end(text, tokens)
        own = next((token for token in tokens if token.start >= call), None)
        if (
            last_token not in self._stops
            or own is None
            or own.token not in self._stops
            or text[call : own.start].strip()
        ):
            return call
        return call if text[own.start : own.end] in self._text_between_answers(base, prior) else own.end

    def _call_end(self, text: str, tokens: Sequence[_SpecialToken]) -> int:
        """Where the probe call ends: after the text that always follows it, in front of the end of the turn."""
        alone = self._profile.turn.after_call
        short = min(len(text), len(alone))
        same = next((n for n in range(short) if text[n] != alone[n]), short)
        for token in tokens:
            if token.start < same and (token.end > same or token.token in self._stops):
                return token.start
        return same

    def _text_between_answers(self, base: BaseTurn, prior: PriorConversation) -> str:
        """The text between two tool messages; empty if the template accepts only one."""
        answers = [probe_message("tool", number) for number in range(2)]
        try:
            text = self._template.text_after_turn(answers, base, prior)
        except TemplateError:
            return ""
        return text.partition(probe_word(0))[2].partition(probe_word(1))[0]

    def _special_tokens(self, text: str) -> list[_SpecialToken]:
        """The special tokens of a text, in order."""
        tokens: list[_SpecialToken] = []
        at = 0
        for token in self._encode(text):
            if token in self._special:
                written = self._decode([token])
                start = text.find(written, at)
                if start >= 0:
                    at = start + len(written)
                    tokens.append(_SpecialToken(token, start, at))
        return tokens


# Parser: a sampled turn as text, reasoning and tool calls


class TurnParser:
    """Parses the turns of one model. `where` names its tokenizer in error messages."""

    def __init__(self, profile: TemplateProfile, decode: Callable[[Sequence[int]], str], where: str) -> None:
        self._profile = profile
        self._decode = decode
        self._where = where

    @property
    def tool_format(self) -> ToolFormat:
        """The format in which the template writes tool calls and the model is expected to write them.

        Raises TemplateError if the format is unknown.
        """
        format = self._profile.tool_format
        if isinstance(format, TemplateProblem):
            raise TemplateError(
                f"the chat template of {self._where} {format.reason}, so the format in which the model should "
                f"write them is unknown. Set the format (for example tool_format=hermes), describe it (docs/tool_calls.md), "
                f"use a model whose template writes tool calls, or remove the tools"
            )
        return format

    def parse(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] = (),
        first_call: int = 0,
        reasoning_opening: str = "",
        text_before: str = "",
    ) -> ParsedTurn:
        """Parse a sampled turn. Calls are searched only if there are `tools`; their ids count from `first_call`.

        `reasoning_opening` is the text with which the generation prompt opens reasoning (`EncodedMessages.reasoning_opening`).
        `text_before` is the earlier part of a turn that was continued: the complete turn is parsed. Text of any kind is accepted;
        a call that cannot be read has its `error` set. Raises TemplateError if there are tools and their format is unknown.
        """
        stopped = len(token_ids) > 0 and token_ids[-1] in self._profile.stop_tokens.token_ids
        text = text_before + self._decode(token_ids[:-1] if stopped else token_ids)
        reasoning, content, calls = self._split(text, bool(reasoning_opening), tools, first_call)
        content = content.removeprefix(self._profile.turn.leading_space)  # the template writes it again
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        readable = [call for call in calls if call.error is None]
        if readable:
            message["tool_calls"] = [call_field(call) for call in readable]
        return ParsedTurn(
            text=text, message=message, reasoning=reasoning, calls=calls, reasoning_opening=reasoning_opening
        )

    def writes_call(self, text: str, *, reasoning_opening: str = "") -> bool:
        """Whether a turn's text has a well-formed call in the model's format, whatever tools there are; False if the format is
        unknown, or needs the tools to be read."""
        format, marks = self._profile.tool_format, self._profile.reasoning.marks
        if isinstance(format, TemplateProblem):
            return False
        calls = format.parse(text, thinking=bool(reasoning_opening), marks=marks).calls
        return any(call.error is None for call in calls)

    def _split(
        self, text: str, opened: bool, tools: Sequence[ToolSchema], first_call: int
    ) -> tuple[str, str, tuple[ToolCall, ...]]:
        """Reasoning, content and calls of a turn's text. The content is without the template's marks around an answer."""
        format, without_marks = self._profile.reasoning, self._profile.turn.without_answer_marks
        if tools:
            read = self.tool_format.parse(text, first_id=first_call, thinking=opened, tools=tools, marks=format.marks)
            return read.reasoning, without_marks(read.content), read.calls
        if format.supported:
            reasoning, content = format.marks.split(text, opened=opened)
            return reasoning, without_marks(content), ()
        return "", without_marks(text), ()


# Renderer: messages to token ids

_UNCHANGED = SamplingChange()

Thinking = Literal["keep", "branch", "strip_at_user"]
DescribeTools = Literal["template", "system"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessages:
    """Tokens that the model did not sample, to be appended to a segment."""

    token_ids: Sequence[int]
    media: Sequence[Media] = ()
    messages: Sequence[Message] = ()
    """The messages in it, as the template received them."""
    reasoning_opening: str = ""
    """The end of the generation prompt if it opens reasoning, for example `<think>` and a line end. The model continues it."""
    text: str = ""
    """The text that was encoded."""


class Renderer:
    """Renders and encodes messages with one tokenizer and its chat template.

    `tokenizer` is a transformers tokenizer. `sanity` is the mode of the sanity check. `generation_stop_ids` are the stop tokens
    of the model's generation config, besides the tokenizer's own. `tool_format` is or names the format of tool calls where the
    template does not show it. `describe_tools` says who shows the tools on offer to the model: the template, or, where the
    template does not, this class in the system message. `unchecked` names checks that `refuse_unusable_tools` does not make.
    `vision` is the processor of a vision model. `chat_template_kwargs` are further arguments of the chat template, such as
    `{"enable_thinking": False}`; `for_arguments` gives the renderer of a row that has its own. `escape_control_tokens` says in
    whose messages `control_text` keeps control tokens text.

    Raises TemplateError if the tokenizer has no chat template, one that cannot be continued turn by turn, or one that never
    reads one of `chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        sanity: SanityMode = "strict",
        generation_stop_ids: Sequence[int] = (),
        tool_format: str | ToolFormat = "auto",
        describe_tools: DescribeTools = "template",
        unchecked: Collection[str] = (),
        vision: MediaProcessor | None = None,
        chat_template_kwargs: Mapping[str, Any] = {},
        escape_control_tokens: EscapedRoles = "tools",
        constrained: Constrained = FREE,
    ) -> None:
        self.tokenizer = tokenizer
        self.sanity: SanityMode = sanity
        self.vision = vision
        self.where = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        """Names the tokenizer in error messages."""
        self.special = special_tokens(tokenizer)
        """Tokens that no plain text is encoded to."""
        self._text_ids = text_encoder(tokenizer)
        self._encode_cached = TokenCache(self._encode_behind)
        self._decode = text_decoder(tokenizer, self._text_ids, self.special)
        self.template = Template(tokenizer, self.where, dict(chat_template_kwargs))
        self.profile: TemplateProfile = find_profile(
            tokenizer, self.template, generation_config=generation_stop_ids, tool_format=tool_format
        )
        self.unchecked = frozenset(unchecked)
        self.constrained = constrained
        """What the recipe says of the form of turns."""
        self.masks = TokenMasks(tokenizer)
        """Compiles the grammars of constrained turns."""
        if describe_tools == "system":
            self._describe_in_system_message()
        self.stop_token_ids = self.profile.stop_tokens.token_ids
        self.turn_parser = TurnParser(self.profile, self.decode, self.where)
        coder: dict[str, Any] = {"encode": self.encode, "decode": self.decode}
        self.control_text = ControlText(
            escape_control_tokens,
            find_control=functools.partial(control_tokens, tokenizer, self.template, self.encode),
            **coder,
            normalize=token_normalizer(tokenizer),
        )
        self._call_texts: CallTexts | None = None
        self._boundary = TurnBoundary(self.template, self.profile, **coder, special=self.special)
        self._made_with = {
            "sanity": sanity,
            "generation_stop_ids": generation_stop_ids,
            "tool_format": tool_format,
            "describe_tools": describe_tools,
            "unchecked": unchecked,
            "vision": vision,
            "escape_control_tokens": escape_control_tokens,
            "constrained": constrained,
        }
        self._with_arguments = functools.lru_cache(maxsize=ARGUMENT_SETS)(self._make_with_arguments)
        self._base: Renderer = self
        """The renderer with the arguments that all conversations share. It keeps those with further arguments."""

    def _make_with_arguments(self, arguments: str) -> Renderer:
        """The renderer with these arguments of the template, as JSON."""
        other = Renderer(self.tokenizer, chat_template_kwargs=json.loads(arguments), **self._made_with)
        other._base, other.masks = self, self.masks
        return other

    def for_arguments(self, chat_template_kwargs: Mapping[str, Any]) -> Renderer:
        """The renderer whose template receives these arguments besides those that all conversations share.

        Of two arguments of one name, the one given here is used.

        There is one renderer, with one profile, for each set of arguments that occurs: what a template writes at the beginning
        of a turn, which reasoning it keeps and how a turn ends may all depend on them. Raises TemplateError if the template never
        reads one of them.
        """
        shared = self._base.template.arguments
        text = argument_text({**shared, **chat_template_kwargs})
        return self._base if text == argument_text(shared) else self._base._with_arguments(text)

    @property
    def made_with(self) -> str | None:
        """What the renderer was made with besides a fast tokenizer's vocabulary and rules, and wherever that is, as text. None if
        no text says it: with Python code of a tokenizer, a processor of images, or a user's own format of tool calls."""
        options = {name: value for name, value in self._made_with.items() if name != "vision"}
        if self.vision is not None or not self.tokenizer.is_fast or not isinstance(options["tool_format"], str):
            return None
        places = ("name_or_path", "tokenizer_file", "vocab_file")
        given = {name: value for name, value in self.tokenizer.init_kwargs.items() if name not in places}
        return repr((argument_text(self.template.arguments), options, given))

    def with_tool_format(self, format: ToolFormat) -> Renderer:
        """The same renderer, but turns are parsed with this format of tool calls; also with further template arguments."""

        def parsing(renderer: Renderer) -> Renderer:
            other = copy.copy(renderer)
            other.profile = replace(renderer.profile, tool_format=format, tool_format_name=format.name)
            other._made_with = {**renderer._made_with, "tool_format": format}
            other.turn_parser = TurnParser(other.profile, other.decode, other.where)
            other._base = base or other
            return other

        base: Renderer | None = None
        base, unchanged = parsing(self._base), self._base
        base._with_arguments = functools.lru_cache(maxsize=ARGUMENT_SETS)(
            lambda arguments: parsing(unchanged._with_arguments(arguments))
        )
        return base

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        sanity: SanityMode = "strict",
        tool_format: str | ToolFormat = "auto",
        describe_tools: DescribeTools = "template",
        unchecked: Collection[str] = (),
        chat_template_kwargs: Mapping[str, Any] = {},
        escape_control_tokens: EscapedRoles = "tools",
        constrained: Constrained = FREE,
    ) -> Renderer:
        """Load the tokenizer, and the stop tokens of the generation config where there is one.

        Raises TemplateError if there is no tokenizer at `path`.
        """
        from transformers import AutoTokenizer

        refuse_other_than_model(path, error=TemplateError, weights=False)
        try:
            with boundary("tokenizer"):  # some libraries raise a bare Exception
                tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Failed as failed:
            if os.path.isdir(path) and not Path(path, "tokenizer_config.json").is_file():
                raise TemplateError(
                    f"the directory {str(path)!r} has no tokenizer (no tokenizer_config.json); {A_MODEL}"
                ) from failed
            raise TemplateError(unreadable("tokenizer", path, failed)) from failed
        # transformers makes an empty one by the type of the model
        if not tokenizer.encode("a", add_special_tokens=False):
            raise TemplateError(
                f"{str(path)!r} has no vocabulary (tokenizer.json, or the file of the model's own tokenizer), so no text has "
                f"tokens: copy the files of the tokenizer into it, as save_pretrained of the tokenizer writes them"
            )
        return cls(
            tokenizer,
            sanity=sanity,
            generation_stop_ids=generation_config_stops(path),
            tool_format=tool_format,
            describe_tools=describe_tools,
            unchecked=unchecked,
            vision=MediaProcessor.from_pretrained(path, tokenizer),
            chat_template_kwargs=chat_template_kwargs,
            escape_control_tokens=escape_control_tokens,
            constrained=constrained,
        )

    def constraint(
        self,
        tools: Sequence[ToolSchema],
        change: SamplingChange = _UNCHANGED,
        *,
        stops: Sequence[int] = (),
        reasoning_opening: str = "",
        before: str = "",
    ) -> Constraint | None:
        """What a turn may consist of, if the recipe or the environment (`change`) says so; None: anything.

        `stops` are the tokens that end the turn, `reasoning_opening` and `before` what the prompt has of the turn already.

        Raises TemplateError if calls cannot be constrained in the format that the model writes, and GrammarError if a schema
        cannot be compiled.
        """
        wanted = self.constrained.changed(change)
        if not wanted.anything(tools):
            return None
        format = self.turn_parser.tool_format if tools else None
        if format is not None and self._call_texts is None:
            self._call_texts = CallTexts.of(
                self.template,
                format,
                ends=[
                    self.profile.turn.closing.strip(),
                    *(self.decode([t]) for t in self.stop_token_ids if t in self.special),
                ],
            )
        return turn_constraint(
            wanted,
            tools,
            calls=self._call_texts if tools else None,
            marks=self.profile.reasoning.marks if self.profile.reasoning.supported else None,
            opened=bool(reasoning_opening),
            stops=stops,
            before=before,
            special={self.decode([token]): token for token in self.special},
            masks=self.masks,
        )

    def escaped(self, message: Message, found: Counter[str]) -> Message:
        """The message with control tokens in the text of others kept text (`ControlText.escape`)."""
        format = self.profile.tool_format
        example = example_at_end(message, format) if isinstance(format, ToolFormat) else ""
        if example and not set(self.stop_token_ids).isdisjoint(self.encode(example)):
            example = ""  # it would end the message
        return self.control_text.escape(message, found, own_end=example)

    def _describe_in_system_message(self) -> None:
        """Raises TemplateError if the template shows tools itself, or the format of calls is unknown."""
        if self.profile.messages.describes_tools:
            raise TemplateError(
                f"tool_calls.describe=system: the chat template of {self.where} shows the tools to the model itself, so they "
                f"would stand in the prompt twice. Remove the option"
            )
        format = TurnParser(self.profile, self.decode, self.where).tool_format
        self.template.describe_tools_by(functools.partial(describe_tools, format))

    def refuse_unusable_tools(self, tools: Sequence[ToolSchema], prompt: str) -> None:
        """Raise TemplateError if the model could not use the tools that a conversation offers. `prompt` is the opening's text.

        The format of calls must be known, no written call may be lost in template, tokens and parser, and the prompt must show
        the names and the parameters.
        """
        _ = self.turn_parser.tool_format
        if "round trip" not in self.unchecked and (lost := [loss for loss in self.lost_turns if not loss.by_template]):
            raise TemplateError(
                f"turns of the model change on their way through template, tokens and parser: {lost[0]}. Correct the template, "
                f"or set tool_format to the format that the model writes"
            )
        if "tools shown" not in self.unchecked and (missing := undescribed(tools, prompt)):
            raise TemplateError(self.undescribed_problem(missing))

    @functools.cached_property
    def lost_turns(self) -> Sequence[LostTurn]:
        """Turns, also with calls, that do not come back unchanged from template, tokens and parser.

        Raises TemplateError if the format of tool calls is unknown.
        """
        return lost_in_round_trip(self, tools=True)

    def undescribed_problem(self, missing: Sequence[str]) -> str:
        """The error text if a prompt does not show the tools (or parameters) `missing`."""
        names = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        return (
            f"the prompt does not contain the tools that the recipe offers ({names}), because the chat template of {self.where} "
            f"does not write them. The model would be trained without knowing its tools. Set tool_calls.describe=system, or "
            f"describe them in the system prompt"
        )

    # messages

    def encode_opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> EncodedMessages:
        """The opening messages, the descriptions of the tools and the first generation prompt.

        Raises TemplateError if the template refuses the messages.
        """
        return self.encode_full(self.template.planned_opening(messages, tools), tools)

    def encode_full(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> EncodedMessages:
        """A complete conversation with the next generation prompt: the beginning of a new segment.

        `messages` are as the template receives them. Raises TemplateError if the template refuses them.
        """
        hidden = self._with_hidden_placeholders(messages)
        text = self.template.render(hidden, tools=tools, add_generation_prompt=True)
        return replace(self._encode_messages(text, hidden, None), messages=messages)

    def encode_bridge(
        self, last_token: int, messages: Sequence[Message], prior: PriorConversation = NO_CONVERSATION
    ) -> EncodedMessages:
        """The tokens between the model's turn, which ended with `last_token`, and its next completion.

        `prior` describes the segment up to here: some templates write the first answer of a tool differently, or number them.
        Raises TemplateError if the template refuses the messages.
        """
        plan = self.template.plan(messages, prior)
        base_prior = plan.base_for(prior)
        planned = plan.apply(messages)
        roles = tuple(str(message["role"]) for message in planned)
        base, own = self._boundary.find(roles, plan.base_turns, base_prior, last_token)
        return self._encode_messages(
            self.template.text_after_turn(planned, base, base_prior)[own:], planned, last_token
        )

    def check_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opening: bool, arguments: Mapping[str, Any]
    ) -> None:
        """Raise TemplateError or DataError for messages that can be in no prompt of this model, before anything is appended:
        images for a text model, images that cannot be read, texts with the placeholder of an image, and with `opening` a
        conversation that the template refuses in one piece. `arguments` are further arguments of the template.

        Messages of tools that follow a turn are not checked: what is wrong with their images becomes their text.
        """
        renderer = self.for_arguments(arguments)
        if opening:
            renderer.render_text(renderer.template.planned_opening(messages, tools), tools, add_generation_prompt=True)
            checked = messages
        else:
            checked = [message for message in messages if message["role"] != "tool"]
        if self.vision is None:
            refuse_media(checked, self.where)
        else:
            self.vision.check(checked)

    def to_template_message(self, turn: ParsedTurn) -> Message:
        """A sampled turn as the template receives it when the complete conversation is rendered."""
        return template_message(turn, self.profile.turn, self.profile.reasoning)

    def render_text(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, add_generation_prompt: bool
    ) -> str:
        """A complete conversation as one text, as it is encoded: with the placeholders of images expanded."""
        messages = self._with_hidden_placeholders(messages)
        text = self.template.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        if self.vision is not None:
            text, _ = self.vision.expand(text, self.vision.parts(messages))
            text = self.vision.placeholders.restore(text)
        return text

    def _with_hidden_placeholders(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages, with a word for each placeholder of an image that the model has sampled as text."""
        return messages if self.vision is None else self.vision.placeholders.hide(messages)

    # tokens

    def encode_continuation(self, last_token: int | None, text: str) -> Sequence[int]:
        """Token ids of a text that continues the model's turn after `last_token`. The cache keeps none of a long text."""
        return (self._encode_cached if len(text) <= LONGEST_TEXT else self._encode_behind)(text, last_token)

    def token_prefix(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        """The most tokens whose text is a prefix of `text`: their number, and their text."""
        # what follows the common part cannot be kept; without it, the search ends next to the answer
        text = text[: common_length(self.decode(token_ids), text)]
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self.decode(token_ids[:middle])) <= len(text) else (low, middle - 1)
        while low and not text.startswith(self.decode(token_ids[:low])):  # the last token ends inside a character
            low -= 1
        return low, self.decode(token_ids[:low])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included, without any clean-up of spaces: the text that was encoded to them."""
        return self._decode(token_ids)

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a plain text, for example of a scripted turn."""
        return self._encode_cached(text, None)

    def encode_conversation(self, text: str) -> Sequence[int]:
        """The token ids of a complete conversation. Those of a long one are not kept in the cache."""
        return self._encode_cached(text, None) if len(text) <= LONGEST_TEXT else self._encode_behind(text)

    def is_special(self, token: int) -> bool:
        """Whether no plain text is encoded to this token: a mark of the template."""
        return token in self.special

    def _encode_messages(self, text: str, messages: Sequence[Message], last_token: int | None) -> EncodedMessages:
        opening = self.profile.reasoning.marks.reasoning_opening(text)
        if self.vision is None:
            refuse_media(messages, self.where)
            return EncodedMessages(
                token_ids=self._encode_cached(text, last_token), messages=messages, reasoning_opening=opening, text=text
            )
        text, unplaced = self.vision.expand(text, self.vision.parts(messages))
        literal, text = self.vision.placeholders.literal_indices(text), self.vision.placeholders.restore(text)
        ids = self._encode_cached(text, last_token)
        media = self.vision.locate(ids, unplaced, literal=literal)
        return EncodedMessages(token_ids=ids, media=media, messages=messages, reasoning_opening=opening, text=text)

    def _encode_behind(self, text: str, behind: int | None = None) -> tuple[int, ...]:
        """The token ids of a text that follows the token `behind`; `_encode_cached` keeps them."""
        if behind is not None and behind in self.special:
            # encoded together with the token in front, as in one pass: some tokenizers put a space before a text that begins
            ids = self._text_ids(self.decode([behind]) + text)
            if ids and ids[0] == behind:
                return tuple(ids[1:])
        return tuple(self._text_ids(text))


# Round trip: written turns come back as they were given

_WORDS, _REASONING = "It is twelve.", "The tree is old."
_ARGUMENTS = {"text": 'a "quoted" text,\nwith a line end, an ä and a </tag>'}
_OTHER_ARGUMENTS = {"text": "another text"}
_IN_ARGUMENTS = "with a line end"
_SHOWN = 160


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


def lost_in_round_trip(renderer: Renderer, *, tools: bool) -> list[LostTurn]:
    """The written turns that do not come back unchanged from template, tokens and parser; empty if all do.

    With `tools`, turns with calls are tried too, if the template writes the format that is parsed. Raises TemplateError if the
    format of tool calls is unknown.
    """
    return [
        lost for turn in written_turns(tools=tools) if (lost := _lost_turn(renderer, turn, tools=tools)) is not None
    ]


def _lost_turn(renderer: Renderer, turn: WrittenTurn, *, tools: bool) -> LostTurn | None:
    profile = renderer.profile
    writes_calls = (
        profile.turn.accepts_calls(len(turn.calls)) and profile.written_format_name == profile.tool_format_name
    )
    if (turn.calls and not writes_calls) or (turn.reasoning and not profile.reasoning.supported):
        return None  # the template writes no such turn
    offered = [TOOL] if tools else renderer.template.message_format.probe_tools()
    try:
        text, opening = _sampled(renderer, turn, offered)
    except TemplateError:
        return None  # the template accepts no such turn
    ids = renderer.encode(text)
    stops = frozenset(renderer.stop_token_ids)
    end = next((place for place, token in enumerate(ids, 1) if token in stops), len(ids))
    parsed = renderer.turn_parser.parse(ids[:end], tools=offered if tools else (), reasoning_opening=opening)
    if changed := _changed_by_template(turn, text, parsed):
        return LostTurn(kind=turn.kind, sampled=text, parts=[changed], by_template=True)
    parts = list(_differences(renderer, turn, parsed))
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


def _sampled(renderer: Renderer, turn: WrittenTurn, tools: Sequence[ToolSchema]) -> tuple[str, str]:
    """The text that the model samples for a turn, and the reasoning opening of its generation prompt.

    Raises TemplateError if the template refuses the turn.
    """
    template, marks = renderer.template, renderer.profile.reasoning.marks
    prompt = template.render([QUESTION], add_generation_prompt=True, tools=tools)
    opening = marks.reasoning_opening(prompt) if renderer.profile.reasoning.supported else ""
    message = turn.message(template.reasoning_format.key)
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


def _differences(renderer: Renderer, turn: WrittenTurn, parsed: ParsedTurn) -> Iterator[str]:
    """What of a turn did not come back."""
    content = str(parsed.message["content"] or "")
    if _spelled(renderer, content) != _spelled(renderer, turn.words):
        yield f"the answer is read as {content!r} instead of {turn.words!r}"
    if _spelled(renderer, parsed.reasoning) != _spelled(renderer, turn.reasoning):
        yield f"its reasoning is read as {parsed.reasoning!r} instead of {turn.reasoning!r}"
    calls = [(call.name, dict(call.arguments)) for call in parsed.calls if call.error is None]
    if calls != [("probe_tool", arguments) for arguments in turn.calls] or len(calls) != len(parsed.calls):
        shown = ", ".join(f"{call.name} with {dict(call.arguments)}" for call in parsed.calls) or "no call"
        yield f"{'the call is' if len(turn.calls) == 1 else 'its calls are'} read as {shown}"


def _spelled(renderer: Renderer, text: str) -> str:
    """A text as the tokenizer gives it back: some put a space in front, or know no upper case. White space at its ends is left
    out: it belongs to the marks."""
    return renderer.decode(renderer.encode(text.strip())).strip() if text.strip() else ""
