"""When two rewards are equal: the same answer for advantages, metrics, dynamic sampling, pass rates and the curriculum."""

from __future__ import annotations

import math

import pytest

from turnwise.data.order import Curriculum
from turnwise.record.metrics import conversation_metrics, lowest_correlation
from turnwise.rewards.credit.credit import centred
from turnwise.rollout.pipeline import has_reward_differences
from turnwise.types import Group, Row, Trajectory
from turnwise.user_code.reward_number import equal_rewards, reaches

ROW = Row(id="r", messages=[])


def group(*rewards: float) -> Group:
    trajectories = [Trajectory(id=str(n), group="r", row=ROW) for n in range(len(rewards))]
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        trajectory.reward, trajectory.rewards = reward, {"a": reward, "b": float(trajectory.id)}
    return Group(id="r", row=ROW, trajectories=trajectories)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ((0.1 + 0.2, 0.3, 0.3), True),
        ((sum([0.1] * 10), 1.0, 1.0), True),
        ((1e6 + 1e-5, 1e6, 1e6), True),
        ((0.3, 0.3 + 1e-6, 0.3), False),
        ((1e6, 1e6 + 1, 1e6), False),
    ],
)
def test_all_parts_of_a_run_agree_whether_rewards_are_equal(rewards: tuple[float, ...], equal: bool) -> None:
    one = group(*rewards)
    metrics = conversation_metrics([one])
    assert equal_rewards(rewards) is equal
    assert (centred(rewards) == [0.0] * len(rewards)) is equal
    assert has_reward_differences(one) is not equal
    assert metrics["groups/zero_std"] == float(equal)
    assert (metrics["reward/std"] == 0.0) is equal
    assert (metrics["rewards/a/std"] == 0.0) is equal
    assert (lowest_correlation(one.trajectories) is None) is equal


def test_a_reward_that_misses_the_bound_by_rounding_reaches_it() -> None:
    almost = sum([0.1] * 10)
    assert almost < 1.0
    assert reaches(almost, 1.0)
    assert not reaches(0.999999, 1.0)
    assert not reaches(0.5, math.inf)
    assert not reaches(-math.inf, 0.5)
    always_skips = Curriculum(low=0.0, high=1.0, keep=1e-12, seed=0)
    assert always_skips.skips(ROW, 0, {"r": almost})
    assert always_skips.skips(ROW, 0, {"r": 1e-17})
    assert not always_skips.skips(ROW, 0, {"r": 0.5})
    assert not Curriculum(low=-math.inf, high=1.0, keep=1e-12, seed=0).skips(ROW, 0, {"r": 0.5})
