"""Parses JSON and YAML that a user wrote, and reports every defect as an error with its place.

The parsers of the standard library and of PyYAML raise many kinds of exception on bad input (RecursionError on deep nesting,
ValueError on an integer of thousands of digits or an impossible date), and accept input that is certainly a mistake: a
key that stands twice, half of a surrogate pair, a cycle of YAML aliases. Here all of these are one `TurnwiseError` of the
caller's choice. This module does not know what the values mean.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from turnwise.errors import TurnwiseError

__all__ = ["MAX_DEPTH", "PlainLoader", "check_text", "parse_json", "parse_yaml", "read_text"]

MAX_DEPTH = 64
"""Nesting of lists and mappings that is accepted. Conversations, schemas and recipes need about ten."""

_MAX_VALUES = 1_000_000
"""Values in one YAML document. Aliases can make a few lines of YAML expand to billions of values."""

_MAX_INTEGER = 2**63


class _Defect(ValueError):
    """A defect of a value; the message is a clause such as `the key 'a' stands twice`."""


def read_text(path: Path, *, error: type[TurnwiseError]) -> str:
    """The text of a UTF-8 file. Raises `error` if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is not UTF-8: {problem.reason} at byte {problem.start + 1}. Save it as UTF-8") from None
    except (OSError, ValueError) as problem:  # ValueError: a path with a NUL character
        raise error(f"{path} cannot be read: {getattr(problem, 'strerror', None) or problem}") from None


def parse_json(text: str, *, where: str, error: type[TurnwiseError], own: bool = False) -> Any:
    """The value of a JSON text. `where` begins the message: `rows.jsonl:3: this line`.

    `own` is for files that turnwise has written: half of a surrogate pair is accepted there (a model can write it), and the
    nesting is bounded by Python's parser only.

    Raises `error` if the text is not JSON, a key stands twice in one object, a text holds half of a surrogate pair, an
    integer has more than 4,300 digits, or the nesting is deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        # UTF-8 holds no lone surrogate and Python's parser bounds no depth: look only where there may be one
        if not own and (text.count("[") + text.count("{") > MAX_DEPTH or "\\ud" in text.lower()):
            _check(value, integers=False)
    except json.JSONDecodeError as problem:
        raise error(f"{where} is not JSON ({problem.msg} at column {problem.colno}): {text[:80]!r}") from None
    except _Defect as problem:
        raise error(f"{where} is not accepted: {problem}: {text[:80]!r}") from None
    except RecursionError:
        raise error(f"{where} is not accepted: it is nested deeper than {MAX_DEPTH} levels: {text[:80]!r}") from None
    except ValueError as problem:  # an integer of more than 4,300 digits
        raise error(f"{where} is not accepted: {problem}: {text[:80]!r}") from None
    return value


class PlainLoader(yaml.SafeLoader):
    """YAML whose values are those of JSON: dates stay texts, and a key that stands twice is a defect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node. Raises ConstructorError if a key stands twice (a key that `<<` merges in may)."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} stands twice; remove one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def parse_yaml(
    text: str, *, where: str, error: type[TurnwiseError], loader: type[yaml.SafeLoader] = PlainLoader
) -> Any:
    """The value of a YAML text: None, bool, int, float, str, or lists and mappings of them.

    Raises `error` if the text is not YAML, or holds what JSON has no value for (sets, bytes, dates), a key that is not a
    text, a NUL character, half of a surrogate pair, an integer beyond 64 bits, a cycle, or too deep a nesting.
    """
    try:
        # the loader's constructor reads the beginning of the text, so it belongs inside
        value = yaml.load(text, Loader=loader)
        _check(value)
    except yaml.YAMLError as problem:
        raise error(f"{where} is not YAML: {problem}") from None
    except _Defect as problem:
        raise error(f"{where} is not accepted: {problem}") from None
    except RecursionError:
        raise error(f"{where} is not accepted: it is nested deeper than {MAX_DEPTH} levels") from None
    except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as problem:  # PyYAML's own constructors
        raise error(f"{where} is not YAML: {problem}") from None
    return value


def check_text(text: str) -> str | None:
    """What makes a text unusable as text (a clause for a message), or None."""
    if "\0" in text:
        return f"the text {text[:60]!r} holds a NUL character; remove it"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return f"the text {text[:60]!r} holds half of a surrogate pair, which is not a character; remove it"
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Defect(f"the key {twice!r} stands twice; remove one of them")
    return found


def _check(value: Any, *, integers: bool = True) -> None:
    """Raise _Defect where a value is not one of JSON's; `integers`: whether integers beyond 64 bits are a defect too."""
    values = 0

    def visit(value: Any, depth: int) -> None:
        nonlocal values
        values += 1
        if depth > MAX_DEPTH:
            raise _Defect(f"it is nested deeper than {MAX_DEPTH} levels, or an alias holds itself")
        if values > _MAX_VALUES:
            raise _Defect(f"it holds more than {_MAX_VALUES:,} values")
        match value:
            case dict():
                for key, item in value.items():
                    if not isinstance(key, str | int | float | bool | None):
                        raise _Defect(f"the key {key!r:.60} is a {type(key).__name__}; keys are texts")
                    visit(key, depth + 1)
                    visit(item, depth + 1)
            case list():
                for item in value:
                    visit(item, depth + 1)
            case str():
                if (problem := check_text(value)) is not None:
                    raise _Defect(problem)
            case bool() | float() | None:
                pass
            case int():
                if integers and not -_MAX_INTEGER <= value < _MAX_INTEGER:
                    raise _Defect("an integer does not fit into 64 bits; write it as a text")
            case _:
                raise _Defect(f"{value!r:.60} is a {type(value).__name__}; write a text, a number, a list or a mapping")

    visit(value, 0)
