"""Messages to token ids and back: the one border between what users write and what models read.

Everything comes from the model's own chat template; there is no table of model families. The opening is rendered once.
After that only the *bridge* is encoded: what the template puts between the model's words and its next cue. It is found by
rendering a fixed base conversation of a question and a placeholder answer, followed by the new messages, and taking what
comes after the placeholder; so its cost does not grow with the conversation. What the model sampled is never rendered
and never encoded again. This module knows no engine and no environment.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import TemplateError
from turnwise.rollout.tool_calls import ToolFormat, detect
from turnwise.types import Message, Segment, ToolCall, ToolSchema

__all__ = ["Renderer", "SanityMode"]

SanityMode = Literal["strict", "ignore_strippable", "disable"]

_PLACEHOLDER = "placeholder-7f3a91"  # letters and digits: no template trims, escapes or splits it
_QUESTION: Message = {"role": "user", "content": "A question."}
_ANSWER: Message = {"role": "assistant", "content": _PLACEHOLDER}
_SHOWN = 60  # characters of context around a difference


class Renderer:
    """Renders with one tokenizer and its chat template.

    `tokenizer` is a transformers tokenizer. `generation_stop_ids` are the stop tokens that the model's generation config
    names in addition to the tokenizer's own.

    Raises TemplateError if the tokenizer has no chat template, or one that cannot be continued.
    """

    def __init__(
        self, tokenizer: Any, *, sanity: SanityMode = "strict", generation_stop_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.sanity: SanityMode = sanity
        where = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{where} has no chat template, so messages cannot be turned into tokens. Put a chat_template.jinja into "
                f"the model directory, or use the instruction-tuned variant of the model"
            )
        self._closing = self._after_placeholder([_QUESTION, _ANSWER], cue=False)
        self.stop_token_ids = self._find_stops(generation_stop_ids, where)
        self._stop_texts = {token: self.decode([token]) for token in self.stop_token_ids}
        self._check_bridge(where)
        self._encode = functools.lru_cache(maxsize=4096)(self._encode_text)

    @classmethod
    def from_pretrained(cls, path: str | Path, *, sanity: SanityMode = "strict") -> Renderer:
        """Load the tokenizer, and the stop tokens of the generation config where there is one.

        Raises TemplateError if there is no tokenizer at `path`.
        """
        from transformers import AutoTokenizer

        if str(path).startswith(("/", ".", "~")) and not Path(path).expanduser().is_dir():
            raise TemplateError(
                f"there is no model directory {Path(path).expanduser().absolute()}; model.path names none"
            )
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path))
        except (OSError, ValueError, KeyError) as error:
            if Path(path).is_dir() and not Path(path, "tokenizer_config.json").is_file():
                raise TemplateError(
                    f"the directory {str(path)!r} has no tokenizer (no tokenizer_config.json)"
                ) from error
            raise TemplateError(
                f"no tokenizer could be loaded from {str(path)!r}: {error}. model.path must be a model directory or a hub id"
            ) from error
        return cls(tokenizer, sanity=sanity, generation_stop_ids=_generation_stops(path))

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """The format of tool calls that the template writes and the model is expected to write.

        Raises TemplateError if it is none that can be read.
        """

        def write(name: str, arguments: dict[str, Any]) -> str:
            call = {"type": "function", "id": "call_0", "function": {"name": name, "arguments": arguments}}
            asked: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
            return self._render([_QUESTION, asked], cue=False)

        found = detect(write)
        if found is None:
            raise TemplateError(
                "the chat template writes tool calls in a format that cannot be read back yet (only hermes, "
                '<tool_call>{"name": ..., "arguments": ...}</tool_call>, can). Use a model of that format, or no tools'
            )
        return found

    @functools.cached_property
    def _cue_thinks(self) -> bool:
        """Whether the cue opens a thinking block, as that of QwQ does: the model then only closes it."""
        cue = self._render([_QUESTION], cue=True)
        return cue.rfind("<think>") > cue.rfind("</think>")

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> Sequence[int]:
        """Token ids of the opening messages, the tools' description and the first cue.

        Raises TemplateError if the template refuses the messages.
        """
        return self._encode(self._render(messages, tools=tools, cue=True))

    def bridge(self, last_token: int, messages: Sequence[Message]) -> Sequence[int]:
        """Token ids of what comes between the model's turn, which ended with `last_token`, and its next cue.

        Raises TemplateError if the template refuses the messages.
        """
        text = self._after_placeholder([_QUESTION, _ANSWER, *messages], cue=True)
        if last_token in self.stop_token_ids:  # the model closed its turn itself: only the rest is missing
            text = text.removeprefix(self._stop_texts[last_token])
        return self._encode(text)

    def parse(
        self, token_ids: Sequence[int], *, tools: bool, first_call: int = 0
    ) -> tuple[str, Message, tuple[ToolCall, ...]]:
        """Read a sampled turn: its text without the stop token, the assistant message, and the tool calls in it."""
        ids = token_ids[:-1] if len(token_ids) and token_ids[-1] in self.stop_token_ids else token_ids
        text = self.decode(ids)
        if not tools:
            return text, {"role": "assistant", "content": text}, ()
        reading = self.tool_format.parse(text, first_id=first_call, thinking=self._cue_thinks)
        content, calls = reading.content, reading.calls
        message: Message = {"role": "assistant", "content": content}
        good = [call for call in calls if call.error is None]
        if good:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in good
            ]
        return text, message, calls

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included, nothing tidied up."""
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def drift(self, segment: Segment, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> str | None:
        """The sanity check at the end of a trajectory: where the segment's text leaves the template's, or None.

        `messages` has the model's turns as they were sampled. `strict` finds every difference, `ignore_strippable` those
        that are more than white space, `disable` none.
        """
        if self.sanity == "disable":
            return None
        written, whole = self.decode(segment.token_ids).rstrip("�"), self._render(messages, tools=tools, cue=False)
        if whole.startswith(written):
            return None
        if self.sanity == "ignore_strippable":
            bare = "".join(written.split())
            if "".join(whole.split()).startswith(bare):
                return None
        at = next(
            (i for i, (a, b) in enumerate(zip(written, whole, strict=False)) if a != b), min(len(written), len(whole))
        )
        return (
            f"from character {at} on the tokens say {written[at : at + _SHOWN]!r} where the template says "
            f"{whole[at : at + _SHOWN]!r} (after {written[max(0, at - _SHOWN) : at]!r})"
        )

    def _render(self, messages: Sequence[Message], *, cue: bool, tools: Sequence[ToolSchema] = ()) -> str:
        for message in messages:
            if not isinstance(message.get("content"), str | None):
                raise TemplateError(
                    f"the content of a {message.get('role')!r} message is a {type(message['content']).__name__}; "
                    f"content must be text so far (images and other parts are not supported yet)"
                )
        import jinja2

        try:
            return self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, add_generation_prompt=cue, tokenize=False
            )
        except jinja2.TemplateError as error:
            roles = ", ".join(str(message.get("role")) for message in messages[-4:])
            raise TemplateError(f"the chat template refuses messages of the roles [... {roles}]: {error}") from error

    def _after_placeholder(self, messages: Sequence[Message], *, cue: bool) -> str:
        rendered = self._render(messages, cue=cue)
        _, found, after = rendered.rpartition(_PLACEHOLDER)
        if not found:
            raise TemplateError(
                "the chat template does not write an assistant message's content as it is, so a conversation cannot be "
                f"continued without rendering it again. It wrote: {rendered[-200:]!r}"
            )
        return after

    def _find_stops(self, generation_stop_ids: Sequence[int], where: str) -> tuple[int, ...]:
        """The tokens that end a turn, the template's own first: it is the one that a scripted turn ends with."""
        closing = self._encode_text(self._closing)
        special = set(self.tokenizer.all_special_ids) | set(self.tokenizer.added_tokens_decoder)
        stops = [closing[0]] if closing and closing[0] in special else []
        if self.tokenizer.eos_token_id is not None:
            stops.append(self.tokenizer.eos_token_id)
        stops = list(dict.fromkeys([*stops, *generation_stop_ids]))
        if not stops:
            raise TemplateError(
                f"{where} has no stop token: the tokenizer has no eos_token, the template closes a turn with "
                f"{self._closing[:20]!r}, which is no special token, and the generation config names none. Set eos_token"
            )
        return tuple(stops)

    def _check_bridge(self, where: str) -> None:
        """A bridge that is cut out of a longer rendering must say the same there as on its own."""
        asked: Message = {"role": "user", "content": "Go on."}
        try:
            longer = self._after_placeholder(
                [_QUESTION, {"role": "assistant", "content": "x"}, asked, _ANSWER], cue=False
            )
        except TemplateError:
            return  # it will be told where it matters: not every environment speaks as a user
        if longer != self._closing:
            raise TemplateError(
                f"the chat template of {where} closes the second assistant turn with {longer!r} and the first with "
                f"{self._closing!r}; such a template cannot be continued turn by turn"
            )

    def _encode_text(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False))

    def encode(self, text: str) -> Sequence[int]:
        """The token ids of a plain text: of a scripted line, say."""
        return self._encode(text)


def _generation_stops(path: str | Path) -> list[int]:
    """The stop tokens in a model's generation config; none where it has no such file."""
    from transformers import GenerationConfig

    try:
        stops = GenerationConfig.from_pretrained(str(path)).eos_token_id
    except OSError:
        return []
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
