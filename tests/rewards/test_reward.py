"""Rewards: functions of turns, conversations, groups and batches, alone and composed."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import json
import math
import re
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from support.conversations import Says, a_row, call, completion, hold, hold_all, scripted
from turnwise import assembly
from turnwise.compat.gym import ToolEnvironments
from turnwise.compat.trajectory_dict import DictReward, DictTurnReward, as_dictionary
from turnwise.config.recipe import load
from turnwise.environments.calculator import calculator
from turnwise.environments.environment import SingleTurn, environment, user_message
from turnwise.environments.tools.tool import Tool
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError
from turnwise.options.algorithm import Grpo
from turnwise.options.schema import Config
from turnwise.record.evaluation import summarize
from turnwise.record.metrics import conversation_metrics
from turnwise.record.trajectory_json import (
    MediaStore,
    decode_trajectory,
    encode_line,
    trajectory_line,
    trajectory_record,
)
from turnwise.record.writer import Retention
from turnwise.rewards.credit import Credit, grpo
from turnwise.rewards.functions import BatchReward, GroupReward, TrajectoryReward, TurnReward, plan_call
from turnwise.rewards.length import GroupLength
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.pipeline import has_reward_differences
from turnwise.types import Failure, Group, Opening, Reply, Trajectory, Turn

# What a conversation was worth, and what becomes of a reward that breaks.


@environment
async def pays(row: Any, *rewards: float | None):  # type: ignore[no-untyped-def]
    yield Opening(messages=row.messages)
    for reward in rewards[:-1]:
        yield user_message("And?", reward=reward)
    yield Reply(done=True, reward=rewards[-1])


def a_trajectory(*rewards: float | None) -> Trajectory:
    """A conversation whose environment gave these rewards; None for a turn without one."""
    return hold(Says(*"abcdefgh"[: len(rewards)]), lambda: pays(*rewards))


def score(scorer: Scorer, *trajectories: Trajectory) -> None:
    group = Group(id="1", row=trajectories[0].row, trajectories=list(trajectories))
    asyncio.run(scorer.score([group]))


def two_turns(trajectory: Trajectory) -> float:
    return float(len(trajectory.turns) == 2)


async def later(trajectory: Trajectory) -> float:
    await asyncio.sleep(0.001)
    return 10.0


def place(trajectory: Trajectory, turn: Turn) -> float:
    assert trajectory.turns[turn.index] is turn
    return float(turn.index)


async def place_later(trajectory: Trajectory, turn: Turn) -> float:
    await asyncio.sleep(0)
    return float(turn.index)


def test_without_functions_the_reward_is_the_sum_of_the_turns() -> None:
    one = a_trajectory(0.5, 0.25)
    assert (one.reward, one.rewards) == (None, {})
    score(Scorer(), one)
    assert (one.reward, one.rewards, one.error) == (0.75, {"turns": 0.75}, None)
    assert [turn.reward for turn in one.turns] == [0.5, 0.25]


def test_functions_of_the_trajectory_sync_and_async_are_added_with_their_weights() -> None:
    one = a_trajectory(0.5, 0.25)
    score(Scorer(trajectory=[TrajectoryReward("two", two_turns, 2.0), TrajectoryReward("later", later, -0.5)]), one)
    assert one.rewards == {"turns": 0.75, "two": 2.0, "later": -5.0}
    assert one.reward == -2.25
    assert [turn.reward for turn in one.turns] == [0.5, 0.25]


def test_functions_of_the_turns_are_added_to_the_turns() -> None:
    one = a_trajectory(0.5, 0.25, 0.0)
    score(Scorer(turns=[TurnReward("place", place), TurnReward("later", place_later, 0.5)]), one)
    assert [turn.reward for turn in one.turns] == [0.5, 1.75, 3.0]
    assert one.rewards == {"turns": 0.75, "place": 3.0, "later": 1.5}
    assert one.reward == sum(turn.reward for turn in one.turns) == 5.25


def test_two_functions_of_one_name_are_added() -> None:
    one = a_trajectory(0.0, 0.0)
    score(Scorer(trajectory=[TrajectoryReward("f", two_turns), TrajectoryReward("f", two_turns, 3.0)]), one)
    assert one.rewards == {"turns": 0.0, "f": 4.0}
    assert one.reward == 4.0


@pytest.mark.parametrize(
    "value",
    [1, True, np.float32(1.0), np.array([1.0]).sum(), np.array([1.0]), np.True_, torch.tensor([1]), Fraction(1)],
)
def test_numbers_of_every_kind_are_rewards(value: Any) -> None:
    one = a_trajectory(0.0)
    score(Scorer(trajectory=[TrajectoryReward("f", lambda _: value)]), one)
    assert one.reward == 1.0
    assert type(one.rewards["f"]) is float


def raises(trajectory: Trajectory) -> float:
    raise KeyError("answer")


async def raises_later(trajectory: Trajectory) -> float:
    await asyncio.sleep(0)
    raise RuntimeError("the judge is gone")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises, "the reward function 'f': KeyError: answer"),
        (raises_later, "the reward function 'f': RuntimeError: the judge is gone"),
        (lambda _: math.nan, "the reward function 'f' gave nan; a reward must be a finite number"),
        (lambda _: -math.inf, "the reward function 'f' gave -inf; a reward must be a finite number"),
        (
            lambda _: None,
            "the reward function 'f' gave None; a reward must be a number, such as 0.0: is a `return` missing?",
        ),
        (
            lambda _: "1.0",
            "the reward function 'f' gave the text '1.0'; a reward must be a number: convert it with float(...)",
        ),
        (
            lambda _: [1.0],
            "the reward function 'f' gave [1.0] (list); a reward must be one number: float() argument must be a string or "
            "a real number, not 'list'",
        ),
        (
            lambda _: {"right": 1.0, "short": 0.5},
            "the reward function 'f' gave {'right': 1.0, 'short': 0.5} (dict); a reward must be one number. Write a function for "
            "each part: each has a name and a weight",
        ),
        (
            lambda _: 10**400,
            f"the reward function 'f' gave 1{'0' * 79} (int); a reward must be one number: int too large to convert to float",
        ),
    ],
)
def test_a_reward_that_breaks_is_no_zero_and_breaks_no_sibling(function: Any, message: str) -> None:
    def only_the_second(trajectory: Trajectory) -> Any:
        return function(trajectory) if trajectory.id == "1/1" else float(trajectory.id[-1])

    trajectories = hold_all(Says("a"), lambda: pays(1.0), size=4)
    score(Scorer(trajectory=[TrajectoryReward("f", only_the_second)]), *trajectories)
    broken = trajectories[1]
    assert broken.error == Failure("reward", message)
    assert (broken.stop, broken.reward, broken.failed) == ("error", None, True)
    assert broken.messages[-1]["content"] == "a"  # what it holds stays
    assert [one.reward for one in trajectories] == [1.0, None, 3.0, 4.0]
    group = Group(id="1", row=broken.row, trajectories=trajectories)
    Credit("grpo", functools.partial(grpo, options=Grpo(scale="none")))([group])
    assert [one.advantages for one in trajectories] == [
        [pytest.approx(-5 / 3)],
        [],
        [pytest.approx(1 / 3)],
        [pytest.approx(4 / 3)],
    ]


def test_a_reward_that_takes_too_long_names_the_bound() -> None:
    async def slow(trajectory: Trajectory) -> float:
        await asyncio.sleep(10)
        return 1.0

    one = a_trajectory(1.0)
    score(Scorer(trajectory=[TrajectoryReward("slow", slow)], timeout=0.05), one)
    assert one.error is not None
    assert (one.error.kind, one.error.message) == (
        "reward",
        "the reward functions took longer than reward.timeout=0.05",
    )


def test_a_reward_of_a_turn_that_breaks_leaves_the_turns_as_they_were() -> None:
    def breaks_late(trajectory: Trajectory, turn: Turn) -> float:
        return 1.0 if turn.index == 0 else math.nan

    one = a_trajectory(0.5, 0.25)
    score(Scorer(turns=[TurnReward("late", breaks_late)]), one)
    assert one.error == Failure("reward", "the reward function 'late' gave nan; a reward must be a finite number")
    assert [turn.reward for turn in one.turns] == [0.5, 0.25]
    assert one.rewards == {}


def test_a_reward_of_the_environment_that_is_no_number_is_told() -> None:
    one = a_trajectory(0.5, math.nan)
    score(Scorer(), one)
    assert one.error == Failure("reward", "the environment gave nan; a reward must be a finite number")
    assert one.reward is None


def test_what_broke_before_is_not_scored_and_what_is_scored_not_again() -> None:
    asked: list[str] = []

    def counts(trajectory: Trajectory) -> float:
        asked.append(trajectory.id)
        return 1.0

    scorer = Scorer(trajectory=[TrajectoryReward("counts", counts)])
    broken, good = hold(Says(RuntimeError("dead"))), a_trajectory(0.5)
    score(scorer, broken, good)
    score(scorer, broken, good)
    assert asked == [good.id]
    assert (broken.reward, broken.error.kind if broken.error else None) == (None, "engine")
    assert (good.reward, good.turns[0].reward) == (1.5, 0.5)


def test_rewards_are_asked_at_the_same_time() -> None:
    now, most = 0, 0

    async def slow(trajectory: Trajectory) -> float:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.01)
        now -= 1
        return 0.0

    score(Scorer(trajectory=[TrajectoryReward("slow", slow)]), *hold_all(Says("a"), size=5))
    assert most == 5


def of_group(function: Any, *, size: int = 4, weight: float = 1.0, seconds: float | None = None) -> list[Trajectory]:
    """Four conversations of a group, the second one broken before, scored by a function of the group."""
    trajectories = hold_all(Says("a"), lambda: pays(0.5), size=size)
    trajectories[1].fail(Failure("environment", "gone"))
    score(Scorer(groups=[GroupReward("together", function, weight)], timeout=seconds), *trajectories)
    return trajectories


def test_a_function_of_the_group_is_asked_once_about_all_that_did_not_break() -> None:
    asked: list[list[str]] = []

    def places(trajectories: Any) -> list[float]:
        asked.append([one.id for one in trajectories])
        return [float(n) for n in range(len(trajectories))]

    trajectories = of_group(places, weight=2.0)
    assert asked == [["1/0", "1/2", "1/3"]]
    assert [one.reward for one in trajectories] == [0.5, None, 2.5, 4.5]
    assert trajectories[3].rewards == {"turns": 0.5, "together": 4.0}
    assert trajectories[1].error == Failure("environment", "gone")


def test_a_group_function_that_raises_while_its_values_are_read_breaks_them_as_a_reward() -> None:
    def half_way(trajectories: Any) -> Any:
        yield 1.0
        raise RuntimeError("lost")

    trajectories = of_group(half_way)
    errors = [one.error for one in trajectories if one is not trajectories[1]]
    assert [(one.kind, "RuntimeError: lost" in one.message) for one in errors if one is not None] == [
        ("reward", True)
    ] * 3


def test_each_group_is_asked_about_by_itself_and_together_with_the_other_kinds_of_functions() -> None:
    async def mean(trajectories: Any) -> Any:
        await asyncio.sleep(0.001)
        return np.full(len(trajectories), len(trajectories))

    groups = [
        Group(id=str(size), row=several[0].row, trajectories=several)
        for size in (1, 3)
        for several in [hold_all(Says("a"), lambda: pays(0.5), size=size)]
    ]
    scorer = Scorer([TrajectoryReward("f", lambda one: 10.0)], [TurnReward("t", place)], [GroupReward("g", mean)])
    asyncio.run(scorer.score(groups))
    assert [[one.reward for one in group.trajectories] for group in groups] == [[11.5], [13.5, 13.5, 13.5]]
    assert groups[1].trajectories[0].rewards == {"turns": 0.5, "t": 0.0, "f": 10.0, "g": 3.0}


def test_none_says_that_a_function_of_the_group_does_not_apply() -> None:
    trajectories = of_group(lambda several: [None, 1.0, None])
    assert [one.rewards for one in trajectories] == [
        {"turns": 0.5},
        {},
        {"turns": 0.5, "together": 1.0},
        {"turns": 0.5},
    ]
    assert [one.reward for one in trajectories] == [0.5, None, 1.5, 0.5]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda several: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda several: several[0].row["label"], "KeyError: "),
        (
            lambda several: [1.0],
            "the reward function 'together' gave 1 values for the 3 trajectories of a group; it must give a list with a number, "
            "or None, for each of them, in their order",
        ),
        (
            lambda several: 1.0,
            "the reward function 'together' gave 1.0 for the 3 trajectories of a group; it must give",
        ),
        (
            lambda several: torch.ones(2),
            "the reward function 'together' gave 2 values for the 3 trajectories of a group",
        ),
        (lambda several: None, "the reward function 'together' gave None for the 3 trajectories of a group"),
        (lambda several: "abc", "the reward function 'together' gave 'abc' for the 3 trajectories"),
        (lambda several: {"a": 1.0}, "the reward function 'together' gave {'a': 1.0} for the 3 trajectories"),
        (lambda several: asyncio.sleep(1), "the reward function 'together' took longer than reward.timeout=0.05"),
    ],
)
def test_a_function_of_the_group_that_breaks_breaks_those_that_it_was_asked_about(function: Any, message: str) -> None:
    trajectories = of_group(function, seconds=0.05)
    for one in (trajectories[0], trajectories[2], trajectories[3]):
        assert one.error is not None
        assert one.error.kind == "reward"
        assert message in one.error.message
        assert (one.reward, one.rewards) == (None, {})


def test_a_wrong_number_of_a_function_of_the_group_breaks_its_own_trajectory() -> None:
    trajectories = of_group(lambda several: [1.0, math.nan, 2.0])
    assert [one.reward for one in trajectories] == [1.5, None, None, 2.5]
    assert trajectories[2].error == Failure(
        "reward", "the reward function 'together' gave nan; a reward must be a finite number"
    )


@pytest.mark.parametrize("value", [1e200, -1e16])
def test_a_reward_that_no_gradient_could_hold_breaks_its_trajectory_and_no_other(value: float) -> None:
    trajectories = hold_all(Says("a"), lambda: pays(1.0), size=3)
    score(Scorer(trajectory=[TrajectoryReward("f", lambda one: value if one.id == "1/1" else 1.0)]), *trajectories)
    assert trajectories[1].error == Failure(
        "reward", f"the reward function 'f' gave {value:g}; a reward must lie between -1e+15 and 1e+15"
    )
    Credit("grpo", grpo)([Group(id="1", row=trajectories[0].row, trajectories=trajectories)])
    assert [one.reward for one in trajectories] == [2.0, None, 2.0]


def test_rewards_whose_sum_is_no_number_break_their_trajectory() -> None:
    one = a_trajectory(1.2e308, 1.2e308)
    score(Scorer(), one)
    assert one.error == Failure("reward", "the environment gave 1.2e+308; a reward must lie between -1e+15 and 1e+15")
    several = a_trajectory(9e14, 9e14)
    score(Scorer(), several)
    assert several.error == Failure(
        "reward", "all reward functions together gave 1.8e+15; a reward must lie between -1e+15 and 1e+15"
    )


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_a_weight_that_is_no_number_is_refused(weight: float) -> None:
    for kind in (TrajectoryReward, TurnReward, GroupReward):
        with pytest.raises(ConfigError, match="has the weight"):
            kind("f", two_turns, weight)  # type: ignore[arg-type]


def test_a_reward_function_may_set_an_alarm() -> None:
    def alarmed(trajectory: Trajectory) -> float:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.alarm(5)
        signal.alarm(0)
        return 1.0

    before = signal.getsignal(signal.SIGALRM)
    trajectories = hold_all(Says("a"), lambda: pays(0.0), size=3)
    try:
        score(Scorer(trajectory=[TrajectoryReward("alarmed", alarmed)]), *trajectories)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [one.reward for one in trajectories] == [1.0] * 3


@pytest.mark.parametrize("error", [SystemExit(1), asyncio.CancelledError(), BaseException("no Exception")])
def test_whatever_a_reward_function_raises_breaks_its_trajectory_only(error: BaseException) -> None:
    async def raises_it(trajectory: Trajectory) -> float:
        await asyncio.sleep(0)
        if trajectory.id == "1/1":
            raise error
        return 1.0

    def at_once(trajectory: Trajectory) -> float:
        if trajectory.id == "1/2":
            raise error
        return 1.0

    trajectories = hold_all(Says("a"), lambda: pays(0.0), size=4)
    score(Scorer(trajectory=[TrajectoryReward("a", raises_it), TrajectoryReward("b", at_once)]), *trajectories)
    assert [one.reward for one in trajectories] == [2.0, None, None, 2.0]
    assert [one.error.message.partition(":")[0] for one in trajectories if one.error] == [
        "the reward function 'a'",
        "the reward function 'b'",
    ]
    assert "at_once" in (trajectories[2].error or Failure("", "")).traceback


# no reward, which is not the reward 0


def for_long_ones(trajectory: Trajectory) -> float | None:
    """Applies to conversations of at least two turns."""
    return None if len(trajectory.turns) < 2 else float(len(trajectory.turns) - 2)


FOR_LONG_ONES = TrajectoryReward("long", for_long_ones, plan=plan_call(for_long_ones, "trajectory", name="long"))


def test_a_conversation_to_which_no_function_applies_has_no_reward_and_is_in_no_mean_and_no_group() -> None:
    short, two, three, broken = (
        a_trajectory(None),
        a_trajectory(None, None),
        a_trajectory(None, None, None),
        a_trajectory(None),
    )
    broken.fail(Failure("environment", "broken"))
    score(Scorer([FOR_LONG_ONES]), short, two, three, broken)
    rewards = [(one.reward, one.rewards, one.failed) for one in (short, two, three, broken)]
    parts = {"turns": 0.0, "long": 0.0}
    assert rewards == [
        (None, {}, False), (0.0, parts, False), (1.0, {"turns": 0.0, "long": 1.0}, False), (None, {}, True)
    ]  # fmt: skip
    group = Group(id="1", row=short.row, trajectories=[short, two, three, broken])
    Credit("grpo", grpo)([group])
    assert [len(one.advantages) for one in group.trajectories] == [0, 2, 3, 0]
    assert two.advantages[0] == -three.advantages[0] != 0
    metrics = conversation_metrics([group])
    assert (metrics["reward/mean"], metrics["reward/none"], metrics["failed"]) == (0.5, 1 / 3, 0.25)
    assert metrics["turns/mean"] == 2.0  # of all that did not fail
    result = summarize(
        group.trajectories,
        name="m",
        model="m",
        engine="local",
        single_turn=False,
        samples=1,
        pass_reward=1.0,
        source_of={},
    )
    assert (result.conversations, result.failed, result.reward.mean, result.pass_rate.mean) == (4, 1, 0.5, 0.5)


def test_conversations_without_a_reward_are_no_difference_between_rewards() -> None:
    short, two, other = a_trajectory(None), a_trajectory(None, None), a_trajectory(None, None)
    score(Scorer([FOR_LONG_ONES]), short, two, other)
    group = Group(id="1", row=short.row, trajectories=[short, two, other])
    assert not has_reward_differences(group)
    assert conversation_metrics([group])["groups/zero_std"] == 1.0


def test_the_reward_0_of_an_environment_is_a_reward_and_nothing_is_none() -> None:
    silent, zero, later_zero, paid = a_trajectory(None), a_trajectory(0), a_trajectory(None, 0.0), a_trajectory(0.5)
    assert [[turn.rewards for turn in one.turns] for one in (silent, zero, later_zero)] == [
        [{}], [{"environment": 0.0}], [{}, {"environment": 0.0}]
    ]  # fmt: skip
    score(Scorer([FOR_LONG_ONES]), silent, zero, later_zero, paid)
    assert [one.reward for one in (silent, zero, later_zero, paid)] == [None, 0.0, 0.0, 0.5]


def test_the_only_source_gives_the_sum_of_its_rewards_which_is_0_without_any() -> None:
    silent, paid = a_trajectory(None, None), a_trajectory(None, 1.0)
    score(Scorer(), silent, paid)
    assert (silent.reward, paid.reward) == (0.0, 1.0)


def test_a_function_of_turns_that_gives_0_is_a_source_and_one_that_gives_none_is_not() -> None:
    def zero_for_first(turn: Turn) -> float | None:
        return 0.0 if turn.index == 0 else None

    def never(turn: Turn) -> float | None:
        return None

    zero, none = (
        TurnReward(function.__name__, function, plan=plan_call(function, "turns", name="f"))
        for function in (zero_for_first, never)
    )
    one, other = a_trajectory(None, None), a_trajectory(None, None)
    score(Scorer(turns=[zero]), one)
    score(Scorer(turns=[none]), other)
    assert (one.rewards, one.reward) == ({"turns": 0.0, "zero_for_first": 0.0}, 0.0)
    assert (other.rewards, other.reward) == ({}, None)


def test_the_record_tells_the_reward_0_of_an_environment_from_none(tmp_path: Path) -> None:
    silent, zero = a_trajectory(None), a_trajectory(0)
    score(Scorer([FOR_LONG_ONES]), silent, zero)
    lines = [trajectory_line(one, MediaStore(tmp_path)) for one in (silent, zero)]
    read = [decode_trajectory(json.loads(line), where="line 1") for line in lines]
    assert [(one.reward, one.turns[0].reward, one.turns[0].rewards) for one in read] == [
        (None, 0.0, {}), (0.0, 0.0, {"environment": 0.0})
    ]  # fmt: skip


def test_what_is_kept_of_a_group_tells_no_reward_from_failed() -> None:
    short, two, three, broken = (
        a_trajectory(None),
        a_trajectory(None, None),
        a_trajectory(None, None, None),
        a_trajectory(None),
    )
    broken.fail(Failure("environment", "broken"))
    score(Scorer([FOR_LONG_ONES]), short, two, three, broken)
    kept = Retention(every=1, best_and_worst=1).kept([short, two, three, broken], step=1, steps=3)
    assert kept == [short, two, three, broken]


# The composite reward of the recipe, and functions of dictionaries.


ROOT = Path(__file__).parents[2]

GOOD, BAD = call("calculator", '{"expression": "6*7"}'), call("calculator", '{"expression": "6*"}')


def conversations(*texts: list[str]) -> Group:
    row = a_row("What is 6 * 7?", answer="42")
    held = [hold(scripted(turns), lambda: Tools([Tool.of(calculator)], then=SingleTurn()), row=row) for turns in texts]
    return Group(id="1", row=row, trajectories=held)


def test_the_parts_of_the_recipe_are_weighted_summed_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, _ = load(ROOT / "recipes" / "composite_reward.yaml")
    scorer = assembly.scorer(config)
    scorer.refuse_unknown_columns(assembly.rows(config, limit=4))
    group = conversations([GOOD, "#### 42"], [BAD, GOOD, "#### 41"], ["#### 42"])
    asyncio.run(scorer.score([group]))
    right, wrong, guessed = group.trajectories
    assert right.rewards == pytest.approx({"turns": 0.0, "correctness": 0.6, "efficiency": 0.16, "tool_quality": 0.2})
    assert wrong.rewards == pytest.approx({"turns": 0.0, "correctness": 0.0, "efficiency": 0.14, "tool_quality": 0.1})
    assert guessed.rewards == pytest.approx({"turns": 0.0, "correctness": 0.6, "efficiency": 0.18})
    assert [one.reward for one in group.trajectories] == pytest.approx([0.96, 0.24, 0.78])
    metrics = conversation_metrics([group])
    assert metrics["rewards/tool_quality/mean"] == pytest.approx(0.15)  # of the two that it applies to
    assert metrics["rewards/tool_quality/std"] == pytest.approx(0.05)
    assert metrics["rewards/efficiency/mean"] == pytest.approx(0.16)


def test_a_trajectory_as_a_dictionary() -> None:
    @environment
    async def pays(row: Any):  # type: ignore[no-untyped-def]
        yield Opening(messages=[{"role": "system", "content": "Count."}, *row.messages])
        yield Reply(messages=[{"role": "user", "content": [{"type": "text", "text": "And?"}]}], reward=0.5)
        yield Reply(messages=[{"role": "user", "content": "Thanks."}], reward=1.0, done=True)

    one = hold(scripted(["<think>Hm.</think>One.", "Two."]), pays, row=a_row("Go.", level=3))
    assert as_dictionary(one) == {
        "turns": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "Go."},
            {**one.turns[0].message, "content": "<think>Hm.</think>One."},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Two."},
        ],
        "reward": 1.5,
        "per_turn_rewards": [0.0, 0.0, 0.5, 0.0, 1.0],
        "prompt": "Go.",
        "response": "Two.",
        "row": {"level": 3},
    }


def test_the_functions_of_dictionaries_on_the_page_give_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "recipes" / "composite_reward.md").read_text(encoding="utf-8")
    (code,), (reward,) = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in ("python", "yaml"))
    (tmp_path / "my.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, **yaml.safe_load(reward)})
    group = conversations([GOOD, "#### 42"], ["#### 41"])
    asyncio.run(assembly.scorer(config).score([group]))
    right, wrong = group.trajectories
    assert right.rewards == pytest.approx({"turns": 0.0, "multiturn_reward": 0.96, "turn_rewards": 0.1})
    assert [turn.reward for turn in right.turns] == pytest.approx([0.1, 0.0])
    assert wrong.rewards == pytest.approx({"turns": 0.0, "multiturn_reward": 0.18, "turn_rewards": 0.0})


def turn_error(values: Any) -> str:
    group = conversations([GOOD, "#### 42"])
    (one,) = group.trajectories
    scorer = Scorer(turns=[TurnReward("f", DictTurnReward(lambda trajectory: values))])
    asyncio.run(scorer.score([group]))
    if one.error is None:
        return str([turn.reward for turn in one.turns])
    assert one.error.kind == "reward"
    return one.error.message


def test_the_rewards_of_turns_are_one_for_each_entry_or_for_each_turn_of_the_model() -> None:
    assert turn_error([0, 0.5, 0, 1.0]) == turn_error([0.5, 1.0]) == "[0.5, 1.0]"
    rule = "it must give a list with one number for each of the 4 entries of trajectory['turns'], or for each of the 2 turns"
    assert rule in turn_error([1.0])
    assert rule in turn_error(None)
    assert "an entry that the model did not write cannot have a reward: give 0" in turn_error([1.0, 0, 0, 1.0])
    assert "gave nan; a reward must be a finite number" in turn_error([0.5, float("nan")])


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.trajectory: arguments\.function: json:__name__ is a str; it must be"
    ):
        DictReward("json:__name__")


# The reward functions of the note on multi-turn RL (document 3): functions of a dictionary, and rewards assigned to
# turns.


class ToolEnvironment:
    """The note's, with one tool."""

    def reset(self) -> None:
        pass

    def step(self, action: str) -> tuple[str, bool]:
        return ("", True) if "<tool_call>" not in action else ("3628800", False)


@environment
async def note_pays(row: Any):  # type: ignore[no-untyped-def]
    yield Opening(messages=row.messages)
    yield user_message("And?", reward=0.5)
    yield Reply(done=True)


def played() -> Trajectory:
    said = "<tool_call>\n" + json.dumps({"name": "python", "arguments": {"code": "1"}}) + "\n</tool_call>"
    make = ToolEnvironments(ToolEnvironment)
    return hold(Says(said, "The factorial of 10 is 3,628,800."), make, row=a_row("10!?", answer="3,628,800"))


def of(form: str, function: Any) -> Scorer:
    kinds: dict[str, Any] = {
        "trajectory": TrajectoryReward,
        "turns": TurnReward,
        "groups": GroupReward,
        "batch": BatchReward,
    }
    return Scorer(**{form: [kinds[form]("given", function)]})


def test_the_reward_function_of_the_note_runs_where_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "note.py").write_text(
        "def verify_answer(text):\n"
        "    return float('3,628,800' in text)\n"
        "def evaluate_tool_usage(turns):\n"
        "    return float(any(t['role'] == 'tool' and t['content'] == '3628800' for t in turns))\n"
        "def multiturn_reward(trajectory):\n"
        '    turns = trajectory["turns"]\n'
        '    n_turns = len([t for t in turns if t["role"] == "assistant"])\n'
        '    final_response = turns[-1]["content"]\n'
        "    correctness = verify_answer(final_response)\n"
        "    efficiency = max(0, 1.0 - 0.1 * n_turns)\n"
        "    tool_quality = evaluate_tool_usage(turns)\n"
        "    reward = 0.6 * correctness + 0.2 * efficiency + 0.2 * tool_quality\n"
        "    return reward\n"
    )
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": "d"}, "reward": {"trajectory": ["note.py:multiturn_reward"]}}
    )
    one = played()
    score(assembly.scorer(config), one)
    assert one.error is None
    assert one.reward == pytest.approx(0.6 + 0.2 * 0.8 + 0.2)


def test_observations_are_tool_messages_in_the_dictionary_also_after_the_record() -> None:
    one = played()
    assert [message["role"] for message in one.messages] == ["user", "assistant", "user", "assistant"]
    read = decode_trajectory(json.loads(encode_line(trajectory_record(one))), where="the record")
    for trajectory in (one, read):
        assert [entry["role"] for entry in trajectory["turns"]] == ["user", "assistant", "tool", "assistant"]
    simulated_user = hold(Says("a", "b"), note_pays)
    assert [entry["role"] for entry in simulated_user["turns"]] == ["user", "assistant", "user", "assistant"]


def test_a_trajectory_is_a_dictionary_with_these_keys_and_no_others() -> None:
    one = played()
    assert list(dict(one)) == ["turns", "reward", "per_turn_rewards", "prompt", "response", "row"]
    assert (one["row"], one["prompt"], one.get("prompt"), one.get("step", 7)) == (
        {"answer": "3,628,800"},
        "10!?",
        "10!?",
        7,
    )
    assert "turns" in one
    assert "stop" not in one
    with pytest.raises(KeyError, match=r"trajectory\['stop'\].*keys turns, reward.*such as trajectory.stop"):
        one["stop"]


def shares_the_reward(trajectory: Trajectory) -> float:
    for turn in trajectory.turns:
        turn.reward = 1.0
    return 0.0


def discounts_the_reward(trajectory: Trajectory, turn: Turn) -> float:
    for i, each in enumerate(reversed(trajectory.turns)):
        each.reward += 0.95**i
    return 0.0


def replaces_the_parts(trajectories: list[Trajectory]) -> list[float]:
    trajectories[0].turns[0].rewards = {"mine": 1.0}
    return [0.0 for _ in trajectories]


@pytest.mark.parametrize(
    ("form", "function", "name"),
    [
        ("trajectory", shares_the_reward, "turn.reward"),
        ("turns", discounts_the_reward, "turn.reward"),
        ("groups", replaces_the_parts, "turn.rewards"),
        ("batch", replaces_the_parts, "turn.rewards"),
    ],
)
def test_a_function_that_assigns_the_reward_of_a_turn_fails_with_the_ways_that_exist(
    form: str, function: Any, name: str
) -> None:
    one = hold(Says("a", "b"), note_pays)
    score(of(form, function), one)
    assert one.error is not None
    assert f"{name} cannot be set" in one.error.message
    for way in ("reward.turns", "add_reward", "credit.name", "shared", "discounted", "Reply(reward=...)"):
        assert way in one.error.message
    assert one.reward is None
    assert [turn.reward for turn in one.turns] == [0.5, 0.0]


def test_turns_can_be_copied_with_their_rewards() -> None:
    turn = hold(Says("a", "b"), note_pays).turns[0]
    for copied in (copy.copy(turn), copy.deepcopy(turn), dataclasses.replace(turn, weight=0.0)):
        assert (copied.reward, copied.rewards) == (0.5, {"environment": 0.5})
        with pytest.raises(AttributeError, match=r"turn\.reward cannot be set"):
            copied.reward = 1.0


def adds_to_the_first_turn(trajectory: Trajectory) -> float:
    trajectory.turns[0].add_reward(0.25, "given")
    return 1.0


def test_add_reward_in_a_reward_function_is_part_of_the_reward_of_the_conversation() -> None:
    one = hold(Says("a", "b"), note_pays)
    score(of("trajectory", adds_to_the_first_turn), one)
    assert (one.rewards, one.reward) == ({"turns": 0.75, "given": 1.0}, 1.75)
    assert one.turns[0].rewards == {"environment": 0.5, "given": 0.25}


def sets_the_reward(trajectory: Trajectory) -> float:
    trajectory.reward = 1.0
    return 0.0


def sets_the_rewards(trajectories: list[Trajectory]) -> list[float]:
    for trajectory in trajectories:
        trajectory.reward = 1.0
    return [0.0 for _ in trajectories]


@pytest.mark.parametrize(
    ("form", "function"), [("trajectory", sets_the_reward), ("groups", sets_the_rewards), ("batch", sets_the_rewards)]
)
def test_a_function_that_assigns_the_reward_of_the_conversation_fails(form: str, function: Any) -> None:
    one = hold(Says("a", "b"), note_pays)
    score(of(form, function), one)
    assert one.error is not None
    assert "set trajectory.reward to 1.0; a reward function returns its number" in one.error.message
    assert one.reward is None


def rewards_of_all_turns(trajectory: Trajectory, turn: Turn) -> list[float]:
    return [0.0, 1.0]


def test_a_list_for_one_turn_is_refused_with_the_class_that_accepts_it() -> None:
    one = hold(Says("a", "b"), note_pays)
    score(of("turns", rewards_of_all_turns), one)
    assert one.error is not None
    assert "gave 2 numbers for one turn" in one.error.message
    assert "turnwise.compat.trajectory_dict:DictTurnReward" in one.error.message


# length


def of_length(tokens: int, reward: float) -> Trajectory:
    one = a_trajectory(reward)
    one.turns[0].completion = completion([90] * tokens)
    assert one.sampled_tokens == tokens
    return one


def test_the_length_reward_is_that_of_its_paper() -> None:
    """The example of the page, and random groups against the formula in float64."""
    three = [of_length(tokens, 1.0) for tokens in (10, 20, 30)]
    assert GroupLength()(three) == [0.5, 0.0, -0.5]
    assert GroupLength(pass_reward=2)(three) == [0.0, 0.0, -0.5]
    assert GroupLength()(three[1:2] * 2) == [0.0, 0.0]
    numbers = np.random.default_rng(0)
    for _ in range(5):
        lengths, right = numbers.integers(1, 50, size=4), numbers.integers(0, 2, size=4)
        group = [of_length(int(n), float(r)) for n, r in zip(lengths, right, strict=True)]
        share = 0.5 - (lengths - lengths.min()).astype(np.float64) / (lengths.max() - lengths.min())
        expected = np.where(right == 1, share, np.minimum(0, share))
        np.testing.assert_allclose(GroupLength()(group), expected, rtol=0, atol=1e-15)


def test_the_length_reward_asks_the_function_that_says_what_is_correct() -> None:
    short, long = of_length(4, 0.0), of_length(8, 0.0)
    reward = GroupLength(correct=lambda trajectory: trajectory.sampled_tokens == 4)
    score(Scorer(groups=[GroupReward("length", reward, 2.0)]), short, long)
    assert (short.rewards["length"], long.rewards["length"]) == (1.0, -1.0)
    with pytest.raises(ConfigError, match="is no sync function: name one that takes a trajectory"):
        GroupLength(correct=later)
