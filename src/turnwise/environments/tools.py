"""Tools as a layer in front of whatever answers the model otherwise.

A tool is a typed Python function. Its schema is made from the signature, its arguments are checked against it, and every
way in which a call can go wrong is told to the model as a tool message and counted: a tool never ends a conversation by
itself. This module knows nothing of how a model writes its calls; it gets them read.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, create_model

from turnwise.environments.environment import Environment, Once
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.types import Message, Opening, Reply, Row, ToolCall, ToolOutcome, ToolSchema, Turn

__all__ = ["Tool", "Tools"]

_LONGEST_ERROR = 1000  # characters of somebody else's exception that are told to the model


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str
    arguments: type[BaseModel]
    """Checks the arguments of a call; made from the signature."""
    function: Callable[..., Any]
    schema: ToolSchema
    """The tool in the OpenAI format, as the chat template is given it."""
    timeout: float = 30.0
    """Seconds."""

    @classmethod
    def of(cls, function: Callable[..., Any], *, timeout: float = 30.0) -> Tool:
        """Make a tool of a typed function with a docstring; `Args:` in Google style describes the parameters.

        Raises ConfigError if a parameter has no type, or is of a kind that a model cannot give.
        """
        name = getattr(function, "__name__", type(function).__name__)
        summary, described = _docstring(function)
        if not summary:
            raise ConfigError(f"the tool {name!r} has no docstring; its first paragraph is what the model is told")
        try:
            hints = get_type_hints(
                function if inspect.isroutine(function) else type(function).__call__, include_extras=True
            )
        except NameError as error:
            raise ConfigError(
                f"a type of the tool {name!r} cannot be found: {error}; import it in the tool's module"
            ) from None
        fields: dict[str, Any] = {}
        for number, parameter in enumerate(inspect.signature(function).parameters.values()):
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
                raise ConfigError(f"the tool {name!r} takes {parameter}; a model can only give named arguments")
            if parameter.name not in hints:
                raise ConfigError(f"the parameter {parameter.name!r} of the tool {name!r} has no type; annotate it")
            default = ... if parameter.default is parameter.empty else parameter.default
            # behind an alias, because a parameter may have a name that a pydantic model uses itself (`json`, `copy`)
            fields[f"argument_{number}"] = (
                hints[parameter.name],
                Field(default, alias=parameter.name, description=described.get(parameter.name)),
            )
        try:
            model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
            model.model_json_schema()  # now, and not in the first conversation
        except PydanticUserError as error:
            raise ConfigError(
                f"a parameter of the tool {name!r} has a type that a model cannot give: {error.message.splitlines()[0]} "
                f"Use numbers, texts, lists, Literal or pydantic models"
            ) from None
        parameters = _tidy(model.model_json_schema())
        parameters.pop("additionalProperties", None)  # it says what is refused; to the model it is noise
        parameters.setdefault("properties", {})
        schema = {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}
        return cls(name=name, description=summary, arguments=model, function=function, schema=schema, timeout=timeout)

    async def run(self, call: ToolCall) -> ToolOutcome:
        """Check the arguments, run the function, and tell what came of it. Never raises."""
        started = time.perf_counter()
        try:
            checked = self.arguments.model_validate(dict(call.arguments))
        except ValidationError as problem:
            return _failed(call, "arguments", self._explain(problem), started)
        arguments = {field.alias or name: getattr(checked, name) for name, field in type(checked).model_fields.items()}
        try:
            async with asyncio.timeout(self.timeout):
                with boundary("tool"):
                    content = _text(await self._call(arguments))
        except TimeoutError:  # ours: the function's own became a Failed at the boundary
            return _failed(call, "timeout", f"{self.name} took longer than {self.timeout:g} s", started)
        except Failed as failure:
            return _failed(call, "raised", _message(failure), started)
        return ToolOutcome(
            id=call.id,
            name=call.name,
            arguments=call.arguments,
            content=_whole(content),
            seconds=time.perf_counter() - started,
        )

    async def _call(self, arguments: dict[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.function):
            return await self.function(**arguments)
        result = await _in_thread(self.function, arguments)
        return await result if inspect.isawaitable(result) else result

    def _explain(self, problem: ValidationError) -> str:
        names = [field.alias or name for name, field in self.arguments.model_fields.items()]
        lines: list[str] = []
        for error in problem.errors(include_url=False):
            where = ".".join(str(part) for part in error["loc"]) or "arguments"
            if error["type"] == "extra_forbidden":
                lines.append(f"{self.name} has no argument {where!r}{nearest(where, names)}")
            elif error["type"] == "missing":
                lines.append(f"the argument {where!r} is missing")
            else:
                lines.append(f"{where}: {error['msg']}, got {error['input']!r}")
        return "; ".join(lines)


class Tools:
    """A layer: turns that call tools are answered by the tools, all others by `then`.

    Example: a calculator in front of a user who checks the answer::

        make_environment = lambda: Tools([calculator], then=checked_answer())
    """

    def __init__(self, tools: Sequence[Tool | Callable[..., Any]], *, then: Environment | None = None) -> None:
        ready = [tool if isinstance(tool, Tool) else Tool.of(tool) for tool in tools]
        if isinstance(then, Tools):  # a layer in front of a layer is one layer: each call finds its tool
            ready, then = [*then._tools.values(), *ready], then._then
        self._tools = {tool.name: tool for tool in ready}
        if len(self._tools) < len(ready):
            names = [tool.name for tool in ready]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigError(f"two tools have the name {twice!r}; a model could not tell them apart: rename one")
        self._then = then if then is not None else Once()
        self._offered_behind: set[str] = set()
        """Names of tools that the environment behind offers, and answers, itself."""

    async def begin(self, row: Row) -> Opening:
        opening = await self._then.begin(row)
        self._offered_behind = {tool["function"]["name"] for tool in opening.tools}
        return Opening(
            messages=opening.messages, tools=(*opening.tools, *(tool.schema for tool in self._tools.values()))
        )

    async def step(self, turn: Turn) -> Reply:
        names = {call.name for call in turn.calls if call.error is None}
        if not turn.calls or (names and names <= self._offered_behind):
            return await self._then.step(turn)
        outcomes = tuple(await asyncio.gather(*(self._run(call) for call in turn.calls)))
        return Reply(messages=[_message_of(outcome) for outcome in outcomes], outcomes=outcomes)

    async def close(self) -> None:
        await self._then.close()

    async def _run(self, call: ToolCall) -> ToolOutcome:
        if call.error is not None:
            return _failed(call, "malformed", call.error, time.perf_counter())
        tool = self._tools.get(call.name)
        if tool is None:
            have = ", ".join(sorted(self._tools))
            text = f"there is no tool {call.name!r}{nearest(call.name, self._tools)} (the tools are: {have})"
            return _failed(call, "unknown_tool", text, time.perf_counter())
        return await tool.run(call)


def _message_of(outcome: ToolOutcome) -> Message:
    return {"role": "tool", "tool_call_id": outcome.id, "name": outcome.name, "content": outcome.content}


def _failed(call: ToolCall, kind: str, text: str, started: float) -> ToolOutcome:
    return ToolOutcome(
        id=call.id,
        name=call.name,
        arguments=call.arguments,
        content=_whole(f"Error: {text}"),
        error=kind,
        seconds=time.perf_counter() - started,
    )


def _message(failure: Failed) -> str:
    # a ValueError is how a tool talks to the model; of anything else the type helps
    text = failure.failure.message.removeprefix("ValueError: ")
    return text if len(text) <= _LONGEST_ERROR else text[:_LONGEST_ERROR] + " ..."


def _whole(text: str) -> str:
    # half of a surrogate pair, which a model can write as JSON, is no text that could be encoded
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, bytes):
        return result.decode("utf-8", errors="replace")
    return json.dumps(result, ensure_ascii=False, default=str)


async def _in_thread(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run a sync function beside the event loop, in a daemon thread of its own.

    Not an executor: a call that hangs would take one of its workers for good, and hold up the interpreter's exit.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # timed out or cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            with boundary("tool"):
                result = function(**arguments)
        except Failed as problem:
            error = problem
        except BaseException as problem:  # on the loop it would end the run, and in a thread nobody would hear of it
            error = RuntimeError(f"{type(problem).__name__}: {problem}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, name=f"tool-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await future


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The first paragraph of a docstring, and what its `Args:` section says of each parameter."""
    text = inspect.getdoc(function) or ""
    summary = " ".join(re.split(r"\n\n|\n(?=Args:\n)", text)[0].split())
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.MULTILINE | re.DOTALL)
    described: dict[str, str] = {}
    for entry in re.split(r"\n(?=    \S)", section.group(1)) if section else []:
        matched = re.match(r"\s*(\w+)\s*(?:\([^)]*\))?:\s*(.*)", entry, re.DOTALL)
        if matched:
            described[matched.group(1)] = " ".join(matched.group(2).split())
    return summary, described


def _tidy(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema in the order that people write, without the titles that pydantic invents from names."""
    first = ("type", "description")

    def clean(node: Any, *, names: bool = False) -> Any:
        if isinstance(node, list):
            return [clean(item) for item in node]
        if not isinstance(node, dict):
            return node
        if names:  # the keys are somebody's names, and one of them may be `title` or `type`
            return {key: clean(value) for key, value in node.items()}
        keys = [*(key for key in first if key in node), *(key for key in node if key not in (*first, "title"))]
        return {
            key: node[key] if key == "default" else clean(node[key], names=key in ("properties", "$defs"))
            for key in keys
        }

    return clean(schema)
