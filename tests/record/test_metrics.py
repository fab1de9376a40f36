"""Numbers about conversations."""

from __future__ import annotations

import asyncio
import math

import pytest

from support.conversations import Says, a_row, a_table, call, scripted
from turnwise.environments.tools.toolbox import Tools
from turnwise.record.metrics import conversation_metrics, failures
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Failure, Group, Trajectory


def f(x: int = 0) -> int:
    """Do it."""
    return x


def held(engine: object, *, size: int, rows: int = 1) -> list[Group]:
    groups = [new_group(a_row(id=str(n)), size=size, seed=0) for n in range(rows)]
    asyncio.run(
        rollout_groups(groups, a_table(engine, lambda: Tools([f]), limits=Limits(turns=2, tokens_per_turn=200)))
    )  # type: ignore[arg-type]
    return groups


def test_the_metrics_of_a_few_conversations() -> None:
    bad, good = call("g"), call("f", '{"x": 1}')
    engine = scripted([good + bad, "So."], ["No."], [good, good], [good])
    groups = held(engine, size=2, rows=2)
    rewards = {"0/0": 1.0, "0/1": 0.0, "1/0": 2.0}
    scorer = Scorer(trajectory=[TrajectoryReward("judge", lambda one: rewards[one.id])])
    asyncio.run(scorer.score(groups))
    metrics = conversation_metrics(groups)
    assert metrics == {
        "reward/mean": 1.0,
        "reward/std": pytest.approx(math.sqrt(2 / 3)),
        "reward/q10": 0.0,
        "reward/median": 1.0,
        "reward/q90": 2.0,
        "segments/mean": 1.0,
        "turns/mean": pytest.approx(5 / 3),
        "tool_calls/mean": pytest.approx(4 / 3),
        "tool_errors/mean": pytest.approx(1 / 3),
        "tokens/sampled": sum(one.sampled_tokens for group in groups for one in group.trajectories),
        "tokens/all": sum(len(segment) for group in groups for one in group.trajectories for segment in one.segments),
        "entropy": None,  # nothing was sampled
        "reward/correlation": None,  # there is one reward function
        "groups/duplicates": 0.0,
        "groups/zero_std": 0.5,  # in the second group only one is whole
        "template_mismatch": 0.0,
        "failed": 0.25,
        "reward/none": 0.0,
        "engine/prefix_hit_rate": None,  # no engine reported it
        "version/oldest": 0,
        "version/newest": 0,
        "rewards/judge/mean": 1.0,
        "rewards/judge/std": pytest.approx(math.sqrt(2 / 3)),
        "stop/done": 0.5,
        "stop/max_turns": 0.25,
        "stop/length": 0.0,
        "stop/max_tokens": 0.0,
        "stop/max_response": 0.0,
        "stop/context": 0.0,
        "stop/deadline": 0.0,
        "stop/error": 0.25,
    }
    assert metrics["tokens/sampled"] == len(good + bad) + 1 + 4 + 4 + 3 * (len(good) + 1)


def test_entropy_is_the_mean_of_what_was_sampled() -> None:
    groups = held(Says("abc"), size=1)
    asyncio.run(Scorer().score(groups))
    assert conversation_metrics(groups)["entropy"] == (1 + 2 + 3 + 4) / 8 / 4


def test_where_nothing_is_whole_there_are_no_means() -> None:
    groups = held(Says(RuntimeError("dead")), size=3)
    metrics = conversation_metrics(groups)
    assert [metrics[name] for name in ("reward/mean", "reward/std", "turns/mean", "entropy")] == [None] * 4
    assert (metrics["failed"], metrics["stop/error"], metrics["groups/zero_std"]) == (1.0, 1.0, 1.0)
    assert conversation_metrics([])["reward/mean"] is None


def test_failures_are_counted_and_the_frequent_ones_come_first() -> None:
    def broken(*messages: str) -> Group:
        row = a_row()
        trajectories = [Trajectory(id=f"1/{n}", group="1", row=row) for n in range(len(messages))]
        for one, message in zip(trajectories, messages, strict=True):
            if message:
                one.fail(Failure("environment", message))
        return Group(id="1", row=row, trajectories=trajectories)

    assert failures([broken("a", "", "b"), broken("b", "b")]) == ["environment (3 times): b", "environment: a"]
    assert failures([broken("", "")]) == []
