"""Messages to token ids: the one border between what users write and what models read.

Everything comes from the model's own chat template (`template`, `profile`); there is no table of model families. The opening is
rendered once. After that only the *bridge* is encoded: the text between the model's words and its next generation prompt, found
by rendering the new messages behind a short base conversation. So the cost of a turn does not grow with the conversation.
Sampled tokens are never rendered or encoded again. Sampled turns are parsed by `turn_parser`. This module knows no engine and
no environment.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from turnwise.chat.base_conversations import NO_CONVERSATION, PriorConversation
from turnwise.chat.caches import LONGEST_TEXT, cached_by_arguments, cached_by_text
from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import refuse_media
from turnwise.chat.round_trip import LostTurn, lost_in_round_trip
from turnwise.chat.stop_tokens import generation_config_stops, special_tokens
from turnwise.chat.template import Template
from turnwise.chat.template_arguments import argument_text
from turnwise.chat.template_profile import TemplateProfile, find_profile
from turnwise.chat.text_encoder import text_decoder, text_encoder
from turnwise.chat.token_differences import SanityMode
from turnwise.chat.tool_calls import ToolFormat, describe_tools, undescribed
from turnwise.chat.turn_boundary import TurnBoundary
from turnwise.chat.turn_messages import ParsedTurn, template_message
from turnwise.chat.turn_parser import TurnParser
from turnwise.errors import Failed, TemplateError, boundary
from turnwise.local_paths import refuse_other_than_model
from turnwise.types import Media, Message, ToolSchema

__all__ = ["EncodedMessages", "Renderer", "SanityMode", "Thinking"]

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
    of the model's generation config, besides the tokenizer's own. `tool_format` names the format of tool calls where the
    template does not show it. `describe_tools` says who shows the tools on offer to the model: the template, or, where the
    template does not, this class in the system message. `unchecked` names checks that `refuse_unusable_tools` does not make.
    `vision` is the processor of a vision model. `chat_template_kwargs` are further arguments of the chat template, such as
    `{"enable_thinking": False}`; `for_arguments` gives the renderer of a row that has its own.

    Raises TemplateError if the tokenizer has no chat template, one that cannot be continued turn by turn, or one that never
    reads one of `chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        sanity: SanityMode = "strict",
        generation_stop_ids: Sequence[int] = (),
        tool_format: str = "auto",
        describe_tools: DescribeTools = "template",
        unchecked: Collection[str] = (),
        vision: MediaProcessor | None = None,
        chat_template_kwargs: Mapping[str, Any] = {},
    ) -> None:
        self.tokenizer = tokenizer
        self.sanity: SanityMode = sanity
        self.vision = vision
        self.where = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        """Names the tokenizer in error messages."""
        self.special = special_tokens(tokenizer)
        """Tokens that no plain text is encoded to."""
        self._text_ids = text_encoder(tokenizer)
        self._encode = cached_by_text(self._encode_text)
        self._decode = text_decoder(tokenizer, self._text_ids, self.special)
        self.template = Template(tokenizer, self.where, dict(chat_template_kwargs))
        self.profile: TemplateProfile = find_profile(
            tokenizer, self.template, generation_config=generation_stop_ids, tool_format=tool_format
        )
        self.unchecked = frozenset(unchecked)
        if describe_tools == "system":
            self._describe_in_system_message()
        self.stop_token_ids = self.profile.stop_tokens.token_ids
        self.turn_parser = TurnParser(self.profile, self.decode, self.where)
        self._boundary = TurnBoundary(
            self.template, self.profile, encode=self.encode, decode=self.decode, special=self.special
        )

        def with_arguments(arguments: str) -> Renderer:
            other = Renderer(
                tokenizer,
                sanity=sanity,
                generation_stop_ids=generation_stop_ids,
                tool_format=tool_format,
                describe_tools=describe_tools,
                unchecked=unchecked,
                vision=vision,
                chat_template_kwargs=json.loads(arguments),
            )
            other._base = self
            return other

        self._with_arguments = cached_by_arguments(with_arguments)
        self._base: Renderer = self
        """The renderer with the arguments that all conversations share. It keeps those with further arguments."""

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

    def with_tool_format(self, format: ToolFormat) -> Renderer:
        """The same renderer, but turns are parsed with this format of tool calls; also with further template arguments."""

        def parsing(renderer: Renderer) -> Renderer:
            other = copy.copy(renderer)
            other.profile = replace(renderer.profile, tool_format=format, tool_format_name=format.name)
            other.turn_parser = TurnParser(other.profile, other.decode, other.where)
            other._base = base or other
            return other

        base: Renderer | None = None
        base, unchanged = parsing(self._base), self._base
        base._with_arguments = cached_by_arguments(lambda arguments: parsing(unchanged._with_arguments(arguments)))
        return base

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        sanity: SanityMode = "strict",
        tool_format: str = "auto",
        describe_tools: DescribeTools = "template",
        unchecked: Collection[str] = (),
        chat_template_kwargs: Mapping[str, Any] = {},
    ) -> Renderer:
        """Load the tokenizer, and the stop tokens of the generation config where there is one.

        Raises TemplateError if there is no tokenizer at `path`.
        """
        from transformers import AutoTokenizer

        refuse_other_than_model(path, error=TemplateError)
        try:
            with boundary("tokenizer"):  # some libraries raise a bare Exception
                tokenizer = AutoTokenizer.from_pretrained(str(path))
        except Failed as failed:
            if os.path.isdir(path) and not Path(path, "tokenizer_config.json").is_file():
                raise TemplateError(
                    f"the directory {str(path)!r} has no tokenizer (no tokenizer_config.json); model.path must be a hub id, "
                    f"or a directory that save_pretrained has written"
                ) from failed
            raise TemplateError(
                f"no tokenizer could be loaded from {str(path)!r}: {failed.failure.message.rstrip('.')}. model.path must be a "
                f"model directory or a hub id"
            ) from failed
        return cls(
            tokenizer,
            sanity=sanity,
            generation_stop_ids=generation_config_stops(path),
            tool_format=tool_format,
            describe_tools=describe_tools,
            unchecked=unchecked,
            vision=MediaProcessor.from_pretrained(path, tokenizer),
            chat_template_kwargs=chat_template_kwargs,
        )

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
        return replace(self._encoded(text, hidden, None), messages=messages)

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
        return self._encoded(self.template.text_after_turn(planned, base, base_prior)[own:], planned, last_token)

    def check_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opening: bool, arguments: Mapping[str, Any]
    ) -> None:
        """Raise TemplateError or DataError for messages that can be in no prompt of this model, before anything is appended:
        images for a text model, images that cannot be read, texts with the placeholder of an image, and with `opening` a
        conversation that the template refuses as a whole. `arguments` are further arguments of the template.

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
        """Token ids of a text that continues the model's turn behind `last_token`."""
        return self._encode(text, last_token)

    def token_prefix(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        """The most tokens whose text is a prefix of `text`: their number, and their text."""
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
        return self._encode(text, None)

    def encode_conversation(self, text: str) -> Sequence[int]:
        """The token ids of a complete conversation. Those of a long one are not kept in the cache."""
        return self._encode(text, None) if len(text) <= LONGEST_TEXT else self._encode_text(text)

    def is_special(self, token: int) -> bool:
        """Whether no plain text is encoded to this token: a mark of the template."""
        return token in self.special

    def _encoded(self, text: str, messages: Sequence[Message], last_token: int | None) -> EncodedMessages:
        opening = self.profile.reasoning.marks.reasoning_opening(text)
        if self.vision is None:
            refuse_media(messages, self.where)
            return EncodedMessages(
                token_ids=self._encode(text, last_token), messages=messages, reasoning_opening=opening, text=text
            )
        text, unplaced = self.vision.expand(text, self.vision.parts(messages))
        literal, text = self.vision.placeholders.literal_indices(text), self.vision.placeholders.restore(text)
        ids = self._encode(text, last_token)
        media = self.vision.locate(ids, unplaced, literal=literal)
        return EncodedMessages(token_ids=ids, media=media, messages=messages, reasoning_opening=opening, text=text)

    def _encode_text(self, text: str, behind: int | None = None) -> tuple[int, ...]:
        if behind is not None and behind in self.special:
            # encoded together with the token in front, as in one pass: some tokenizers put a space before a text that begins
            ids = self._text_ids(self.decode([behind]) + text)
            if ids and ids[0] == behind:
                return tuple(ids[1:])
        return tuple(self._text_ids(text))
