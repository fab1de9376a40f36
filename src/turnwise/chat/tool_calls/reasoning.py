"""Where a turn is thought and where it is said: the marks around thoughts.

A template's own marks are found by asking it (`rollout/thinking.py`). The marks of well-known families are read as well:
a model that writes them means a thought, and a call inside a thought must never be executed. A thought runs from its
opening mark to its closing mark, or to the end of the text where it was cut. Inside a thought no other mark counts. Harmony
and ATEM write whole messages with headers; the headers of spoken messages are removed (`SCAFFOLD`).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["KNOWN", "MARKS", "Thought", "ThoughtMarks", "join_pieces", "split_reasoning", "thoughts"]

MARKS: tuple[tuple[str, str], ...] = (
    ("<think>", "</think>"),  # DeepSeek, Qwen, GLM, Nemotron, LFM2, Kimi K2 and most others
    ("[THINK]", "[/THINK]"),  # Magistral
    ("<|channel>thought", "<channel|>"),  # Gemma 4
    ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A
    ("<seed:think>", "</seed:think>"),  # Seed-OSS
    ("◁think▷", "◁/think▷"),  # Kimi-VL
    ("<|channel|>analysis<|message|>", "<|end|>"),  # gpt-oss
    (" to=self<|message|>", "<|eom|>"),  # Muse Glimmer
)
"""What opens and what closes a thought, family by family."""

_HEAD = r"(?:<\|start\|>assistant)?"
SCAFFOLD = (
    r"(?:<\|e(?:nd|om)\|>)?<\|start\|>assistant(?: to=[^\s<]+)?(?:<\|channel\|>\w+)?<\|message\|>"
    r"|<\|channel\|>(?:final|commentary)<\|message\|>| to=user<\|message\|>|<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"
)
"""Regular expression of the headers of messages that are said."""


@dataclass(frozen=True, slots=True)
class Thought:
    """One thought, and where it stands: `whole_text[start:end]` has its marks, `text` has not."""

    start: int
    end: int
    text: str
    at: int
    """Where `text` begins."""


@dataclass(frozen=True)
class ThoughtMarks:
    """The marks around thoughts that one template's turns are read with.

    Example: `ThoughtMarks(own=(("<mm:think>", "</mm:think>"),))` reads those marks, and the ones in `MARKS`.
    """

    own: tuple[tuple[str, str], ...] = ()
    """Opening and closing marks that the template itself writes or removes. They take precedence over `MARKS`."""
    headers: tuple[str, ...] = ()
    """What the template writes before the spoken part of a turn: a header that is removed."""

    @functools.cached_property
    def closing_of(self) -> dict[str, str]:
        """Each opening mark with its closing mark, longer opening marks first."""
        pairs = {**dict(MARKS), **dict(self.own)}
        return {opening: pairs[opening] for opening in sorted(pairs, key=len, reverse=True)}

    @functools.cached_property
    def opening(self) -> str:
        """Regular expression of what opens a thought."""
        return _HEAD + "(?:" + "|".join(re.escape(mark) for mark in self.closing_of) + ")"

    @functools.cached_property
    def scaffold(self) -> str:
        """Regular expression of the headers of spoken messages."""
        return "|".join([*(re.escape(header) for header in self.headers), SCAFFOLD])

    def thought_at(self, text: str, start: int) -> Thought:
        """The thought whose opening mark is at `start`."""
        opens = self._opens.match(text, start)
        if opens is None:
            raise ValueError(f"no thought begins at character {start}")
        closing = self.closing_of[opens["mark"]]
        closes = text.find(closing, opens.end())
        inner = closes if closes >= 0 else len(text)
        end = closes + len(closing) if closes >= 0 else len(text)
        return Thought(start, end, *_trimmed(text, opens.end(), inner))

    def opened_thought(self, text: str) -> Thought:
        """The thought that the text begins in, because the generation prompt has opened it; a model may open it once more."""
        if again := self._opens_again.match(text):
            thought = self.thought_at(text, again.end())
            return Thought(0, thought.end, thought.text, thought.at)
        closes = self._closes.search(text)
        if closes is None:
            return Thought(0, len(text), *_trimmed(text, 0, len(text)))
        return Thought(0, closes.end(), *_trimmed(text, 0, closes.start()))

    def thoughts(self, text: str, *, opened: bool = False) -> list[Thought]:
        """The thoughts in a text, in order. `opened`: the text begins inside one."""
        return self._walk(text, opened=opened)[0]

    def split(self, text: str, *, opened: bool = False) -> tuple[str, str]:
        """What was thought, and what was said. `opened`: the text begins inside a thought.

        White space is removed where a thought was taken out; a text without marks is returned unchanged.
        """
        found, said = self._walk(text, opened=opened)
        return join_pieces(["", *(thought.text for thought in found), ""]), join_pieces(said)

    def open_thought(self, text: str) -> str:
        """What a generation prompt ends with, if it leaves a thought open: the mark and the white space behind it."""
        bare = text.rstrip()
        mark = next((opening for opening in self.closing_of if bare.endswith(opening)), None)
        return "" if mark is None else text[len(bare) - len(mark) :]

    def without_open_thought(self, text: str) -> str:
        """A generation prompt without the thought that it opens, or leaves empty."""
        return self._empty_thought.sub("", text)

    def _walk(self, text: str, *, opened: bool) -> tuple[list[Thought], list[str]]:
        found: list[Thought] = []
        said: list[str] = []
        at = 0
        if opened:
            found.append(self.opened_thought(text))
            said.append("")
            at = found[0].end
        while mark := self._thought_or_scaffold.search(text, at):
            said.append(text[at : mark.start()])
            at = mark.end()
            if mark["thought"] is not None:
                found.append(self.thought_at(text, mark.start()))
                at = found[-1].end
        said.append(text[at:])
        return found, said

    @functools.cached_property
    def _opens(self) -> re.Pattern[str]:
        return re.compile(f"{_HEAD}(?P<mark>{'|'.join(re.escape(opening) for opening in self.closing_of)})")

    @functools.cached_property
    def _opens_again(self) -> re.Pattern[str]:
        return re.compile(rf"\s*(?={self.opening})")

    @functools.cached_property
    def _closes(self) -> re.Pattern[str]:
        """What closes a thought that the generation prompt has opened: the template's own mark where it is known."""
        closing = [pair[1] for pair in self.own or MARKS]
        return re.compile("|".join(re.escape(mark) for mark in sorted(set(closing), key=len, reverse=True)))

    @functools.cached_property
    def _thought_or_scaffold(self) -> re.Pattern[str]:
        return re.compile(f"(?P<thought>{self.opening})|{self.scaffold}")

    @functools.cached_property
    def _empty_thought(self) -> re.Pattern[str]:
        pairs = "|".join(
            rf"{re.escape(opening)}\s*(?:{re.escape(closing)}\s*)?" for opening, closing in self.closing_of.items()
        )
        return re.compile(rf"(?:{pairs})\Z")


KNOWN = ThoughtMarks()
"""The marks of well-known families, where no template says which marks it has."""


def thoughts(text: str, *, opened: bool = False) -> list[Thought]:
    """The thoughts in a text between the marks of well-known families."""
    return KNOWN.thoughts(text, opened=opened)


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """What was thought and what was said, by the marks of well-known families."""
    return KNOWN.split(text, opened=opened)


def _trimmed(text: str, start: int, end: int) -> tuple[str, int]:
    """What is between two places without the white space around it, and where that begins."""
    found = text[start:end].strip()
    return found, text.index(found, start)


def join_pieces(pieces: Sequence[str]) -> str:
    """Pieces between which something was taken out: a line each, without the white space at the joints, none empty."""
    last = len(pieces) - 1
    trimmed = (
        piece.strip() if 0 < n < last else piece.lstrip() if n else piece.rstrip() if last else piece
        for n, piece in enumerate(pieces)
    )
    return "\n".join(piece for piece in trimmed if piece)
