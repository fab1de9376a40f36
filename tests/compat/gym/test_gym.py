"""Gymnasium environments, registered ones and users', and others with `step`: what is shown, and what is an action."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from support.conversations import Says, a_row, call, hold, hold_all
from turnwise import assembly
from turnwise.compat.gym import GymEnvironments, ToolEnvironments
from turnwise.config.recipe import checked
from turnwise.environments.calculator import calculator
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

# Gymnasium environments as they are: what is shown, what is an action, and everything that can go wrong.


MADE: list[Guess] = []


class Guess(gymnasium.Env[str, int]):
    """A number from 0 to 9 is to be guessed."""

    def __init__(self, tries: int = 3, wait: Callable[[], Any] = bool) -> None:
        self.action_space = spaces.Discrete(10)
        self.observation_space = spaces.Text(40)
        self.closed = 0
        self._tries = tries
        self._wait = wait
        MADE.append(self)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self.given = (seed, options)
        self.secret = int(self.np_random.integers(10)) if options is None else options["secret"]
        self._left = self._tries
        return f"{self._left} tries.", {}

    def step(self, action: int) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._wait()
        self._left -= 1
        info = {"left": np.int64(self._left), "board": np.arange(2)}
        if action == self.secret:
            return "Right.", 1.0, True, False, info
        return ("Higher." if action < self.secret else "Lower."), np.float32(-0.5), False, self._left == 0, info

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    MADE.clear()


def play(*said: Any, environment: Any = Guess, options: Any = None, **rules: Any) -> Trajectory:
    """One game, whose secret is 7 unless told otherwise."""
    make = GymEnvironments(environment, **rules)
    MADE.clear()
    return hold(Says(*said), make, row=a_row("Guess!", options={"secret": 7} if options is None else options))


def heard(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "user"]


def failure(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    return trajectory.error.message


def test_a_game_is_played_to_its_end() -> None:
    trajectory = play("3", "I say 9.", "then it is 7")
    assert heard(trajectory) == ["Guess!\n\n3 tries.", "Higher.", "Lower.", "Right."]
    assert [turn.reward for turn in trajectory.turns] == [-0.5, -0.5, 1.0]
    assert trajectory.turns[2].info == {"left": 0, "board": [0, 1], "terminated": True}
    assert (trajectory.stop, [game.closed for game in MADE]) == ("done", [1])


def test_a_truncated_game_is_over_too() -> None:
    trajectory = play("1", arguments={"tries": 1})
    assert trajectory.turns[0].info == {"left": 0, "board": [0, 1], "truncated": True}
    assert (trajectory.stop, trajectory.turns[0].reward) == ("done", -0.5)


def test_what_is_no_action_is_reported_and_counted_and_ends_nothing() -> None:
    trajectory = play("dunno", "12", "99999999999999999999999", "7", invalid_reward=-0.25)
    allowed = "Allowed is an integer from 0 to 9."
    assert heard(trajectory) == [
        "Guess!\n\n3 tries.",
        f"There is no action in your answer. {allowed}",
        f"'12' is not allowed. {allowed}",
        f"'999999999999999999' is not allowed. {allowed}",
        "Right.",
    ]
    assert [turn.info.get("invalid_actions") for turn in trajectory.turns] == [1, 2, 3, None]
    assert [turn.reward for turn in trajectory.turns] == [-0.25, -0.25, -0.25, 1.0]
    assert trajectory.turns[3].info["left"] == 2


def test_a_text_space_is_given_the_answer() -> None:
    class Spell(Guess):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Text(3, min_length=2, charset="abc")  # type: ignore[assignment]

        def step(self, action: Any) -> Any:
            return f"You said {action}.", 0, action == "cab", False, {}

    trajectory = play("a", "  abba", "b!", " ab\n", "cab", environment=Spell)
    allowed = "Allowed is a text of 2 to 3 of the characters 'abc'."
    assert heard(trajectory)[1:] == [
        f"'a' is not allowed. {allowed}",
        f"'abba' is not allowed. {allowed}",
        f"'b!' is not allowed. {allowed}",
        "You said ab.",
        "You said cab.",
    ]


def word(text: str) -> int:
    """An action in words."""
    names = {"seven": 7, "eleven": 11}
    if text not in names:
        raise ValueError(f"Say seven, not {text}.")
    return names[text]


def test_an_action_may_be_read_by_a_function() -> None:
    trajectory = play("six", "eleven", "seven", action=word)
    assert heard(trajectory)[1:] == [
        "Say seven, not six.",
        "'11' is not allowed. Allowed is an integer from 0 to 9.",
        "Right.",
    ]


def test_an_action_function_that_breaks_fails_the_conversation() -> None:
    assert failure(play("six", action=lambda text: {}[text])) == "KeyError: six"


def test_an_action_space_without_words_needs_a_function() -> None:
    class Steer(Guess):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(-1, 1, (2,), np.float32)  # type: ignore[assignment]

        def step(self, action: Any) -> Any:
            return action, float(action.sum()), True, False, {}

    with pytest.raises(
        ConfigError, match=r"Steer: the actions of Box.* have no form in words: set environment\.arguments\."
    ):
        GymEnvironments(Steer)
    action = lambda text: np.array([float(one) for one in text.split()], np.float32)  # noqa: E731
    trajectory = play("2 3", "x", "0.5 0.25", environment=Steer, action=action)
    assert heard(trajectory)[1:] == [
        "'[2. 3.]' is not allowed. Allowed is Box(-1.0, 1.0, (2,), float32).",
        "could not convert string to float: 'x'",
        "[0.5, 0.25]",
    ]
    assert trajectory.turns[2].reward == 0.75


def test_an_environment_without_spaces_is_given_the_text() -> None:
    class Bare:
        def reset(self, seed: Any = None, options: Any = None) -> Any:
            return None, {}

        def step(self, action: str) -> Any:
            return [{"role": "user", "content": action.upper()}], 0.5, action == "b", False, {}

    trajectory = play(" a ", "b", environment=Bare)
    assert heard(trajectory) == ["Guess!", "A", "B"]


def test_what_is_shown_may_be_said_by_a_function() -> None:
    def show(text: str) -> Any:
        return [{"type": "text", "text": text.upper()}]

    trajectory = play("7", observation=show)
    assert heard(trajectory) == [
        [{"type": "text", "text": "Guess!"}, {"type": "text", "text": "3 TRIES."}],
        [{"type": "text", "text": "RIGHT."}],
    ]


def test_registered_games_are_made_by_their_id() -> None:
    make = GymEnvironments("FrozenLake-v1", arguments={"is_slippery": False})
    trajectory = hold(Says(*"112122"), make, row=a_row("Go!"))
    assert heard(trajectory) == ["Go!\n\n0", "4", "8", "9", "13", "14", "15"]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ("FrozenLak-v9", {}, "FrozenLak-v9 cannot be created: NameNotFound: Environment `FrozenLak` doesn't exist"),
        ("json:dumps", {}, r"dumps cannot be created with the arguments {}: missing a required argument: 'obj'"),
        ("json:no", {}, "environment.arguments.environment: json has no 'no'"),
        ("guess.py:Guess", {}, "there is no file"),
        (5, {}, "environment.arguments.environment is a int, 5; it must be a class or a function"),
        (dict, {}, "dict makes a dict without reset and step; what is played must have reset and step"),
        (Guess, {"arguments": {"trys": 1}}, "Guess cannot be created with the arguments {'trys': 1}"),
        (Guess, {"action": 5}, "environment.arguments.action is a int"),
        (Guess, {"observation": "json"}, "environment.arguments.observation: 'json' is not a reference"),
        (Guess, {"invalid_reward": "much"}, "environment.arguments.invalid_reward is 'much'"),
        (functools.partial(Guess, wait=5), {"arguments": {"tries": 1, "more": 2}}, "partial cannot be created"),
    ],
)
def test_what_cannot_be_played_is_refused_at_the_start(environment: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        GymEnvironments(environment, **options)
    assert message in str(error.value)


def test_an_environment_of_another_contract_is_refused_with_the_right_adapter() -> None:
    class Other:
        def reset(self) -> None: ...

        def step(self, action: str) -> Any: ...

    with pytest.raises(
        ConfigError, match=r"reset cannot be called with seed and options.*compat\.gym:ToolEnvironments"
    ):
        GymEnvironments(Other)


def test_an_environment_that_cannot_be_made_is_refused_at_the_start() -> None:
    class Broken(Guess):
        def __init__(self) -> None:
            raise OSError("no licence")

    with pytest.raises(ConfigError, match="Broken cannot be created: OSError: no licence"):
        GymEnvironments(Broken)


# seeds


def seeds(row: Any, size: int = 2, **rules: Any) -> list[Any]:
    make = GymEnvironments(Guess, **rules)
    MADE.clear()
    trajectories = hold_all(Says("7", "7", "7"), make, row=row, size=size)
    failed = [one.error.message for one in trajectories if one.error is not None]
    return failed or [game.given for game in MADE]


def test_all_conversations_of_a_row_begin_alike() -> None:
    (first, _), (second, _) = seeds(a_row(id="a"))
    ((other, _),) = seeds(a_row(id="b"), size=1)
    assert first == second != other
    assert 0 <= first < 2**31


def test_a_row_may_say_the_seed_and_the_options() -> None:
    assert seeds(a_row(seed=5, options={"secret": 3})) == [(5, {"secret": 3})] * 2
    assert seeds(a_row(number=6, how={"secret": 4}), size=1, seed="number", options="how") == [(6, {"secret": 4})]


@pytest.mark.parametrize(
    ("row", "rules", "message"),
    [
        (a_row(seed="x"), {}, "row '1' has seed='x'; a seed must be an integer of at least 0"),
        (a_row(seed=-1), {}, "row '1' has seed=-1; a seed must be an integer of at least 0"),
        (a_row(options=[1]), {}, "row '1' has options=[1]; options must be a dictionary"),
        (a_row(), {"seed": "n"}, "KeyError: row '1' has no column 'n'; its columns are: none. Add the column to the data, or "
                                 "map another column to it: data.columns.n=<column>"),
        (a_row(options={"colour": 1}), {}, "KeyError: secret"),
    ],
)  # fmt: skip
def test_a_row_that_lacks_what_reset_wants_fails_alone(row: Any, rules: Any, message: str) -> None:
    assert seeds(row, size=1, **rules) == [message]


# what goes wrong


class Wrong(Guess):
    """Does what a test says."""

    todo: Any = None

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        super().reset(seed=seed, options={"secret": 7})
        return options["reset"]() if "reset" in options else ("", {})

    def step(self, action: int) -> Any:
        return self.todo()


def raises() -> Any:
    raise RuntimeError("no luck")


FINITE = "it must be a finite number"

FIVE = "it must return (observation, reward, terminated, truncated, info), as in gymnasium"


@pytest.mark.parametrize(
    ("reset", "step", "message"),
    [
        (raises, None, "RuntimeError: no luck"),
        (lambda: "hello", None, "TypeError: Wrong.reset returned 'hello'; it must return (observation, info), as in gymnasium"),
        (None, raises, "RuntimeError: no luck"),
        (None, lambda: ("a", 0.0, True, {}), f"TypeError: Wrong.step returned 4 values (str, float, bool, dict); {FIVE}"),
        (None, lambda: "abcde", f"TypeError: Wrong.step returned 'abcde'; {FIVE}"),
        (None, lambda: ("a", float("nan"), True, False, {}), "TypeError: Wrong.step gave the reward nan; " + FINITE),
        (None, lambda: ("a", None, True, False, {}), "TypeError: Wrong.step gave the reward None; " + FINITE),
        (None, lambda: ("a", 0.0, True, False, None), "TypeError: Wrong.step returned the info None; it must be a dictionary"),
        (None, lambda: exit(3), "the code tried to exit the process (status 3)"),
    ],
)  # fmt: skip
def test_what_breaks_fails_its_conversation_and_is_closed(reset: Any, step: Any, message: str) -> None:
    class Does(Wrong):
        todo = staticmethod(step) if step else None

    Does.__name__ = "Wrong"
    trajectory = play("7", environment=Does, options={"reset": reset} if reset else {"x": 1})
    assert failure(trajectory) == message
    assert [game.closed for game in MADE] == [1]


def test_a_game_that_hangs_is_given_up_and_closed() -> None:
    gate = threading.Event()
    make = GymEnvironments(Guess, arguments={"wait": gate.wait})
    MADE.clear()
    limits = Limits(turns=3, tokens_per_turn=99, seconds_per_turn=0.1)
    trajectory = hold(Says("7"), make, row=a_row(), limits=limits)
    gate.set()
    assert (trajectory.stop, [game.closed for game in MADE]) == ("deadline", [1])


@pytest.mark.parametrize(
    ("said", "limits"),
    [
        (["1", "2"], Limits(turns=2, tokens_per_turn=99)),
        (["1", "2 is what I say"], Limits(turns=9, tokens_per_turn=8)),
        (["1", RuntimeError("the engine is gone")], Limits(turns=9, tokens_per_turn=99)),
    ],
)
def test_a_game_is_closed_however_its_conversation_ends(said: list[Any], limits: Limits) -> None:
    make = GymEnvironments(Guess, arguments={"tries": 9})
    MADE.clear()
    hold(Says(*said), make, row=a_row(options={"secret": 7}), limits=limits)
    assert [game.closed for game in MADE] == [1]


def test_eight_games_wait_together() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once
    make = GymEnvironments(Guess, arguments={"wait": gate.wait})
    trajectories = hold_all(Says("7"), make, row=a_row(options={"secret": 7}), size=8)
    assert [one.turns[0].reward for one in trajectories] == [1.0] * 8


def test_tools_stand_in_front_of_a_game() -> None:
    games = GymEnvironments(Guess)
    row = a_row(options={"secret": 7})
    trajectory = hold(
        Says(call("calculator", '{"expression": "3+4"}'), "7"), lambda: Tools([calculator], then=games()), row=row
    )
    assert [message["content"] for message in trajectory.messages if message["role"] == "tool"] == ["7"]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0]


def test_a_recipe_names_a_game_and_the_tools_in_front_of_it(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        "import gymnasium\n"
        "class Game(gymnasium.Env):\n"
        "    action_space = gymnasium.spaces.Discrete(3)\n"
        "    def reset(self, *, seed=None, options=None):\n"
        "        return 'Go', {}\n"
        "    def step(self, action):\n"
        "        return '', float(action), True, False, {}\n"
        "def last(text):\n"
        "    return int(text.split()[-1])\n"
    )
    config = Config.model_validate(
        {
            "model": {"path": "m"},
            "data": {"train": "x"},
            "tools": ["turnwise.environments.calculator:calculator"],
            "environment": {
                "use": "turnwise.compat.gym:GymEnvironments",
                "arguments": {"environment": f"{file}:Game", "action": f"{file}:last"},
            },
        }
    )
    environments = assembly.environment_factory(config)
    trajectory = hold(Says(call("calculator", '{"expression": "1+1"}'), "I take 2"), environments)
    assert [turn.reward for turn in trajectory.turns] == [0.0, 2.0]
    assert trajectory.messages[0]["content"] == "Hi\n\nGo"


def test_the_text_of_render_and_the_information_are_shown_where_they_are_asked_for() -> None:
    make = GymEnvironments(
        "FrozenLake-v1", arguments={"is_slippery": False, "render_mode": "ansi"}, render=True, info=True
    )
    shown = hold(Says("2", "0"), make, limits=Limits(turns=2)).messages
    board = "\x1b[41mS\x1b[0mFFF\nFHFH\nFFFH\nHFFG"
    assert shown[0]["content"].endswith(f'0\n{board}\n{{"prob": 1}}')
    assert shown[2]["content"] == '1\n  (Right)\nS\x1b[41mF\x1b[0mFF\nFHFH\nFFFH\nHFFG\n{"prob": 1.0}'
    with pytest.raises(ConfigError, match="has the render_mode None"):
        GymEnvironments("FrozenLake-v1", render=True)
    with pytest.raises(ConfigError, match="NoSuchGame"):
        GymEnvironments("NoSuchGame-v1")


# Document 3's `ToolEnvironment` as it is, and others with `reset` and `step(action) -> (observation, done)`.


TOOL_ENVIRONMENT_MADE: list[Any] = []


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
        TOOL_ENVIRONMENT_MADE.append(self)

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
def _tool_environment_forgotten() -> None:
    TOOL_ENVIRONMENT_MADE.clear()


def said(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.mark.parametrize("role", ["tool", "user"])
def test_the_documents_class_is_played_as_it_is(role: Any) -> None:
    make = ToolEnvironments(ToolEnvironment, tools={"add": add}, role=role)
    TOOL_ENVIRONMENT_MADE.clear()
    trajectory = hold(Says(said("add", a=1, b=2), said("sub"), said("add", a=1), "It is 3."), make)
    told = [message for message in trajectory.messages if message["role"] == role][role == "user" :]
    assert [message["content"] for message in told] == [
        "3",
        "Error: Unknown tool 'sub'",
        "Error: add() missing 1 required positional argument: 'b'",
    ]
    assert (
        trajectory.stop,
        trajectory.template_mismatch,
        len(TOOL_ENVIRONMENT_MADE),
        TOOL_ENVIRONMENT_MADE[0].resets,
    ) == ("done", None, 1, 1)


class Counter:
    """Async, with rewards, and closed."""

    def __init__(self, wait: float = 0.0) -> None:
        self.closed = 0
        self._wait = wait
        TOOL_ENVIRONMENT_MADE.append(self)

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
    TOOL_ENVIRONMENT_MADE.clear()
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
    assert [one.closed for one in TOOL_ENVIRONMENT_MADE] == [1]


def test_a_row_without_what_reset_names_fails_alone() -> None:
    trajectory = hold(Says("go"), ToolEnvironments(Counter), row=a_row(step=2))
    assert failure(trajectory).startswith(
        "KeyError: Counter.reset needs the column 'start', and row '1' has no such column; its columns are: step."
    )
    assert TOOL_ENVIRONMENT_MADE[-1].closed == 1


class Answers:
    """Answers a turn with what it was made with."""

    def __init__(self, answer: Any = None) -> None:
        self.closed = 0
        self._answer = answer
        TOOL_ENVIRONMENT_MADE.append(self)

    def reset(self) -> None:
        if self._answer == "reset":
            raise OSError("no board")

    def step(self, action: str) -> Any:
        if callable(self._answer):
            return self._answer()
        return self._answer

    def close(self) -> None:
        self.closed += 1


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
def test_tool_environment_what_breaks_fails_its_conversation_and_is_closed(answer: Any, message: str) -> None:
    trajectory = hold(Says("go"), ToolEnvironments(Answers, arguments={"answer": answer}))
    assert failure(trajectory) == message
    assert TOOL_ENVIRONMENT_MADE[-1].closed == 1


def test_one_that_hangs_is_given_up_and_closed() -> None:
    gate = threading.Event()
    make = ToolEnvironments(Answers, arguments={"answer": gate.wait})
    trajectory = hold(Says("go"), make, limits=Limits(turns=2, tokens_per_turn=99, seconds_per_turn=0.1))
    gate.set()
    assert (trajectory.stop, TOOL_ENVIRONMENT_MADE[-1].closed) == ("deadline", 1)


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


# gymnasium through the loop: registered environments, with the rewards of the library's own loop


STEPS = 30
TEN: list[tuple[str, dict[str, Any], list[int]]] = [
    ("Blackjack-v1", {}, [1, 0]),
    ("Blackjack-v1", {"sab": True}, [1, 1, 0]),
    ("FrozenLake-v1", {}, [2, 1, 1, 2, 0]),
    ("FrozenLake-v1", {"is_slippery": False}, [2, 2, 1, 1, 1, 2]),
    ("FrozenLake8x8-v1", {}, [2, 1, 2, 3]),
    ("Taxi-v4", {}, [0, 2, 4, 5, 1, 3]),
    ("CliffWalking-v1", {}, [0, 1, 1, 1, 2]),
    ("CliffWalkingSlippery-v1", {}, [0, 1, 1, 1, 2]),
    ("CartPole-v1", {}, [0, 1, 1]),
    ("MountainCar-v0", {}, [0, 2]),
    ("Acrobot-v1", {}, [0, 2, 1]),
]
"""Names, arguments, and the actions, which are repeated."""


def own_rewards(name: str, arguments: dict[str, Any], seed: int, actions: list[int]) -> list[float]:
    """The rewards of the library's own loop."""
    environment = gymnasium.make(name, **arguments)
    environment.reset(seed=seed)
    rewards = []
    for action in actions:
        _, reward, terminated, truncated, _ = environment.step(action)
        rewards.append(float(reward))
        if terminated or truncated:
            break
    environment.close()
    return rewards


@pytest.mark.parametrize(("name", "arguments", "repeated"), TEN)
def test_an_environment_has_the_rewards_of_the_librarys_own_loop(
    name: str, arguments: dict[str, Any], repeated: list[int]
) -> None:
    use = {"use": f"gymnasium:{name}", "arguments": {"arguments": arguments}}
    config = checked({"model": "m", "environment": use}, source="recipe")
    actions = (repeated * STEPS)[:STEPS]
    (row,) = assembly.rows(config, limit=1)
    trajectory = hold(
        Says(*map(str, actions)),
        assembly.environment_factory(config),
        row=row,
        limits=Limits(turns=STEPS, tokens_per_turn=20),
    )
    assert trajectory.error is None, trajectory.error
    assert [turn.reward for turn in trajectory.turns] == own_rewards(name, arguments, row["seed"], actions)
