"""The tools of a recipe: functions, classes and MCP servers, and the options that hold for all of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.build.trial import close_tried
from turnwise.config.schema import Config, ToolUse, changed_options
from turnwise.environments.mcp.servers import McpServers
from turnwise.environments.tools.toolbox import Tool, Toolbox, Truncation
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import ToolSchema
from turnwise.user_code.object_references import resolve

__all__ = ["mcp_servers", "refuse_unused_tool_options", "tool", "tool_schemas", "truncation"]


def tool(use: ToolUse, *, key: str) -> Tool | Toolbox:
    """The tool that a recipe names. A class is a toolbox: one instance is built to check that construction works.

    Raises ConfigError.
    """
    target = resolve(use.use, key=key)
    options = {name: value for name, value in use.model_dump(exclude={"use", "arguments"}).items() if value is not None}
    if isinstance(target, type):
        return _toolbox(target, use.arguments, options, key=key)
    if use.arguments:
        raise ConfigError(
            f"{key}: {use.use} is a {type(target).__name__}, and only classes take arguments in a recipe (the model gives those "
            f"of a function): remove `arguments`"
        )
    if isinstance(target, Tool):
        return dataclasses.replace(target, **options)
    if isinstance(target, Toolbox):
        return dataclasses.replace(
            target, tools=tuple(dataclasses.replace(method, **options) for method in target.tools)
        )
    if not callable(target):
        raise ConfigError(
            f"{key}: {use.use} is a {type(target).__name__} and cannot be called; give a function or a class"
        )
    return Tool.of(target, **options)


def tool_schemas(config: Config) -> list[ToolSchema]:
    """The schemas of the tools that the recipe names, without those of MCP servers. Nothing is built. Raises ConfigError."""
    schemas: list[ToolSchema] = []
    for number, use in enumerate(config.tools):
        target = resolve(use.use, key=f"tools.{number}")
        if isinstance(target, Toolbox):
            schemas += [method.schema for method in target.tools]
        elif isinstance(target, type):
            schemas += [method.schema for method in Toolbox.of(target, arguments=use.arguments).tools]
        elif isinstance(target, Tool) or callable(target):
            schemas.append((target if isinstance(target, Tool) else Tool.of(target)).schema)
    return schemas


def _toolbox(target: type, arguments: dict[str, Any], options: dict[str, Any], *, key: str) -> Toolbox:
    thread = bool(options.pop("thread", False))
    box = Toolbox.of(target, arguments=arguments, **options)
    if thread:
        box = _threaded(box)
    _check_construction(box, key=key)
    return box


def _threaded(box: Toolbox) -> Toolbox:
    """The toolbox with its async methods in threads. Raises ConfigError if it has no async method."""
    tools = [
        dataclasses.replace(method, thread=True) if inspect.iscoroutinefunction(method.function) else method
        for method in box.tools
    ]
    if not any(method.thread for method in tools):
        raise ConfigError(
            f"thread=True of {box.name} has no effect: all its methods are sync, and sync methods always run in threads; remove "
            f"it"
        )
    return dataclasses.replace(box, tools=tuple(tools))


def _check_construction(box: Toolbox, *, key: str) -> None:
    """Build one instance and close it, so that an error is raised before the first conversation. Raises ConfigError."""
    try:
        with boundary("tool"):
            instance = box.make()
            if box.closes:
                close_tried(instance.close)
    except Failed as failed:
        raise ConfigError(f"{key}: {box.name} cannot be created: {failed.failure.message}") from failed


def mcp_servers(config: Config) -> McpServers | None:
    """The MCP servers of the recipe, not started yet; None if it names no servers. Raises ConfigError."""
    options = config.mcp
    if options.servers is None:
        return None
    kind = resolve(options.use, key="mcp.use")
    if not (isinstance(kind, type) and issubclass(kind, McpServers)):
        raise ConfigError(f"mcp.use: {options.use} must be a subclass of turnwise.environments.mcp:McpServers")
    return kind.from_file(options.servers, start_timeout=options.start_timeout)


def truncation(config: Config, encode: Callable[[str], Sequence[int]] | None) -> Truncation | None:
    """The truncation of long tool responses; None keeps the default. `encode` gives a text's token ids."""
    options = config.tool_calls
    if options.max_tool_response_length is None:
        return None
    return Truncation(
        options.max_tool_response_length,
        side=options.tool_response_truncate_side,
        unit=options.tool_response_unit,
        encode=encode,
    )


def refuse_unused_tool_options(config: Config, *, environment_has_tools: bool) -> None:
    """Refuse options of tools that have no effect, such as a truncation without any tool. Raises ConfigError."""
    mcp, calls = changed_options(config.mcp), changed_options(config.tool_calls)
    if config.environment.use != Config.model_fields["environment"].default.use:
        calls = [name for name in calls if name != "describe"]  # other environments may offer tools in their openings
    if mcp and config.mcp.servers is None:
        raise ConfigError(f"mcp.{mcp[0]} has no effect without mcp.servers: set mcp.servers, or remove it")
    if calls and not config.tools and config.mcp.servers is None and not environment_has_tools:
        raise ConfigError(f"tool_calls.{calls[0]} has no effect without tools: set tools or mcp.servers, or remove it")
    of_truncation = [name for name in calls if name.startswith("tool_response_")]
    if of_truncation and config.tool_calls.max_tool_response_length is None:
        raise ConfigError(
            f"tool_calls.{of_truncation[0]} has no effect without tool_calls.max_tool_response_length: set that option, or "
            f"remove this one"
        )
