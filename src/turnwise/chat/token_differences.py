"""Where the tokens of a conversation differ from the template's text for the same messages in one pass, and why.

Token ids are compared first (`SanityCheck.compare`). If they differ, this module compares texts. Context must be the same, word
for word, and in the same tokens. Turns of the model are compared too, except for what templates are known to change in them:
reasoning that is left out of earlier turns (the thinking policy decides about that), the spelling of the same calls, and the
token that ends a turn (the model has chosen its own). Only the text that differs is shown.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from turnwise.types import MismatchKind, TemplateMismatch

SanityMode = Literal["strict", "ignore_strippable", "disable"]

_SHOWN = 60  # characters of a difference in a report, and a third as many ids
_EDGE = 3  # tokens at the ends of a run that may be split differently next to sampled text
_MIN_COMMON = 3  # characters that two texts must have in common to be aligned
_MAX_PLACES = 32  # places in the one-pass text at which a context is tried


@dataclass(frozen=True, slots=True)
class ContextRun:
    """Consecutive tokens that the model did not sample."""

    text: str
    token_ids: Sequence[int]
    start: int
    """The place of the first token in the segment."""
    bare: str
    """The text without the reasoning that the generation prompt at its end opens or leaves empty."""
    bare_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class TurnRun:
    """A turn of the model: sampled and injected tokens, without the token that ended the turn."""

    text: str
    token_ids: Sequence[int]
    start: int
    as_text: bool
    """Whether the template writes the sampled text. If it builds the turn from fields, words and calls are compared, in their
    order, and not their spelling."""
    opened: bool
    """Whether the turn begins inside reasoning."""
    closed: bool
    """Whether a stop token followed."""
    calls: bool
    """Whether the turn's calls were given to the template as calls, which it writes in its own spelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextReader:
    """How a tokenizer's texts are read. The flag of the last three functions says that the text begins inside reasoning."""

    encode: Callable[[str], Sequence[int]]
    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]
    without_reasoning: Callable[[str, bool], str]
    """A turn's text without its reasoning."""
    reasoning_texts: Callable[[str, bool], Sequence[str]]
    """The blocks of reasoning in a turn's text."""
    calls: Callable[[str, bool], object]
    """The calls and the content of a turn's text: equal for texts with the same calls and the same content."""
    fields: Callable[[str, bool], object]
    """The content, the calls and their order in a turn's text, without its reasoning."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A place where a segment and the one-pass text differ."""

    kind: Literal["reasoning", "other"]
    """`reasoning`: only in reasoning that the template leaves out, empties or inserts."""
    run: ContextRun | TurnRun
    ours: str
    """The segment's text."""
    theirs: str
    """The template's text."""


def find_differences(
    runs: Sequence[ContextRun | TurnRun], text: str, *, mode: SanityMode, reader: TextReader
) -> Iterator[Difference]:
    """The places where the runs of a segment and the one-pass `text` differ, in order; none after a context that is missing.

    `ignore_strippable` ignores white space.
    """
    normalize = _without_space if mode == "ignore_strippable" else str
    text = normalize(text)
    at = 0
    turn: TurnRun | None = None
    inside = False  # whether the template's text for the turn begins inside reasoning
    for run in runs:
        if isinstance(run, TurnRun):
            turn, inside = run, inside and run.opened
            continue
        place = _place(run, turn, text, at, normalize, reader, inside)
        if place is None:
            # what stands in its place begins after the model's words, if they are there
            begin = text.find(normalize(turn.text), at) if turn is not None else at
            begin = begin + len(normalize(turn.text)) if turn is not None and begin >= 0 else at
            context = normalize(run.bare)
            yield Difference("other", run, context, _counterpart(context, text, begin))
            return
        start, end = place
        if turn is not None and (kind := _turn_difference(turn, text[at:start], normalize, reader, inside)) is not None:
            yield Difference(kind, turn, normalize(turn.text), text[at:start])
        inside = end - start == len(normalize(run.text))
        if not inside:  # matched without the reasoning that the generation prompt opens
            yield Difference("reasoning", run, normalize(run.text), text[start:end])
        turn, at = None, end
    if turn is None or (not turn.closed and text.startswith(normalize(turn.text), at)):
        return
    if (kind := _turn_difference(turn, text[at:], normalize, reader, inside)) is not None:
        yield Difference(kind, turn, normalize(turn.text), text[at:])


def find_retokenized(runs: Sequence[ContextRun | TurnRun], token_ids: Sequence[int]) -> ContextRun | None:
    """The first run of context whose text is the same in one pass and whose tokens are others; None if there is none.

    `token_ids` are those of the one pass. Tokens at either end of a run may differ: the text beside it was sampled, and one pass
    may split the joint differently.
    """
    haystack = array("q", token_ids).tobytes()
    at = 0
    for run in runs:
        if not isinstance(run, ContextRun):
            continue
        ids = list(run.token_ids)
        opening_length = max(0, len(ids) - len(run.bare_ids))
        ends = [*range(_EDGE + 1), *range(opening_length, opening_length + _EDGE + 1)]
        parts = (ids[first : len(ids) - last] for last in dict.fromkeys(ends) for first in range(_EDGE + 1))
        # the earliest match: the same context may occur again, there with the reasoning that the template leaves out here
        matched_end = min((end for part in parts if part and (end := _end_of(part, haystack, at)) >= 0), default=None)
        if matched_end is None and len(ids) > 2 * _EDGE:
            return run
        at = at if matched_end is None else matched_end
    return None


def _end_of(part: Sequence[int], haystack: bytes, at: int) -> int:
    """The place after the tokens of `part` in the one pass, in bytes; -1 if they are not found from `at` on."""
    # Searching bytes is much faster than comparing lists. A token has 8 bytes, so a match at another place than a multiple of 8
    # consists of halves of tokens.
    needle = array("q", part).tobytes()
    start = haystack.find(needle, at)
    while start >= 0 and start % 8:
        start = haystack.find(needle, start + 1)
    return start + len(needle) if start >= 0 else -1


def _place(
    run: ContextRun,
    turn: TurnRun | None,
    text: str,
    at: int,
    normalize: Callable[[str], str],
    reader: TextReader,
    inside: bool,
) -> tuple[int, int] | None:
    """Beginning and end of a context in the one-pass text; None if it is missing.

    Behind a turn of the model, the first place is taken at which the turn in front is the same: its words may contain the text
    of the context.
    """
    first: tuple[int, int] | None = None
    for context in dict.fromkeys((normalize(run.text), normalize(run.bare))):
        if turn is None:
            if text.startswith(context, at):
                return at, at + len(context)
            continue
        start = text.find(context, at)
        for _ in range(_MAX_PLACES):
            if start < 0:
                break
            if _turn_difference(turn, text[at:start], normalize, reader, inside) != "other":
                return start, start + len(context)
            first = first or (start, start + len(context))
            start = text.find(context, start + 1)
    return first


def _turn_difference(
    turn: TurnRun, written: str, normalize: Callable[[str], str], reader: TextReader, inside: bool
) -> Literal["reasoning", "other"] | None:
    """How a turn differs from the template's text for it, the end of the turn aside; None if it does not. `inside`: the template
    opens the reasoning in front of this text (and writes `</think>Yes.` for the turn if it leaves the reasoning out)."""
    ours = [normalize(text) for text in reader.reasoning_texts(turn.text, turn.opened)]
    theirs = [normalize(text) for text in reader.reasoning_texts(written, inside)]
    if not turn.as_text:  # the template builds the turn from fields, and spells it in its own way
        if reader.fields(turn.text, turn.opened) != reader.fields(written, inside):
            return "other"
        return None if list(filter(None, ours)) == list(filter(None, theirs)) else "reasoning"
    sampled = normalize(turn.text)
    if written.startswith(sampled) and _only_special(written[len(sampled) :], reader):
        return None
    begin = written.find(sampled) if sampled else -1
    if begin > 0 and _only_special(written[begin + len(sampled) :], reader):
        before = written[:begin]
        if not reader.without_reasoning(before, False).strip() and not any(reader.reasoning_texts(before, False)):
            return "reasoning"  # the template only put an empty reasoning block in front
    if turn.calls and reader.calls(turn.text, turn.opened) == reader.calls(written, inside):
        return None if ours == theirs else "reasoning"  # the same calls in the template's own spelling
    ours, theirs = list(filter(None, ours)), list(filter(None, theirs))
    if len(theirs) >= max(len(ours), 1) or not set(theirs) <= set(ours):
        return "other"  # no reasoning was left out, so the words differ
    own_words = normalize(reader.without_reasoning(turn.text, turn.opened)).strip()
    their_words = reader.without_reasoning(written, inside).strip()
    has_reasoning = own_words != sampled.strip() or their_words != written.strip()
    same_words = their_words.startswith(own_words) and _only_special(their_words[len(own_words) :].strip(), reader)
    return "reasoning" if has_reasoning and same_words else "other"


def _only_special(text: str, reader: TextReader) -> bool:
    return all(token in reader.special for token in reader.encode(text.rstrip()))


def _counterpart(context: str, text: str, begin: int) -> str:
    """The part of the one-pass text that stands for a context which is not in it, to be shown beside the context.

    Both begin alike up to the first difference. Behind it, the longest common end is looked for; without one, the part is as
    long as the context.
    """
    other = text[begin : begin + len(context)]
    head = next((n for n, (a, b) in enumerate(zip(context, other, strict=False)) if a != b), len(other))
    # Binary search, because a longer end can only be found where a shorter one is. Invariant: the last `low` characters of the
    # context are found. Context "user: 7<end>", text "user: 9<end>": head 6, low 5, and the part is "user: 9<end>".
    low, high = 0, len(context) - head
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if text.find(context[-middle:], begin + head) >= 0 else (low, middle - 1)
    if low < _MIN_COMMON:
        return other
    return text[begin : text.find(context[-low:], begin + head) + low]


def mismatch_of(difference: Difference, reader: TextReader, explanation: str = "") -> TemplateMismatch:
    """A difference as it is recorded: whether sampled tokens differ, and a description, followed by `explanation`."""
    kind = MismatchKind.COMPLETION if isinstance(difference.run, TurnRun) else MismatchKind.CONTEXT
    return TemplateMismatch(kind, f"{kind}, {_description(difference, reader)}{explanation}")


def _description(difference: Difference, reader: TextReader) -> str:
    """Both sides of a difference, for people, without their common beginning and end."""
    run, ours, theirs = difference.run, difference.ours, difference.theirs
    short = min(len(ours), len(theirs))
    head = next((n for n in range(short) if ours[n] != theirs[n]), short)
    tail = next((n for n in range(short - head) if ours[-1 - n] != theirs[-1 - n]), short - head)
    ours_only, theirs_only = ours[head : len(ours) - tail], theirs[head : len(theirs) - tail]
    place = head if ours == run.text else run.text.find(ours_only)
    first, last = 0, len(run.token_ids)
    if place >= 0:  # else the place is unknown: removed white space stood inside the difference
        first = _tokens_before(run, place, reader)
        last = _tokens_before(run, place + len(ours_only), reader, round_up=True) if ours_only else first
    ids = list(run.token_ids[first:last])
    return (
        f"tokens {run.start + first} to {run.start + last}: the segment has {_shortened(ours_only)} {_ids(ids)} where "
        f"the template writes {_shortened(theirs_only)} {_ids(reader.encode(theirs_only))}, after "
        f"{ours[max(0, head - _SHOWN) : head]!r}"
    )


def _tokens_before(run: ContextRun | TurnRun, characters: int, reader: TextReader, *, round_up: bool = False) -> int:
    """How many tokens of a run spell its first `characters`. A part of a token counts if `round_up`."""
    # Tokens are decoded together, because a character may consist of several. Invariant: the first `low` tokens have at most
    # `characters` characters.
    low, high = 0, len(run.token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(reader.decode(run.token_ids[:middle])) <= characters:
            low = middle
        else:
            high = middle - 1
    cut = low < len(run.token_ids) and len(reader.decode(run.token_ids[:low])) < characters
    return low + (round_up and cut)


def _without_space(text: str) -> str:
    return "".join(text.split())


def _shortened(text: str) -> str:
    return repr(text) if len(text) <= _SHOWN else f"{text[:_SHOWN]!r}..."


def _ids(token_ids: Sequence[int]) -> str:
    shown = _SHOWN // 3
    return f"{list(token_ids)}" if len(token_ids) <= shown else f"{list(token_ids[:shown])[:-1]}..."
