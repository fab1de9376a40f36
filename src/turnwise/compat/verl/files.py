"""Reads verl's two files: the interactions that answer the model (`interaction:`), and its tools (`tools:`).

A `class_name` is `package.module.Class` (importable from the working directory, or one of verl's names), or
`path/to/file.py:Class`. Errors name the place of a mistake.

For code that calls them, the functions of `verl.interactions.utils` and `verl.tools.utils` are here too. They accept the same
arguments and raise the same exceptions as in verl; recipes do not use them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from turnwise.compat.conversion import read_mapping, resolved
from turnwise.compat.verl.base import BaseInteraction, BaseTool, OpenAIFunctionToolSchema, defines, read_schema
from turnwise.compat.verl.names import NAMES, ours, verl_names
from turnwise.compat.verl.tools import RawServers, VerlTool, connect, load_function_tools_from_path
from turnwise.environments.mcp import McpServers
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.user_code.references import resolve

_SLACK = 5.0  # seconds; added to a tool's own `timeout` for the time limit of a call


def read_interactions(path: str | Path) -> dict[str, Any]:
    """The interactions of a file, by name.

    Example::

        interaction:
          - name: gsm8k          # default: the class's name in small letters, without `Interaction`
            class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
            config: {}

    Raises ConfigError.
    """
    path = Path(path)
    interactions: dict[str, Any] = {}
    for entry, place in _entries(path, "interaction", ("name", "class_name", "config")):
        kind = load_class(entry["class_name"], key=f"{place}.class_name")
        _refuse_without(kind, ("start_interaction", "generate_response", "finalize_interaction"), place)
        if not defines(kind, "generate_response", BaseInteraction):
            raise ConfigError(f"{place}: {kind.__name__} does not define generate_response: define it")
        name = entry.get("name") or kind.__name__.removesuffix("Interaction").lower() or "base"
        if name in interactions:
            raise ConfigError(
                f"{place}: two interactions have the name {name!r}; rows select an interaction by name: rename one"
            )
        interactions[name] = _created(kind, place, {**_mapping(entry, "config", place), "name": name})
    return interactions


def read_tools(path: str | Path, *, timeout: float) -> tuple[list[VerlTool], list[McpServers]]:
    """The tools of a file, and their connected MCP servers, which the caller must close.

    `timeout` is the time limit of a call in seconds, unless a tool's own `timeout` is longer. Raises ConfigError.
    """
    path = Path(path)
    tools: list[VerlTool] = []
    servers: list[McpServers] = []
    try:
        for entry, place in _entries(path, "tools", ("class_name", "config", "tool_schema", "mcp")):
            kind = load_class(entry["class_name"], key=f"{place}.class_name")
            _refuse_without(kind, ("create", "execute", "calc_reward", "release"), place)
            if not defines(kind, "execute", BaseTool):
                raise ConfigError(f"{place}: {kind.__name__} does not define execute: define it")
            config = _mapping(entry, "config", place)
            if _is_mcp(entry, config, kind, place):
                entry_tools, server = _mcp_tools(entry, config, kind, place, path, timeout)
                servers.append(server)
            else:
                entry_tools = [_tool(kind, config, _schema(entry.get("tool_schema"), place), place, timeout)]
            for tool in entry_tools:
                if any(tool.name == other.name for other in tools):
                    raise ConfigError(
                        f"{place}: two tools have the name {tool.name!r}; tool names must be unique: rename one of them"
                    )
                tools.append(tool)
    except BaseException:
        for server in servers:
            server.close()
        raise
    return tools, servers


def load_class(name: Any, *, key: str) -> type:
    """The class of a `class_name`. Raises ConfigError."""
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{key} is {name!r}; write package.module.Class or path/to/file.py:Class")
    working_directory = os.getcwd()
    if working_directory not in sys.path and "" not in sys.path:
        sys.path.append(working_directory)  # `python -m verl...` also finds modules there
    module, _, attribute = name.rpartition("." if ":" not in name else ":")
    loaded: Any = ours(module, attribute)  # also where an installed verl has a class of this name
    if module.partition(".")[0] == "verl" and (loaded is not None or not _installed()):
        if loaded is None:
            known = [f"{home}.{place.rpartition(':')[2]}" for home, places in NAMES.items() for place in places]
            classes = [
                name
                for name in known
                if name.rpartition(".")[2][:1].isupper() and not name.startswith("verl.tools.sch")
            ]
            raise ConfigError(
                f"{key}: {name} is a class of verl that turnwise does not have{nearest(name, classes)}; it has: "
                f"{', '.join(sorted(classes))}"
            )
    else:
        with verl_names():
            loaded = resolve(f"{module}:{attribute}", key=key)
    if not isinstance(loaded, type):
        raise ConfigError(f"{key}: {name} is of type {type(loaded).__name__}; it must be a class")
    return loaded


def _installed() -> bool:
    from importlib.util import find_spec

    return find_spec("verl") is not None


def _entries(path: Path, key: str, known: Sequence[str]) -> list[tuple[Mapping[str, Any], str]]:
    """The entries of the list under `key`, each with its place for error messages."""
    tree, left = resolved(read_mapping(path, what=f"the {key} file"))
    if left:
        raise ConfigError(f"{path}: {left[0]} has an interpolation that cannot be resolved: set the variable it names")
    for name in tree:
        if name != key:
            raise ConfigError(f"{path} has a key {name!r}{nearest(name, [key])}; it must contain only `{key}:`")
    entries = tree.get(key)
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: `{key}` must be a list of {{class_name: ..., config: ...}}; it is {entries!r:.80}")
    listed: list[tuple[Mapping[str, Any], str]] = []
    for number, entry in enumerate(entries):
        place = f"{path}: {key}[{number}]"
        if not isinstance(entry, Mapping):
            raise ConfigError(f"{place} must be a mapping with class_name; it is {entry!r:.80}")
        for name in entry:
            if name not in known:
                raise ConfigError(f"{place} has a key {name!r}{nearest(name, known)}; it may have: {', '.join(known)}")
        if "class_name" not in entry:
            raise ConfigError(f"{place} has no class_name")
        listed.append((entry, place))
    return listed


def _mapping(entry: Mapping[str, Any], key: str, place: str) -> dict[str, Any]:
    value = entry.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{place}.{key} must be a mapping; it is {value!r:.80}")
    return dict(value)


def _refuse_without(kind: type, methods: Sequence[str], place: str) -> None:
    missing = [method for method in methods if not callable(getattr(kind, method, None))]
    if missing:
        raise ConfigError(f"{place}: the class {kind.__name__} has no method {', '.join(missing)}")


def _created(kind: type, place: str, *arguments: Any) -> Any:
    try:
        with boundary("class"), verl_names():
            return kind(*arguments)
    except Failed as failed:
        raise ConfigError(f"{place}: {kind.__name__} cannot be created: {failed.failure.message}") from failed


def _schema(schema: Any, place: str) -> OpenAIFunctionToolSchema | None:
    try:
        tool_schema = read_schema(schema)
        if tool_schema is None and schema is not None:
            raise ConfigError(f"{place}.tool_schema is not a schema of a tool: it is {schema!r:.80}")
        return tool_schema
    except ValidationError as problem:
        lines = [f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in problem.errors(include_url=False)]
        raise ConfigError(f"{place}.tool_schema is not a schema of a tool: {'; '.join(lines)}") from None


def _tool(
    kind: type, config: dict[str, Any], schema: OpenAIFunctionToolSchema | None, place: str, timeout: float
) -> VerlTool:
    instance = _created(kind, place, config, schema)
    describe = getattr(instance, "get_openai_tool_schema", None)
    if callable(describe):  # a method of verl's base class, or of a copy of it
        schema = _schema(describe(), place)
    if schema is None:
        raise ConfigError(
            f"{place} has no tool_schema, and {kind.__name__}.get_openai_tool_schema returns none: write one of the two"
        )

    async def unbound() -> None:
        raise RuntimeError("the tool was called outside of a conversation")

    try:
        tool = Tool.from_schema(
            schema.model_dump(exclude_unset=True), unbound, by_name=False, timeout=_seconds(config, timeout)
        )
    except ConfigError as error:
        raise ConfigError(f"{place}.tool_schema: {error}") from None
    return VerlTool(instance, tool)


def _seconds(config: Mapping[str, Any], timeout: float) -> float:
    own = [config.get(name) for name in ("timeout", "default_timeout")]
    return max([timeout, *(value + _SLACK for value in own if isinstance(value, int | float))])


def _is_mcp(entry: Mapping[str, Any], config: Mapping[str, Any], kind: type, place: str) -> bool:
    type_ = config.get("type", "mcp" if "mcp" in entry else "native")
    if type_ not in ("native", "mcp"):
        raise ConfigError(f"{place}.config.type is {type_!r}; it must be native or mcp")
    if type_ == "native":
        if "mcp" in entry:
            raise ConfigError(f"{place}: mcp has no effect with config.type=native; write type: mcp")
        return False
    if entry.get("tool_schema") is not None:
        raise ConfigError(
            f"{place}: tool_schema has no effect with config.type=mcp; the server defines its tools: remove tool_schema"
        )
    if not callable(
        getattr(kind, "_parse_tool_result", None)
    ):  # not isinstance: the class may derive from a copy of verl's class
        raise ConfigError(f"{place}: {kind.__name__} must be a subclass of verl.tools.mcp_base_tool.MCPBaseTool")
    return True


def _mcp_tools(
    entry: Mapping[str, Any], config: dict[str, Any], kind: type, place: str, path: Path, timeout: float
) -> tuple[list[VerlTool], McpServers]:
    options = _mapping(entry, "mcp", place)
    known = ("mcp_servers_config_path", "tool_selected_list")
    for name in options:
        if name not in known:
            raise ConfigError(f"{place}.mcp has a key {name!r}{nearest(name, known)}; it may have: {', '.join(known)}")
    file = options.get("mcp_servers_config_path")
    if not isinstance(file, str):
        raise ConfigError(f"{place}.mcp needs mcp_servers_config_path: a JSON file with mcpServers")
    selected = options.get("tool_selected_list") or None  # verl's documentation writes `{}` for all tools
    if selected is not None and not (isinstance(selected, list) and all(isinstance(name, str) for name in selected)):
        raise ConfigError(f"{place}.mcp.tool_selected_list must be a list of names; it is {selected!r:.80}")
    beside = path.parent / file
    servers = RawServers.from_file(beside if not os.path.exists(file) and os.path.exists(beside) else file)
    tools: list[VerlTool] = []
    try:
        for listed in servers.tools(selected, timeout=_seconds(config, timeout)):
            instance = _created(kind, place, config, _schema(listed.schema, place))
            connect(instance, listed.function)
            tools.append(VerlTool(instance, listed))
    except BaseException:
        servers.close()
        raise
    return tools, servers


class ToolType(Enum):
    """Whether a tool runs in its class or on an MCP server."""

    NATIVE = "native"
    MCP = "mcp"


def get_interaction_class(cls_name: str) -> Any:
    """The class that `package.module.Class` names. Raises ModuleNotFoundError, AttributeError."""
    module, _, name = cls_name.rpartition(".")
    with verl_names():
        return getattr(importlib.import_module(module), name)


def get_tool_class(cls_name: str) -> Any:
    """The class that `package.module.Class` names. Raises ModuleNotFoundError, AttributeError."""
    return get_interaction_class(cls_name)


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, Any]:
    """The interactions of a file by name: the entry's name, or the class's name in small letters without `Interaction`.

    Raises ValueError if two interactions have the same name.
    """
    interactions: dict[str, Any] = {}
    for entry in _entries_of_file(interaction_config_file, "interaction"):
        kind = get_interaction_class(entry["class_name"])
        name = entry.get("name")
        if name is None:
            name = entry["class_name"].rpartition(".")[2].removesuffix("Interaction").lower()
        if name in interactions:
            raise ValueError(f"Duplicate interaction name '{name}' found in {interaction_config_file}: rename one")
        with verl_names():
            interactions[name] = kind(config={**(entry.get("config") or {}), "name": name})
    return interactions


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The tools of a file.

    Raises ConfigError for tools of MCP servers, which belong to a run: name the file in a recipe.
    """
    tools: list[Any] = []
    for entry in _entries_of_file(tools_config_file, "tools"):
        config = dict(entry.get("config") or {})
        if ToolType(config.get("type", "native")) is ToolType.MCP:
            raise ConfigError(
                f"{tools_config_file}: {entry['class_name']} is a tool of an MCP server, which only a run can connect: "
                f"name the file in a recipe, environment.arguments.tools"
            )
        kind = get_tool_class(entry["class_name"])
        schema = entry.get("tool_schema")
        with verl_names():
            tools.append(
                kind(
                    config=config,
                    tool_schema=None if schema is None else OpenAIFunctionToolSchema.model_validate(schema),
                )
            )
    return tools


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """The tools of a file and the functions of a Python file. Raises ValueError if two have the same name."""
    tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    functions = load_function_tools_from_path(function_tool_path) if function_tool_path else []
    names = [tool.name for tool in (*tools, *functions)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"two tools of {tool_config_path} and {function_tool_path} have the name {twice!r}: rename one of them"
        )
    return [*tools, *functions]


def _entries_of_file(file: str, key: str) -> list[Mapping[str, Any]]:
    tree, left = resolved(read_mapping(Path(file), what=f"the {key} file"))
    if left:
        raise ConfigError(f"{file}: {left[0]} has an interpolation that cannot be resolved: set the variable it names")
    entries = tree.get(key)
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: `{key}` must be a list of {{class_name: ..., config: ...}}; it is {entries!r:.80}")
    return entries
