"""The sanity check: the tokens that a conversation was held in, compared with the one text that the template makes of it.

What the model did not say must stand in both word for word. What it said is compared too, but for what a template is known
to change about it: thoughts that it leaves out of earlier turns (the thinking policy says what is done about that), and the
token that ends a turn (the model has chosen its own). Only the text that differs is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Context", "SanityMode", "Words", "difference"]

SanityMode = Literal["strict", "ignore_strippable", "disable"]

_SHOWN = 60  # characters of a difference, and a third as many ids
_TRIED = 32  # places at which a text may stand


@dataclass(frozen=True, slots=True)
class Context:
    """Tokens in a row that the model did not sample."""

    text: str
    token_ids: Sequence[int]
    start: int
    """Where they begin in their segment."""
    bare: str
    """The text without the thinking block that the cue at its end opens, or leaves empty."""


@dataclass(frozen=True, slots=True)
class Words:
    """A turn of the model: what it sampled and what was put into its mouth, the token that ended the turn left off."""

    text: str
    token_ids: Sequence[int]
    start: int
    compared: bool
    """Whether the template writes a turn's own words; if it puts calls and thoughts together anew, only the rest is compared."""
    opened: bool
    """Whether they begin inside a thought."""
    closed: bool
    """Whether a token that ends a turn stood behind them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a tokenizer's texts are read."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    plain: Callable[[str, bool], str]
    """A turn's text without its thoughts; with True, the text begins inside one."""
    thoughts: Callable[[str, bool], Sequence[str]]
    """The thoughts in a turn's text, likewise."""


def difference(runs: Sequence[Context | Words], whole: str, *, mode: SanityMode, reading: Reading) -> str | None:
    """The first place where the runs of a segment and the one-pass text differ, told for people; None where nowhere.

    `ignore_strippable` does not count white space.
    """
    squeeze = _squeezed if mode == "ignore_strippable" else str
    whole = squeeze(whole)
    at = 0
    words: Words | None = None
    for run in runs:
        if isinstance(run, Words):
            words = run
            continue
        place = _place(run, words, whole, at, squeeze, reading)
        if place is None:
            # behind the model's words, as far as they are there
            begin = whole.find(squeeze(words.text), at) if words is not None else at
            begin = begin + len(squeeze(words.text)) if words is not None and begin >= 0 else at
            text = squeeze(run.bare)
            return _told(run, text, _like(text, whole, begin), reading)
        found, end = place
        if words is not None and not _same(words, whole[at:found], squeeze, reading):
            return _told(words, squeeze(words.text), whole[at:found], reading)
        words, at = None, end
    if words is None or (not words.closed and whole.startswith(squeeze(words.text), at)):
        return None
    if not _same(words, whole[at:], squeeze, reading):
        return _told(words, squeeze(words.text), whole[at:], reading)
    return None


def _place(
    run: Context, words: Words | None, whole: str, at: int, squeeze: Callable[[str], str], reading: Reading
) -> tuple[int, int] | None:
    """From where to where a context stands in the whole, or None: behind the model's words, and they may hold the same text."""
    first: tuple[int, int] | None = None
    for text in dict.fromkeys((squeeze(run.text), squeeze(run.bare))):
        if words is None:
            if whole.startswith(text, at):
                return at, at + len(text)
            continue
        found = whole.find(text, at)
        for _ in range(_TRIED):
            if found < 0:
                break
            if _same(words, whole[at:found], squeeze, reading):
                return found, found + len(text)
            first = first or (found, found + len(text))
            found = whole.find(text, found + 1)
    return first


def _same(words: Words, written: str, squeeze: Callable[[str], str], reading: Reading) -> bool:
    """Whether the template wrote what the model said, but for its thoughts and the end of the turn."""
    if not words.compared:
        return True
    said = squeeze(words.text)
    if written.startswith(said) and _only_special(written[len(said) :], reading):
        return True
    begin = written.find(said) if said else -1
    if begin > 0 and _only_special(written[begin + len(said) :], reading):
        before = written[:begin]
        if not reading.plain(before, False).strip() and not any(reading.thoughts(before, False)):
            return True  # it only put an empty thought in front
    ours, theirs = ([squeeze(one) for one in each if one] for each in _thoughts(words, written, reading))
    if len(theirs) >= max(len(ours), 1) or not set(theirs) <= set(ours):
        return False  # no thought was left out: it is the words that differ
    kept, plain = squeeze(reading.plain(words.text, words.opened)).strip(), reading.plain(written, False).strip()
    thought = kept != said.strip() or plain != written.strip()
    return thought and plain.startswith(kept) and _only_special(plain[len(kept) :].strip(), reading)


def _thoughts(words: Words, written: str, reading: Reading) -> tuple[Sequence[str], Sequence[str]]:
    return reading.thoughts(words.text, words.opened), reading.thoughts(written, False)


def _only_special(text: str, reading: Reading) -> bool:
    return all(token in reading.special for token in reading.encode(text.rstrip()))


def _like(text: str, whole: str, begin: int) -> str:
    """As much of the whole as stands for a text that was not found in it: to where both go on alike, or as long."""
    tail = text[-_SHOWN:]
    end = whole.find(tail, begin)
    return whole[begin : end + len(tail)] if end >= 0 else whole[begin : begin + len(text)]


def _told(run: Context | Words, ours: str, theirs: str, reading: Reading) -> str:
    """Both sides of a difference, without what they begin and end with alike."""
    short = min(len(ours), len(theirs))
    head = next((n for n in range(short) if ours[n] != theirs[n]), short)
    tail = next((n for n in range(short - head) if ours[-1 - n] != theirs[-1 - n]), short - head)
    ours_only, theirs_only = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    place = head if ours == run.text else run.text.find(ours_only)
    first, last = 0, len(run.token_ids)
    if place >= 0:  # white space that was taken out may have brought together what stands apart in the tokens
        first = _tokens_before(run, place, reading)
        last = _tokens_before(run, place + len(ours_only), reading, up=True) if ours_only else first
    ids = list(run.token_ids[first:last])
    what = "what the model said" if isinstance(run, Words) else "what was said to the model"
    return (
        f"{what}, tokens {run.start + first} to {run.start + last}: the tokens say {_cut(ours_only)} {_ids(ids)} where the "
        f"template says {_cut(theirs_only)} {_ids(reading.encode(theirs_only))}, after {ours[max(0, head - _SHOWN) : head]!r}"
    )


def _tokens_before(run: Context | Words, characters: int, reading: Reading, *, up: bool = False) -> int:
    """How many tokens of a run make up its first `characters`, one more for a part of a token if `up`."""
    low, high = 0, len(run.token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(reading.decode(run.token_ids[:middle])) <= characters:
            low = middle
        else:
            high = middle - 1
    return low + (up and low < len(run.token_ids) and len(reading.decode(run.token_ids[:low])) < characters)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _cut(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _ids(token_ids: Sequence[int]) -> str:
    shown = _SHOWN // 3
    return f"{list(token_ids)}" if len(token_ids) <= shown else f"{list(token_ids[:shown])[:-1]}..."
