"""The tokens that end a turn: those of the template, of the tokenizer and of the model's generation config.

Each is checked against the text that the template writes for reasoning, for calls and for an answer of several lines: a token
inside a turn does not end it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnwise.chat.probes import PLACEHOLDER, assistant_message, probe_call, probe_word
from turnwise.chat.template import Template
from turnwise.chat.turn_format import TurnFormat
from turnwise.errors import TemplateError
from turnwise.types import Message

__all__ = ["StopTokens", "find_stop_tokens", "generation_config_stops", "special_tokens"]

_LINES = "First, a line: 1 + 1 = 2.\nThen another one,\n\n1. a list,\n   * of two (or so).\n\n"
_TWO_CALLS = "a turn of two calls"


@dataclass(frozen=True, slots=True)
class StopTokens:
    """The tokens that end a turn, and the tokens that are configured as such and do not."""

    token_ids: tuple[int, ...]
    """The template's own token comes first: scripted turns end with it."""
    inside_turns: Mapping[int, str] = field(default_factory=dict)
    """Configured tokens that are written inside a turn, with the part of the turn: `{7: "reasoning"}`. They do not stop it."""
    unknown_ids: tuple[int, ...] = ()
    """Ids in the generation config that the tokenizer does not have."""


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The ids that no plain text is encoded to: the tokenizer's special tokens, and the tokens that were added to it."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def find_stop_tokens(
    tokenizer: Any, template: Template, turn_format: TurnFormat, generation_config: Sequence[int]
) -> StopTokens:
    """Find the tokens that end a turn. `generation_config` are the stop tokens that it names.

    Raises TemplateError if no token ends a turn.
    """
    unknown = tuple(token for token in dict.fromkeys(generation_config) if not _is_token(tokenizer, token))
    configured = [token for token in generation_config if token not in unknown]
    if tokenizer.eos_token_id is not None:
        configured.insert(0, tokenizer.eos_token_id)
    own = _template_stops(tokenizer, template, turn_format, configured)
    candidates = tuple(dict.fromkeys([*own, *configured]))
    inside = _inside_turns(tokenizer, template, turn_format, candidates, own)
    if stops := tuple(token for token in candidates if token not in inside):
        return StopTokens(stops, inside, unknown)
    if inside:
        places = "; ".join(
            f"{tokenizer.decode([token])!r} ({token}) occurs in {part}" for token, part in inside.items()
        )
        raise TemplateError(
            f"{template.where} has no stop token, because all configured stop tokens also occur inside a turn: {places}. Set "
            f"eos_token_id in generation_config.json to the token that ends the model's turns"
        )
    raise TemplateError(
        f"{template.where} has no stop token: the tokenizer has no eos_token, the template closes a turn with "
        f"{turn_format.closing[:20]!r}, which is not a special token, and the generation config has no eos_token_id. Set "
        f"eos_token in tokenizer_config.json"
    )


def _template_stops(
    tokenizer: Any, template: Template, turn_format: TurnFormat, configured: Sequence[int]
) -> list[int]:
    """The tokens with which the template itself ends a turn; `configured` decides if it writes several."""
    special = special_tokens(tokenizer)

    def special_in(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in special]

    closing = _leading_special(tokenizer, turn_format.closing, special)
    # other text may stand in front of the token that ends the turn
    named = [token for token in (closing or special_in(turn_format.closing)) if token in configured]
    own = (named or closing)[:1]
    if not own:  # only the header of the next message ends a turn
        headers = (_header(template, role) for role in ("user", "tool"))
        own = [token for header in headers for token in _leading_special(tokenizer, header, special)[:1]]
    after_call, between_calls = special_in(turn_format.after_call), special_in(turn_format.between_calls)
    if after_call and after_call[-1] not in between_calls:  # it ends the turn with calls, and not a single call
        own.append(after_call[-1])
    return own


def _is_token(tokenizer: Any, token: int) -> bool:
    try:
        return token >= 0 and tokenizer.convert_ids_to_tokens(token) is not None
    except (IndexError, OverflowError, ValueError):  # tokenizers written in Python raise for unknown ids
        return False


def _inside_turns(
    tokenizer: Any, template: Template, turn_format: TurnFormat, stops: Sequence[int], own: Sequence[int]
) -> dict[int, str]:
    """The candidates that are written inside a turn, before its end, with the part of the turn.

    The template's `own` tokens may be written between two calls, since some templates write each call as a turn.
    """
    inside: dict[int, str] = {}
    for part, text in _turn_parts(template, turn_format):
        ids = frozenset(tokenizer.encode(text, add_special_tokens=False))
        for token in stops:
            if token in ids and not (part == _TWO_CALLS and token in own):
                inside.setdefault(token, part)
    return inside


def _turn_parts(template: Template, turn_format: TurnFormat) -> Iterator[tuple[str, str]]:
    """Completions of several kinds, each up to its last word, with the name of the kind."""
    for marked in _marked_reasoning(template, turn_format):
        yield "reasoning", marked
    key = template.reasoning.key
    reasoning: Message = {} if key is None else {key: _LINES + probe_word(0)}
    kinds: list[tuple[str, Message]] = [("an answer of several lines", assistant_message(_LINES + PLACEHOLDER))]
    if reasoning:
        kinds.append(("reasoning", {**assistant_message(PLACEHOLDER), **reasoning}))
    if template.writes_calls:
        call, calls = probe_call({"text": PLACEHOLDER}), probe_call({"text": probe_word(0)}, {"text": PLACEHOLDER})
        kinds += [("a call", call), ("a turn of words and a call", {**call, "content": probe_word(1)})]
        kinds += [("a reasoning before a call", {**call, **reasoning}), (_TWO_CALLS, calls)]
    for part, message in kinds:
        try:
            before, placeholder, _ = template.completion_text(message).rpartition(PLACEHOLDER)
        except TemplateError:
            continue  # the template accepts no such turn
        if placeholder:
            yield part, before


def _marked_reasoning(template: Template, turn_format: TurnFormat) -> Iterator[str]:
    """Thoughts between the marks that the template removes from a content."""
    for opening, closing in template.reasoning.marks.own:
        if not turn_format.closing.startswith(closing):
            yield f"{opening}\n{_LINES}\n{closing}\n\n"


def _leading_special(tokenizer: Any, text: str, special: frozenset[int]) -> list[int]:
    """The special tokens that a text begins with."""
    leading: list[int] = []
    for token in tokenizer.encode(text, add_special_tokens=False):
        if token not in special:
            break
        leading.append(token)
    return leading


def _header(template: Template, role: str) -> str:
    try:
        return template.text_before_content([role], "text")
    except TemplateError:
        return ""


def generation_config_stops(path: str | Path) -> list[int]:
    """The stop tokens in a model's generation config; empty if it has no such file.

    Raises TemplateError if the file cannot be read.
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
