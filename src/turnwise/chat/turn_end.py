"""Where the model's turn ends in what the template writes behind it.

The bridge after a turn is taken from a fixed base conversation (`template.after_turn`), whose text begins behind a probe word
in the model's turn. A part of that text belongs to the model: the rest of the probe call, and the stop token that it has
sampled. This module finds out how long that part is. It knows tokens, and no message's content.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turnwise.chat.base_conversations import Base, Before
from turnwise.chat.probes import probe, probe_message
from turnwise.chat.template import Template
from turnwise.errors import TemplateError

__all__ = ["TurnEnd"]


@dataclass(frozen=True, slots=True)
class _Mark:
    """A special token in a text, and its place: `text[start:end]`."""

    token: int
    start: int
    end: int


class TurnEnd:
    """Finds the part of a bridge's text that the model has said itself.

    `special` are the tokens that no plain text is encoded to, `stops` those that end a turn.
    """

    def __init__(
        self,
        template: Template,
        *,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[Sequence[int]], str],
        special: frozenset[int],
        stops: Sequence[int],
    ) -> None:
        self._template = template
        self._encode = encode
        self._decode = decode
        self._special = special
        self._stops = frozenset(stops)
        self._cut = functools.lru_cache(maxsize=1024)(self._find)

    def cut(self, roles: tuple[str, ...], bases: Sequence[Base], before: Before, last_token: int) -> tuple[Base, int]:
        """The base to take, and how many characters of its `after_turn` the model has said. `bases`: best first.

        `before` is what stands in the conversation (`Plan.behind`), `last_token` the last one that the model sampled, a stop
        token or not.
        """
        find = self._find if before.messages else self._cut  # no conversation has the same messages twice
        return find(roles, tuple(bases), before, last_token)

    def _find(
        self, roles: tuple[str, ...], bases: tuple[Base, ...], before: Before, last_token: int
    ) -> tuple[Base, int]:
        for base in bases:
            found = self._find_cut(roles, base, before, last_token)
            if found is not None:
                return base, found
        return bases[-1], self._other_end(roles, bases[-1], before, last_token)

    def _find_cut(self, roles: tuple[str, ...], base: Base, before: Before, last_token: int) -> int | None:
        """The part that the model has said; None where a base of calls does not write the token that the turn ended with."""
        head = self._template.head(roles, base, before)
        if (
            last_token not in self._stops
        ):  # a text of the user's stopped it, say: the template's own end of turn is missing
            return 0 if base == "words" else None
        stop = self._decode([last_token])
        call = 0 if base == "words" else self._call_end(head, self._marks(head))
        if last_token not in self._special:
            # a word: it stands in other places too, so that only directly behind the turn it is the end of it
            return call + len(stop) if head.startswith(stop, call) else 0 if base == "words" else None
        end = head.find(stop, call)
        if end >= 0:
            return end + len(stop)
        if base != "words":
            return None
        if self._template.closing.startswith(stop) and (marks := self._marks(head)) and marks[0].start == 0:
            return marks[
                0
            ].end  # a last turn ends with `stop`, and any other with the token that now stands in its place
        return 0

    def _other_end(self, roles: tuple[str, ...], base: Base, before: Before, last_token: int) -> int:
        """The same for a turn of calls that did not end as the template ends it.

        The probe call is the model's. The template's own stop token is left out behind the model's, unless it opens the answer
        too (Gemma 4 writes `<|tool_response>` before each answer).
        """
        head = self._template.head(roles, base, before)
        marks = self._marks(head)
        call = self._call_end(head, marks)
        own = next((mark for mark in marks if mark.start >= call), None)
        if (
            last_token not in self._stops
            or own is None
            or own.token not in self._stops
            or head[call : own.start].strip()
        ):
            return call
        return call if head[own.start : own.end] in self._between_answers(base, before) else own.end

    def _call_end(self, head: str, marks: Sequence[_Mark]) -> int:
        """Where the probe call ends: what the template writes behind it in any case, without the end of the turn."""
        alone, _ = self._template.call_ends
        short = min(len(head), len(alone))
        same = next((n for n in range(short) if head[n] != alone[n]), short)
        for mark in marks:
            if mark.start < same and (mark.end > same or mark.token in self._stops):
                return mark.start
        return same

    def _between_answers(self, base: Base, before: Before) -> str:
        """What the template writes between two answers of tools; empty where it takes only one."""
        answers = [probe_message("tool", number) for number in range(2)]
        try:
            text = self._template.after_turn(answers, base, before)
        except TemplateError:
            return ""
        return text.partition(probe(0))[2].partition(probe(1))[0]

    def _marks(self, text: str) -> list[_Mark]:
        found: list[_Mark] = []
        at = 0
        for token in self._encode(text):
            if token in self._special:
                mark = self._decode([token])
                start = text.find(mark, at)
                if start >= 0:
                    at = start + len(mark)
                    found.append(_Mark(token, start, at))
        return found
