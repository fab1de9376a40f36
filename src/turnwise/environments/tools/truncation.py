"""Shortens a long text for the model: the side to cut, and the unit of the length.

The names and their meaning are those of verl (since its #6313): `side` names the side that is *cut*. `left` keeps the end,
`right` keeps the beginning, `middle` keeps half the length of each. This module has no tokenizer; the caller may pass `encode`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.errors import ConfigError

__all__ = ["LONGEST", "Side", "Truncation", "Unit", "bounded"]

Side = Literal["left", "right", "middle"]
Unit = Literal["characters", "tokens"]

LONGEST = 1_000_000
"""Maximum characters of any tool's text, independent of the recipe."""
_FURTHEST = 64  # maximum characters that a cut moves to leave a cluster; natural text has no longer clusters


@dataclass(frozen=True, slots=True)
class Truncation:
    """Shortens texts to `length` units. The mark of the cut is added and does not count.

    Example::

        Truncation(4, side="left")("abcdefgh")     # "(truncated)...efgh"
        Truncation(4, side="right")("abcdefgh")    # "abcd...(truncated)"
        Truncation(4, side="middle")("abcdefgh")   # "ab...(truncated)...gh"
    """

    length: int
    side: Side = "middle"
    """The side to cut."""
    unit: Unit = "characters"
    encode: Callable[[str], Sequence[int]] | None = None
    """Returns the token ids of a text. Required if `unit` is `tokens`."""

    def __post_init__(self) -> None:
        if self.length <= 0:
            raise ConfigError(f"Truncation.length is {self.length} {self.unit}; it must be above 0")
        if self.unit == "tokens" and self.encode is None:
            raise ConfigError(
                "Truncation with unit='tokens' needs a tokenizer: write Truncation(..., encode=renderer.encode)"
            )

    def __call__(self, text: str) -> str:
        """The text, shortened if it is longer than `length`."""
        if self._head(text, self.length) == text:
            return text
        match self.side:
            case "left":
                return "(truncated)..." + self._tail(text, self.length)
            case "right":
                return self._head(text, self.length) + "...(truncated)"
            case "middle":
                half = self.length // 2
                return self._head(text, half) + "...(truncated)..." + self._tail(text, half)

    def _head(self, text: str, length: int) -> str:
        at = self._fitting(text, length, lambda size: text[:size])
        for _ in range(_FURTHEST):
            if not _inside_cluster(text, at):
                break
            at -= 1
        return text[:at]

    def _tail(self, text: str, length: int) -> str:
        at = len(text) - self._fitting(text, length, lambda size: text[len(text) - size :])
        for _ in range(_FURTHEST):
            if not _inside_cluster(text, at):
                break
            at += 1
        return text[at:]

    def _fitting(self, text: str, length: int, piece: Callable[[int], str]) -> int:
        """The number of characters of `piece` that fit in `length` units. The cost depends on `length`, not on the text."""
        if self.encode is None or self.unit == "characters":
            return min(length, len(text))
        fits, too_many = 0, min(len(text), 4 * length + 16)
        while len(self.encode(piece(too_many))) <= length:
            if too_many == len(text):
                return too_many
            fits, too_many = too_many, min(len(text), 2 * too_many)
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if len(self.encode(piece(middle))) <= length:
                fits = middle
            else:
                too_many = middle
        return fits


def bounded(text: str) -> str:
    """The text, cut after `LONGEST` characters if it is longer."""
    if len(text) <= LONGEST:
        return text
    note = f"...(truncated: this is the first {LONGEST:,} of {len(text):,} characters)"
    return Truncation(LONGEST, side="right")(text).removesuffix("...(truncated)") + note


def _inside_cluster(text: str, at: int) -> bool:
    """Whether a cut at `at` would split one displayed character, such as a letter with accents or a composed emoji."""
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if unicodedata.category(after).startswith("M") or "\u200d" in (before, after):
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or before + after == "\r\n":  # an emoji skin tone, or a CRLF
        return True
    flags = 0  # a flag is a pair of regional indicator letters
    while flags < at and _is_flag_letter(text[at - 1 - flags]):
        flags += 1
    return _is_flag_letter(after) and flags % 2 == 1


def _is_flag_letter(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
