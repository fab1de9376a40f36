"""Document 3's `ToolEnvironment` as it is, and others with `reset` and `step(action) -> (observation, done)`."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, hold, hold_all
from turnwise import assembly
from turnwise.compat.gym import ToolEnvironments
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

MADE: list[Any] = []


def parse_tool_call(action: str) -> tuple[str | None, dict[str, Any]]:
    """As the document's class expects it."""
    found = re.search(r"<tool_call>(.*?)</tool_call>", action, re.DOTALL)
    if found is None:
        return None, {}
    call = json.loads(found[1])
    return call["name"], call["arguments"]


class ToolEnvironment:
    """The document's."""

    def __init__(self, tools: dict[str, Callable[..., Any]]) -> None:
        self.tools = tools
        self.resets = 0
        MADE.append(self)

    def step(self, action: str) -> tuple[str, bool]:
        tool_name, args = parse_tool_call(action)
        if tool_name is None:
            return "", True
        if tool_name not in self.tools:
            return f"Error: Unknown tool '{tool_name}'", False
        try:
            result = self.tools[tool_name](**args)
            return str(result), False
        except Exception as e:
            return f"Error: {e!s}", False

    def reset(self) -> None:
        self.resets += 1


def add(a: int, b: int) -> int:
    return a + b


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    MADE.clear()


def said(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def failure(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    return trajectory.error.message


@pytest.mark.parametrize("role", ["tool", "user"])
def test_the_documents_class_is_played_as_it_is(role: Any) -> None:
    make = ToolEnvironments(ToolEnvironment, tools={"add": add}, role=role)
    MADE.clear()
    trajectory = hold(Says(said("add", a=1, b=2), said("sub"), said("add", a=1), "It is 3."), make)
    told = [message for message in trajectory.messages if message["role"] == role][role == "user" :]
    assert [message["content"] for message in told] == [
        "3",
        "Error: Unknown tool 'sub'",
        "Error: add() missing 1 required positional argument: 'b'",
    ]
    assert (trajectory.stop, trajectory.template_mismatch, len(MADE), MADE[0].resets) == ("done", None, 1, 1)


class Counter:
    """Async, with rewards, and closed."""

    def __init__(self, wait: float = 0.0) -> None:
        self.closed = 0
        self._wait = wait
        MADE.append(self)

    async def reset(self, start: int, step: int = 1) -> str:
        self.count, self._step = start, step
        return f"It is {start}."

    async def step(self, action: str) -> tuple[Any, float, bool, dict[str, Any]]:
        await asyncio.sleep(self._wait)
        self.count += self._step
        return {"count": self.count}, 0.5, action == "stop", {"count": self.count}

    async def close(self) -> None:
        self.closed += 1


def test_async_methods_rewards_and_columns_of_the_row() -> None:
    make = ToolEnvironments(Counter, role="user")
    MADE.clear()
    trajectory = hold(Says("go", "stop"), make, row=a_row(start=3, step=2, other="x"))
    assert [message["content"] for message in trajectory.messages] == [
        "Hi\n\nIt is 3.",
        "go",
        '{"count": 5}',
        "stop",
        '{"count": 7}',
    ]
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5]
    assert [turn.info for turn in trajectory.turns] == [{"count": 5}, {"count": 7}]
    assert [one.closed for one in MADE] == [1]


def test_a_row_without_what_reset_names_fails_alone() -> None:
    trajectory = hold(Says("go"), ToolEnvironments(Counter), row=a_row(step=2))
    assert failure(trajectory).startswith(
        "KeyError: Counter.reset needs the column 'start', and row '1' has no such column; its columns are: step."
    )
    assert MADE[-1].closed == 1


class Answers:
    """Answers a turn with what it was made with."""

    def __init__(self, answer: Any = None) -> None:
        self.closed = 0
        self._answer = answer
        MADE.append(self)

    def reset(self) -> None:
        if self._answer == "reset":
            raise OSError("no board")

    def step(self, action: str) -> Any:
        if callable(self._answer):
            return self._answer()
        return self._answer

    def close(self) -> None:
        self.closed += 1


def raises() -> Any:
    raise RuntimeError("no luck")


GIVES = (
    "it must return (observation, done), (observation, reward, done) or (observation, reward, done, info), where done is True or "
    "False. For a gymnasium environment, use turnwise.compat.gym:GymEnvironments"
)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("reset", "OSError: no board"),
        (raises, "RuntimeError: no luck"),
        (None, f"TypeError: Answers.step returned None; {GIVES}"),
        ("ab", f"TypeError: Answers.step returned 'ab'; {GIVES}"),
        (["a", True], f"TypeError: Answers.step returned ['a', True]; {GIVES}"),
        (("a",), f"TypeError: Answers.step returned 1 values (str); {GIVES}"),
        (("a", "no"), f"TypeError: Answers.step returned 2 values (str, str); {GIVES}"),
        (("a", 0.0, False, False, {}), f"TypeError: Answers.step returned 5 values (str, float, bool, bool, dict); {GIVES}"),
        (("a", "much", True), "TypeError: Answers.step gave the reward 'much'; it must be a finite number"),
    ],
)  # fmt: skip
def test_what_breaks_fails_its_conversation_and_is_closed(answer: Any, message: str) -> None:
    trajectory = hold(Says("go"), ToolEnvironments(Answers, arguments={"answer": answer}))
    assert failure(trajectory) == message
    assert MADE[-1].closed == 1


def test_one_that_hangs_is_given_up_and_closed() -> None:
    gate = threading.Event()
    make = ToolEnvironments(Answers, arguments={"answer": gate.wait})
    trajectory = hold(Says("go"), make, limits=Limits(turns=2, tokens_per_turn=99, seconds_per_turn=0.1))
    gate.set()
    assert (trajectory.stop, MADE[-1].closed) == ("deadline", 1)


def test_eight_of_them_wait_together() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once

    def slow() -> Any:
        gate.wait()
        return "", True

    make = ToolEnvironments(Answers, arguments={"answer": slow})
    assert [one.stop for one in hold_all(Says("go"), make, size=8)] == ["done"] * 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"role": "system"}, "environment.arguments.role is 'system'; it must be user or tool"),
        ({"tools": {"add": "json:no"}}, "environment.arguments.tools.add: json has no 'no'"),
        (
            {"tools": {}, "arguments": {"tools": {}}},
            "environment.arguments.tools and environment.arguments.arguments.tools are both set",
        ),
        ({"arguments": {"tool": {}}}, "ToolEnvironment cannot be created with the arguments {'tool': {}}"),
    ],
)
def test_options_that_do_not_fit_are_refused_at_the_start(options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        ToolEnvironments(ToolEnvironment, **options)
    assert message in str(error.value)


def test_a_recipe_names_the_class_and_its_tools(tmp_path: Path) -> None:
    file = tmp_path / "env.py"
    file.write_text(
        "class Env:\n"
        "    def __init__(self, tools):\n"
        "        self.tools = tools\n"
        "    def reset(self):\n"
        "        pass\n"
        "    async def step(self, action):\n"
        "        return (self.tools['up'](action), False) if action != 'end' else ('', True)\n"
        "def up(text):\n"
        "    return text.upper()\n"
    )
    arguments = {"environment": f"{file}:Env", "tools": {"up": f"{file}:up"}}
    use = {"use": "turnwise.compat.gym:ToolEnvironments", "arguments": arguments}
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "x"}, "environment": use})
    trajectory = hold(Says("a", "end"), assembly.environment_factory(config))
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "A", "end"]
