"""Messages to token ids and back: the one border between what users write and what models read.

Everything comes from the model's own chat template (`template`); there is no table of model families. The opening is
rendered once. After that only the *bridge* is encoded: what the template puts between the model's words and its next cue,
found by rendering the new messages behind a fixed base conversation; so its cost does not grow with the conversation. What
the model sampled is never rendered and never encoded again. This module knows no engine and no environment.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.base_conversations import NOTHING, Before
from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import refuse_media
from turnwise.chat.probes import PLACEHOLDER, probe_call, words
from turnwise.chat.stop_tokens import find_stops, generation_stops, special_tokens
from turnwise.chat.stripped_thoughts import StripRule, find_strips
from turnwise.chat.template import Template
from turnwise.chat.token_differences import SanityMode
from turnwise.chat.tool_calls import FromResponseTemplate, ToolFormat, by_name, find_format
from turnwise.chat.tool_calls.reasoning import ThoughtMarks
from turnwise.chat.turn_end import TurnEnd
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.types import Media, Message, ToolCall, ToolSchema

__all__ = ["EncodedMessages", "ParsedTurn", "Renderer", "SanityMode", "Thinking"]

Thinking = Literal["keep", "branch", "strip_at_user"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedMessages:
    """Tokens that the model did not say, ready to be appended."""

    token_ids: Sequence[int]
    media: Sequence[Media] = ()
    messages: Sequence[Message] = ()
    """The messages in it, as the template was given them."""
    open_thought: str = ""
    """What its cue ends with where it opens a thought: `<think>` and a line end, say. The model then begins inside it."""
    text: str = ""
    """What was encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """A sampled turn, read."""

    text: str
    """Without the stop token."""
    message: Message
    """`content`, and where there are any `tool_calls` and `reasoning_content`."""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    thought_opening: str = ""
    """What its cue had opened a thought with, if it had."""


class Renderer:
    """Renders with one tokenizer and its chat template.

    `tokenizer` is a transformers tokenizer. `generation_stop_ids` are the stop tokens that the model's generation config
    names in addition to the tokenizer's own. `tool_format` names the format of tool calls where the template does not show
    it. `vision` is the processor of a model that sees.

    Raises TemplateError if the tokenizer has no chat template, or one that cannot be continued.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        sanity: SanityMode = "strict",
        generation_stop_ids: Sequence[int] = (),
        tool_format: str = "auto",
        vision: MediaProcessor | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.sanity: SanityMode = sanity
        self.vision = vision
        self.where = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        self.template = Template(tokenizer, self.where)
        self._own_format = None if (spec := _response_template(tokenizer)) is None else FromResponseTemplate(spec)
        self._named_format = None if tool_format == "auto" else self._format_named(tool_format)
        self.special = special_tokens(tokenizer)
        """Tokens that no plain text is encoded to."""
        self._encode = functools.lru_cache(maxsize=512)(self._encode_text)
        self.stops = find_stops(tokenizer, self.template, generation_stop_ids, where=self.where)
        self.stop_token_ids = self.stops.token_ids
        self._end = TurnEnd(
            self.template, encode=self.encode, decode=self.decode, special=self.special, stops=self.stop_token_ids
        )

    @classmethod
    def from_pretrained(cls, path: str | Path, *, sanity: SanityMode = "strict", tool_format: str = "auto") -> Renderer:
        """Load the tokenizer, and the stop tokens of the generation config where there is one.

        Raises TemplateError if there is no tokenizer at `path`.
        """
        from transformers import AutoTokenizer

        if str(path).startswith(("/", ".", "~")) and not os.path.isdir(os.path.expanduser(path)):
            raise TemplateError(
                f"there is no model directory {os.path.abspath(os.path.expanduser(path))}; model.path must be a directory as "
                f"save_pretrained writes it, or a hub id"
            )
        try:
            with boundary("tokenizer"):  # some libraries raise what is no more than an Exception
                tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Failed as failed:
            if os.path.isdir(path) and not Path(path, "tokenizer_config.json").is_file():
                raise TemplateError(
                    f"the directory {str(path)!r} has no tokenizer (no tokenizer_config.json); model.path must be a directory "
                    f"as save_pretrained writes it, or a hub id"
                ) from failed
            raise TemplateError(
                f"no tokenizer could be loaded from {str(path)!r}: {failed.failure.message.rstrip('.')}. model.path must be a "
                f"model directory or a hub id"
            ) from failed
        return cls(
            tokenizer,
            sanity=sanity,
            generation_stop_ids=generation_stops(path),
            tool_format=tool_format,
            vision=MediaProcessor.from_pretrained(path, tokenizer),
        )

    def _format_named(self, name: str) -> ToolFormat:
        if name != FromResponseTemplate.name:
            return by_name(name)
        if self._own_format is None:
            raise TemplateError(
                f"tool_format={name}: the tokenizer of {self.where} has no response_template; leave tool_format out, or name "
                f"a format (tool_format=hermes, say)"
            )
        return self._own_format

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls that the template writes and the model is expected to write.

        Raises TemplateError if it is none that can be read.
        """
        if self._named_format is not None:
            return self._named_format

        # what the template writes in front of all of the model's words: the end of a thought that the cue opens, say
        head = self.template.said(words(PLACEHOLDER)).partition(PLACEHOLDER)[0].rstrip()

        def write(calls: Sequence[Mapping[str, Any]]) -> str:
            try:
                return self.template.said(probe_call(*calls)).removeprefix(head)
            except TemplateError:
                if len(calls) > 1:
                    return ""  # it takes one call a turn
                raise

        found: ToolFormat | None = None
        if self.template.call_shape is not None:
            own = [] if self._own_format is None else [self._own_format]
            stops = [self.decode([token]) for token in self.stop_token_ids if token in self.special]
            found = find_format(write, own=own, ends=[self.template.closing.strip(), *stops], marks=self.marks)
        if found is None:
            why = (
                "writes tool calls in a format that cannot be read back"
                if self.template.call_shape is not None
                else "writes no tool calls"
            )
            raise TemplateError(
                f"the chat template of {self.where} {why}, so it is unknown how the model is to write them. "
                f"Name the format (tool_format=hermes, say), use a model whose template has tools, or no tools"
            )
        return found

    @property
    def thinks(self) -> bool:
        """Whether the template knows of thinking: only then is a turn's text split into thoughts and words."""
        return self.template.thoughts.thinks

    @property
    def marks(self) -> ThoughtMarks:
        """The marks around thoughts that turns are read with."""
        return self.template.thoughts.marks

    @functools.cached_property
    def strips(self) -> StripRule:
        """Which earlier thoughts the template leaves out when the conversation goes on."""
        return find_strips(self.template, self._sample_turn) if self.thinks else StripRule()

    @property
    def strips_at(self) -> tuple[str, ...]:
        """The roles of messages before which the template leaves out what the model has thought so far."""
        return self.strips.at

    def _sample_turn(self, thought: str, calls: bool, number: int) -> Message:
        opening, closing = next(iter(self.marks.own), ("", ""))
        call = ToolCall(id=f"callprob{number}", name="probe_tool", arguments={"text": "x"}, text="")
        said = ParsedTurn(
            text=f"{opening}\n{thought}\n{closing}\n\nSaid.",
            message={"role": "assistant", "content": "Said."},
            reasoning=thought,
            calls=(call,) if calls else (),
        )
        return self.to_template_message(said)

    def encode_opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> EncodedMessages:
        """The opening messages, the tools' description and the first cue.

        Raises TemplateError if the template refuses the messages.
        """
        handed = self.template.opening(messages, tools)
        return self.encode_full(handed, tools)

    def encode_full(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> EncodedMessages:
        """A conversation that was handed to the template before, in one pass, with the next cue: a new segment's beginning."""
        piece = self._piece(
            self.template.render(self._hidden(messages), tools=tools, cue=True), self._hidden(messages), None
        )
        return replace(piece, messages=messages)

    def _hidden(self, messages: Sequence[Message]) -> Sequence[Message]:
        return messages if self.vision is None else self.vision.placeholders.hide(messages)

    def encode_bridge(self, last_token: int, messages: Sequence[Message], before: Before = NOTHING) -> EncodedMessages:
        """What comes between the model's turn, which ended with `last_token`, and its next cue.

        `before` is what stands in the segment: some templates write the first answer of a tool differently, or number them.
        Raises TemplateError if the template refuses the messages.
        """
        plan = self.template.plan(messages, before)
        behind = plan.behind(before)
        handed = plan.apply(messages)
        roles = tuple(str(message["role"]) for message in handed)
        base, cut = self._end.cut(roles, plan.bases, behind, last_token)
        return self._piece(self.template.after_turn(handed, base, behind)[cut:], handed, last_token)

    def encode_continuation(self, last_token: int | None, text: str) -> Sequence[int]:
        """Token ids of words that are put into the model's mouth behind `last_token`."""
        return self._encode(text, last_token)

    def parse_turn(
        self,
        token_ids: Sequence[int],
        *,
        tools: Sequence[ToolSchema] = (),
        first_call: int = 0,
        thinking: str = "",
        before: str = "",
    ) -> ParsedTurn:
        """Read a sampled turn. `thinking` is what its cue has opened a thought with.

        `before` is what of the same turn stands already, where it was resumed; the turn is read with it.
        """
        ids = token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_token_ids else token_ids
        text = before + self.decode(ids)
        if tools:
            reading = self.tool_format.parse(
                text, first_id=first_call, thinking=bool(thinking), tools=tools, marks=self.marks
            )
            reasoning, content, calls = reading.reasoning, reading.content, reading.calls
        elif self.thinks:
            (reasoning, content), calls = self.marks.split(text, opened=bool(thinking)), ()
        else:
            reasoning, content, calls = "", text, ()
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning_content"] = reasoning
        good = [call for call in calls if call.error is None]
        if good:
            message["tool_calls"] = [_written(call) for call in good]
        return ParsedTurn(text=text, message=message, reasoning=reasoning, calls=calls, thought_opening=thinking)

    def to_template_message(self, said: ParsedTurn) -> Message:
        """A turn as the template is given it when the whole conversation is rendered.

        Its calls are given as calls, as a server does that has parsed them: what a template writes behind a turn may depend
        on whether it called. Everything else is given in the turn's own words wherever the template takes them.
        """
        takes, calls = self.template.takes, self._given_calls(said)
        text = self._before_calls(said) if calls and takes != "fields" else said.text.removeprefix(self.template.lead)
        if takes == "text":
            message: Message = {"role": "assistant", "content": said.thought_opening + text}
        elif takes == "thoughts apart":
            message = {"role": "assistant", "content": self.without_thoughts(text, bool(said.thought_opening))}
        else:
            message = {"role": "assistant", "content": said.message["content"]}
        if takes != "text" and said.reasoning and self.template.reasoning_key is not None:
            message[self.template.reasoning_key] = said.reasoning
        if calls:
            message["tool_calls"] = [_written(call) for call in calls]
        return message

    def _given_calls(self, said: ParsedTurn) -> Sequence[ToolCall]:
        """The calls of a turn that are given to the template as calls; none where the turn is given as text with its calls."""
        if self.template.takes == "fields":  # those that could not be read too: an answer without a call is refused
            return said.calls
        readable = all(call.error is None for call in said.calls)
        return said.calls if readable and self.template.takes_calls(len(said.calls)) else ()

    def _before_calls(self, said: ParsedTurn) -> str:
        """A turn's text without its calls: its thought as it was written, and its content."""
        text = said.text.removeprefix(self.template.lead)
        thoughts = self.marks.thoughts(text, opened=bool(said.thought_opening)) if self.thinks else []
        content = str(said.message["content"] or "")
        if not thoughts or text[: thoughts[0].start].strip():
            return content
        rest = text[thoughts[0].end :]
        return text[: thoughts[0].end] + rest[: len(rest) - len(rest.lstrip())] + content

    def token_prefix(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        """How many of the tokens spell a beginning of `text`, and that beginning: whole tokens, as many as there are."""
        low, high = 0, len(token_ids)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if len(self.decode(token_ids[:middle])) <= len(text) else (low, middle - 1)
        while low and not text.startswith(self.decode(token_ids[:low])):  # it ends inside a character
            low -= 1
        return low, self.decode(token_ids[:low])

    def without_thoughts(self, text: str, opened: bool = False) -> str:
        """A turn's text without what was thought; `opened` says that it begins inside a thought."""
        return self.marks.split(text, opened=opened)[1] if self.thinks else text

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included, nothing tidied up."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a plain text: of a scripted line, say."""
        return self._encode(text, None)

    def render_text(self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, cue: bool) -> str:
        """A whole conversation as one text, images in their places, as it is encoded."""
        messages = self._hidden(messages)
        whole = self.template.render(messages, tools=tools, cue=cue)
        if self.vision is not None:
            whole, _ = self.vision.expand(whole, self.vision.parts(messages))
            whole = self.vision.placeholders.restore(whole)
        return whole

    def encode_uncached(self, text: str) -> Sequence[int]:
        """The token ids of a long text that will not be encoded again."""
        return self._encode_text(text)

    def is_special(self, token: int) -> bool:
        """Whether a token is one that no text is written with: a mark of the template's."""
        return token in self.special

    # tokens

    def _piece(self, text: str, messages: Sequence[Message], last_token: int | None) -> EncodedMessages:
        thinking = self.marks.open_thought(text)
        if self.vision is None:
            refuse_media(messages, self.where)
            return EncodedMessages(
                token_ids=self._encode(text, last_token), messages=messages, open_thought=thinking, text=text
            )
        text, found = self.vision.expand(text, self.vision.parts(messages))
        literal, text = self.vision.placeholders.literal_indices(text), self.vision.placeholders.restore(text)
        ids = self._encode(text, last_token)
        media = self.vision.locate(ids, found, literal=literal)
        return EncodedMessages(token_ids=ids, media=media, messages=messages, open_thought=thinking, text=text)

    def _encode_text(self, text: str, behind: int | None = None) -> tuple[int, ...]:
        if behind is not None and behind in self.special:
            # behind the token that it follows, as in one pass: some tokenizers put a space before what stands alone
            ids = self.tokenizer.encode(self.decode([behind]) + text, add_special_tokens=False)
            if ids and ids[0] == behind:
                return tuple(ids[1:])
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))


def _response_template(tokenizer: Any) -> Mapping[str, Any] | None:
    """What a tokenizer itself says of how its model's turns are read; tokenizers of other libraries say nothing."""
    return getattr(tokenizer, "response_template", None)


def _written(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name or "unknown", "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
