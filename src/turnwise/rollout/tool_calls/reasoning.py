"""Where a turn is thought and where it is said: the marks that model families put around their thoughts.

A thought runs from its opening mark to its closing one, or to the end of the text where it was cut. Inside a thought no other
mark counts. Harmony and ATEM write whole messages with headers; those of what is said mean nothing to a reader and are taken
off (`SCAFFOLD`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "MARKS",
    "Thought",
    "joined",
    "open_thought",
    "opened_thought",
    "split_reasoning",
    "thought_at",
    "thoughts",
    "without_open_thought",
]

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

_CLOSING_OF: dict[str, str] = dict(MARKS)
_HEAD = r"(?:<\|start\|>assistant)?"
OPENING = _HEAD + "(?:" + "|".join(re.escape(opening) for opening in _CLOSING_OF) + ")"
"""Regular expression of what opens a thought."""
SCAFFOLD = (
    r"(?:<\|e(?:nd|om)\|>)?<\|start\|>assistant(?: to=[^\s<]+)?(?:<\|channel\|>\w+)?<\|message\|>"
    r"|<\|channel\|>(?:final|commentary)<\|message\|>| to=user<\|message\|>|<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"
)
"""Regular expression of the headers of messages that are said."""
_OPENS = re.compile(f"{_HEAD}(?P<mark>{'|'.join(re.escape(opening) for opening in _CLOSING_OF)})")
_OPENS_AGAIN = re.compile(rf"\s*(?={OPENING})")
_CLOSES = re.compile("|".join(re.escape(closing) for closing in _CLOSING_OF.values()))
_THOUGHT_OR_SCAFFOLD = re.compile(f"(?P<thought>{OPENING})|{SCAFFOLD}")


@dataclass(frozen=True, slots=True)
class Thought:
    """One thought, and where it stands: `whole_text[start:end]` has its marks, `text` has not."""

    start: int
    end: int
    text: str
    at: int
    """Where `text` begins."""


def thought_at(text: str, start: int) -> Thought:
    """The thought whose opening mark is at `start`."""
    opens = _OPENS.match(text, start)
    if opens is None:
        raise ValueError(f"no thought begins at character {start}")
    closing = _CLOSING_OF[opens["mark"]]
    closes = text.find(closing, opens.end())
    inner = closes if closes >= 0 else len(text)
    end = closes + len(closing) if closes >= 0 else len(text)
    return Thought(start, end, *_trimmed(text, opens.end(), inner))


def opened_thought(text: str) -> Thought:
    """The thought that the text begins in, because the cue has opened it; a model may open it once more."""
    if again := _OPENS_AGAIN.match(text):
        thought = thought_at(text, again.end())
        return Thought(0, thought.end, thought.text, thought.at)
    closes = _CLOSES.search(text)
    if closes is None:
        return Thought(0, len(text), *_trimmed(text, 0, len(text)))
    return Thought(0, closes.end(), *_trimmed(text, 0, closes.start()))


def _trimmed(text: str, start: int, end: int) -> tuple[str, int]:
    """What is between two places without the white space around it, and where that begins."""
    found = text[start:end].strip()
    return found, text.index(found, start)


def thoughts(text: str, *, opened: bool = False) -> list[Thought]:
    """The thoughts in a text, in order. `opened`: the text begins inside one."""
    return _walk(text, opened=opened)[0]


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """What was thought, and the rest: what was said. `opened`: the text begins inside a thought.

    White space is taken off where something was taken out; a text without marks comes back as it is.
    """
    found, said = _walk(text, opened=opened)
    return joined(["", *(thought.text for thought in found), ""]), joined(said)


def _walk(text: str, *, opened: bool) -> tuple[list[Thought], list[str]]:
    found: list[Thought] = []
    said: list[str] = []
    at = 0
    if opened:
        found.append(opened_thought(text))
        said.append("")
        at = found[0].end
    while mark := _THOUGHT_OR_SCAFFOLD.search(text, at):
        said.append(text[at : mark.start()])
        at = mark.end()
        if mark["thought"] is not None:
            found.append(thought_at(text, mark.start()))
            at = found[-1].end
    said.append(text[at:])
    return found, said


def joined(pieces: Sequence[str]) -> str:
    """Pieces between which something was taken out: a line each, without the white space at the joints, none empty."""
    last = len(pieces) - 1
    trimmed = (
        piece.strip() if 0 < n < last else piece.lstrip() if n else piece.rstrip() if last else piece
        for n, piece in enumerate(pieces)
    )
    return "\n".join(piece for piece in trimmed if piece)


_EMPTY_THOUGHT = re.compile(
    "(?:" + "|".join(rf"{re.escape(opening)}\s*(?:{re.escape(closing)}\s*)?" for opening, closing in MARKS) + r")\Z"
)


def open_thought(text: str) -> str:
    """What a cue ends with, if it leaves a thought open: the mark and the white space behind it."""
    bare = text.rstrip()
    mark = next((opening for opening, _ in MARKS if bare.endswith(opening)), None)
    return "" if mark is None else text[len(bare) - len(mark) :]


def without_open_thought(text: str) -> str:
    """A cue without the thought that it opens, or leaves empty."""
    return _EMPTY_THOUGHT.sub("", text)
