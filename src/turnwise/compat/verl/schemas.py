"""What verl's tools speak in: schemas, calls and responses, by verl's names (`verl.tools.schemas`).

Unlike the originals these keep every key that they are given: `items`, `default`, nested `properties` and `anyOf` reach the
chat template, and a property without `type` is no error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "OpenAIFunctionCallSchema",
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionParsedSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolCall",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
    "read_response",
    "read_schema",
]


class _Whole(BaseModel):
    """Keeps keys that it does not know."""

    model_config = ConfigDict(extra="allow")


class OpenAIFunctionPropertySchema(_Whole):
    """One parameter of a function."""

    type: str | list[str] | None = None
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(_Whole):
    """The parameters of a function: the JSON Schema of an object."""

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema | bool] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(_Whole):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(_Whole):
    """A tool in the OpenAI format."""

    type: str = "function"
    function: OpenAIFunctionSchema


class OpenAIFunctionParsedSchema(BaseModel):
    """A call as it was read from the model's words; the arguments are JSON still."""

    name: str
    arguments: str


class OpenAIFunctionCallSchema(BaseModel):
    """A call whose arguments are a mapping."""

    name: str
    arguments: dict[str, Any]

    @staticmethod
    def from_openai_function_parsed_schema(
        parsed_schema: OpenAIFunctionParsedSchema,
    ) -> tuple[OpenAIFunctionCallSchema, bool]:
        """The call, and whether its arguments could not be read; there are none then."""
        try:
            arguments = json.loads(parsed_schema.arguments)
        except (ValueError, RecursionError):
            arguments = None
        wrong = not isinstance(arguments, dict)
        return OpenAIFunctionCallSchema(name=parsed_schema.name, arguments={} if wrong else arguments), wrong


class OpenAIFunctionToolCall(BaseModel):
    """A call with its id."""

    id: str
    type: str = "function"
    function: OpenAIFunctionCallSchema


class ToolResponse(BaseModel):
    """What a tool says: a text, and lists of images and videos."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, values: Any) -> Any:
        if isinstance(values, dict):
            for name in ("image", "video"):
                value = values.get(name)
                if value is not None and not isinstance(value, list):
                    raise ValueError(f"{name} must be a list, got a {type(value).__name__}: put it in brackets")
        return values

    def is_empty(self) -> bool:
        """Whether it says nothing."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether it is a text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


@runtime_checkable
class _ResponseShape(Protocol):
    """A response of verl's or of a copy of verl's class."""

    text: str | None
    image: list[Any] | None
    video: list[Any] | None


@runtime_checkable
class _SchemaShape(Protocol):
    """A schema of verl's or of a copy of verl's class."""

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]: ...


def read_response(value: Any) -> ToolResponse | None:
    """A response by its shape, ours or of another copy of the class; None for anything else."""
    if isinstance(value, ToolResponse) or not isinstance(value, _ResponseShape):
        return value if isinstance(value, ToolResponse) else None
    return ToolResponse(text=value.text, image=value.image, video=value.video)


def read_schema(value: Any) -> OpenAIFunctionToolSchema | None:
    """A schema by its shape: ours, of another copy of the class, or a mapping; None for anything else.

    Raises pydantic's ValidationError.
    """
    if isinstance(value, OpenAIFunctionToolSchema):
        return value
    if isinstance(value, _SchemaShape):
        value = value.model_dump(exclude_unset=True)
    return OpenAIFunctionToolSchema.model_validate(value) if isinstance(value, Mapping) else None
