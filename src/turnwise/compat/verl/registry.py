"""verl's functions that create interactions and tools from its two files (`verl.interactions.utils`, `verl.tools.utils`).

For code that calls these functions: they accept the same arguments and raise the same exceptions as in verl. For a recipe, the
module `files` reads the same files; it is stricter, and its errors name the place of a mistake.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from turnwise.compat.verl.function_tool import load_function_tools_from_path
from turnwise.compat.verl.names import verl_names
from turnwise.compat.verl.schemas import OpenAIFunctionToolSchema
from turnwise.compat.yaml_files import read_mapping, resolved
from turnwise.errors import ConfigError

__all__ = [
    "ToolType",
    "get_interaction_class",
    "get_tool_class",
    "initialize_interactions_from_config",
    "initialize_tools_from_config",
    "load_all_tools",
]


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
    for entry in _entries(interaction_config_file, "interaction"):
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
    for entry in _entries(tools_config_file, "tools"):
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


def _entries(file: str, key: str) -> list[Mapping[str, Any]]:
    tree, left = resolved(read_mapping(Path(file), what=f"the {key} file"))
    if left:
        raise ConfigError(f"{file}: {left[0]} has an interpolation that cannot be resolved: set the variable it names")
    entries = tree.get(key)
    if not isinstance(entries, list):
        raise ConfigError(f"{file}: `{key}` must be a list of {{class_name: ..., config: ...}}; it is {entries!r:.80}")
    return entries
