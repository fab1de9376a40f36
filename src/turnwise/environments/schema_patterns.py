"""Patterns of JSON Schemas, compared within a time limit.

A pattern such as `^(a+)+$` can take longer than any conversation, on a text that a model writes, and `re` holds Python's global
lock meanwhile. The package `regex` takes a time limit and lets the lock go.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

__all__ = ["PATTERN_SECONDS", "bounded_patterns"]

PATTERN_SECONDS = 1.0
"""For one pattern and one text."""


class _TooLong(Exception):
    """A text could not be compared with a pattern in time."""


def bounded_patterns(kind: type[Validator]) -> type[Validator]:
    """The same kind of validator with `pattern`, `patternProperties` and `additionalProperties` in bounded time."""
    from jsonschema import validators
    from jsonschema.exceptions import ValidationError

    additional = kind.VALIDATORS.get("additionalProperties")

    def pattern(validator: Any, patrn: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "string"):
            return
        try:
            if not _found(patrn, instance):
                yield ValidationError(f"{instance!r:.200} does not match {patrn!r}")
        except _TooLong as problem:
            yield ValidationError(str(problem))

    def pattern_properties(
        validator: Any, properties: Mapping[str, Any], instance: Any, schema: Any
    ) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "object"):
            return
        for patrn, subschema in properties.items():
            for name, value in instance.items():
                try:
                    if _found(patrn, name):
                        yield from validator.descend(value, subschema, path=name, schema_path=patrn)
                except _TooLong as problem:
                    yield ValidationError(str(problem))

    def additional_properties(validator: Any, allowed: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        patterns = schema.get("patternProperties", {})
        if not validator.is_type(instance, "object") or not patterns:
            if additional is not None:
                yield from additional(validator, allowed, instance, schema) or ()
            return
        try:
            names = [name for name in instance if name not in schema.get("properties", {})]
            extra = [name for name in names if not any(_found(patrn, name) for patrn in patterns)]
        except _TooLong as problem:
            yield ValidationError(str(problem))
            return
        if validator.is_type(allowed, "object"):
            for name in extra:
                yield from validator.descend(instance[name], allowed, path=name)
        elif not allowed and extra:
            yield ValidationError(f"there is no argument of the names {', '.join(map(repr, extra))}"[:500])

    bounded: Any = validators.extend(
        kind,
        {
            "pattern": pattern,
            "patternProperties": pattern_properties,
            "additionalProperties": additional_properties,
        },
    )
    return bounded


def _found(pattern: str, text: str) -> bool:
    import regex

    try:
        return regex.search(pattern, text, timeout=PATTERN_SECONDS, concurrent=True) is not None
    except TimeoutError:
        raise _TooLong(
            f"{text!r:.80} could not be compared with the pattern {pattern!r} in {PATTERN_SECONDS:g} s; give a shorter text"
        ) from None
