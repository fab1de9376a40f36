"""The base class of the sections of a recipe, types of options, and sections that are chosen by name.

A section such as `engine` or `loss` has a class for each name, with a field `name` that has one possible value. Each name has
its own options; options that several names share are in a common base class.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Union, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError

# all sections


def _not_empty(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "it must not be empty")
    return text


def _whole_from_one(value: float) -> float:
    if value >= 1 and value != int(value):
        raise PydanticCustomError("steps", "a number of steps must be whole; below 1, it is a share of all steps")
    return int(value) if value == int(value) else value


Positive = Annotated[int, Field(gt=0)]
NonEmpty = Annotated[str, AfterValidator(_not_empty)]
PathText = Annotated[NonEmpty, AfterValidator(os.path.expanduser)]
"""A path. `~` is replaced where the recipe is read, so that all code sees the same directory."""
NotNegative = Annotated[float, Field(ge=0)]
StepsOrShare = Annotated[float, Field(ge=0), AfterValidator(_whole_from_one)]
"""A number of steps, or, below 1, a share of all steps, as `warmup_steps` of transformers 5."""
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section of a recipe: frozen, and strict about its keys.

    The descriptions below its fields are read where pages are written (`scripts/generated_pages.py`): each start of a
    command would read the source of 85 classes for them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, coerce_numbers_to_str=True, allow_inf_nan=False)


def changed_options(section: Section) -> list[str]:
    """The names of the options that differ from their defaults, in the order of the schema.

    Values are compared, not presence: the config.yaml of a run names every option and must stay a valid recipe.
    """
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]


def expand_reference(value: Any) -> Any:
    """The mapping that a plain text is short for: `file.py:name` becomes `{use: file.py:name}`."""
    return {"use": value} if isinstance(value, str) else value


def expand_format(value: Any) -> Any:
    """The mapping that a name or a description of a format is short for: `hermes` becomes `{use: hermes}`, `{opening: "<call>"}`
    becomes `{use: described, arguments: {opening: "<call>"}}`."""
    if isinstance(value, Mapping) and "use" not in value:
        return {"use": "described", "arguments": dict(value)}
    return expand_reference(value)


def short_for(option: str) -> Any:
    """A validator for a section that may be written as a text, which is the value of `option`: `model: demo/model`."""
    return model_validator(mode="before")(lambda value: {option: value} if isinstance(value, str) else value)


class Use(Section):
    """A reference to a Python object. Instead of `{use: text}` you can write only the text."""

    use: NonEmpty
    """The object: `package.module:name` or `path/to/file.py:name`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments: of a constructor (class, environment), or of each call (function)."""

    _expand = model_validator(mode="before")(expand_reference)


# sections that are chosen by name

OWN = "own"
"""The `name` of a section whose algorithm is a function of the user."""


class OwnFunction(Section):
    """The options of a function of your own."""

    use: NonEmpty
    """`path/to/file.py:name` or `package.module:name`; `credit: NAME` or `loss: NAME` is short for it."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of each call, as the function's annotations say."""


def named(value: Any) -> Any:
    """The mapping that a section which is chosen by name is short for: `grpo` becomes `{name: grpo}`, and a reference to a
    function `{name: own, use: file.py:function}`."""
    if isinstance(value, str):
        return {"name": OWN, "use": value} if ":" in value else {"name": value}
    return {"name": OWN, **value} if isinstance(value, Mapping) and "use" in value and "name" not in value else value


class NamedSection(Section):
    """The base of the classes of a section that is chosen by name. Each class has a field `name` with one possible value."""

    if TYPE_CHECKING:
        name: Any = None


@dataclass(frozen=True, slots=True)
class OneOf:
    """Chooses the class of a section by its `name`; `default` where the recipe gives none.

    `Annotated[LossSection, OneOf((PpoClip, Gspo), default="ppo_clip")]`: for type checkers the section is a `LossSection`, and a
    recipe with `name: gspo` gets a `Gspo`.
    """

    classes: tuple[type[Section], ...]
    default: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        tagged = tuple(Annotated[cls, Tag(name_of(cls))] for cls in self.classes)
        return handler.generate_schema(Annotated[Union[tagged], by_name(self.default)])  # noqa: UP007  a tuple of types


def by_name(default: str) -> Discriminator:
    """Choose the class of a section by its `name`; `default` where the recipe gives none."""
    return Discriminator(
        lambda value: value.get("name", default) if isinstance(value, Mapping) else getattr(value, "name", None)
    )


def named_sections(config: type[Section]) -> dict[str, dict[str, type[Section]]]:
    """For each section that is chosen by name: its class for each name."""
    found = {
        key: [cls for cls in section_classes(field) if "name" in cls.model_fields]
        for key, field in config.model_fields.items()
    }
    return {key: {name_of(cls): cls for cls in classes} for key, classes in found.items() if len(classes) > 1}


def section_classes(field: FieldInfo) -> list[type[Section]]:
    """The classes that a section may have; empty if the option is no section."""
    choices = [cls for choice in field.metadata if isinstance(choice, OneOf) for cls in choice.classes]
    return choices or list(_classes(field.annotation))


def name_of(cls: type[Section]) -> str:
    """The value of `name` that chooses the class."""
    return get_args(cls.model_fields["name"].annotation)[0]


def shared_options(first: type[Section], second: type[Section]) -> set[str]:
    """The options that two classes of a section inherit from the same base class."""
    bases = [base for base in first.__mro__ if issubclass(second, base) and issubclass(base, Section)]
    return {name for base in bases for name in base.model_fields}


def _classes(annotation: Any) -> Iterator[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from _classes(argument)
