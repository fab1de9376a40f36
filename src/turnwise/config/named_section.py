"""Sections of a recipe that are chosen by name, such as `engine` and `loss`. Each name has its own options.

A class for each name has a field `name` with one possible value. Options that several names share are in a common base class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import Discriminator

from turnwise.config.section import Section

__all__ = ["by_name", "name_of", "named_sections", "shared_options"]


def by_name(default: str) -> Discriminator:
    """Choose the class of a section by its `name`; `default` where the recipe gives none."""
    return Discriminator(
        lambda value: value.get("name", default) if isinstance(value, Mapping) else getattr(value, "name", None)
    )


def named_sections(config: type[Section]) -> dict[str, dict[str, type[Section]]]:
    """For each section that is chosen by name: its class for each name."""
    found = {key: list(_classes(field.annotation)) for key, field in config.model_fields.items()}
    return {key: {name_of(cls): cls for cls in classes} for key, classes in found.items() if len(classes) > 1}


def name_of(cls: type[Section]) -> str:
    """The value of `name` that chooses the class."""
    return get_args(cls.model_fields["name"].annotation)[0]


def shared_options(first: type[Section], second: type[Section]) -> set[str]:
    """The options that two classes of a section inherit from the same base class."""
    bases = [base for base in first.__mro__ if issubclass(second, base) and issubclass(base, Section)]
    return {name for base in bases for name in base.model_fields}


def _classes(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section) and "name" in annotation.model_fields:
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)
