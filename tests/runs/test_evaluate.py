"""Conversations on held-out rows."""

from __future__ import annotations

import asyncio

from support.conversations import Says, a_row, a_table
from turnwise.environments.users import ScriptedUser
from turnwise.rewards.functions import TrajectoryReward
from turnwise.rewards.scorer import Scorer
from turnwise.train import evaluate


def test_an_evaluation_holds_scores_and_summarises() -> None:
    engine = Says("a", "b")
    table = a_table(engine, lambda: ScriptedUser(["And?"]))
    scorer = Scorer(trajectory=[TrajectoryReward("id", lambda one: float(one.row.id))])
    rows = [a_row(id="1"), a_row(id="4")]
    summary, groups = asyncio.run(evaluate(rows, table, scorer, samples=2, seed=3, step=7))
    assert [[one.id for one in group.trajectories] for group in groups] == [["1/0", "1/1"], ["4/0", "4/1"]]
    assert [[one.reward for one in group.trajectories] for group in groups] == [[1.0, 1.0], [4.0, 4.0]]
    assert (summary["step"], summary["reward/mean"], summary["reward/std"], summary["turns/mean"]) == (7, 2.5, 1.5, 2.0)
    assert summary["seconds/rollout"] >= 0
    seeds = [(request.conversation, request.seed) for request in engine.requests]
    again = Says("a", "b")
    asyncio.run(evaluate(rows, a_table(again, lambda: ScriptedUser(["And?"])), Scorer(), samples=2, seed=3, step=8))
    assert sorted((request.conversation, request.seed) for request in again.requests) == sorted(seeds)  # at every step


def test_the_pass_rate_counts_rewards_from_the_recipes_bound() -> None:
    scorer = Scorer(trajectory=[TrajectoryReward("id", lambda one: float(one.row.id))])
    rows = [a_row(id=id) for id in ("0.5", "1", "3")]
    for bound, expected in ((1.0, 2 / 3), (0.5, 1.0), (3.5, 0.0)):
        summary, _ = asyncio.run(evaluate(rows, a_table(Says("a")), scorer, pass_reward=bound))
        assert summary["pass_rate"] == expected
