"""What an environment may ask about the prompts and the turns of a run's model (`environments.environment.ModelPrompts`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.chat.text_encoder import text_size
from turnwise.errors import GrammarError, TurnwiseError
from turnwise.rollout.context import RolloutContext
from turnwise.types import Message, SamplingChange, ToolSchema

_LONGEST_TOKEN = 64
"""Characters for each token of the context, more than texts have by far: longer ones are refused unread."""
_LONGEST_CONTEXT = 1 << 20
"""Tokens of the context, if it is not known."""


@dataclass(frozen=True, slots=True)
class RenderedPrompts:
    """Prompts that the context's renderer writes, for an engine that samples tokens."""

    context: RolloutContext

    def check_size(self, messages: Sequence[Message], tools: Sequence[ToolSchema], prompt: str | Sequence[int]) -> None:
        most = self.context.limits.context or _LONGEST_CONTEXT
        if len(messages) > most:
            raise TurnwiseError(f"there are {len(messages)} messages, and the model's context has {most} tokens")
        length = text_size(messages, tools) + len(prompt)
        if length > _LONGEST_TOKEN * most:
            raise TurnwiseError(
                f"the prompt has {length} characters, which is too long for the model's context of {most} tokens: at most "
                f"{_LONGEST_TOKEN} characters for each token are read"
            )

    def check_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opening: bool, arguments: Mapping[str, Any]
    ) -> None:
        self.context.renderer.check_messages(messages, tools, opening=opening, arguments=arguments)

    def check_turn(
        self, tools: Sequence[ToolSchema], change: SamplingChange, *, prefill: str, arguments: Mapping[str, Any]
    ) -> None:
        renderer = self.context.renderer.for_arguments(arguments)
        if not renderer.constrained.changed(change).anything(tools):  # the recipe may ask for a form, too
            return
        if reason := self.context.no_forms or (prefill and self.context.no_begun_forms):
            raise GrammarError(reason)
        # what a prompt opens of reasoning is known when it is written: only then is a beginning compared with the grammar
        before = "" if renderer.profile.reasoning.supported else prefill
        constraint = renderer.constraint(tools, change, stops=renderer.stop_token_ids, before=before)
        if constraint is not None:
            renderer.masks.matcher(constraint)

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, prefill: str, arguments: Mapping[str, Any]
    ) -> int:
        renderer = self.context.renderer.for_arguments(arguments)
        prompt = renderer.encode_opening(messages, tools).token_ids
        return len(prompt) + (len(renderer.encode_continuation(prompt[-1], prefill)) if prefill else 0)

    def encode(self, text: str, behind: int | None) -> Sequence[int]:
        renderer = self.context.renderer
        if behind is not None:
            return renderer.encode_continuation(behind, text)
        tokens, opening = list(renderer.encode_conversation(text)), renderer.tokenizer.bos_token_id
        # as servers do: with the token that begins each text, where the tokenizer writes it
        if opening is None or tokens[:1] == [opening] or renderer.tokenizer.encode("a")[:1] != [opening]:
            return tokens
        return [opening, *tokens]

    def decode(self, token_ids: Sequence[int]) -> str:
        size = len(self.context.renderer.tokenizer)
        if wrong := [token for token in token_ids if not 0 <= token < size]:
            raise TurnwiseError(f"{wrong[0]} is no token of the model: they are 0 to {size - 1}")
        return self.context.renderer.decode(token_ids)

    def token_prefix(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        return self.context.renderer.token_prefix(token_ids, text)


class EndpointPrompts:
    """Prompts that the server of an OpenAI-compatible endpoint writes: there are no tokens, and turns have no form."""

    def check_size(self, messages: Sequence[Message], tools: Sequence[ToolSchema], prompt: str | Sequence[int]) -> None:
        pass

    def check_messages(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, opening: bool, arguments: Mapping[str, Any]
    ) -> None:
        pass

    def check_turn(
        self, tools: Sequence[ToolSchema], change: SamplingChange, *, prefill: str, arguments: Mapping[str, Any]
    ) -> None:
        if prefill or change.asks_for_form:
            raise TurnwiseError(f"the server of the model writes each turn itself: {_OTHER_ENGINE}")

    def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema], *, prefill: str, arguments: Mapping[str, Any]
    ) -> int:
        raise TurnwiseError(_NO_TOKENS)

    def encode(self, text: str, behind: int | None) -> Sequence[int]:
        raise TurnwiseError(_NO_TOKENS)

    def decode(self, token_ids: Sequence[int]) -> str:
        raise TurnwiseError(_NO_TOKENS)

    def token_prefix(self, token_ids: Sequence[int], text: str) -> tuple[int, str]:
        raise TurnwiseError(_NO_TOKENS)


_OTHER_ENGINE = "use an engine that samples tokens (engine.name=local)"
_NO_TOKENS = f"the tokens of a server's prompts are not known: {_OTHER_ENGINE}"
