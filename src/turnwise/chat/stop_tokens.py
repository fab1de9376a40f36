"""The tokens that end a turn: what the template says of them, what the tokenizer does, and the model's generation config.

Each is held against what the template writes for a thought, for calls and for an answer of several lines: a token that stands
inside a turn does not end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.chat.probes import PLACEHOLDER, probe, probe_call, words
from turnwise.chat.template import Template
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["Stops", "find_stops", "generation_stops", "special_tokens"]

_LINES = "First, a line: 1 + 1 = 2.\nThen another one,\n\n1. a list,\n   * of two (or so).\n\n"


@dataclass(frozen=True, slots=True)
class Stops:
    """The tokens that end a turn, and those that were named as such and do not."""

    token_ids: tuple[int, ...]
    """The template's own first: it is the one that a scripted turn ends with."""
    inside: Mapping[int, str] = field(default_factory=dict)
    """Tokens that stand inside a turn, and in which part of one: `{7: "a thought"}`."""
    unknown: tuple[int, ...] = ()
    """Ids in the generation config that the tokenizer does not have."""


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that no text is written with: the tokenizer's special ones, and those that were added to it."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def find_stops(tokenizer: Any, template: Template, generation: Sequence[int], *, where: str) -> Stops:
    """The tokens that end a turn.

    Raises TemplateError if there is none.
    """
    special = special_tokens(tokenizer)

    def marks(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in special]

    unknown = tuple(token for token in dict.fromkeys(generation) if not _is_token(tokenizer, token))
    known = [token for token in generation if token not in unknown]
    if tokenizer.eos_token_id is not None:
        known.insert(0, tokenizer.eos_token_id)
    closing = _leading(tokenizer, template.closing, special)
    if closing:
        own = [next((token for token in closing if token in known), closing[0])]
    else:  # nothing ends a turn but the header of the next one
        heads = (_head(template, role) for role in ("user", "tool"))
        own = [token for head in heads for token in _leading(tokenizer, head, special)[:1]]
    alone, between = map(marks, template.call_ends)
    if alone and alone[-1] not in between:  # what ends a turn of calls, where it is not what ends a single call
        own.append(alone[-1])
    named = tuple(dict.fromkeys([*own, *known]))
    inside = _inside(tokenizer, template, named, own)
    if stops := tuple(token for token in named if token not in inside):
        return Stops(stops, inside, unknown)
    if inside:
        told = "; ".join(f"{tokenizer.decode([token])!r} ({token}) stands in {part}" for token, part in inside.items())
        raise TemplateError(
            f"{where} has no stop token, since all that are named stand inside a turn too: {told}. Name the token that the "
            f"model ends its turns with: eos_token_id in generation_config.json"
        )
    raise TemplateError(
        f"{where} has no stop token: the tokenizer has no eos_token, the template closes a turn with "
        f"{template.closing[:20]!r}, which is no special token, and the generation config names none. Set eos_token "
        f"in tokenizer_config.json"
    )


def _is_token(tokenizer: Any, token: int) -> bool:
    try:
        return token >= 0 and tokenizer.convert_ids_to_tokens(token) is not None
    except (IndexError, OverflowError, ValueError):  # tokenizers in Python look it up
        return False


def _inside(tokenizer: Any, template: Template, stops: Sequence[int], own: Sequence[int]) -> dict[int, str]:
    """Those of the tokens that stand inside a turn, before its end, and in which part of a turn.

    `own` are the template's. They may stand between two calls, since some templates write each call as a turn.
    """
    found: dict[int, str] = {}
    for part, text in _parts(template):
        ids = frozenset(tokenizer.encode(text, add_special_tokens=False))
        for token in stops:
            if token in ids and not (part == "a turn of two calls" and token in own):
                found.setdefault(token, part)
    return found


def _parts(template: Template) -> Iterator[tuple[str, str]]:
    """What the model says in turns of several kinds, up to their last word; and what is special about the kind."""
    for marked in _marked_thoughts(template):
        yield "a thought", marked
    thought: Message = {} if template.reasoning_key is None else {template.reasoning_key: _LINES + probe(0)}
    kinds: list[tuple[str, Message]] = [("an answer of several lines", words(_LINES + PLACEHOLDER))]
    if thought:
        kinds.append(("a thought", {**words(PLACEHOLDER), **thought}))
    if template.call_shape is not None:
        call, calls = probe_call({"text": PLACEHOLDER}), probe_call({"text": probe(0)}, {"text": PLACEHOLDER})
        kinds += [("a call", call), ("a turn of words and a call", {**call, "content": probe(1)})]
        kinds += [("a thought before a call", {**call, **thought}), ("a turn of two calls", calls)]
    for part, message in kinds:
        try:
            before, found, _ = template.said(message).rpartition(PLACEHOLDER)
        except TemplateError:
            continue  # it takes no such turn
        if found:
            yield part, before


def _marked_thoughts(template: Template) -> Iterator[str]:
    """Thoughts between the marks that the template looks for in the model's own text."""
    for opening, closing in template.thoughts.marks.own:
        if not template.closing.startswith(closing):
            yield f"{opening}\n{_LINES}\n{closing}\n\n"


def _leading(tokenizer: Any, text: str, special: frozenset[int]) -> list[int]:
    """The special tokens that a text begins with."""
    found: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in special:
            break
        found.append(token)
    return found


def _head(template: Template, role: str) -> str:
    try:
        return template.head([role], "words")
    except TemplateError:
        return ""


def generation_stops(path: str | Path) -> list[int]:
    """The stop tokens in a model's generation config; none where it has no such file.

    Raises TemplateError if there is one that cannot be read.
    """
    from transformers import GenerationConfig

    file = Path(path).expanduser() / "generation_config.json"
    try:
        stops = GenerationConfig.from_pretrained(str(path)).eos_token_id
    except (OSError, TypeError) as error:
        if file.is_file():
            raise TemplateError(f"{file} cannot be read: {error}. Correct it, or remove it") from error
        return []
    return stops if isinstance(stops, list) else [] if stops is None else [stops]
