"""The base class of the sections of a recipe, and types that several sections share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

__all__ = [
    "NonEmpty",
    "NotNegative",
    "Positive",
    "Seconds",
    "Section",
    "Use",
    "changed_options",
    "expand_reference",
    "short_for",
]


def _not_empty(text: str) -> str:
    if not text.strip():
        raise PydanticCustomError("empty", "it must not be empty")
    return text


Positive = Annotated[int, Field(gt=0)]
NonEmpty = Annotated[str, AfterValidator(_not_empty)]
NotNegative = Annotated[float, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]


class Section(BaseModel):
    """A section of a recipe: frozen, and strict about its keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        coerce_numbers_to_str=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


def changed_options(section: Section) -> list[str]:
    """The names of the options that differ from their defaults, in the order of the schema.

    Values are compared, not presence: the config.yaml of a run names every option and must stay a valid recipe.
    """
    return [name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default]


def expand_reference(value: Any) -> Any:
    """The mapping that a plain text is short for: `file.py:name` becomes `{use: file.py:name}`."""
    return {"use": value} if isinstance(value, str) else value


def short_for(option: str) -> Any:
    """A validator for a section that may be written as a text, which is the value of `option`: `model: demo/model`."""
    return model_validator(mode="before")(lambda value: {option: value} if isinstance(value, str) else value)


class Use(Section):
    """A reference to a Python object. Instead of `{use: text}` you can write only the text."""

    use: NonEmpty
    """The object: `package.module:name` or `path/to/file.py:name`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments. For a class or an environment: of the constructor; for a function: of each call."""

    _expand = model_validator(mode="before")(expand_reference)
