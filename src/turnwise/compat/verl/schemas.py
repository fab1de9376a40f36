"""The data classes of verl's tools: schemas, calls and responses, with verl's names (`verl.tools.schemas`).

Unlike verl's classes, these classes keep all given keys: the chat template receives `items`, `default`, nested `properties` and
`anyOf`. A property without `type` is not an error.
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
    """A model that keeps unknown keys."""

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
    """A call as parsed from the model's text; the arguments are JSON text."""

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
        """The call, and whether its arguments could not be parsed; if so, the call has no arguments."""
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
    """The response of a tool: a text, and lists of images and videos."""

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
        """Whether the response has no content."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Whether the response has a text only."""
        return bool(self.text) and not (self.image or self.video)


@runtime_checkable
class _ResponseShape(Protocol):
    """A response of verl's class or of a copy of it."""

    text: str | None
    image: list[Any] | None
    video: list[Any] | None


@runtime_checkable
class _SchemaShape(Protocol):
    """A schema of verl's class or of a copy of it."""

    def model_dump(self, *, exclude_unset: bool) -> dict[str, Any]: ...


def read_response(value: Any) -> ToolResponse | None:
    """The response if the value has its attributes, also from a copy of verl's class; otherwise None."""
    if isinstance(value, ToolResponse) or not isinstance(value, _ResponseShape):
        return value if isinstance(value, ToolResponse) else None
    return ToolResponse(text=value.text, image=value.image, video=value.video)


def read_schema(value: Any) -> OpenAIFunctionToolSchema | None:
    """The schema from a mapping or from a value with its attributes, also from a copy of verl's class; otherwise None.

    Raises pydantic's ValidationError.
    """
    if isinstance(value, OpenAIFunctionToolSchema):
        return value
    if isinstance(value, _SchemaShape):
        value = value.model_dump(exclude_unset=True)
    return OpenAIFunctionToolSchema.model_validate(value) if isinstance(value, Mapping) else None
