"""From rewards to advantages, against numbers worked out by hand."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.conversations import a_row
from turnwise.options.algorithm import Grpo
from turnwise.rewards import credit
from turnwise.rewards.credit import Credit
from turnwise.rewards.credit.credit import Scale
from turnwise.types import Failure, Group, Trajectory, Turn


def a_group(*rewards: float | None, turns: Sequence[int] | None = None) -> Group:
    """A group with these rewards; None is a conversation that broke."""
    row = a_row()
    trajectories = []
    for n, reward in enumerate(rewards):
        count = turns[n] if turns is not None else 1
        said = [Turn(index=t, message={"role": "assistant", "content": ""}, text="") for t in range(count)]
        one = Trajectory(id=f"1/{n}", group="1", row=row, turns=said, reward=reward)
        if reward is None:
            one.fail(Failure("environment", "broken"))
        trajectories.append(one)
    return Group(id="1", row=row, trajectories=trajectories)


def grpo(groups: Sequence[Group], *, scale: Scale = "std") -> None:
    Credit("grpo", functools.partial(credit.grpo, options=Grpo(scale=scale)))(groups)


def advantages(group: Group) -> list[list[float]]:
    return [one.advantages for one in group.trajectories]


def test_grpo_is_the_centred_reward_over_the_standard_deviation_of_the_sample() -> None:
    group = a_group(1, 0, 0, 1)
    grpo([group])
    width = math.sqrt(1 / 3) + 1e-6  # four squares of 1/2, over n - 1 = 3
    assert advantages(group) == [
        [pytest.approx(0.5 / width, rel=1e-12)],
        [pytest.approx(-0.5 / width, rel=1e-12)],
        [pytest.approx(-0.5 / width, rel=1e-12)],
        [pytest.approx(0.5 / width, rel=1e-12)],
    ]
    assert advantages(group)[0][0] == pytest.approx(0.866, abs=5e-4)  # the docstring's


def test_without_scale_it_is_the_centred_reward() -> None:
    group = a_group(2.0, 0.5, 0.5, -1.0)
    grpo([group], scale="none")
    assert advantages(group) == [[1.5], [0.0], [0.0], [-1.5]]


def test_all_turns_of_a_trajectory_have_its_advantage() -> None:
    group = a_group(1.0, 0.0, turns=[3, 1])
    grpo([group], scale="none")
    assert advantages(group) == [[0.5, 0.5, 0.5], [-0.5]]


def test_broken_conversations_are_in_no_statistics_and_get_nothing() -> None:
    group = a_group(1.0, None, 0.0, None)
    grpo([group], scale="none")
    assert advantages(group) == [[0.5], [], [-0.5], []]


def test_one_that_was_not_scored_gets_nothing() -> None:
    group = a_group(1.0, 0.0, 5.0)
    group.trajectories[2].reward = None
    grpo([group], scale="none")
    assert advantages(group) == [[0.5], [-0.5], []]


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.7], [[0.0]]),
        ([0.7, None, None], [[0.0], [], []]),
        ([0.1, 0.1, 0.1], [[0.0], [0.0], [0.0]]),
        ([None, None], [[], []]),
        ([], []),
    ],
)
def test_a_group_that_compares_nothing_teaches_nothing(
    rewards: list[float | None], expected: list[list[float]], scale: str
) -> None:
    group = a_group(*rewards)
    grpo([group], scale=scale)  # type: ignore[arg-type]
    assert advantages(group) == expected


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8), st.floats(-10, 10))
def test_advantages_sum_to_nothing_and_do_not_see_a_constant(rewards: list[float], constant: float) -> None:
    group, shifted = a_group(*rewards), a_group(*(reward + constant for reward in rewards))
    grpo([group], scale="none")
    grpo([shifted], scale="none")
    values = [values[0] for values in advantages(group)]
    assert sum(values) == pytest.approx(0.0, abs=1e-9)
    assert [values[0] for values in advantages(shifted)] == pytest.approx(values, abs=1e-9)
    assert sorted(values) == [value for _, value in sorted(zip(rewards, values, strict=True))]


# accumulate first, centre after: research/rivals.md 4.5

P = 0.5  # of going on, at theta = 0; d log p(go on)/d theta = 1 - P, d log p(stop)/d theta = -P
ENDS = 0.4  # what the turn that ends the conversation pays
ROLLOUTS = [  # (share, choices, rewards of the turns): at most two choices, the third turn ends by itself
    (0.5, ["stop"], [ENDS]),
    (0.25, ["go on", "stop"], [0.2, ENDS]),
    (0.25, ["go on", "go on"], [0.2, 0.5, ENDS]),
]


def gradient(of: Sequence[Sequence[float]]) -> float:
    """The policy gradient in closed form, from the advantages of the turns of the three kinds of rollouts."""
    total = 0.0
    for (share, choices, _), values in zip(ROLLOUTS, of, strict=True):
        for choice, value in zip(choices, values, strict=False):
            total += share * value * ((1 - P) if choice == "go on" else -P)
    return total


def test_grpo_has_the_sign_of_the_true_gradient_where_the_policy_decides_when_it_stops() -> None:
    # J = p * 0.2 + p^2 * 0.5 + 0.4, so dJ/d theta = p (1 - p) (0.2 + 2 p * 0.5)
    true = P * (1 - P) * (0.2 + 2 * P * 0.5)
    assert true == pytest.approx(0.175)
    rewards = [sum(rewards) for _, _, rewards in ROLLOUTS]
    group = a_group(rewards[0], rewards[0], rewards[1], rewards[2], turns=[1, 1, 2, 3])  # the shares 2 : 1 : 1
    grpo([group], scale="none")
    values = advantages(group)
    assert values[0] == values[1]
    assert gradient([values[0], values[2], values[3]]) == pytest.approx(true)
    grpo([group])
    scaled = advantages(group)
    assert gradient([scaled[0], scaled[2], scaled[3]]) > 0


def test_the_toy_tells_the_wrong_order_from_the_right_one() -> None:
    means = []
    for turn in range(3):
        alive = [(share, rewards[turn]) for share, _, rewards in ROLLOUTS if len(rewards) > turn]
        means.append(sum(share * reward for share, reward in alive) / sum(share for share, _ in alive))
    centred_first = [
        [sum(rewards[k] - means[k] for k in range(turn, len(rewards))) for turn in range(len(rewards))]
        for _, _, rewards in ROLLOUTS
    ]
    assert gradient(centred_first) == pytest.approx(-0.0375)


def test_each_group_of_the_batch_is_centred_by_itself() -> None:
    groups = [a_group(1.0, 0.0), a_group(5.0, 3.0), a_group(2.0, 2.0)]
    grpo(groups, scale="none")
    assert [advantages(group) for group in groups] == [[[0.5], [-0.5]], [[1.0], [-1.0]], [[0.0], [0.0]]]
