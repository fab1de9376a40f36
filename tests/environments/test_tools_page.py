"""The page about tools says what is true: its examples run, and its recipe is one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml

from support.conversations import Says, a_row, call, hold
from turnwise import assembly
from turnwise.environments.mcp import McpServers
from turnwise.options.schema import Config, ToolCallsSection, ToolUse

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The page's examples."""
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_with_a_class_runs(tmp_path: Path) -> None:
    (code,) = [block for block in blocks("python") if block.startswith("# shop.py")]
    (recipe,) = [block for block in blocks("yaml") if "shop.py:price" in block]
    (tmp_path / "shop.py").write_text(code)
    parts = yaml.safe_load(recipe.replace("shop.py", str(tmp_path / "shop.py")))
    make = assembly.environment_factory(
        Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, **parts})
    )
    engine = Says(
        call("price", '{"item": "apple"}') + call("buy", '{"item": "apple", "count": 9}'),
        call("buy", '{"item": "pear", "count": 2}') + call("price", '{"item": "plum"}'),
        "#### 1",
    )
    trajectory = hold(engine, make, row=a_row(answer=1))
    assert [[one.content for one in turn.outcomes] for turn in trajectory.turns] == [
        ["0.5", "0.50 are left"],
        ["Error: only 0.50 are left", "Error: KeyError: plum"],
        [],
    ]
    assert (trajectory.stop, trajectory.error) == ("done", None)


def test_the_file_of_servers_is_one(tmp_path: Path) -> None:
    (example,) = blocks("json")
    (tmp_path / "mcp.json").write_text(example)
    McpServers.from_file(tmp_path / "mcp.json").close()
    assert sorted(json.loads(example)["mcpServers"]) == ["files", "search"]


def test_the_table_of_options_names_them_all() -> None:
    named = set(re.findall(r"^\| `(tools\.N\.\w+|tool_calls\.\w+)`", PAGE, re.MULTILINE))
    assert named == {f"tools.N.{name}" for name in ToolUse.model_fields} | {
        f"tool_calls.{name}" for name in ToolCallsSection.model_fields
    }
