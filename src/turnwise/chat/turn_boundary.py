"""Where the model's turn ends in the text that the template writes behind it.

The bridge after a turn is taken from a base conversation (`Template.text_after_turn`), whose text begins behind a placeholder in
the model's turn. The beginning of that text is the model's own: the rest of the probe call, and the stop token that it has
sampled. This module finds the length of that part. It knows tokens, and no message's content.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.chat.base_conversations import BaseTurn, PriorConversation
from turnwise.chat.caches import cached_by_roles
from turnwise.chat.probes import probe_message, probe_word
from turnwise.chat.template import Template
from turnwise.chat.template_profile import TemplateProfile
from turnwise.errors import TemplateError

__all__ = ["TurnBoundary"]


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
        self._find_cached = cached_by_roles(self._find)

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
            # the token is a word and may occur anywhere: it is the end of the turn only directly behind it
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

        The probe call is the model's. The template's own stop token is left out behind the model's, unless it opens the answer
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
        """Where the probe call ends: behind the text that always follows it, in front of the end of the turn."""
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
