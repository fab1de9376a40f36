"""The tokens that a conversation was held in, compared with what the template makes of the same messages in one pass.

The token ids are compared first (`Renderer.drift`). Where they differ, this module explains in texts where and why. What the
model did not say must stand in both word for word, and in the same tokens. What it said is compared too, but for what a
template is known to change about it: thoughts that it leaves out of earlier turns (the thinking policy decides about
those), how it writes the same calls, and the token that ends a turn (the model has chosen its own). Only the text that
differs is shown.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["Context", "Difference", "Reading", "SanityMode", "Words", "differences", "recut", "told"]

SanityMode = Literal["strict", "ignore_strippable", "disable"]

_SHOWN = 60  # characters of a difference, and a third as many ids
_EDGE = 3  # tokens at the ends of a run that may be cut in another way beside sampled text
_ALIKE = 3  # characters that two texts must have in common to be laid over each other
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
    bare_ids: Sequence[int]


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
    calls: bool
    """Whether the template was given calls of this turn as calls, and so writes them in its own way."""


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
    calls: Callable[[str, bool], object]
    """The calls in a turn's text and what else it says, likewise: equal for texts that call the same."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where a segment and the one-pass text differ."""

    kind: Literal["thoughts", "other"]
    """`thoughts`: only in a thought that the template leaves out, empties or inserts."""
    run: Context | Words
    ours: str
    theirs: str


def differences(
    runs: Sequence[Context | Words], whole: str, *, mode: SanityMode, reading: Reading
) -> Iterator[Difference]:
    """The places where the runs of a segment and the one-pass text differ, in order; none after a context that is not there.

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
            yield Difference("other", run, text, _like(text, whole, begin))
            return
        found, end = place
        if words is not None and (kind := _compared(words, whole[at:found], squeeze, reading)) is not None:
            yield Difference(kind, words, squeeze(words.text), whole[at:found])
        if end - found != len(squeeze(run.text)):
            yield Difference("thoughts", run, squeeze(run.text), whole[found:end])
        words, at = None, end
    if words is None or (not words.closed and whole.startswith(squeeze(words.text), at)):
        return
    if (kind := _compared(words, whole[at:], squeeze, reading)) is not None:
        yield Difference(kind, words, squeeze(words.text), whole[at:])


def recut(runs: Sequence[Context | Words], whole: Sequence[int]) -> Context | None:
    """The first run of context whose tokens are not those of the one pass, where the texts are alike; None where all are.

    A token at either end may be another one: the text behind it or before it was sampled, and may be cut in another way.
    """
    haystack = array("q", whole).tobytes()
    at = 0
    for run in runs:
        if not isinstance(run, Context):
            continue
        ids = list(run.token_ids)
        thought = max(0, len(ids) - len(run.bare_ids))
        ends = [*range(_EDGE + 1), *range(thought, thought + _EDGE + 1)]
        parts = (ids[first : len(ids) - last] for last in dict.fromkeys(ends) for first in range(_EDGE + 1))
        found = next((end for part in parts if part and (end := _end_of(part, haystack, at)) >= 0), None)
        if found is None and len(ids) > 2 * _EDGE:
            return run
        at = at if found is None else found
    return None


def _end_of(part: Sequence[int], haystack: bytes, at: int) -> int:
    """Where in the one pass, in bytes, the tokens end; -1 where they are not found from `at` on."""
    needle = array("q", part).tobytes()
    found = haystack.find(needle, at)
    while found >= 0 and found % 8:
        found = haystack.find(needle, found + 1)
    return found + len(needle) if found >= 0 else -1


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
            if _compared(words, whole[at:found], squeeze, reading) != "other":
                return found, found + len(text)
            first = first or (found, found + len(text))
            found = whole.find(text, found + 1)
    return first


def _compared(
    words: Words, written: str, squeeze: Callable[[str], str], reading: Reading
) -> Literal["thoughts", "other"] | None:
    """In what a turn differs from what the template wrote for it, the end of the turn aside; None where in nothing."""
    ours, theirs = ([squeeze(one) for one in each] for each in _thoughts(words, written, reading))
    if not words.compared:  # the template puts the turn together from fields: its thoughts are compared
        return None if [one for one in ours if one] == [one for one in theirs if one] else "thoughts"
    said = squeeze(words.text)
    if written.startswith(said) and _only_special(written[len(said) :], reading):
        return None
    begin = written.find(said) if said else -1
    if begin > 0 and _only_special(written[begin + len(said) :], reading):
        before = written[:begin]
        if not reading.plain(before, False).strip() and not any(reading.thoughts(before, False)):
            return "thoughts"  # it only put an empty thought in front
    if words.calls and reading.calls(words.text, words.opened) == reading.calls(written, False):
        return None if ours == theirs else "thoughts"  # the calls are the same, and written in the template's own way
    ours, theirs = [one for one in ours if one], [one for one in theirs if one]
    if len(theirs) >= max(len(ours), 1) or not set(theirs) <= set(ours):
        return "other"  # no thought was left out: it is the words that differ
    kept, plain = squeeze(reading.plain(words.text, words.opened)).strip(), reading.plain(written, False).strip()
    thought = kept != said.strip() or plain != written.strip()
    alike = thought and plain.startswith(kept) and _only_special(plain[len(kept) :].strip(), reading)
    return "thoughts" if alike else "other"


def _thoughts(words: Words, written: str, reading: Reading) -> tuple[Sequence[str], Sequence[str]]:
    return reading.thoughts(words.text, words.opened), reading.thoughts(written, False)


def _only_special(text: str, reading: Reading) -> bool:
    return all(token in reading.special for token in reading.encode(text.rstrip()))


def _like(text: str, whole: str, begin: int) -> str:
    """As much of the whole as stands for a text that was not found in it: to the end of what both have in common, or as long.

    Both begin alike up to the first difference. Behind it, the longest end of the text is looked for.
    """
    other = whole[begin : begin + len(text)]
    head = next((n for n, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), len(other))
    low, high = 0, len(text) - head
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if whole.find(text[-middle:], begin + head) >= 0 else (low, middle - 1)
    if low < _ALIKE:
        return other
    return whole[begin : whole.find(text[-low:], begin + head) + low]


def told(difference: Difference, reading: Reading) -> str:
    """Both sides of a difference for people, without what they begin and end with alike."""
    run, ours, theirs = difference.run, difference.ours, difference.theirs
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
