"""`Tool`, a function that the model can call, and `Toolbox`, a class whose methods are tools.

If a call fails, the model receives an error message, and the failure is counted. A tool never ends a conversation.
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

from turnwise.environments.tools.result import Answer, Result, Truncation, failed, read_result
from turnwise.environments.tools.schema import Arguments, FromSchema, WrongArguments, schema_of
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Failure, ToolCall, ToolOutcome, ToolSchema
from turnwise.user_code.calls import NO_ASYNC, deadline
from turnwise.user_code.calls import call as call_user_code
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.threads import run_in_thread

_log = logging.getLogger(__name__)
_logged: set[str] = set()
_MAX_LOGGED = 100
_FIRST_PAUSE, _MAX_PAUSE = 0.1, 5.0  # seconds before the first further attempt, doubled each time


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model can call."""

    name: str
    description: str
    arguments: Arguments
    """Checks the arguments of a call."""
    function: Callable[..., Any]
    schema: ToolSchema
    """The schema of the tool in the OpenAI format. It is passed to the chat template."""
    by_name: bool = True
    """True: the arguments are passed as keyword arguments. False: they are passed as one dictionary."""
    timeout: float = 30.0
    """Seconds for each attempt."""
    retries: int = 0
    """Further attempts after an exception. Not retried are a ValueError, which is a message of the tool to the model, and the
    failure of an agent that the tool has opened."""
    retry_timeouts: bool = False
    """Whether a call is also retried after a timeout."""
    thread: bool = False
    """Whether an async function runs in a thread with its own event loop, so that it may block."""
    truncation: Truncation | None = None
    """How a long result is shortened. None: `Tools` decides."""
    option: str = ""
    """The key of the recipe that names the tool, such as `tools.0`; empty: the environment brings the tool."""

    def __post_init__(self) -> None:
        if not (self.timeout > 0 and math.isfinite(self.timeout)):
            raise ConfigError(
                f"the tool {self.name!r} has timeout={self.timeout}; it must be a number of seconds above 0"
            )
        if self.retries < 0:
            raise ConfigError(f"the tool {self.name!r} has retries={self.retries}; it must be 0 or more")
        if self.retry_timeouts and not self.retries:
            raise ConfigError(
                f"retry_timeouts of the tool {self.name!r} has no effect without retries: set retries, or remove it"
            )
        if self.thread and not inspect.iscoroutinefunction(self.function):
            raise ConfigError(
                f"thread=True of the tool {self.name!r} has no effect: the function is not async, and sync functions always run "
                f"in threads; remove it"
            )

    @classmethod
    def of(
        cls, function: Callable[..., Any], *, timeout: float = 30.0, retries: int = 0, retry_timeouts: bool = False
    ) -> Tool:
        """Make a tool from a function with type hints and a docstring. `Args:` in Google style describes the parameters.

        Raises ConfigError if a parameter has no type, or a type that a model cannot write, or if a check of `requires` fails.
        """
        if not callable(function):
            raise ConfigError(f"a tool is made from a function, not from {function!r:.200}")
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
        """Make a tool from a schema in the OpenAI format and a function.

        Example::

            Tool.from_schema(
                {"type": "function", "function": {"name": "find", "description": "Find a page.", "parameters": {
                    "type": "object", "properties": {"words": {"type": "array", "items": {"type": "string"}}},
                    "required": ["words"]}}},
                find,
            )

        Raises ConfigError if the schema is invalid, or if the function does not accept the arguments of the schema.
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
        """Run a call and return its outcome, without images. Never raises."""
        return (await self.answer(call)).outcome

    async def answer(self, call: ToolCall) -> Answer:
        """Check the arguments, run the function (with retries), and return the answer for the model. Never raises."""
        started = time.perf_counter()
        attempt = 0
        while True:
            attempt += 1
            traceback = ""
            try:
                result = await self._attempt(call.arguments)
            except TimeoutError:  # our time limit; a TimeoutError of the function itself arrives as Failed
                kind, text, again = "timeout", f"{self.name} took longer than {self.timeout:g} s", self.retry_timeouts
            except Failed as failure:
                cause = failure.__cause__
                kind = "arguments" if isinstance(cause, WrongArguments) else "raised"
                text, again = _error_text(failure), not isinstance(cause, ValueError | WrongArguments)
                if failure.failure.kind == "agent":  # a further attempt would open another agent (rollout/episode.py)
                    again = False
                traceback = failure.failure.traceback if kind == "raised" else ""
                if again:  # an unexpected exception, not a message of the tool to the model
                    _log_once(self.name, failure.failure)
            else:
                return Answer.of(call, result, seconds=time.perf_counter() - started, attempts=attempt)
            if not again or attempt > self.retries:
                seconds = time.perf_counter() - started
                return failed(call, kind, text, seconds=seconds, attempts=attempt, traceback=traceback)
            await asyncio.sleep(min(_FIRST_PAUSE * 2 ** (attempt - 1), _MAX_PAUSE))

    async def _attempt(self, given: Mapping[str, Any]) -> Result:
        ways = f"{NO_ASYNC}, set {self.option}.thread: true" if self.option else None
        # the turns of agents that the tool asks have limits of their own
        async with deadline(self.timeout, agents=False):
            return await call_user_code(lambda: self._call(given), kind="tool", name=f"the tool {self.name}", ways=ways)

    async def _call(self, given: Mapping[str, Any]) -> Result:
        with boundary("tool"):
            if self.arguments.quick:
                arguments = self.arguments.check(given)
            else:  # in a thread, because checking arguments against such a schema can take long
                arguments = await run_in_thread(
                    lambda: self.arguments.check(given), name=f"{self.name}.arguments", kind="tool"
                )
            function = partial(self._own_arguments, arguments)
            if inspect.iscoroutinefunction(self.function) and not self.thread:
                return self._read(await function())
            # the result is converted in the thread too, because a result of many megabytes takes long
            result = await run_in_thread(lambda: self._finish(function()), name=self.name, kind="tool")
            return result if isinstance(result, Result) else self._read(await result)

    def _own_arguments(self, arguments: dict[str, Any]) -> Any:
        """Call the function. Its arguments are its own: the record and a further attempt have those that the model wrote."""
        own = copy_containers(arguments)
        return self.function(**own) if self.by_name else self.function(own)

    def _finish(self, result: Any) -> Result | Awaitable[Any]:
        if self.thread:
            result = asyncio.run(result)
        return result if inspect.isawaitable(result) else self._read(result)

    def _read(self, result: Any) -> Result:
        return read_result(result).shortened(self.truncation)


_requirements: weakref.WeakKeyDictionary[Callable[..., Any], Callable[[], object]] = weakref.WeakKeyDictionary()

F = TypeVar("F", bound=Callable[..., Any])


def requires(check: Callable[[], object]) -> Callable[[F], F]:
    """Decorates a function that needs something on this machine, such as a program.

    `check` is called when the function becomes a tool, at the start of a run. It raises ConfigError if something is missing.
    """

    def decorated(function: F) -> F:
        _requirements[function] = check
        return function

    return decorated


@dataclass(frozen=True, slots=True)
class Toolbox:
    """A class whose public methods are tools. Each conversation has its own instance, which holds its state.

    Methods whose name begins with `_` are not tools. `close`, sync or async, is not a tool either: it is called at the end of
    the conversation. Calls of one instance run one after the other, in the order in which the model wrote them.
    """

    make: Callable[[], Any]
    """Makes an instance."""
    name: str
    tools: tuple[Tool, ...]
    """One tool for each method. They belong to no instance, so they can be checked and shown, but not run."""
    closes: bool = False
    """Whether the class has a method `close`."""
    method: Callable[[Any, str], Callable[..., Any]] = getattr
    """Finds the function of a tool in an instance, by its name."""

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
        """Make tools from a class. `arguments` are the arguments of its constructor.

        Raises ConfigError if the constructor does not accept them, or if a method cannot be a tool.
        """
        arguments = dict(arguments or {})
        try:
            inspect.signature(kind).bind(**arguments)
        except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
            raise ConfigError(f"{kind.__name__} cannot be created with the arguments {arguments}: {error}") from None
        methods = _public_methods(kind)
        closes = methods.pop("close", None) is not None
        if not methods:
            raise ConfigError(
                f"the class {kind.__name__} has no public methods; each public method becomes a tool, so add at least one"
            )
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

    @classmethod
    def around(cls, instance: object) -> Toolbox:
        """Make tools from the public methods of an object, which whoever made it can read, and closes.

        Raises ConfigError if it has none, or if a method cannot be a tool.
        """
        kind = type(instance)
        methods = {name: method for name, method in _public_methods(kind).items() if name != "close"}
        if not methods:
            raise ConfigError(
                f"a tool is a function, a class or an object with public methods, a Tool or a Toolbox, not {instance!r:.200}"
            )
        tools = tuple(Tool.of(method) for method in methods.values())
        return cls(make=lambda: instance, name=kind.__name__, tools=tools)


def _public_methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The public methods by name, in the order of definition, base classes first. `self` is already bound."""
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
                methods.pop(name, None)  # a subclass may replace a method by something else
    return methods


def _parts(schema: ToolSchema) -> tuple[str, str, Mapping[str, Any]]:
    """Name, description and parameters of a schema in the OpenAI format."""
    example = '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}'
    function = schema.get("function") if isinstance(schema, Mapping) and schema.get("type") == "function" else None
    if not isinstance(function, Mapping):
        raise ConfigError(f"a tool's schema must have the form {example}; got {schema!r:.200}")
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
    """Raise ConfigError if the function cannot be called with all arguments that the schema allows."""
    signature = inspect.signature(function)
    takes = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes):
        for argument in parameters.get("properties", {}):
            if argument not in signature.parameters:
                raise ConfigError(
                    f"the schema of the tool {name!r} has the parameter {argument!r}, which its function does not "
                    f"have{nearest(argument, signature.parameters)}"
                )
    for parameter in takes:
        needed = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
            parameter.POSITIONAL_ONLY,
        )
        if needed and parameter.name not in parameters.get("required", []):
            raise ConfigError(
                f"the function of the tool {name!r} needs the argument {parameter.name!r}, but its schema does not "
                f"require it: add it to `required`, or give the parameter a default"
            )


def _log_once(name: str, failure: Failure) -> None:
    """Log an exception of a tool. Each exception is logged once."""
    key = f"{name}\n{failure.traceback or failure.message}"
    if key not in _logged and len(_logged) < _MAX_LOGGED:
        _logged.add(key)
        _log.warning("the tool %s raised %s\n%s", name, failure.message, failure.traceback)


def _error_text(failure: Failed) -> str:
    if isinstance(failure.__cause__, WrongArguments):
        return str(failure.__cause__)
    # a ValueError is a message to the model; for other exceptions the type is useful to the model
    return failure.failure.message.removeprefix("ValueError: ")
