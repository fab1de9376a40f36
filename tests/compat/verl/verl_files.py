"""The files of a user of verl, written for one test, and the module with his classes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from turnwise.compat.verl import Conversations, verl_names

PLUGINS = Path(__file__).parent / "plugins"


def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`verl_user`, importable by its name for this test, with no events yet."""
    monkeypatch.syspath_prepend(str(PLUGINS))
    with verl_names():
        module = importlib.import_module("verl_user")
    module.EVENTS.clear()
    return module


def written(path: Path, tree: Any) -> str:
    """A YAML file; a text is written as it is."""
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree, sort_keys=False), encoding="utf-8")
    return str(path)


def schema(name: str, **parameters: str) -> dict[str, Any]:
    """A tool's schema whose parameters are all optional: `by="integer"`."""
    properties = {parameter: {"type": kind, "description": parameter} for parameter, kind in parameters.items()}
    function = {
        "name": name,
        "description": f"The tool {name}.",
        "parameters": {"type": "object", "properties": properties, "required": []},
    }
    return {"type": "function", "function": function}


def an_interaction(kind: str = "CounsellorInteraction", name: str | None = None, **config: Any) -> dict[str, Any]:
    """An entry of an interaction file."""
    named = {} if name is None else {"name": name}
    return {**named, "class_name": f"verl_user.{kind}", "config": config}


def a_tool(kind: str = "CounterTool", name: str = "count", parameters: str = "by", **config: Any) -> dict[str, Any]:
    """An entry of a tool file."""
    types = {"by": "integer", "what": "string", "": ""}
    return {
        "class_name": f"verl_user.{kind}",
        "config": {"type": "native", **config},
        "tool_schema": schema(name, **({parameters: types[parameters]} if parameters else {})),
    }


def set_up(folder: Path, *, interactions: list[Any] | None = None, tools: list[Any] | None = None, **more: Any) -> Any:
    """The environments of files with these entries."""
    return Conversations(
        interactions=written(folder / "interaction.yaml", {"interaction": interactions}) if interactions else None,
        tools=written(folder / "tools.yaml", {"tools": tools}) if tools else None,
        **more,
    )


def names(module: ModuleType) -> list[str]:
    """What happened, without its details."""
    return [event[0] for event in module.EVENTS]


def no_verl_left() -> bool:
    """Whether nothing of verl's is in `sys.modules`."""
    return not any(name.partition(".")[0] == "verl" for name in sys.modules)
