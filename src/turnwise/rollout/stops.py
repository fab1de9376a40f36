"""The tokens that end a turn: what the template says of them, what the tokenizer does, and the model's generation config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import TemplateError
from turnwise.rollout.template import Template

__all__ = ["find_stops", "generation_stops", "special_tokens"]


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokens that no text is written with: the tokenizer's special ones, and those that were added to it."""
    return frozenset(tokenizer.all_special_ids) | frozenset(tokenizer.added_tokens_decoder)


def find_stops(tokenizer: Any, template: Template, generation: Sequence[int], *, where: str) -> tuple[int, ...]:
    """The tokens that end a turn, the template's own first: it is the one that a scripted turn ends with.

    Raises TemplateError if there is none.
    """
    special = special_tokens(tokenizer)

    def marks(text: str) -> list[int]:
        return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in special]

    known = [*generation]
    if tokenizer.eos_token_id is not None:
        known.insert(0, tokenizer.eos_token_id)
    closing = _leading(tokenizer, template.closing, special)
    if closing:
        stops = [next((token for token in closing if token in known), closing[0])]
    else:  # nothing ends a turn but the header of the next one
        heads = (_head(template, role) for role in ("user", "tool"))
        stops = [token for head in heads for token in _leading(tokenizer, head, special)[:1]]
    alone, between = map(marks, template.call_ends)
    if alone and alone[-1] not in between:  # what ends a turn of calls, where it is not what ends a single call
        stops.append(alone[-1])
    stops = list(dict.fromkeys([*stops, *known]))
    if not stops:
        raise TemplateError(
            f"{where} has no stop token: the tokenizer has no eos_token, the template closes a turn with "
            f"{template.closing[:20]!r}, which is no special token, and the generation config names none. Set eos_token "
            f"in tokenizer_config.json"
        )
    return tuple(stops)


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
