"""One tool: a function that the model may call, or a class whose methods it may.

Every way in which a call can go wrong is told to the model and counted: a tool never ends a conversation by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

from turnwise.environments.tools.result import Answer, Result, failed, read_result
from turnwise.environments.tools.schema import Arguments, FromSchema, WrongArguments, schema_of
from turnwise.environments.tools.truncation import Truncation
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Failure, ToolCall, ToolOutcome, ToolSchema
from turnwise.user_code.calls import call as call_user_code
from turnwise.user_code.deadlines import deadline
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Tool", "Toolbox", "copy_containers", "requires"]

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_MOST_LOGGED = 100
_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # seconds before the first further attempt, doubled each time


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    arguments: Arguments
    """Checks the arguments of a call."""
    function: Callable[..., Any]
    schema: ToolSchema
    """The tool in the OpenAI format, as the chat template is given it."""
    by_name: bool = True
    """Whether the function takes its arguments by name, or all of them as one dictionary."""
    timeout: float = 30.0
    """Seconds for each attempt."""
    retries: int = 0
    """Further attempts after an exception. A ValueError is the tool talking to the model, and is told at once."""
    retry_timeouts: bool = False
    """Whether a timeout is worth a further attempt too."""
    thread: bool = False
    """Whether an async function runs in a thread, in an event loop of its own for each call: it may block then."""
    truncation: Truncation | None = None
    """How a long text is shortened; None leaves that to the layer."""

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ConfigError(f"the tool {self.name!r} has a timeout of {self.timeout} s; give a number above 0")
        if self.retries < 0:
            raise ConfigError(f"the tool {self.name!r} has {self.retries} retries; give 0 or more")
        if self.retry_timeouts and not self.retries:
            raise ConfigError(f"retry_timeouts of the tool {self.name!r} has no effect without retries: set retries")
        if self.thread and not inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"thread=True of the tool {self.name!r} has no effect: it is no async function, and sync ones run in threads "
                f"anyway; leave it out"
            )

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, timeout: float = 30.0, retries: int = 0, retry_timeouts: bool = False
    ) -> Tool:
        """Make a tool of a typed function with a docstring; `Args:` in Google style describes the parameters.

        Raises ConfigError if a parameter has no type, is of a kind that a model cannot give, or if the function `requires` what
        is not there.
        """
        if isinstance(function, FunctionType) and (check := _requirements.get(function)) is not None:
            check()
        schema, arguments = schema_of(function)
        return cls(
            name=schema["function"]["name"],
            description=schema["function"]["description"],
            arguments=arguments,
            function=function,
            schema=schema,
            timeout=timeout,
            retries=retries,
            retry_timeouts=retry_timeouts,
        )

    @classmethod
    def from_schema(
        cls,
        schema: ToolSchema,
        function: Callable[..., Any],
        *,
        by_name: bool = True,
        timeout: float = 30.0,
        retries: int = 0,
        retry_timeouts: bool = False,
    ) -> Tool:
        """Make a tool of a schema in the OpenAI format and the function that does what it says.

        Example::

            Tool.from_schema(
                {"type": "function", "function": {"name": "find", "description": "Find a page.", "parameters": {
                    "type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}},
                    "required": ["words"]}}},
                find,
            )

        Raises ConfigError if the schema is none, or the function does not take the arguments that it names.
        """
        name, description, parameters = _parts(schema)
        arguments = FromSchema(parameters, name)
        if by_name:
            _refuse_unfit(function, parameters, name)
        return cls(
            name=name,
            description=description,
            arguments=arguments,
            function=function,
            schema=schema,
            by_name=by_name,
            timeout=timeout,
            retries=retries,
            retry_timeouts=retry_timeouts,
        )

    async def run(self, call: ToolCall) -> ToolOutcome:
        """What became of a call, without what the model is told of it beside text. Never raises."""
        return (await self.answer(call)).outcome

    async def answer(self, call: ToolCall) -> Answer:
        """Check the arguments, run the function as often as it takes, and tell what came of it. Never raises."""
        started = time.perf_counter()
        attempt = 0
        while True:
            attempt += 1
            traceback = ""
            try:
                result = await self._attempt(call.arguments)
            except TimeoutError:  # ours: the function's own became a Failed at the boundary
                kind, text, again = "timeout", f"{self.name} took longer than {self.timeout:g} s", self.retry_timeouts
            except Failed as failure:
                cause = failure.__cause__
                kind = "arguments" if isinstance(cause, WrongArguments) else "raised"
                text, again = _told(failure), not isinstance(cause, ValueError | WrongArguments)
                traceback = failure.failure.traceback if kind == "raised" else ""
                if again:  # a defect, and not the tool talking to the model
                    _tell_once(self.name, failure.failure)
            else:
                return Answer.of(call, result, seconds=time.perf_counter() - started, attempts=attempt)
            if not again or attempt > self.retries:
                seconds = time.perf_counter() - started
                return failed(call, kind, text, seconds=seconds, attempts=attempt, traceback=traceback)
            await asyncio.sleep(min(_PAUSE * 2 ** (attempt - 1), _LONGEST_PAUSE))

    async def _attempt(self, given: Mapping[str, Any]) -> Result:
        async with deadline(self.timeout):
            return await call_user_code(lambda: self._call(given), kind="tool", name=f"the tool {self.name}")

    async def _call(self, given: Mapping[str, Any]) -> Result:
        with boundary("tool"):
            if self.arguments.quick:
                arguments = self.arguments.check(given)
            else:  # beside the event loop: such a schema and what a model gives for it can take any time to be compared
                arguments = await run_in_thread(
                    lambda: self.arguments.check(given), name=f"{self.name}.arguments", kind="tool"
                )
            function = partial(self.function, **arguments) if self.by_name else partial(self.function, arguments)
            if inspect.iscoroutinefunction(self.function) and not self.thread:
                return self._read(await function())
            # what is at hand is read in the thread too: ten megabytes take a while
            result = await run_in_thread(lambda: self._at_hand(function()), name=self.name, kind="tool")
            return result if isinstance(result, Result) else self._read(await result)

    def _at_hand(self, result: Any) -> Result | Awaitable[Any]:
        if self.thread:
            result = asyncio.run(result)
        return result if inspect.isawaitable(result) else self._read(result)

    def _read(self, result: Any) -> Result:
        return read_result(result).shortened(self.truncation)


_requirements: weakref.WeakKeyDictionary[Callable[..., Any], Callable[[], object]] = weakref.WeakKeyDictionary()

F = TypeVar("F", bound=Callable[..., Any])


def requires(check: Callable[[], object]) -> Callable[[F], F]:
    """Decorates a function that needs something of this machine: `check` is called when it becomes a tool, at the start of a
    run, and raises ConfigError where that is not there."""

    def decorated(function: F) -> F:
        _requirements[function] = check
        return function

    return decorated


@dataclass(frozen=True, slots=True)
class Toolbox:
    """A class whose public methods are tools: one instance for each conversation, which keeps its state.

    A method whose name begins with `_` is no tool, nor is `close`, sync or async, which is called when the conversation is
    over. Calls of one instance are run one after the other, in the order in which the model wrote them.
    """

    make: Callable[[], Any]
    """The class, with its arguments."""
    name: str
    tools: tuple[Tool, ...]
    """One for each method, not yet of any instance: to be checked and shown, not to be run."""
    closes: bool = False
    """Whether there is a method `close`."""

    @classmethod
    def of(
        cls,
        kind: type,
        *,
        arguments: Mapping[str, Any] | None = None,
        timeout: float = 30.0,
        retries: int = 0,
        retry_timeouts: bool = False,
    ) -> Toolbox:
        """Make tools of a class; `arguments` are those of its constructor.

        Raises ConfigError if it cannot be called with them, or one of its methods cannot be a tool.
        """
        arguments = dict(arguments or {})
        try:
            inspect.signature(kind).bind(**arguments)
        except (TypeError, ValueError) as error:  # the latter from a builtin without a signature
            raise ConfigError(f"{kind.__name__} cannot be made with the arguments {arguments}: {error}") from None
        methods = _public_methods(kind)
        closes = methods.pop("close", None) is not None
        if not methods:
            raise ConfigError(f"the class {kind.__name__} has no public methods, which would be its tools")
        tools = tuple(
            Tool.of(method, timeout=timeout, retries=retries, retry_timeouts=retry_timeouts)
            for method in methods.values()
        )
        return cls(
            make=lambda: kind(**copy_containers(arguments)),
            name=kind.__name__,
            tools=tools,
            closes=closes,
        )


def copy_containers(value: Any) -> Any:
    """The same lists and dictionaries, of one's own: what an instance puts into its arguments is in no other's."""
    if type(value) is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    return [copy_containers(item) for item in value] if type(value) is list else value


def _public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """Its methods by name in the order of their definition, those of its bases first, bound so that `self` is given."""
    methods: dict[str, Callable[..., Any]] = {}
    for base in reversed(kind.__mro__):
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            if isinstance(value, FunctionType):
                methods[name] = MethodType(value, kind)
            elif isinstance(value, staticmethod | classmethod):
                methods[name] = getattr(kind, name)
            else:
                methods.pop(name, None)  # a subclass may put something else in a method's place
    return methods


def _parts(schema: ToolSchema) -> tuple[str, str, Mapping[str, Any]]:
    """Name, description and parameters of a schema in the OpenAI format."""
    example = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
    function = schema.get("function") if isinstance(schema, Mapping) and schema.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise ConfigError(f"a tool's schema must be of the form {example}; got {schema!r:.200}")
    name, description = function.get("name"), function.get("description", "")
    parameters = function.get("parameters", {"type": "object", "properties": {}})
    if not isinstance(name, str) or not name:
        raise ConfigError(f"a tool's schema must have a name, as in {example}; got {schema!r:.200}")
    if not isinstance(description, str):
        raise ConfigError(f"the description of the tool {name!r} is a {type(description).__name__}; write a text")
    if not isinstance(parameters, Mapping):
        raise ConfigError(
            f"the parameters of the tool {name!r} are a {type(parameters).__name__}; write a JSON Schema, such as "
            f'{{"type": "object", "properties": {{}}}}'
        )
    return name, description, parameters


def _refuse_unfit(function: Callable[..., Any], parameters: Mapping[str, Any], name: str) -> None:
    """Refuse a function that could not be called with the arguments that a schema allows."""
    signature = inspect.signature(function)
    takes = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        for argument in parameters.get("properties", {}):
            if argument not in signature.parameters:
                raise ConfigError(
                    f"the schema of the tool {name!r} has the parameter {argument!r}, and its function takes none of that "
                    f"name{nearest(argument, signature.parameters)}"
                )
    for parameter in takes:
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
            parameter.POSITIONAL_ONLY,
        )
        if needed and parameter.name not in parameters.get("required", []):
            raise ConfigError(
                f"the function of the tool {name!r} needs the argument {parameter.name!r}, and its schema does not require "
                f"it: add it to `required`, or give it a default"
            )


def _tell_once(name: str, failure: Failure) -> None:
    """Log an exception of a tool, the first time that it is raised on that line."""
    key = f"{name}\n{failure.traceback or failure.message}"
    if key not in _logged and len(_logged) < _MOST_LOGGED:
        _logged.add(key)
        _log.warning("the tool %s raised %s\n%s", name, failure.message, failure.traceback)


def _told(failure: Failed) -> str:
    if isinstance(failure.__cause__, WrongArguments):
        return str(failure.__cause__)
    # a ValueError is how a tool talks to the model; of anything else the type helps
    return failure.failure.message.removeprefix("ValueError: ")
