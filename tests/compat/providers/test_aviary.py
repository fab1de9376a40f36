"""Aviary through the loop: its own environment, functional environments and task data sets, with their tools and rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, hold
from support.own_environment import needs
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

pytestmark = needs("aviary")

LIMITS = Limits(turns=6, tokens_per_turn=400)
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
FILE = '''
from aviary.core import Environment, Message, TaskDataset, Tool, ToolRequestMessage, fenv

@fenv.start()
def story(topic: str = "cats"):
    return f"Write about {topic}.", {"topic": topic}

@story.tool()
def tell(text: str, state) -> str:
    """Tell the story.

    Args:
        text: The story.
    """
    state.reward = float(state.topic in text)
    state.done = True
    return "told"

class Number(Environment):
    def __init__(self, target):
        self.target, self.low, self.left = target, 0, 3
        self.closed = False

    async def reset(self):
        self.tools = [Tool.from_function(self.guess)]
        return [Message(content="A number below 10?")], self.tools

    def guess(self, number: int) -> str:
        """Guess.

        Args:
            number: The number.
        """
        self.left -= 1
        self.hit = number == self.target
        return "right" if self.hit else "higher" if number < self.target else "lower"

    async def step(self, action):
        if not isinstance(action, ToolRequestMessage):
            return self.default_no_tool_calls_response
        messages = await self.exec_tool_calls(action)
        return messages, float(self.hit), self.hit, self.left == 0

class Numbers(TaskDataset):
    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def get_new_env_by_idx(self, idx):
        return Number(self.targets[idx])

class Wrong(Number):
    async def step(self, action):
        return 1

def nothing():
    return 3
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def recipe(use: str, data: dict[str, Any] | None = None, **arguments: Any) -> Config:
    tree = {"model": "m", "environment": {"use": use, "arguments": arguments}, "data": data or {}}
    return checked(tree, source="recipe")


def played(config: Config, *texts: str, row: int = 0, held_out: bool = False) -> Trajectory:
    rows = assembly.rows(config, limit=row + 1, held_out=held_out)
    return hold(Says(*texts, *["?"] * 9), assembly.environment_factory(config), row=rows[row], limits=LIMITS)


def guess(number: int) -> str:
    return CALL.format("guess", f'{{"number": {number}}}')


async def own_rewards(environment: Any, *calls: tuple[str, dict[str, Any]]) -> list[float]:
    """The rewards of the library's own steps."""
    import aviary.core as aviary

    await environment.reset()
    rewards = []
    for name, arguments in calls:
        request = aviary.ToolRequestMessage(tool_calls=[aviary.ToolCall.from_name(name, **arguments)])
        _, reward, done, truncated = await environment.step(request)
        rewards.append(float(reward))
        if done or truncated:
            break
    return rewards


def test_the_librarys_environment_has_the_rewards_of_its_own_steps() -> None:
    import aviary.core as aviary

    trajectory = played(recipe("aviary:dummy"), CALL.format("print_story", '{"story": "A b c d e"}'))
    assert trajectory.error is None, trajectory.error
    own = asyncio.run(own_rewards(aviary.DummyEnv(), ("print_story", {"story": "A b c d e"})))
    assert [turn.reward for turn in trajectory.turns] == own == [1.0]
    assert trajectory.messages[0] == {"role": "user", "content": "Write a 5 word story via print_story"}


def test_a_task_data_set_has_a_row_for_each_task_and_plays_it(file: Path) -> None:
    import aviary.core as aviary

    arguments = {"targets": [3, 8]}
    config = recipe(
        f"aviary:{file}:Numbers", {"eval": "environment"}, arguments=arguments, eval_arguments={"targets": [5]}
    )
    assert [row["idx"] for row in assembly.rows(config)] == [0, 1]
    trajectory = played(config, guess(5), "Hm.", guess(8), row=1)
    assert trajectory.error is None, trajectory.error
    assert trajectory.stop == "done"
    space: dict[str, Any] = {}
    exec(FILE, space)
    environment = space["Numbers"](**arguments).get_new_env_by_idx(1)
    own = asyncio.run(own_rewards(environment, ("guess", {"number": 5}), ("guess", {"number": 8})))
    assert [turn.reward for turn in trajectory.turns] == [own[0], 0.0, own[1]] == [0.0, 0.0, 1.0]
    contents = [message["content"] for message in trajectory.messages if message["role"] != "assistant"]
    assert contents == [
        "A number below 10?",
        "higher",
        aviary.DummyEnv().default_no_tool_calls_response[0][0].content,
        "right",
    ]
    assert trajectory.turns[0].outcomes[0].content == "higher"
    assert played(config, guess(5), held_out=True).turns[-1].reward == 1.0


def test_a_function_takes_its_columns_and_a_bad_call_is_answered(file: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"topic": "dogs"}\n', encoding="utf-8")
    config = recipe(f"aviary:{file}:story", {"train": str(rows)}, thread=True)
    trajectory = played(
        config,
        "<tool_call>\n{broken\n</tool_call>",
        CALL.format("tel", '{"text": "x"}'),
        CALL.format("tell", '{"text": "Two dogs."}'),
    )
    assert trajectory.error is None, trajectory.error
    assert trajectory.messages[0]["content"] == "Write about dogs."
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    tools = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert tools[0].startswith("Error: ")
    assert tools[1:] == ["Invalid tool call: tel", "told"]
    assert trajectory.turns[0].outcomes[0].error == "malformed"


def test_arguments_that_do_not_fit_are_answered_and_the_environment_gets_the_other_calls() -> None:
    wrong = {
        '{"x": "abc"}': "Error: x: 'abc' is not of type 'number'",
        "{}": "Error: the argument 'x' is missing",
        '{"x": 1, "state": 3}': "Error: cast_int has no argument 'state'",
    }
    calls = "".join(CALL.format("cast_int", arguments) for arguments in [*wrong, '{"x": 1.5}'])
    story = CALL.format("print_story", '{"story": "A b c d e"}')
    trajectory = played(recipe("aviary:dummy"), CALL.format("cast_int", "{}"), calls, story)
    assert trajectory.error is None, trajectory.error
    alone, mixed, told = ({one.content: one.error for one in turn.outcomes} for turn in trajectory.turns)
    assert alone == {"Error: the argument 'x' is missing": "arguments"}
    assert mixed == {"1": None, **dict.fromkeys(wrong.values(), "arguments")}
    assert list(told.values()) == [None]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]


def test_an_episode_that_the_environment_cuts_ends(file: Path) -> None:
    trajectory = played(recipe(f"aviary:{file}:Numbers", arguments={"targets": [3]}), guess(1), guess(2), guess(9))
    assert (trajectory.stop, trajectory.turns[-1].info) == ("done", {"truncated": True})


def test_what_is_not_of_the_librarys_form_is_told(file: Path) -> None:
    trajectory = played(recipe(f"aviary:{file}:Wrong", arguments={"target": 1}), guess(1))
    assert trajectory.error is not None
    assert "step returned 1; it must return (messages, reward, done, truncated)" in trajectory.error.message
    trajectory = played(recipe(f"aviary:{file}:nothing"), "x")
    assert trajectory.error is not None
    assert "made a int; it must be an aviary Environment" in trajectory.error.message
    for use, arguments, message in (
        ("aviary:dumy", {}, "did you mean 'dummy'"),
        ("aviary:gsm8k", {}, r"cannot be imported: .*pip install 'fhaviary\[gsm8k\]'"),
        (f"aviary:{file}:Numbers", {}, "cannot be created with .*targets"),
        (f"aviary:{file}:story", {"eval_arguments": {"a": 1}}, "eval_arguments has no effect"),
    ):
        with pytest.raises(ConfigError, match=message):
            assembly.environment_factory(recipe(use, **arguments))
