"""Tools in recipes: functions, classes, ready-made ones and MCP servers, and what is refused of their options."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.conversations import RENDERER, Says, call, hold
from support.tiny import save_model, save_rows
from turnwise import assembly
from turnwise.assembly.conversations import tool as tool_of
from turnwise.config.recipe import load
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.record.writer import write_config
from turnwise.runs.sampling_only import collect
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train

SCRIPT = str(Path(__file__).parent / "support" / "mcp_server.py")

USER = '''
from turnwise.environments.mcp import McpServers
from turnwise.environments.tools.toolbox import Tool, Toolbox, ToolResponse

class Bank:
    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def deposit(self, amount: int) -> str:
        """Put money in."""
        self.balance += amount
        return f"there are {self.balance} now"

def long() -> str:
    """Talk."""
    return "0123456789" * 3

SCHEMA = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {
    "words": {"type": "array", "items": {"type": "string"}}}, "required": ["words"]}}}
find = Tool.from_schema(SCHEMA, lambda words: "+".join(words), timeout=7.0)
box = Toolbox.of(Bank, arguments={"balance": 10})

class Short(McpServers):
    def parse_result(self, content):
        return ToolResponse(text=content[0].text[:3])

class Other: ...
'''


@pytest.fixture
def user(tmp_path: Path) -> str:
    """The path of a user's file."""
    (tmp_path / "mine.py").write_text(USER)
    return str(tmp_path / "mine.py")


@pytest.fixture
def mcp(tmp_path: Path) -> str:
    """A file that names a server which leaves its process id in `pid`."""
    code = (
        f"import os, runpy, sys; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); "
        f"sys.argv = ['server', 'stdio']; runpy.run_path({SCRIPT!r}, run_name='__main__')"
    )
    path = tmp_path / "mcp.json"
    path.write_text(json.dumps({"mcpServers": {"tests": {"command": sys.executable, "args": ["-c", code]}}}))
    return str(path)


def a_config(**parts: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **parts})


def gone(path: Path) -> bool:
    """Whether the server that left its process id there has ended."""
    for _ in range(200):
        try:
            os.kill(int((path / "pid").read_text()), 0)
        except ProcessLookupError:
            return True
        time.sleep(0.01)
    return False


def outcomes(config: Config, *said: str, **options: Any) -> list[list[str]]:
    """What the recipe's tools answer, turn by turn."""
    make = assembly.environment_factory(config, **options)
    try:
        trajectory = hold(Says(*said, "done"), make)
    finally:
        asyncio.run(make.aclose())
    assert (trajectory.stop, trajectory.error) == ("done", None)
    return [[one.content for one in turn.outcomes] for turn in trajectory.turns[:-1]]


def test_classes_functions_and_ready_made_tools_are_named_alike(user: str) -> None:
    config = a_config(
        tools=[{"use": f"{user}:Bank", "arguments": {"balance": 5}, "retries": 1}, f"{user}:long", f"{user}:find"]
    )
    told = outcomes(config, call("deposit", '{"amount": 2}') + call("find", '{"words": ["a", "b"]}'), call("long"))
    assert told == [["there are 7 now", "a+b"], ["0123456789" * 3]]
    assert outcomes(a_config(tools=[f"{user}:box"]), call("deposit", '{"amount": 1}')) == [["there are 11 now"]]


def test_what_a_ready_made_tool_says_itself_holds_unless_the_recipe_says_something_else(user: str) -> None:
    (tool,) = [tool_of(use, key="k") for use in a_config(tools=[f"{user}:find"]).tools]
    assert (tool.timeout, tool.retries) == (7.0, 0)  # type: ignore[union-attr]
    (tool,) = [tool_of(use, key="k") for use in a_config(tools=[{"use": f"{user}:find", "timeout": 2}]).tools]
    assert tool.timeout == 2.0  # type: ignore[union-attr]
    options = {"use": f"{user}:box", "retries": 2, "retry_timeouts": True}
    (box,) = [tool_of(use, key="k") for use in a_config(tools=[options]).tools]
    assert [(one.retries, one.retry_timeouts, one.timeout) for one in box.tools] == [(2, True, 30.0)]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"max_tool_response_length": 4}, "01...(truncated)...89"),
        ({"max_tool_response_length": 4, "tool_response_truncate_side": "left"}, "(truncated)...6789"),
        (
            {"max_tool_response_length": 4, "tool_response_truncate_side": "right", "tool_response_unit": "tokens"},
            "0123...(truncated)",
        ),
    ],
)
def test_long_answers_are_cut_as_the_recipe_says(user: str, options: dict[str, Any], told: str) -> None:
    config = a_config(tools=[f"{user}:long"], tool_calls=options)
    assert outcomes(config, call("long"), encode=RENDERER.encode) == [[told]]


def test_calls_beyond_the_recipes_bound_are_told_so(user: str) -> None:
    config = a_config(tools=[f"{user}:long"], tool_calls={"max_parallel_calls": 1})
    ((first, second),) = outcomes(config, call("long") * 2)
    assert first == "0123456789" * 3
    assert second.startswith("Error: at most 1 tool call can be made in one turn, and this turn has 2")


def test_the_tools_of_mcp_servers_stand_beside_the_others(user: str, mcp: str, tmp_path: Path) -> None:
    config = a_config(tools=[f"{user}:long"], mcp={"servers": mcp, "select": ["add", "pid"], "use": f"{user}:Short"})
    told = outcomes(config, call("add", '{"a": 1000, "b": 1}') + call("slow") + call("long"))
    assert told == [["100", "Error: there is no tool 'slow' (the tools are: add, long, pid)", "0123456789" * 3]]
    assert gone(tmp_path)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"tools": [{"use": "{user}:long", "arguments": {"x": 1}}]},
            "tools.0: {user}:long is a function, and only classes take arguments in a recipe",
        ),
        (
            {"tools": [{"use": "{user}:Bank", "arguments": {"x": 1}}]},
            "Bank cannot be created with the arguments {'x': 1}",
        ),
        ({"tools": ["{user}:SCHEMA"]}, "tools.0: {user}:SCHEMA is a dict and cannot be called"),
        (
            {"tools": ["{user}:Other"]},
            "the class Other has no public methods; each public method becomes a tool, so add at least one",
        ),
        (
            {"tools": [{"use": "{user}:long", "retry_timeouts": True}]},
            "'long' has no effect without retries: set retries, or remove it",
        ),
        (
            {"mcp": {"timeout": 5}},
            "mcp.timeout has no effect without mcp.servers: set mcp.servers, or remove it",
        ),
        ({"mcp": {"select": ["a"]}}, "mcp.select has no effect without mcp.servers"),
        ({"mcp": {"servers": "nowhere.json"}}, "nowhere.json cannot be read: No such file or directory"),
        (
            {"mcp": {"servers": "x", "use": "{user}:Other"}},
            "mcp.use: {user}:Other must be a subclass of turnwise.environ",
        ),
        (
            {"tool_calls": {"max_parallel_calls": 2}},
            "tool_calls.max_parallel_calls has no effect without tools: set tools or mcp.servers",
        ),
        (
            {"tools": ["{user}:long"], "tool_calls": {"tool_response_truncate_side": "left"}},
            "tool_calls.tool_response_truncate_side has no effect without tool_calls.max_tool_response_length: set that option",
        ),
        (
            {"tools": ["{user}:long"], "tool_calls": {"max_tool_response_length": 9, "tool_response_unit": "tokens"}},
            "Truncation with unit='tokens' needs a tokenizer",
        ),
    ],
)
def test_options_of_tools_that_would_do_nothing_are_refused(user: str, parts: dict[str, Any], message: str) -> None:
    filled = json.loads(json.dumps(parts).replace("{user}", user))
    with pytest.raises(ConfigError) as error:
        assembly.environment_factory(a_config(**filled))
    assert message.replace("{user}", user) in str(error.value)


def test_an_mcp_tool_of_the_name_of_another_one_is_refused(user: str, mcp: str, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def add(a: int) -> int:\n    'Add.'\n    return a\n")
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        assembly.environment_factory(a_config(tools=[f"{tmp_path}/more.py:add"], mcp={"servers": mcp}))
    assert gone(tmp_path)  # nobody held them


# runs


def test_a_resolved_recipe_with_tools_stays_valid(user: str, tmp_path: Path) -> None:
    config = a_config(tools=[{"use": f"{user}:Bank", "arguments": {"balance": 5}}, f"{user}:find"])
    write_config(tmp_path / "config.yaml", config)
    loaded, _ = load(tmp_path / "config.yaml")
    assert loaded == config
    assert outcomes(loaded, call("deposit", '{"amount": 2}')) == [["there are 7 now"]]


@pytest.mark.slow
def test_the_servers_of_a_run_end_with_it(mcp: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    tree: dict[str, Any] = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(save_rows(tmp_path / "train.jsonl"))},
        "limits": {"turns": 3, "tokens_per_turn": 80},
        "mcp": {"servers": mcp, "select": ["add", "pid"]},
    }
    (tmp_path / "script.jsonl").write_text(json.dumps([call("add", '{"a": 41}'), "42"]) + "\n")
    scripted = {**tree, "engine": {"name": "scripted", "script": str(tmp_path / "script.jsonl")}}
    asyncio.run(collect(Config.model_validate(scripted), tmp_path / "out", Console(quiet=True)))
    (line,) = (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()
    assert [message["content"] for message in json.loads(line)["messages"] if message["role"] == "tool"] == ["42"]
    assert gone(tmp_path)

    (tmp_path / "pid").unlink()
    trained = {**tree, "train": {"steps": 1, "batch_size": 2, "group_size": 2}, "output": str(tmp_path / "run")}
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(assemble(Config.model_validate(trained)), TrainReport(Console(file=nowhere))))
    assert gone(tmp_path)

    (tmp_path / "bad.py").write_text("def raises(trajectory):\n    raise KeyboardInterrupt\n")
    broken = {**tree, "engine": scripted["engine"], "reward": {"trajectory": [f"{tmp_path}/bad.py:raises"]}}
    (tmp_path / "pid").unlink()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(collect(Config.model_validate(broken), tmp_path / "out2", Console(quiet=True)))
    assert gone(tmp_path)
