"""From a recipe to living objects: what its references and tools name, and what is told where they name nothing."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.conversations import RENDERER, Says, call, hold
from support.tiny import save_model, save_rows
from support.training import train_silently
from turnwise import assembly
from turnwise.assembly.conversations import tool as tool_of
from turnwise.config.recipe import load, with_known_model
from turnwise.environments.environment import Environment, SingleTurn
from turnwise.environments.tools.toolbox import Tools
from turnwise.environments.users import ScriptedUser
from turnwise.errors import ConfigError, DataError
from turnwise.models.model_config import context_length
from turnwise.options.schema import Config
from turnwise.record.writer import write_config
from turnwise.rollout.context import Limits
from turnwise.runs.sampling_only import collect
from turnwise.train import assemble
from turnwise.types import Sampling
from turnwise.user_code.references import MOVED, resolve

# From a recipe to living objects: what its references name, and what is told where they name nothing.


USER = '''
from turnwise.environments.environment import SingleTurn, environment, user_message
from turnwise.types import Opening, Reply

class Mine(SingleTurn):
    made = 0

    def __init__(self, lines=(), n: int = 1):
        type(self).made += 1
        self.lines, self.n = lines, n

@environment
async def talker(row, text: str):
    turn = yield Opening(messages=row.messages)
    yield user_message(text, done=True)

async def bare(row):
    yield Opening(messages=row.messages)

class Half:
    async def begin(self, row): ...

def breaks():
    raise OSError("no port is free")

def tool(x: int) -> int:
    """Double."""
    return 2 * x

def untyped(x):
    """Double."""

def good(trajectory, scale: float = 1.0) -> float:
    return scale

async def at_turn(trajectory, turn) -> float:
    return 1.0

def ranked(trajectories) -> list:
    return [0.0] * len(trajectories)

class Shortest:
    made = 0

    def __init__(self, most: float = 1.0):
        type(self).made += 1
        if most < 0:
            raise ValueError("most is negative")
        self.most = most

    def __call__(self, trajectories):
        return [self.most] * len(trajectories)

class Named(Shortest):
    __name__ = "by_its_name"

NUMBER = 5
'''


@pytest.fixture
def user(tmp_path: Path) -> str:
    """The path of a user's file."""
    (tmp_path / "mine.py").write_text(USER)
    return str(tmp_path / "mine.py")


def a_config(**parts: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **parts})


def test_a_reference_names_an_object_of_a_package_or_of_a_file(user: str) -> None:
    assert resolve("turnwise.environments.environment:SingleTurn", key="k") is SingleTurn
    assert resolve("json:decoder.JSONDecoder", key="k") is json.JSONDecoder
    assert resolve(f"{user}:NUMBER", key="k") == 5
    assert resolve(f"{user}:Mine", key="k") is resolve(f"{user}:Mine", key="other")  # imported once


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("SingleTurn", "k: 'SingleTurn' is not a reference; write package.module:name or path/to/file.py:name"),
        (":SingleTurn", "k: ':SingleTurn' is not a reference; write"),
        ("a.b:", "k: 'a.b:' is not a reference; write"),
        ("turnwise.nothing:x", "k: turnwise.nothing could not be imported: ModuleNotFoundError: No module named"),
        ("turnwise.environments.users:ScriptedUsr", "has no 'ScriptedUsr'; did you mean 'ScriptedUser'?"),
        ("json:decoder.Nope", "k: json has no 'decoder.Nope'"),
        ("nowhere/mine.py:x", "/nowhere/mine.py; paths are relative to the directory you run from"),
    ],
)
def test_a_reference_to_nothing_is_told(reference: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(reference, key="k")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("turnwise.environments.modelled_user:ModelledUser", "turnwise.environments.users:ModelledUser"),
        ("turnwise.compat.trl_rewards:TrlReward", "turnwise.compat.trl:TrlReward"),
        ("turnwise.services.chat_model:Endpoint", "turnwise.services.chat:Endpoint"),
    ],
)
def test_a_reference_to_a_module_that_was_renamed_is_answered_with_the_new_reference(old: str, new: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(old, key="environment")
    assert str(error.value) == f"environment: {old} is now {new}; write the new reference"
    assert resolve(new, key="environment").__name__ == new.partition(":")[2]


def test_a_module_that_exists_is_not_said_to_be_renamed() -> None:
    assert [old for old in MOVED if find_spec(old) is not None] == []


def test_a_recipe_with_the_old_reference_is_told_the_new_one() -> None:
    config = a_config(environment="turnwise.environments.modelled_user:ModelledUser")
    with pytest.raises(ConfigError, match=r"ModelledUser is now turnwise\.environments\.users:ModelledUser;"):
        assembly.environment_factory(config)


def test_a_file_that_cannot_be_imported_is_told(tmp_path: Path) -> None:
    for number, (text, problem) in enumerate(
        [
            ("1/0", "ZeroDivisionError: division by zero"),
            ("def f(:", "SyntaxError: "),
            ("import nowhere", "No module named"),
        ]
    ):
        path = tmp_path / f"bad{number}.py"
        path.write_text(text)
        with pytest.raises(ConfigError, match=rf"k: {path} could not be imported: .*{problem}"):
            resolve(f"{path}:x", key="k")
        path.write_text("x = 1")
        assert resolve(f"{path}:x", key="k") == 1  # and may be put right


# environments and tools


def test_no_conversation_hears_of_what_another_does_to_its_arguments(user: Path) -> None:
    make = assembly.environment_factory(a_config(environment={"use": f"{user}:Mine", "arguments": {"lines": ["a"]}}))
    one: Any = make()
    one.lines.append("b")
    other: Any = make()
    assert other.lines == ["a"]


def test_each_conversation_gets_a_fresh_environment_with_its_arguments(user: str) -> None:
    make = assembly.environment_factory(a_config(environment={"use": f"{user}:Mine", "arguments": {"n": 3}}))
    one, other = make(), make()
    assert one is not other
    assert (one.n, type(one).__name__) == (3, "Mine")  # type: ignore[attr-defined]
    talker = assembly.environment_factory(a_config(environment={"use": f"{user}:talker", "arguments": {"text": "x"}}))
    assert isinstance(talker(), Environment)
    default = assembly.environment_factory(a_config())
    assert isinstance(default(), SingleTurn)
    lines = {"use": "turnwise.environments.users:ScriptedUser", "arguments": {"lines": ["a"]}}
    assert isinstance(assembly.environment_factory(a_config(environment=lines))(), ScriptedUser)


def test_tools_are_put_in_front(user: str) -> None:
    make = assembly.environment_factory(a_config(tools=[{"use": f"{user}:tool", "timeout": 2}]))
    environment = make()
    assert isinstance(environment, Tools)
    assert make() is not environment


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"environment": "{user}:NUMBER"}, "environment: {user}:NUMBER is a int and cannot be called"),
        (
            {"environment": "{user}:talker"},
            "cannot be called with the arguments {{}}: missing a required argument: 'text'",
        ),
        (
            {"environment": {"use": "{user}:Mine", "arguments": {"m": 1}}},
            "cannot be called with the arguments {{'m': 1}}: got an unexpected keyword argument 'm'",
        ),
        ({"environment": "{user}:bare"}, "missing a required argument: 'row'"),
        (
            {"environment": "{user}:Half"},
            "{user}:Half creates a Half without step, close; an environment has async methods begin(row)",
        ),
        ({"environment": "{user}:Half", "tools": ["{user}:tool"]}, "creates a Half without step, close"),
        ({"environment": "{user}:breaks"}, "environment: {user}:breaks cannot be created: OSError: no port is free"),
        ({"environment": "builtins:int"}, "environment: builtins:int cannot be called with the arguments"),
        (
            {"environment": {"use": "turnwise.environments.users:ScriptedUser", "arguments": {"lines": "a"}}},
            "cannot be created: TypeError: lines must be a list of texts",
        ),
        ({"tools": ["{user}:untyped"]}, "the parameter 'x' of the tool 'untyped' has no type: add an annotation"),
        ({"tools": ["{user}:tool", "{user}:tool"]}, "two tools have the name 'tool'"),
        ({"tools": ["{user}:nope"]}, "tools.0: {user} has no 'nope'"),
        ({"tools": ["{user}:tool", "{user}:NUMBER"]}, "tools.1: {user}:NUMBER is a int and cannot be called"),
    ],
)
def test_what_is_no_environment_or_tool_is_told_before_anything_runs(
    user: str, parts: dict[str, Any], message: str
) -> None:
    parts = json.loads(json.dumps(parts).replace("{user}", user))
    with pytest.raises(ConfigError) as error:
        assembly.environment_factory(a_config(**parts))
    assert message.format(user=user) in str(error.value)


# rewards, limits, sampling


def test_rewards_carry_their_names_arguments_and_weights(user: str) -> None:
    config = a_config(
        reward={
            "trajectory": [{"use": f"{user}:good", "arguments": {"scale": 3.0}, "weight": 0.5}],
            "turns": [f"{user}:at_turn"],
        }
    )
    scorer = assembly.scorer(config)
    (trajectory,), (turn,) = scorer.trajectory, scorer.turns
    assert (trajectory.name, trajectory.weight, trajectory.function(None)) == ("good", 0.5, 3.0)  # type: ignore[arg-type]
    assert (turn.name, turn.weight) == ("at_turn", 1.0)


def test_a_reward_class_is_made_once_and_may_say_its_name(user: str) -> None:
    group = [{"use": f"{user}:Shortest", "arguments": {"most": 0.5}, "weight": 2.0}, f"{user}:Named", f"{user}:ranked"]
    scorer = assembly.scorer(a_config(reward={"group": group}))
    assert [(one.name, one.weight) for one in scorer.groups] == [
        ("Shortest", 2.0),
        ("by_its_name", 1.0),
        ("ranked", 1.0),
    ]
    asked = [list(one.function([None, None])) for one in scorer.groups]  # type: ignore[arg-type, list-item]
    assert asked == [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]
    assert resolve(f"{user}:Shortest", key="k").made == 1


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            {"trajectory": ["{user}:at_turn"]},
            "reward.trajectory.0: {user}:at_turn cannot be called as a reward function: it has the "
            "parameter 'turn', which functions in "
            "reward.turns have; functions in reward.trajectory have: trajectory, completion, messages",
        ),
        (
            {"turns": ["{user}:good", "{user}:tool"]},
            "reward.turns.1: {user}:tool cannot be called as a reward function: it has none of the parameters",
        ),
        ({"trajectory": [{"use": "{user}:good", "arguments": {"skale": 1}}]}, "unexpected keyword argument 'skale'"),
        ({"trajectory": ["{user}:NUMBER"]}, "reward.trajectory.0: {user}:NUMBER is a int and cannot be called"),
        ({"group": ["{user}:ranked", "{user}:at_turn"]}, "reward.group.1: {user}:at_turn cannot be called"),
        ({"group": [{"use": "{user}:Shortest", "arguments": {"least": 1}}]}, "unexpected keyword argument 'least'"),
        (
            {"group": [{"use": "{user}:Shortest", "arguments": {"most": -1}}]},
            "reward.group.0: {user}:Shortest cannot be created: ValueError: most is negative",
        ),
        (
            {"turns": ["{user}:Shortest"]},
            "reward.turns.0: an instance of {user}:Shortest cannot be called as a reward function: it has the parameter "
            "'trajectories', which functions in reward.group and reward.batch have",
        ),
        (
            {"turns": ["{user}:Half"]},
            "reward.turns.0: an instance of {user}:Half cannot be called as a reward function",
        ),
    ],
)
def test_a_reward_that_cannot_be_asked_is_told(user: str, reward: dict[str, Any], message: str) -> None:
    reward = json.loads(json.dumps(reward).replace("{user}", user))
    with pytest.raises(ConfigError) as error:
        assembly.scorer(a_config(reward=reward))
    assert message.format(user=user) in str(error.value)


def test_limits_are_those_of_the_recipe_and_the_context_that_of_the_model() -> None:
    options = {"turns": 3, "tokens_per_turn": 7, "tokens": 20, "seconds_per_turn": 1.5, "seconds": None}
    config = a_config(limits=options)
    assert assembly.limits(config, longest=None) == Limits(**options, context=None)
    assert assembly.limits(config, longest=512) == Limits(**options, context=512)
    shorter = a_config(limits={**options, "context": 100})
    assert assembly.limits(shorter, longest=512).context == assembly.limits(shorter, longest=100).context == 100
    with pytest.raises(ConfigError, match=r"limits.context=100 is more than the model's longest context, 99 tokens"):
        assembly.limits(shorter, longest=99)


def test_sampling_is_that_of_the_recipe() -> None:
    config = a_config(sampling={"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "stop": ["a", "b"]})
    assert assembly.sampling(config) == Sampling(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, stop=("a", "b"))


def test_the_context_of_a_model_by_whichever_name() -> None:
    assert context_length({"max_position_embeddings": 40}) == 40
    assert context_length({"n_positions": 30, "vocab_size": 9}) == 30
    assert context_length({"text_config": {"max_position_embeddings": 20}}) == 20
    assert context_length({"max_position_embeddings": None}) is None


# rows and scripts


def test_rows_of_both_sets_and_the_smallest_of_the_limits(tmp_path: Path) -> None:
    for name, count in (("train", 6), ("held", 5)):
        lines = [json.dumps({"q": f"{name} {n}"}) for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "held.jsonl"), "columns": {"prompt": "q"}}
    config = a_config(data=data)
    assert [row.messages[0]["content"] for row in assembly.rows(config)][:2] == ["train 0", "train 1"]
    assert [row.messages[0]["content"] for row in assembly.rows(config, held_out=True, limit=1)] == ["held 0"]
    limited = a_config(data={**data, "max_rows": 3, "system_prompt": "Be brief."})
    assert len(assembly.rows(limited)) == 3
    assert len(assembly.rows(limited, limit=2)) == 2
    assert len(assembly.rows(limited, limit=5)) == 3  # data.max_rows is not forgotten
    assert assembly.rows(limited)[0].messages[0] == {"role": "system", "content": "Be brief."}


def test_scripts_are_lists_of_texts_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('["a", "b"]\n\n[]\n["c\u2028d\x85"]\n', encoding="utf-8")
    assert [script.turns for script in assembly.read_scripts(str(path))] == [["a", "b"], [], ["c\u2028d\x85"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["a"]\n\n["b"', ":3: this line is not JSON (Expecting ',' delimiter at column 5)"),
        ('"a"', ':1: a script is a list of texts, for example ["Hello.", "Bye."]'),
        ('["a"]\n["b", 5]', ":2: a script is a list of texts"),
        ('{"a": ["b"]}', ":1: a script is a list of texts"),
        ("\n \n", " is empty; write a list of texts on each line"),
    ],
)
def test_a_script_that_is_none_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(text)
    with pytest.raises(DataError) as error:
        assembly.read_scripts(str(path))
    assert str(error.value).startswith(f"{path}{message}")


def test_texts_of_agents_are_refused_where_scripts_belong_to_no_row(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"turns": ["one"], "agents": {"second": ["AGENT"]}}\n["two"]\n')
    config = a_config(engine={"name": "scripted", "script": str(path)})
    with pytest.raises(
        DataError, match="has `agents`, the texts of a row's agents; in rollout workers, scripts belong to no row"
    ):
        assembly.engine(config, RENDERER)


def test_a_script_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"engine\.script: there is no file {tmp_path / 'no.jsonl'}"):
        assembly.read_scripts(str(tmp_path / "no.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes(b'["caf\xe9"]')
    with pytest.raises(DataError, match=r"latin\.jsonl is not UTF-8: "):
        assembly.read_scripts(str(tmp_path / "latin.jsonl"))


TRIED_OUT = """
from pathlib import Path

LOG = Path(__file__).with_suffix(".log")

class Place:
    def __init__(self):
        self.tell("made")
    def tell(self, what):
        with LOG.open("a") as file:
            file.write(f"{type(self).__name__} {what}\\n")
    async def begin(self, row):
        raise RuntimeError
    async def step(self, turn):
        raise RuntimeError
    async def close(self):
        self.tell("closed")

class Box:
    def __init__(self):
        self._tell("made")
    def _tell(self, what):
        Place.tell(self, what)
    async def close(self):
        self._tell("closed")
    async def look(self) -> str:
        \'\'\'Look.\'\'\'
        return "nothing"

class Unready(Place):
    async def close(self):
        raise AttributeError("not begun")
"""


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in an event loop"])
def test_what_is_made_to_be_tried_out_is_closed_also_where_close_is_async(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: bool
) -> None:
    file = tmp_path / "places.py"
    file.write_text(TRIED_OUT)

    def make(environment: str) -> None:
        tree = {
            "model": {"path": "m"},
            "data": {"train": "x.jsonl"},
            "environment": f"{file}:{environment}",
            "tools": [f"{file}:Box"],
        }
        assembly.environment_factory(Config.model_validate(tree))

    async def make_inside() -> None:
        make("Place")

    if inside:
        asyncio.run(make_inside())
    else:
        make("Place")
    assert file.with_suffix(".log").read_text().splitlines() == ["Box made", "Box closed", "Place made", "Place closed"]
    with caplog.at_level(logging.INFO):
        make("Unready")  # it was not begun
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "was created as a check, and could not be closed: AttributeError: not begun" in caplog.text


# Tools in recipes: functions, classes, ready-made ones and MCP servers, and what is refused of their options.


SCRIPT = str(Path(__file__).parent / "support" / "mcp_server.py")


TOOLS_USER = '''
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
def tools_user(tmp_path: Path) -> str:
    """The path of a user's file."""
    (tmp_path / "mine.py").write_text(TOOLS_USER)
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


def tools_a_config(**parts: Any) -> Config:
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


def test_classes_functions_and_ready_made_tools_are_named_alike(tools_user: str) -> None:
    config = tools_a_config(
        tools=[
            {"use": f"{tools_user}:Bank", "arguments": {"balance": 5}, "retries": 1},
            f"{tools_user}:long",
            f"{tools_user}:find",
        ]
    )
    told = outcomes(config, call("deposit", '{"amount": 2}') + call("find", '{"words": ["a", "b"]}'), call("long"))
    assert told == [["there are 7 now", "a+b"], ["0123456789" * 3]]
    assert outcomes(tools_a_config(tools=[f"{tools_user}:box"]), call("deposit", '{"amount": 1}')) == [
        ["there are 11 now"]
    ]


def test_what_a_ready_made_tool_says_itself_holds_unless_the_recipe_says_something_else(tools_user: str) -> None:
    (tool,) = [tool_of(use, key="k") for use in tools_a_config(tools=[f"{tools_user}:find"]).tools]
    assert (tool.timeout, tool.retries) == (7.0, 0)  # type: ignore[union-attr]
    (tool,) = [
        tool_of(use, key="k") for use in tools_a_config(tools=[{"use": f"{tools_user}:find", "timeout": 2}]).tools
    ]
    assert tool.timeout == 2.0  # type: ignore[union-attr]
    options = {"use": f"{tools_user}:box", "retries": 2, "retry_timeouts": True}
    (box,) = [tool_of(use, key="k") for use in tools_a_config(tools=[options]).tools]
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
def test_long_answers_are_cut_as_the_recipe_says(tools_user: str, options: dict[str, Any], told: str) -> None:
    config = tools_a_config(tools=[f"{tools_user}:long"], tool_calls=options)
    assert outcomes(config, call("long"), encode=RENDERER.encode) == [[told]]


def test_calls_beyond_the_recipes_bound_are_told_so(tools_user: str) -> None:
    for name, told in (
        ("max_parallel_calls", "Error: at most 1 tool call can be made in one turn, and this turn has 2"),
        ("max_calls", "Error: at most 1 tool call can be made in this conversation. This call was not run"),
    ):
        config = tools_a_config(tools=[f"{tools_user}:long"], tool_calls={name: 1})
        ((first, second),) = outcomes(config, call("long") * 2)
        assert first == "0123456789" * 3
        assert second.startswith(told)


@pytest.mark.slow
def test_the_tools_of_mcp_servers_stand_beside_the_others(tools_user: str, mcp: str, tmp_path: Path) -> None:
    config = tools_a_config(
        tools=[f"{tools_user}:long"], mcp={"servers": mcp, "select": ["add", "pid"], "use": f"{tools_user}:Short"}
    )
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
            {"tool_calls": {"max_calls": 2}},
            "tool_calls.max_calls has no effect without tools: set tools or mcp.servers",
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
def test_options_of_tools_that_would_do_nothing_are_refused(
    tools_user: str, parts: dict[str, Any], message: str
) -> None:
    filled = json.loads(json.dumps(parts).replace("{user}", tools_user))
    with pytest.raises(ConfigError) as error:
        assembly.environment_factory(tools_a_config(**filled))
    assert message.replace("{user}", tools_user) in str(error.value)


@pytest.mark.slow
def test_an_mcp_tool_of_the_name_of_another_one_is_refused(tools_user: str, mcp: str, tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text("def add(a: int) -> int:\n    'Add.'\n    return a\n")
    with pytest.raises(ConfigError, match="two tools have the name 'add'"):
        assembly.environment_factory(tools_a_config(tools=[f"{tmp_path}/more.py:add"], mcp={"servers": mcp}))
    assert gone(tmp_path)  # nobody held them


# runs


def test_a_resolved_recipe_with_tools_stays_valid(tools_user: str, tmp_path: Path) -> None:
    config = tools_a_config(tools=[{"use": f"{tools_user}:Bank", "arguments": {"balance": 5}}, f"{tools_user}:find"])
    write_config(tmp_path / "config.yaml", config)
    loaded, _ = load(tmp_path / "config.yaml")
    assert loaded == with_known_model(config)
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
    (tmp_path / "length.py").write_text("def length(completion):\n    return len(completion)\n")
    tree |= {"reward": {"trajectory": [f"{tmp_path}/length.py:length"]}}  # tools of MCP servers give none
    trained = {**tree, "train": {"steps": 1, "batch_size": 2, "group_size": 2}, "output": str(tmp_path / "run")}
    train_silently(assemble(Config.model_validate(trained)))
    assert gone(tmp_path)

    (tmp_path / "bad.py").write_text("def raises(trajectory):\n    raise KeyboardInterrupt\n")
    broken = {**tree, "engine": scripted["engine"], "reward": {"trajectory": [f"{tmp_path}/bad.py:raises"]}}
    (tmp_path / "pid").unlink()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(collect(Config.model_validate(broken), tmp_path / "out2", Console(quiet=True)))
    assert gone(tmp_path)
