"""verl's `@function_tool`: a function with type hints and a docstring, registered as a tool (`verl.tools.function_tool`).

The functions of a file are offered to the model like all other tools: arguments are checked, calls have a time limit, and errors
are told to the model. The return value has verl's forms: a text, a mapping, a `ToolResponse`, or a tuple of up to three with a
reward and metrics; any other value becomes its text.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.compat.verl.calls import call
from turnwise.compat.verl.names import verl_names
from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema, ToolResponse, read_response, read_schema
from turnwise.environments.tools import result as tool_result
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError
from turnwise.user_code.object_references import load_file

__all__ = [
    "FUNCTION_TOOL_REGISTRY",
    "FunctionTool",
    "function_tool",
    "get_function_tool",
    "load_function_tools_from_path",
    "normalize_function_tool_return",
    "read_function_tools",
    "tool_of",
]


@dataclass
class FunctionTool:
    """A registered function."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: dict[str, Any]) -> Any:
        """Call the function; a sync function runs in a thread."""
        return await self.fn(**parameters) if self.is_async else await asyncio.to_thread(self.fn, **parameters)


FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""All registered functions by the names of their tools."""
_files: dict[str, list[FunctionTool]] = {}
"""The functions of each file that was loaded."""


def function_tool(name: Any = None, *, schema: OpenAIFunctionToolSchema | dict[str, Any] | None = None) -> Any:
    """Register a function as a tool: `@function_tool`, or `@function_tool("name")`.

    The schema is inferred from the type hints and the docstring (Google style), as `transformers.utils.get_json_schema` does it,
    unless `schema` is given. Raises ValueError for `*args`, for a name that another function has, and for a missing type or
    description.
    """

    def register(fn: Callable[..., Any], called: str | None) -> Callable[..., Any]:
        tool = called or fn.__name__
        own = _inferred(fn, tool) if schema is None else read_schema(schema)
        if own is None:
            raise ValueError(f"@function_tool {tool!r}: schema is {schema!r:.80}; give a schema in the OpenAI format")
        before = FUNCTION_TOOL_REGISTRY.get(tool)
        if before is not None and before.fn is not fn:
            raise ValueError(
                f"@function_tool {tool!r} of {fn.__module__}.{fn.__qualname__}: "
                f"{before.fn.__module__}.{before.fn.__qualname__} has "
                f"this name already; choose another name"
            )
        FUNCTION_TOOL_REGISTRY[tool] = FunctionTool(tool, fn, own, inspect.iscoroutinefunction(fn))
        return fn

    if callable(name):
        return register(name, None)
    return lambda fn: register(fn, name)


def get_function_tool(name: str) -> FunctionTool:
    """The registered function of this name. Raises KeyError."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"there is no @function_tool {name!r}; there are: {', '.join(sorted(FUNCTION_TOOL_REGISTRY))}")
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """The functions that a Python file registers; the file is executed once. Raises ConfigError."""
    place = os.path.abspath(os.path.expanduser(path))
    if place not in _files:
        before = dict(FUNCTION_TOOL_REGISTRY)
        with verl_names():
            load_file(Path(place), key="environment.arguments.function_tools")
        _files[place] = [tool for name, tool in sorted(FUNCTION_TOOL_REGISTRY.items()) if before.get(name) is not tool]
    return list(_files[place])


def read_function_tools(path: str, *, timeout: float) -> dict[str, tuple[FunctionTool, Tool]]:
    """The functions of a file, each with its tool, by name. `timeout` is the time limit of a call in seconds.

    Raises ConfigError.
    """
    found = load_function_tools_from_path(path)
    if not found:
        raise ConfigError(
            f"environment.arguments.function_tools: {path} registers no function: write @function_tool above one"
        )
    return {one.name: (one, tool_of(one, timeout=timeout)) for one in found}


def tool_of(registered: FunctionTool, *, timeout: float) -> Tool:
    """The tool of a registered function."""

    async def run(arguments: dict[str, Any]) -> Any:
        value = await call(registered.fn, keywords=arguments, name=registered.name, kind="tool")
        response, reward, info = normalize_function_tool_return(value)
        answer = tool_result.ToolResponse(response.text, response.image or None, response.video or None)
        return answer, reward, {registered.name: info} if info else {}

    schema = registered.tool_schema.model_dump(exclude_unset=True)
    return Tool.from_schema(schema, run, by_name=False, timeout=timeout)


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """The return value of a function as (response, reward, metrics). Raises TypeError for a tuple of another length."""
    if not isinstance(ret, tuple):
        return _response(ret), 0.0, {}
    if not 1 <= len(ret) <= 3:
        raise TypeError(
            f"a @function_tool returned a tuple of {len(ret)} values: return (response,), (response, reward) or (response, "
            f"reward, metrics)"
        )
    response, reward, metrics = (*ret, None, None)[:3]
    return _response(response), 0.0 if reward is None else float(reward), {} if metrics is None else dict(metrics)


def _response(value: Any) -> ToolResponse:
    if (response := read_response(value)) is not None:
        return response
    if isinstance(value, Mapping):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False))
    return ToolResponse(text=value if isinstance(value, str) else str(value))


def _inferred(fn: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    parameters = inspect.signature(fn).parameters.values()
    variadic = [one.name for one in parameters if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if variadic:
        raise ValueError(
            f"@function_tool {name!r}: {fn.__module__}.{fn.__qualname__} takes {', '.join(variadic)}, which a schema cannot "
            f"describe: name each parameter"
        )
    from transformers.utils.chat_template_utils import get_json_schema

    schema = get_json_schema(fn)
    return OpenAIFunctionToolSchema.model_validate({**schema, "function": {**schema["function"], "name": name}})
