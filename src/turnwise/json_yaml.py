"""Parses JSON and YAML files of users, and reports each defect as an error with its position.

The standard library and PyYAML raise many kinds of exception on bad input: RecursionError on deep nesting, ValueError on an
integer with thousands of digits or on an impossible date. They also accept input that is certainly a mistake: a duplicate key,
half of a surrogate pair, a cycle of YAML aliases. Here all of these raise one `TurnwiseError` class, which the caller chooses.
This module does not know what the values mean.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from turnwise.errors import TurnwiseError, text_of

MAX_DEPTH = 64
"""Maximum nesting of lists and mappings. Conversations, schemas and recipes need about ten levels."""

_MAX_VALUES = 1_000_000
"""Maximum number of values in one YAML document. Aliases can expand a few lines of YAML to billions of values."""

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
    """The value of a JSON text. Messages begin with `where`, such as `rows.jsonl:3: this line`.

    `own` is for files that turnwise has written: half of a surrogate pair is accepted there (a model can write it), and the
    nesting is bounded by Python's parser only.

    Raises `error` if the text is not JSON, an object has a duplicate key, a text holds half of a surrogate pair, an integer
    has more than 4,300 digits, or the nesting is deeper than `MAX_DEPTH`.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique)
        # the check visits all values, so it runs only on texts that may be too deep or may hold a lone surrogate
        if not own and (text.count("[") + text.count("{") > MAX_DEPTH or "\\ud" in text.lower()):
            _check(value, integers=False)
    except json.JSONDecodeError as problem:
        raise error(f"{where} is not JSON ({problem.msg} at column {problem.colno}): {text[:80]!r}") from None
    except _Defect as problem:
        raise error(f"{where} is not accepted: {problem}: {text[:80]!r}") from None
    except RecursionError:
        raise error(f"{where} is not accepted: it is nested deeper than {MAX_DEPTH} levels: {text[:80]!r}") from None
    except ValueError as problem:  # an integer of more than 4,300 digits
        raise error(f"{where} is not accepted: {_misfit(problem)}: {text[:80]!r}") from None
    return value


class PlainLoader(yaml.SafeLoader):
    """YAML with the values of JSON: dates stay texts, and a duplicate key is a defect."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node. Raises ConstructorError on a duplicate key, except for keys that `<<` merges in."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if (key.tag, key.value) in seen:
                problem = f"the key {key.value!r} occurs twice; remove one of them"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


_CLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""PyYAML's classes in C, where it was built with libyaml."""


class RecordedLoader(_CLoader):
    """Reads what turnwise has written, ten times as fast as the loader that explains the defects of users' files."""


RecordedLoader.yaml_implicit_resolvers = PlainLoader.yaml_implicit_resolvers


def yaml_text(value: Any) -> str:
    """YAML of mappings, lists and plain values, in their order. In C, PyYAML is four times as fast, but writes emoji as numbers:
    texts with them are written by its slow class."""
    text = yaml.dump(value, Dumper=_CDumper, sort_keys=False, allow_unicode=True)
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True) if "\\U" in text else text


def parse_yaml(
    text: str, *, where: str, error: type[TurnwiseError], loader: type[yaml.SafeLoader] = PlainLoader
) -> Any:
    """The value of a YAML text: None, bool, int, float, str, or lists and mappings of them.

    Raises `error` if the text is not YAML, if it holds a value that JSON does not have (sets, bytes, dates), a key that is not a
    text, a NUL character, half of a surrogate pair, an integer beyond 64 bits or a cycle, or if it is nested too deeply.
    """
    try:
        # the loader's constructor reads the beginning of the text, so it belongs inside
        value = yaml.load(text, Loader=loader)
        _check(value)
    except yaml.YAMLError as problem:
        hint = ""
        if "${" in text and re.search(r"[{\[,:]\s*\$\{", text):
            hint = '\nInside {} and [], a value with ${...} must be quoted: {path: "${NAME}"}'
        raise error(f"{where} is not YAML: {problem}{hint}") from None
    except _Defect as problem:
        raise error(f"{where} is not accepted: {problem}") from None
    except RecursionError:
        raise error(f"{where} is not accepted: it is nested deeper than {MAX_DEPTH} levels") from None
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError) as problem:  # PyYAML's own constructors
        raise error(f"{where} is not YAML: {_misfit(problem)}") from None
    return value


def half_character(value: Any) -> str | None:
    """The first text in `value` (in lists and mappings too) with half of a surrogate pair, as a clause for a message; or None.

    Such a text cannot be written as UTF-8, so no tokenizer takes it. It comes from a JSON escape that was cut (`\\ud83d`), or
    from bytes that are no text.
    """
    text = lone_surrogate(value)
    if text is None:
        return None
    place = next(place for place, character in enumerate(text) if "\ud800" <= character <= "\udfff")
    around = text[max(place - 20, 0) : place + 20]
    return (
        f"the text {around!r} contains {text[place]!r} at position {place}, which is half of a surrogate pair and not a "
        f"character: remove it, for example with text.encode('utf-8', 'replace').decode()"
    )


def check_text(text: str) -> str | None:
    """Why a text cannot be used (a clause for a message), or None."""
    if "\0" in text:
        return f"the text {text[:60]!r} contains a NUL character; remove it"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return f"the text {text[:60]!r} contains half of a surrogate pair, which is not a character; remove it"
    return None


def lone_surrogate(value: Any) -> str | None:
    """A text of a JSON value, or a key, that contains half of a surrogate pair; None if there is none."""
    waiting = [value]
    while waiting:
        match waiting.pop():
            case str() as text:
                try:
                    text.encode("utf-8")
                except UnicodeEncodeError:
                    return text
            case Mapping() as mapping:
                waiting += [*mapping, *mapping.values()]
            case list() | tuple() as values:
                waiting += values
            case _:
                pass
    return None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Defect(f"the key {twice!r} occurs twice; remove one of them")
    return mapping


def _misfit(problem: Exception) -> str:
    """Why Python cannot read a number, as a short clause: its own messages repeat all digits, or advise to change the limit."""
    said = text_of(problem)
    if "int_max_str_digits" in said:
        return "an integer has more than 4,300 digits; write it as a text, in quotes"
    return f"a value does not fit its type: {said if len(said) <= 200 else said[:200] + ' ...'}"


def _check(value: Any, *, integers: bool = True) -> None:
    """Raise _Defect on a value that JSON does not have. `integers`: whether integers beyond 64 bits are a defect too."""
    values = 0

    def visit(value: Any, depth: int) -> None:
        nonlocal values
        values += 1
        if depth > MAX_DEPTH:
            raise _Defect(f"it is nested deeper than {MAX_DEPTH} levels, or an alias contains itself")
        if values > _MAX_VALUES:
            raise _Defect(f"it contains more than {_MAX_VALUES:,} values")
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
