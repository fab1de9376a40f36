"""TRL's environment classes and reward functions as they are, and instances that conversations use one after the other."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from support.conversations import Says, a_row, call, hold, hold_all, scripted
from support.vision import save_vision_model
from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.compat.trl import EXHAUSTED, InstancePool, Lease, TrlEnvironments, TrlReward
from turnwise.errors import ConfigError, DataError
from turnwise.options.schema import Config
from turnwise.rewards.functions import BatchReward, GroupReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.types import Group, Trajectory
from turnwise.user_code.calls import conversations_of_step, scored_together

# TRL's environment classes as they are.


MADE: list[Any] = []

ROOM = Limits(turns=8, tokens_per_turn=400)


class GuessEnv:
    """In the form of those in TRL's documentation."""

    def __init__(self) -> None:
        self.reward = -1.0
        self.asked = 0
        MADE.append(self)

    def reset(self, **kwargs: Any) -> str | None:
        self.given = kwargs
        self.secret = kwargs["secret"]
        return f" Between 1 and {kwargs.get('most', 10)}."

    def guess(self, number: int) -> str:
        """
        Make a guess.

        Args:
            number: The number.

        Returns:
            Whether it is right.
        """
        if number > 10:
            raise ValueError("Too large.")
        self.reward = 1.0 if number == self.secret else 0.25
        return "Right." if number == self.secret else "Wrong."

    async def peek(self, hard: bool = False) -> dict[str, int]:
        """
        Look.

        Args:
            hard: How.
        """
        if hard:
            raise RuntimeError("You must not.")
        return {"secret": self.secret}

    def _secretly(self) -> None: ...

    @classmethod
    def from_file(cls, *paths: str) -> GuessEnv:
        return cls()

    def get_reward(self) -> float:
        self.asked += 1
        return self.reward


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    MADE.clear()


def play(*said: Any, environment: Any = GuessEnv, row: Any = None, limits: Limits = ROOM, **options: Any) -> Trajectory:
    MADE.clear()
    make = TrlEnvironments(environment, **options)
    return hold(Says(*said), make, row=row or a_row("Guess!", secret=7), limits=limits)


def guess(number: int) -> str:
    return call("guess", f'{{"number": {number}}}')


def failure(trajectory: Trajectory) -> str:
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    return trajectory.error.message


def tool_texts(trajectory: Trajectory) -> list[Any]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


def test_public_methods_are_tools_and_the_reward_is_the_environments() -> None:
    trajectory = play(guess(3), guess(7), "It is 7.")
    assert trajectory.messages[0]["content"] == "Guess! Between 1 and 10."
    assert [tool["function"]["name"] for tool in trajectory.tools] == ["guess", "peek"]
    assert tool_texts(trajectory) == ["Wrong.", "Right."]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.0, 1.0]
    (env,) = MADE
    assert (trajectory.stop, env.asked) == ("done", 1)
    assert env.given == {"secret": 7, "prompt": [{"role": "user", "content": "Guess!"}]}


def test_errors_inside_are_reported_to_the_model_and_end_nothing() -> None:
    trajectory = play(guess(11), call("peek", '{"hard": true}'), call("peek"), call("reset"), guess(7), "7")
    assert tool_texts(trajectory) == [
        "Error: Too large.",
        "Error: RuntimeError: You must not.",
        "{'secret': 7}",  # as TRL has it: str, not JSON
        "Error: there is no tool 'reset' (the tools are: guess, peek)",
        "Right.",
    ]
    assert [outcome.error for turn in trajectory.turns for outcome in turn.outcomes] == [
        "raised",
        "raised",
        None,
        "unknown_tool",
        None,
    ]
    assert trajectory.turns[-1].reward == 1.0


@pytest.mark.parametrize(
    ("said", "limits", "stop", "rewards"),
    [
        ([guess(3), guess(4)], Limits(turns=2, tokens_per_turn=400), "max_turns", [0.0, 0.25]),
        (["I do not know at all"], Limits(turns=2, tokens_per_turn=8), "length", [-1.0]),
        ([guess(7), "I do not know at all" * 9], Limits(turns=2, tokens_per_turn=100), "length", [0.0, 1.0]),
        ([guess(7), RuntimeError("gone")], ROOM, "error", [0.0]),
    ],
)
def test_the_reward_is_asked_for_once_whoever_ends_the_conversation(
    said: list[Any], limits: Limits, stop: str, rewards: list[float]
) -> None:
    trajectory = play(*said, limits=limits)
    assert (trajectory.stop, [turn.reward for turn in trajectory.turns]) == (stop, rewards)
    assert [env.asked for env in MADE] == [int(stop != "error")]


class Bare:
    """No tools, no reward, a way to be closed."""

    shown: Any = None

    def __init__(self) -> None:
        self.closed = 0
        MADE.append(self)

    def reset(self, colour: str = "none") -> Any:
        return self.shown

    def close(self) -> None:
        self.closed += 1


IMAGE = Image.new("RGB", (2, 2))


@pytest.mark.parametrize(
    ("shown", "messages"),
    [
        (None, [{"role": "user", "content": "Hi"}]),
        ("!", [{"role": "user", "content": "Hi!"}]),
        (
            [{"type": "image", "image": IMAGE}, {"type": "text", "text": "Look."}],
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Hi"},
                        {"type": "image", "image": IMAGE},
                        {"type": "text", "text": "Look."},
                    ],
                }
            ],
        ),
        (
            [{"role": "assistant", "content": "Well?"}, {"role": "user", "content": "Go on."}],
            [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Well?"},
                {"role": "user", "content": "Go on."},
            ],
        ),
    ],
)
def test_what_reset_shows_stands_behind_the_prompt(shown: Any, messages: list[Any]) -> None:
    class Shows(Bare):
        pass

    Shows.shown = shown
    environment = TrlEnvironments(Shows)()
    opening = asyncio.run(environment.begin(a_row()))
    assert (list(opening.messages), list(opening.tools)) == (messages, [])


def test_an_environment_without_tools_and_reward_listens_once_and_is_kept() -> None:
    trajectory = play("a", environment=Bare, row=a_row())
    assert (trajectory.stop, trajectory.turns[0].reward, MADE[0].closed) == ("done", 0.0, 0)
    assert trajectory.environment is not None
    assert trajectory.environment.instance is MADE[0]  # kept for reward functions, then for the next conversation


def test_content_blocks_of_a_tool_are_reported_as_they_are(tmp_path: Path) -> None:
    class Camera(Bare):
        def look(self) -> list[dict[str, Any]]:
            """Look."""
            return [{"type": "image", "image": IMAGE}, {"type": "text", "text": "A wall."}]

        def count(self) -> list[int]:
            """Count."""
            return [1, 2]

        def nothing(self) -> None:
            """Do nothing."""

    trajectory = play(call("count") + call("nothing"), "b", environment=Camera, row=a_row())
    assert tool_texts(trajectory) == ["[1, 2]", "None"]
    make = TrlEnvironments(Camera)
    sees = Renderer.from_pretrained(
        save_vision_model(tmp_path / "model"), tool_format="hermes", unchecked=["tools shown"]
    )
    trajectory = hold(scripted([call("look"), "b"], renderer=sees), make, renderer=sees)
    assert trajectory.error is None
    assert tool_texts(trajectory) == [[{"type": "image", "image": IMAGE}, {"type": "text", "text": "A wall."}]]


def test_several_environments_are_chosen_by_the_row() -> None:
    MADE.clear()
    make = TrlEnvironments({"guess": GuessEnv, "bare": Bare})
    assert [tool.name for tool in make.tools()] == ["guess", "peek"]
    guessing = hold(Says(guess(7), "7"), make, row=a_row(environment="guess", secret=7))
    assert (guessing.reward, [turn.reward for turn in guessing.turns]) == (None, [0.0, 1.0])
    assert "environment" not in MADE[0].given
    bare = hold(Says("a"), make, row=a_row(environment="bare"))
    assert (bare.stop, list(bare.tools)) == ("done", [])
    assert failure(hold(Says("a"), make, row=a_row(environment="gess"))) == (
        "KeyError: row '1' has environment='gess', which is not a name in "
        "environment.arguments.environment: guess, bare; did you mean "
        "'guess'?"
    )
    assert "row '1' has no column 'environment'" in failure(hold(Says("a"), make))


# what goes wrong


class Wants(Bare):
    def reset(self, secret: int, colour: str) -> None: ...


class ResetRaises(Bare):
    def reset(self, **row: Any) -> None:
        raise OSError("no board")


class ResetGives(Bare):
    def reset(self, **row: Any) -> Any:
        return 5


class RewardRaises(Bare):
    def get_reward(self) -> float:
        raise RuntimeError("no judge")


class RewardIsNone(Bare):
    def get_reward(self) -> Any:
        return float("inf")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (Wants, "KeyError: Wants.reset needs the column 'colour', and row '1' has no such column; its columns are: prompt, "
                "secret. Add the column to the data, or map another column to it: data.columns.colour=<column>"),
        (ResetRaises, "OSError: no board"),
        (ResetGives, "TypeError: ResetGives.reset returned 5; it must return None, a text, a list of content blocks or a list of "
                     "messages"),
        (RewardRaises, "RuntimeError: no judge"),
        (RewardIsNone, "TypeError: RewardIsNone.get_reward gave the reward inf; it must be a finite number"),
    ],
)  # fmt: skip
def test_what_breaks_fails_its_conversation_and_is_closed(environment: Any, message: str) -> None:
    trajectory = play("a", environment=environment)
    assert failure(trajectory) == message
    assert [env.closed for env in MADE] == [1]


def test_a_reset_that_hangs_is_given_up_and_the_environment_closed() -> None:
    gate = threading.Event()

    class Hangs(Bare):
        def reset(self) -> None:
            gate.wait()

    limits = Limits(turns=2, tokens_per_turn=99, seconds_per_turn=0.1)
    trajectory = play("a", environment=Hangs, row=a_row(), limits=limits)
    gate.set()
    assert (trajectory.stop, [env.closed for env in MADE]) == ("deadline", [1])


def test_a_tool_that_hangs_is_reported_to_the_model() -> None:
    gate = threading.Event()

    class Hangs(Bare):
        def wait(self) -> None:
            """Wait."""
            gate.wait()

    MADE.clear()
    make = TrlEnvironments(Hangs, timeout=0.05)
    trajectory = hold(Says(call("wait"), "b"), make, row=a_row(), limits=ROOM)
    assert tool_texts(trajectory) == ["Error: wait took longer than 0.05 s"]
    assert trajectory.environment is not None
    trajectory.environment.release()
    hold(Says("b"), make, row=a_row(), limits=ROOM)
    assert len(MADE) == 2  # the first one is still busy
    gate.set()
    asyncio.run(make.aclose())
    assert MADE[0].closed == 1


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({}, "is empty; name at least one environment"),
        ("no.such.module:X", "environment.arguments.environment: no.such.module could not be imported"),
        (object, "object makes a object without reset"),
        (7, "environment.arguments.environment is a int, 7; it must be a class or a function"),
        (lambda: 1 // 0, "cannot be created: ZeroDivisionError"),
        (lambda colour: colour, "cannot be created with the arguments {}: missing a required argument: 'colour'"),
    ],
)
def test_what_is_no_environment_is_refused_at_the_start(environment: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        TrlEnvironments(environment)
    assert message in str(error.value)


def test_a_method_that_cannot_be_a_tool_is_refused_at_the_start() -> None:
    class Untyped(Bare):
        def move(self, where) -> None:  # type: ignore[no-untyped-def]
            """Move."""

    with pytest.raises(ConfigError, match="where"):
        TrlEnvironments(Untyped)


def test_eight_conversations_wait_together() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once

    class Slow(Bare):
        def wait(self) -> str:
            """Wait."""
            gate.wait()
            return "done"

    make = TrlEnvironments(Slow)
    trajectories = hold_all(Says(call("wait"), "b"), make, size=8)
    assert [tool_texts(one) for one in trajectories] == [["done"]] * 8


def test_a_recipe_names_a_class_and_its_tools_obey_the_recipes_options(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(
        "class Env:\n"
        "    def __init__(self, word='hello'):\n"
        "        self.word = word\n"
        "    def reset(self, **row):\n"
        "        return None\n"
        "    def say(self) -> str:\n"
        "        '''Say it.'''\n"
        "        return self.word\n"
        "    def get_reward(self):\n"
        "        return 0.5\n"
    )
    tree: dict[str, Any] = {
        "model": {"path": "m"},
        "data": {"train": "x"},
        "tools": ["turnwise.environments.calculator:calculator"],
        "tool_calls": {"max_tool_response_length": 4, "max_parallel_calls": 1},
        "environment": {
            "use": "turnwise.compat.trl:TrlEnvironments",
            "arguments": {"environment": f"{file}:Env", "arguments": {"word": "goodbye"}},
        },
    }
    environments = assembly.environment_factory(Config.model_validate(tree))
    trajectory = hold(Says(call("say") + call("calculator", '{"expression": "1+1"}'), "b"), environments)
    assert tool_texts(trajectory)[0] == "go...(truncated)...ye"
    assert tool_texts(trajectory)[1].startswith(
        "Error: at most 1 tool call can be made in one turn, and this turn has 2"
    )
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.5]
    file.write_text(file.read_text().replace("say", "calculator"))
    other = tmp_path / "other.py"
    other.write_text(file.read_text())
    tree["environment"]["arguments"]["environment"] = f"{other}:Env"
    with pytest.raises(ConfigError, match="two tools have the name 'calculator'"):
        assembly.environment_factory(Config.model_validate(tree))


class SelfSampling:
    """As in TRL's documentation: the environment owns the data."""

    def reset(self, **kwargs: Any) -> str | None:
        self.given, self.counter = kwargs, 0
        return None if kwargs.get("silent") else "Increment the counter by 2."

    def get_reward(self) -> float:
        return float(self.counter == 2)

    def increment(self, step: int) -> int:
        """
        Increment the internal counter.

        Args:
            step: Value to add to the counter.
        """
        self.counter += step
        MADE.append(self)
        return self.counter


def data_owning(tmp_path: Path, train: str, environment: Any) -> Config:
    use = {"use": "turnwise.compat.trl:TrlEnvironments", "arguments": {"environment": environment}}
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": train}, "environment": use})


def test_an_environment_that_owns_the_data_writes_the_prompt(tmp_path: Path) -> None:
    place = f"{__file__}:SelfSampling"
    rows = assembly.rows(data_owning(tmp_path, "empty:3", place))
    assert [(row.id, dict(row.fields)) for row in rows] == [("1", {}), ("2", {}), ("3", {})]
    trajectory = hold(Says(call("increment", '{"step": 2}'), "done"), TrlEnvironments(SelfSampling), row=rows[0])
    assert trajectory.error is None
    assert trajectory.messages[0] == {"role": "user", "content": "Increment the counter by 2."}
    assert trajectory.turns[-1].reward == 1.0


def test_rows_may_have_only_the_column_that_names_the_environment(tmp_path: Path) -> None:
    data = tmp_path / "names.jsonl"
    data.write_text('{"environment": "a"}\n{"environment": "b"}\n')
    rows = assembly.rows(
        data_owning(tmp_path, str(data), {"a": f"{__file__}:SelfSampling", "b": f"{__file__}:SelfSampling"})
    )
    factory = TrlEnvironments({"a": SelfSampling, "b": SelfSampling})
    trajectory = hold(Says(call("increment", '{"step": 1}'), "done"), factory, row=rows[1])
    assert trajectory.messages[0]["content"] == "Increment the counter by 2."
    assert set(MADE[-1].given) == {"prompt"}  # not the column that selects


def test_a_missing_prompt_is_refused_where_nobody_writes_it(tmp_path: Path) -> None:
    silent = hold(Says("a"), TrlEnvironments(SelfSampling), row=a_row("", silent=True))
    assert silent.error is not None
    assert "the row has no prompt, and SelfSampling.reset returned None" in silent.error.message
    plain = Config.model_validate({"model": {"path": "m"}, "data": {"train": "empty:3"}})
    with pytest.raises(DataError, match=r"has no column 'prompt'.*writes_prompt = True"):
        assembly.rows(plain)
    with pytest.raises(DataError, match="write empty:N"):
        assembly.rows(data_owning(tmp_path, "empty:none", f"{__file__}:SelfSampling"))


# Instances that conversations of overlapping steps use one after the other.


async def run_steps(chance: random.Random) -> tuple[int, int]:
    """Conversations of several steps at the same time, each step scored as one batch. Returns the limit of instances and the
    largest number of conversations that had one at the same time."""
    size, ahead, steps = chance.randint(1, 4), chance.randint(1, 3), 12
    limit = chance.randint(size, size * (ahead + 1))
    pool = InstancePool("Game", [])
    scored_together.set("batch")
    conversations_of_step.set(size)
    made, most, held = 0, 0, set[int]()

    async def make() -> Any:
        nonlocal made
        made += 1
        number = made
        await asyncio.sleep(chance.random() * 0.004)  # a later one may be created first
        return number if number <= limit else EXHAUSTED

    async def conversation() -> Lease:
        nonlocal most
        lease = await pool.lease(make)
        assert lease.instance not in held
        held.add(lease.instance)
        most = max(most, len(held))
        await asyncio.sleep(chance.random() * 0.002)
        lease.played()
        return lease

    running = [[asyncio.create_task(conversation()) for _ in range(size)] for _ in range(ahead + 1)]
    for step in range(steps):
        for lease in await asyncio.gather(*running.pop(0)):
            held.remove(lease.instance)
            lease.give_back(usable=True)
        if step + ahead + 1 < steps:
            running.append([asyncio.create_task(conversation()) for _ in range(size)])
    return limit, most


@pytest.mark.parametrize("seed", range(40))
def test_steps_that_overlap_get_instances_in_the_order_of_arrival(seed: int) -> None:
    limit, most = asyncio.run(asyncio.wait_for(run_steps(random.Random(seed)), 20))
    assert most <= limit


def test_a_constructor_that_fails_lets_the_next_conversation_create_an_instance() -> None:
    async def play() -> None:
        pool = InstancePool("Game", [])
        scored_together.set("batch")
        conversations_of_step.set(1)
        begun = asyncio.Event()

        async def fails() -> Any:
            begun.set()
            await asyncio.sleep(0.01)
            raise ValueError("no game today")

        async def makes() -> Any:
            return "a game"

        first = asyncio.create_task(pool.lease(fails))
        await begun.wait()
        second = asyncio.create_task(pool.lease(makes))
        await asyncio.sleep(0)
        assert not second.done()
        with pytest.raises(ValueError, match="no game today"):
            await first
        lease = await second
        assert (lease.instance, lease.new) == ("a game", True)
        lease.give_back(usable=True)
        assert pool.drain() == ["a game"]

    asyncio.run(play())


# TRL's reward functions as they are.


class Counter:
    """Counts what it is told; made once, reset often."""

    def __init__(self) -> None:
        MADE.append(self)
        self.resets, self.closed = 0, False

    def reset(self, **row: Any) -> None:
        self.resets += 1
        self.total = 0

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: The number.
        """
        self.total += number
        return self.total

    def close(self) -> None:
        self.closed = True


def score(function: Any, trajectories: list[Trajectory]) -> list[dict[str, float]]:
    group = Group(id="1", row=trajectories[0].row, trajectories=trajectories)
    asyncio.run(Scorer(groups=[GroupReward("f", TrlReward(function))]).score([group]))
    for one in trajectories:
        assert one.error is None, one.error
        assert one.environment is None
    return [one.rewards for one in trajectories]


def test_a_function_sees_the_instances_as_their_conversations_left_them() -> None:
    def reward_from_env(environments: list[Any], completions: Any, **kwargs: Any) -> list[float]:
        assert kwargs["answer"] == [7, 7, 7]
        assert len(completions) == len(kwargs["prompts"]) == len(kwargs["completion_ids"]) == 3
        assert completions[0][-1] == {"role": "assistant", "content": "Done."}
        assert kwargs["prompts"][0][-1]["role"] == "user"
        kwargs["log_extra"]("total", [one.total for one in environments])
        return [float(one.total) for one in environments]

    MADE.clear()
    source = TrlEnvironments(Counter)
    first = hold_all(Says(call("add", '{"number": 3}'), "Done."), source, size=3, row=a_row(answer=7), limits=ROOM)
    assert score(reward_from_env, first) == [{"turns": 0.0, "f": 3.0}] * 3
    assert [one.turns[-1].info["total"] for one in first] == [3, 3, 3]
    again = hold_all(Says(call("add", '{"number": 3}'), "Done."), source, size=3, row=a_row(answer=7), limits=ROOM)
    score(reward_from_env, again)
    # made once and reset often, the one that was made to be tried out included
    assert [one.resets for one in MADE] == [2, 2, 2]
    assert not any(one.closed for one in MADE)
    asyncio.run(source.aclose())
    assert all(one.closed for one in MADE)


def test_an_instance_is_lent_to_one_conversation_until_it_is_scored() -> None:
    MADE.clear()
    source = TrlEnvironments(Counter)
    first = hold_all(Says(call("add", '{"number": 3}'), "Done."), source, size=2, row=a_row(), limits=ROOM)
    hold_all(Says(call("add", '{"number": 1}'), "Done."), source, size=2, row=a_row(), limits=ROOM)
    assert len(MADE) == 4
    assert score(lambda environments, **kwargs: [one.total for one in environments], first)[0]["f"] == 3.0


def test_a_function_of_texts_gets_texts_or_says_how() -> None:
    def short(prompts: list[str], completions: list[str]) -> list[float]:
        return [
            float(len(prompt.strip()) + len(text.strip())) for prompt, text in zip(prompts, completions, strict=True)
        ]

    async def waits(completions: list[str]) -> list[float]:
        await asyncio.sleep(0)
        return [float(len(text.strip())) for text in completions]

    (one,) = hold_all(Says("Yes."), row=a_row())
    assert TrlReward(short, texts=True)([one]) == [len(str(one.row.messages[-1]["content"])) + 4.0]
    for function in (short, waits):
        (one,) = hold_all(Says("Yes."), row=a_row())
        group = Group(id="1", row=one.row, trajectories=[one])
        asyncio.run(Scorer(groups=[GroupReward("f", TrlReward(function))]).score([group]))
        assert one.error is not None
        assert "'list' object has no attribute 'strip'" in one.error.message
        assert "For a function of texts, set texts: true in its arguments" in one.error.message


def test_none_and_nan_do_not_apply_and_async_functions_are_awaited() -> None:
    async def judge(prompts: Any, completions: Any, answer: Any) -> list[float | None]:
        await asyncio.sleep(0)
        return [None, float("nan"), 0.5]

    from turnwise.environments.environment import SingleTurn

    trajectories = hold_all(Says("<think>Hm.</think>Yes."), SingleTurn, size=3, row=a_row(answer=1), limits=ROOM)
    assert score(judge, trajectories) == [{}, {}, {"turns": 0.0, "f": 0.5}]


def test_a_function_of_trl_itself_is_named_in_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text(
        "def tagged(completions, **kwargs):\n    return [float('<a>' in one[0]['content']) for one in completions]\n"
        "def maker(most):\n    return lambda completions, **kwargs: [most] * len(completions)\n"
        "def by_state(completions, trainer_state):\n    return [0.0] * len(completions)\n"
    )
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}

    def recipe(name: str) -> Config:
        use = {"use": "turnwise.compat.trl:TrlReward", "arguments": {"function": f"{tmp_path / 'r.py'}:{name}"}}
        return Config.model_validate({**tree, "reward": {"group": [use]}})

    (reward,) = assembly.scorer(recipe("tagged")).groups
    assert reward.name == "tagged"
    with pytest.raises(ConfigError, match="by_state has the parameter trainer_state"):
        assembly.scorer(recipe("by_state"))
    with pytest.raises(ConfigError, match=r"maker\(most\) has none of the parameters .* give its arguments"):
        assembly.scorer(recipe("maker"))
    with pytest.raises(ConfigError, match="has no 'missing'"):
        assembly.scorer(recipe("missing"))


def test_in_the_batch_a_function_is_called_once_with_all_rows_of_a_step_and_log_metric_is_a_metric() -> None:
    calls: list[Any] = []

    def centred(prompts: Any, completions: Any, answer: list[int], log_metric: Any, **kwargs: Any) -> list[float]:
        calls.append((len(prompts), answer))
        log_metric("mean_answer", sum(answer) / len(answer))
        return [one - sum(answer) / len(answer) for one in answer]

    groups = [
        Group(id=str(answer), row=row, trajectories=hold_all(Says("Yes."), size=size, row=row))
        for answer, size in ((1, 2), (7, 1))
        for row in [a_row(id=str(answer), answer=answer)]
    ]
    asyncio.run(Scorer(batch=[BatchReward("f", TrlReward(centred))]).score(groups))
    assert calls == [(3, [1, 1, 7])]
    assert [[one.reward for one in group.trajectories] for group in groups] == [[-2.0, -2.0], [4.0]]
    assert groups[1].trajectories[0].metrics == {"mean_answer": 3.0}


@pytest.mark.parametrize("value", [None, 1.0, "abc"])
def test_a_result_that_is_no_list_fails_with_the_rule(value: Any) -> None:
    trajectories = hold_all(Says("Yes."), row=a_row())
    group = Group(id="1", row=trajectories[0].row, trajectories=trajectories)
    asyncio.run(Scorer(batch=[BatchReward("f", TrlReward(lambda completions: value))]).score([group]))
    assert trajectories[0].error is not None
    assert f"gave {value!r}; it must return a list with a number, or None, for each" in trajectories[0].error.message


def test_an_item_that_is_no_number_fails_its_conversation_only_and_the_function_is_called_once() -> None:
    calls: list[int] = []

    def odd(completions: Any) -> list[Any]:
        calls.append(len(completions))
        return [1.0, "0.5", torch.tensor([2.0])]

    row = a_row()
    group = Group(id="1", row=row, trajectories=hold_all(Says("Yes."), size=3, row=row))
    asyncio.run(Scorer(batch=[BatchReward("f", TrlReward(odd))]).score([group]))
    assert [one.reward for one in group.trajectories] == [1.0, None, 2.0]
    assert calls == [3]
    error = group.trajectories[1].error
    assert error is not None
    assert "the reward function odd gave the text '0.5'; a reward must be a number" in error.message
