"""Runs and scores conversations without training, with the same loop, engine and rewards as in training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.record.metrics import conversation_metrics, mean
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.types import Group, Row, Trajectory
from turnwise.user_code.reward_number import reaches

__all__ = ["evaluate"]


async def evaluate(
    rows: Sequence[Row],
    table: RolloutContext,
    scorer: Scorer,
    *,
    samples: int = 1,
    seed: int = 0,
    step: int = 0,
    pass_reward: float = 1.0,
    on_finished: Callable[[int], None] = lambda tokens: None,
) -> tuple[dict[str, Any], list[Group]]:
    """Run `samples` conversations on each row and score them. Returns the metrics and the groups.

    A conversation with a reward of at least `pass_reward` counts in the metric `pass_rate`.

    `on_finished` is called with the number of sampled tokens of each finished conversation.

    The random streams depend on `seed` only, so equal weights give equal conversations at every step.
    """
    started = time.perf_counter()
    groups = [new_group(row, size=samples, seed=seed) for row in rows]
    score = scorer.scoring_callback(groups)

    async def done(trajectory: Trajectory) -> None:
        await score(trajectory)
        on_finished(trajectory.sampled_tokens)

    await rollout_groups(groups, table, on_finished=done)
    seconds = {"seconds/rollout": round(time.perf_counter() - started, 4)}
    passed = [
        float(reaches(trajectory.reward, pass_reward))
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None and not trajectory.failed
    ]
    count = sum(len(group.trajectories) for group in groups)
    metrics = {"conversations": count, **conversation_metrics(groups), "pass_rate": mean(passed)}
    return {"step": step, **metrics, **seconds}, groups
