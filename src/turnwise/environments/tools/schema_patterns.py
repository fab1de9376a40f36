"""Matches the patterns of JSON Schemas within a time limit.

Matching a pattern such as `^(a+)+$` on a text from a model can take longer than a conversation, and `re` holds Python's global
interpreter lock during the match. The package `regex` accepts a time limit and releases the lock.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

__all__ = ["PATTERN_SECONDS", "PatternTooSlow", "bounded_patterns", "expanded", "needs_expansion"]

PATTERN_SECONDS = 1.0
"""Maximum seconds to match one pattern with one text."""


_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value maps names to schemas."""
_DATA = frozenset({"enum", "const", "default", "examples"})
"""Keywords whose value is data, not a schema."""


class PatternTooSlow(Exception):
    """Matching a text with a pattern took longer than `PATTERN_SECONDS`."""


def bounded_patterns(kind: type[Validator]) -> type[Validator]:
    """A subclass of the validator that checks `pattern`, `patternProperties` and `additionalProperties` in bounded time.

    The checks raise PatternTooSlow at the first text whose match takes longer than `PATTERN_SECONDS`.
    """
    from jsonschema import validators
    from jsonschema.exceptions import ValidationError

    additional = kind.VALIDATORS.get("additionalProperties")

    def pattern(validator: Any, patrn: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "string"):
            return
        if not _matches(patrn, instance):
            yield ValidationError(f"{instance!r:.200} does not match {patrn!r}")

    def pattern_properties(
        validator: Any, properties: Mapping[str, Any], instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "object"):
            return
        for patrn, subschema in properties.items():
            for name, value in instance.items():
                if _matches(patrn, name):
                    yield from validator.descend(value, subschema, path=name, schema_path=patrn)

    def additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        patterns = schema.get("patternProperties", {})
        if not validator.is_type(instance, "object") or not patterns:
            if additional is not None:
                yield from additional(validator, allowed, instance, schema) or ()
            return
        names = [name for name in instance if name not in schema.get("properties", {})]
        extra = [name for name in names if not any(_matches(patrn, name) for patrn in patterns)]
        if validator.is_type(allowed, "object"):
            for name in extra:
                yield from validator.descend(instance[name], allowed, path=name)
        elif not allowed and extra:
            yield ValidationError(f"these arguments do not exist: {', '.join(map(repr, extra))}"[:500])

    bounded: Any = validators.extend(
        kind,
        {
            "pattern": pattern,
            "patternProperties": pattern_properties,
            "additionalProperties": additional_properties,
        },
    )
    return bounded


def needs_expansion(parameters: Mapping[str, Any]) -> bool:
    """Whether a schema has `unevaluatedProperties`. jsonschema checks this keyword with `re`, in unbounded time."""
    return any("unevaluatedProperties" in schema for schema in _schemas(parameters))


def expanded(parameters: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    """A schema without `patternProperties` that is equivalent for these arguments: each name that matches a pattern becomes an
    entry of `properties`.

    Raises PatternTooSlow if a match takes longer than `PATTERN_SECONDS`.
    """
    expanded_schema: dict[str, Any] = copy.deepcopy(dict(parameters))
    names = _names(arguments)
    for schema in list(_schemas(expanded_schema)):
        patterns = schema.pop("patternProperties", None)
        if not isinstance(patterns, Mapping):
            continue
        properties = schema.setdefault("properties", {})
        for name in names:
            if parts := [subschema for pattern, subschema in patterns.items() if _matches(pattern, name)]:
                properties[name] = {"allOf": [*([properties[name]] if name in properties else []), *parts]}
    return expanded_schema


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all its nested schemas, inner schemas first."""
    if isinstance(schema, list):
        for item in schema:
            yield from _schemas(item)
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _MAPS and isinstance(value, dict):
            for item in value.values():
                yield from _schemas(item)
        elif keyword not in _DATA:
            yield from _schemas(value)
    yield schema


def _names(value: Any) -> set[str]:
    """The property names of all objects in the arguments, at any depth."""
    if isinstance(value, list):
        return set().union(*map(_names, value))
    if isinstance(value, dict):
        return set(value).union(*map(_names, value.values()))
    return set()


def _matches(pattern: str, text: str) -> bool:
    import regex

    try:
        return regex.search(pattern, text, timeout=PATTERN_SECONDS, concurrent=True) is not None
    except TimeoutError:
        raise PatternTooSlow(
            f"{text!r:.80} could not be compared with the pattern {pattern!r} in {PATTERN_SECONDS:g} s; use a shorter text"
        ) from None
