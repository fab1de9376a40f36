"""The classes that users of verl derive from and receive, with verl's names, and calls of users' classes.

`BaseInteraction` and `BaseTool` have verl's signatures and defaults. One object serves all conversations and distinguishes them
by `instance_id`; in turnwise, a conversation has one id for its interaction and its tools. Unlike verl's, the classes of schemas,
calls and responses (`verl.tools.schemas`) keep all given keys: the chat template receives `items`, `default`, nested `properties`
and `anyOf`, and a property without `type` is not an error. `AgentData`, the argument `agent_data` of `execute` in verl v0.7, has
the tokens of the last turn but not those of the prompt, because environments receive messages.

`call` accepts sync and async methods with the signatures of all versions of verl. Sync methods run in a thread, and so do `async`
methods in a conversation with an `OwnLoop`. While a method runs, turnwise provides verl's names, because methods may also import
them. Knows no conversations and no YAML files."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.compat.verl.names import verl_names
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Message, Turn
from turnwise.user_code.calls import conversation_name, spawn
from turnwise.user_code.thread_loops import call_async
from turnwise.user_code.threads import run_in_thread


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


class BaseInteraction:
    """Answers the model: verl's `verl.interactions.base.BaseInteraction`."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin a conversation; `kwargs` are the row's `interaction_kwargs`. Returns the conversation's id."""
        return instance_id if instance_id is not None else str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        """Answer the model. Returns (is the conversation over, the answer, the turn's score, data to record)."""
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self) -> float:
        """The score of the conversation; subclasses may take `instance_id` and keywords."""
        return 0.0

    async def finalize_interaction(self) -> None:
        """End a conversation; subclasses may take `instance_id` and keywords."""


class BaseTool:
    """A tool: verl's `verl.tools.base_tool.BaseTool`."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        if self.tool_schema is None:
            self.tool_schema = self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: write tool_schema in the tool file, or override "
                f"get_openai_tool_schema"
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The tool's schema. The constructor calls this if the tool file has no `tool_schema`."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin a conversation; `kwargs` are the row's `create_kwargs`. Returns the conversation's id and a response."""
        return (instance_id if instance_id is not None else str(uuid4())), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float | None, dict[str, Any] | None]:
        """Run a call. Returns (the response for the model, the call's reward, metrics to record)."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the conversation's calls, computed after the conversation."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a conversation."""


_TOKENS = ("prompt_ids", "response_mask", "response_logprobs", "routed_experts")


@dataclass(slots=True)
class FunctionCall:
    """A tool call of the current turn: `verl.experimental.agent_loop.tool_parser.FunctionCall`."""

    name: str
    arguments: str
    """The arguments as JSON text."""
    tool_call_id: str | None = None
    """The id that the model wrote, if the format has ids."""


@dataclass
class AgentData:
    """A conversation's state for its tools. All calls receive the same object; `extra_fields` is for data of the tools."""

    messages: list[Message] = field(default_factory=list)
    """Copies of all messages so far, the turn with the call included."""
    image_data: list[Any] | None = None
    """The images of the conversation in order; None if there are none."""
    video_data: list[Any] | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    request_id: str = ""
    """The id of the conversation, its interaction and its tools."""
    tools_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """`tools_kwargs` of the row."""
    interaction: Any = None
    interaction_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_ids: list[int] = field(default_factory=list)
    """The token ids of the turn with the call."""
    turn_scores: list[float] = field(default_factory=list)
    """The interaction's scores so far."""
    tool_rewards: list[float] = field(default_factory=list)
    """The rewards of earlier calls."""
    user_turns: int = 0
    """The number of answers to the model, by tools or by the interaction."""
    assistant_turns: int = 0
    tool_calls: list[FunctionCall] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        if name in _TOKENS:
            raise AttributeError(
                f"agent_data.{name}: tools see the messages of a conversation, not its tokens; the tokens of the last turn are "
                f"agent_data.response_ids"
            )
        raise AttributeError(f"agent_data has no {name!r}")

    def hear(self, messages: Sequence[Message]) -> None:
        """Append messages of the conversation."""
        for message in messages:
            content = message.get("content")
            parts = list(content) if isinstance(content, list | tuple) else []
            self.messages.append({**message, "content": [dict(part) for part in parts]} if parts else dict(message))
            for part in parts:
                if part.get("type") == "image":
                    self.image_data = [*(self.image_data or ()), part.get("image")]
                elif part.get("type") == "video":
                    self.video_data = [*(self.video_data or ()), part.get("video")]

    def add_turn(self, turn: Turn, message: Message) -> None:
        """Append a turn of the model; `message` is its message."""
        self.hear([message])
        self.assistant_turns += 1
        self.response_ids = list(turn.completion.token_ids) if turn.completion is not None else []
        self.tool_calls = [FunctionCall(call.name, json.dumps(dict(call.arguments))) for call in turn.calls]

    def rewritten(self, messages: Sequence[Message]) -> None:
        """Replace all messages."""
        self.messages.clear()
        self.image_data = self.video_data = None
        self.hear(messages)


T = TypeVar("T")
_log = logging.getLogger(__name__)
_calls = logging.getLogger(f"{__name__}.calls")
"""The calls of users' methods. Its level is that of `VERL_LOGGING_LEVEL`, also with `TURNWISE_LOG=debug`, which prints the story
of one conversation."""
_LEVEL = "VERL_LOGGING_LEVEL"
_MOST_CHARACTERS = 300


async def call(
    method: Callable[..., Any], *arguments: Any, keywords: Mapping[str, Any] | None = None, name: str, kind: str
) -> Any:
    """Call a method and wait for it.

    If the method takes fewer positional arguments, the last ones are left out: verl's base classes have
    `finalize_interaction(self)`, users write `finalize_interaction(self, instance_id, **kwargs)`. Raises Failed with `kind`.
    """
    result: Any = "an exception"
    try:
        with boundary(kind):
            bound = _fitting(method, arguments, keywords or {})
            with verl_names():
                if inspect.iscoroutinefunction(method):
                    result = await call_async(bound, kind=kind)
                else:
                    result = await run_in_thread(bound, name=name, kind=kind)
                    if inspect.isawaitable(started := result):
                        result = await call_async(lambda: started, kind=kind)
                return result
    finally:
        if _calls.isEnabledFor(logging.DEBUG):
            given = [*map(_short, arguments), *(f"{key}={_short(value)}" for key, value in (keywords or {}).items())]
            _calls.debug("%s: %s(%s) -> %s", conversation_name(), name, ", ".join(given), _short(result))


def follow_verl_logging() -> None:
    """Print each call of a user's method if `VERL_LOGGING_LEVEL` is DEBUG. Raises ConfigError for an unknown level."""
    level, levels = os.environ.get(_LEVEL, "WARN").upper(), logging.getLevelNamesMapping()
    if level not in levels:
        raise ConfigError(f"{_LEVEL}={level} is not a log level; the levels are: {', '.join(levels)}")
    _calls.setLevel(level)


def _short(value: Any) -> str:
    """A value in a log line: one line of at most `_MOST_CHARACTERS` characters."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def takes(method: Callable[..., Any], keyword: str, *, anything: bool = False) -> bool:
    """Whether a method has a parameter of this name. With `anything`, `**kwargs` counts too."""
    parameters = inspect.signature(method).parameters
    swallows = anything and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return swallows or keyword in parameters


def defines(kind: type, method: str, base: type) -> bool:
    """Whether a class overrides a method of `base`, or of a copy of `base` with the same class name."""
    own = getattr(kind, method, None)
    owner = next((parent for parent in kind.__mro__ if method in vars(parent)), kind)
    return callable(own) and owner.__name__ != base.__name__


class ConversationResource(Generic[T]):
    """A resource of one conversation: acquired with `take`, and released exactly once with `give` if it was acquired.

    If `take` is still running when the conversation ends, the resource is released as soon as `take` returns.
    """

    def __init__(self, take: Callable[[], Awaitable[T]], give: Callable[[T], Awaitable[Any]], name: str) -> None:
        self._take = take
        self._give = give
        self._name = name
        self._taking: asyncio.Future[T] | None = None
        self._given = False

    async def acquire(self) -> T:
        self._taking = spawn(_awaited(self._take()))
        return await asyncio.shield(self._taking)

    async def release(self) -> None:
        """Release the resource. Has no effect if it was not acquired, or if it was released before."""
        if self._taking is None or self._given:
            return
        self._given = True
        if not self._taking.done():
            self._taking.add_done_callback(self._give_late)
        elif (taken := _result(self._taking)) is not None:
            await self._give(taken)

    def _give_late(self, taking: asyncio.Future[T]) -> None:
        if (taken := _result(taking)) is not None:
            _late.add(task := spawn(_awaited(self._give(taken))))
            task.add_done_callback(self._was_given)

    def _was_given(self, task: asyncio.Future[Any]) -> None:
        _late.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Failed):
            _log.warning("%s could not be released: %s", self._name, error)


_late: set[asyncio.Future[Any]] = set()
"""Strong references to running tasks: the event loop has weak references only."""


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _result(taking: asyncio.Future[T]) -> T | None:
    return None if taking.cancelled() or taking.exception() is not None else taking.result()


def _fitting(method: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[[], Any]:
    """The method, bound to as many positional arguments as it takes and to all keywords. Raises TypeError."""
    signature = inspect.signature(method)
    first: TypeError | None = None
    for count in range(len(arguments), -1, -1):
        try:
            signature.bind(*arguments[:count], **keywords)
        except TypeError as error:
            first = first or TypeError(f"{method.__qualname__}: {error}")
            continue
        return partial(method, *arguments[:count], **keywords)
    assert first is not None
    raise first
