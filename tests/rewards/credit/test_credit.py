"""Estimators of advantages: what a recipe names, the examples of their docstrings, and the proofs of the page."""

from __future__ import annotations

import doctest
import functools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from credit_toy import LARGE, SEVERAL_STATES, Problem, expected_gradient, large_group_gradient, stopping
from hypothesis import given
from hypothesis import strategies as st

from support.conversations import a_row
from turnwise.options.algorithm import (
    BilevelGae,
    CriticCredit,
    Gae,
    Gigpo,
    Grpo,
    Igpo,
    Kevin,
    MtGrpo,
    Shared,
    Spo,
    TurnGae,
    TurnReturn,
)
from turnwise.rewards import credit
from turnwise.rewards.credit import Credit, critic, outcome, turns
from turnwise.rewards.credit.credit import Episode, Scale
from turnwise.types import Failure, Group, Trajectory, Turn

# From rewards to advantages, against numbers worked out by hand.


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


def test_remax_compares_trained_agents_with_trained_agents_of_their_name_only() -> None:
    """In each episode, `second` is played by the model, by a frozen policy, and once without being trained on."""

    def episode(id: str, own: float) -> Trajectory:
        whole = Trajectory(id=id, group="1", row=a_row(), reward=0.0)
        for policy, trained, reward in (("", True, own), ("past", False, 1.0), ("", False, 0.5)):
            turn = Turn(index=0, message={"role": "assistant", "content": ""}, text="")
            name = f"1/second@{policy}" if policy else "1/second"
            agent = Trajectory(
                id=f"{id}/{len(whole.agents)}",
                group=name,
                row=whole.row,
                agent="second",
                policy=policy,
                trained=trained,
                turns=[turn],
                reward=reward,
            )
            whole.agents.append(agent)
        return whole

    whole = Group(id="1", row=a_row(), trajectories=[episode("1/0", 0.75)], baseline=episode("1/greedy", 0.25))
    (second,) = whole.of_agents()
    Credit("remax", outcome.remax, needs_baseline=True)([second])
    assert advantages(second) == [[0.5]]


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


# The examples in the docstrings of the estimators, and where each estimator names its paper.


ESTIMATORS = [
    (module, estimator.estimate.__name__)
    for module in (outcome, turns, critic)
    for estimator in module.ESTIMATORS.values()
]


def rounded(value: Any) -> Any:
    return round(value, 3) + 0.0 if isinstance(value, int | float) else [rounded(entry) for entry in value]


@pytest.mark.parametrize(("module", "name"), ESTIMATORS, ids=[name for _, name in ESTIMATORS])
def test_the_example_in_the_docstring_is_right(module: ModuleType, name: str) -> None:
    function = getattr(module, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        function, name, module, extraglobs={"Episode": Episode, "rounded": rounded}
    )
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
    own = name in ("shared", "discounted", "critic", "none")  # schemes of the multi-turn note, which cites no paper
    assert own or any(word in function.__doc__ for word in ("Paper", "Reference"))


def test_a_wrong_example_would_be_noticed() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(
        outcome.grpo, "grpo", outcome, extraglobs={"Episode": Episode, "rounded": lambda value: value}
    )
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1


# The expected gradient of each estimator, by enumeration, against the true gradient of the expected reward.


sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

NO_SCALE = {"scale": "none"}

UNBIASED: dict[str, Callable[..., Any]] = {
    "rloo": outcome.rloo,
    "shared": turns.shared,
    "shared without baseline": partial(turns.shared, options=Shared(baseline="none")),
    "turn_return": partial(turns.turn_return, options=TurnReturn(scale="none")),
    "remax": outcome.remax,
    "spo": partial(outcome.spo, options=Spo(whiten=False)),
    "critic": partial(critic.critic, options=CriticCredit(whiten=False)),
    "gae, lambda 1": partial(critic.gae, options=Gae(lam=1.0, whiten=False)),
    "turn_gae, lambda 1": partial(critic.turn_gae, options=TurnGae(gamma=1.0, lam=1.0, whiten=False)),
}
"""For any size of the group and, where there is a critic, for any values."""


def test_the_true_gradient_is_that_of_torch() -> None:
    """J as a function of the logits, differentiated by torch in float64."""
    names = list(SEVERAL_STATES.probabilities)
    logits = {name: torch.tensor(SEVERAL_STATES.probabilities[name], dtype=torch.float64).log() for name in names}
    for value in logits.values():
        value.requires_grad_()

    def value(name: str | None) -> torch.Tensor:
        if name is None:
            return torch.zeros((), dtype=torch.float64)
        chances = torch.softmax(logits[name], 0)
        actions = SEVERAL_STATES.decisions[name]
        return sum(p * (a.reward + a.outcome + value(a.next)) for p, a in zip(chances, actions, strict=True))  # type: ignore[return-value]

    value(SEVERAL_STATES.start).backward()
    gradient = np.concatenate([logits[name].grad.numpy() for name in names])  # type: ignore[union-attr]
    assert SEVERAL_STATES.true_gradient() == pytest.approx(gradient, abs=1e-15)
    assert np.abs(gradient).max() > 0.08


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_the_true_gradient_of_stopping_is_the_closed_form(p: float) -> None:
    # J = 0.4 + 0.2 p + 0.5 p^2, and dp/d theta = p (1 - p)
    assert stopping(p).true_gradient() == pytest.approx([p * (1 - p) * (0.2 + p)])
    assert stopping(0.5).true_gradient() == pytest.approx([0.175])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("problem", [SEVERAL_STATES, stopping(0.25)], ids=["states", "stopping"])
@pytest.mark.parametrize("name", UNBIASED)
def test_unbiased_estimators_give_the_true_gradient_for_any_group(name: str, problem: Problem, size: int) -> None:
    gradient = expected_gradient(problem, UNBIASED[name], size=size, errors=0.5)
    assert gradient == pytest.approx(problem.true_gradient(), abs=1e-14)


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
@pytest.mark.parametrize(("estimator", "section"), [(critic.gae, Gae), (critic.turn_gae, TurnGae)])
def test_with_an_exact_critic_any_lambda_is_unbiased_and_with_a_wrong_one_it_is_not(
    estimator: Callable[..., Any], section: type[Gae | TurnGae], lam: float
) -> None:
    bound = partial(estimator, options=section(gamma=1.0, lam=lam, whiten=False))
    true = SEVERAL_STATES.true_gradient()
    assert expected_gradient(SEVERAL_STATES, bound, size=2) == pytest.approx(true, abs=1e-14)
    assert np.abs(expected_gradient(SEVERAL_STATES, bound, size=2, errors=0.5) - true).max() > 1e-3 * (1 - lam)


def test_bilevel_gae_is_unbiased_with_all_factors_1() -> None:
    bound = partial(critic.bilevel_gae, options=BilevelGae(gamma=1.0, lam=1.0, turn_gamma=1.0, whiten=False))
    gradient = expected_gradient(SEVERAL_STATES, bound, size=2, errors=0.5)
    assert gradient == pytest.approx(SEVERAL_STATES.true_gradient(), abs=1e-14)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_mean_that_contains_the_conversation_itself_scales_the_gradient(size: int) -> None:
    scaled = (size - 1) / size * SEVERAL_STATES.true_gradient()
    for estimator in (partial(outcome.grpo, options=Grpo(scale="none")), outcome.gpg):
        assert expected_gradient(SEVERAL_STATES, estimator, size=size) == pytest.approx(scaled, abs=1e-14)


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        (partial(outcome.grpo, options=Grpo(scale="none")), 0.175),
        (partial(turns.turn_return, options=TurnReturn(scale="none")), 0.175),
        (partial(turns.kevin, options=Kevin(gamma=1.0, scale="none")), 0.175),
        (partial(turns.gigpo, options=Gigpo(gamma=1.0)), 2 * 0.175),  # the sum of two terms, each of them right
        (partial(turns.mt_grpo, options=MtGrpo(scale="none")), -0.01875),
        (partial(turns.igpo, options=Igpo(normalise="joint", scale="none")), -0.0035714),
    ],
    ids=["grpo", "turn_return", "kevin", "gigpo", "mt_grpo", "igpo, joint"],
)
def test_the_table_of_stopping_in_a_large_group(estimator: Callable[..., Any], gradient: float) -> None:
    """The numbers of research/rivals.md 4.5, at theta = 0."""
    assert large_group_gradient(stopping(0.5), estimator) == pytest.approx([gradient], abs=1e-4)


def test_rewards_that_are_centred_before_they_are_accumulated_have_the_wrong_sign() -> None:
    """The rule of the module, with an estimator that breaks it: means for each turn, subtracted first."""

    def centred_first(batch: Any) -> Any:
        (group,) = batch
        longest = max(episode.turns for episode in group)
        alive = [[one.received[t] for one in group if one.turns > t] for t in range(longest)]
        means = [sum(rewards) / len(rewards) for rewards in alive]
        return [
            [[sum(one.received[k] - means[k] for k in range(t, one.turns)) for t in range(one.turns)] for one in group]
        ]

    assert large_group_gradient(stopping(0.5), centred_first) == pytest.approx([-0.0375], abs=1e-12)


def test_a_large_group_has_each_conversation_as_often_as_its_probability_says() -> None:
    with pytest.raises(ValueError, match="no multiple"):
        large_group_gradient(stopping(1 / 3), outcome.rloo)
    assert sum(c.probability * LARGE for c in SEVERAL_STATES.conversations()) == LARGE


def test_the_page_shows_which_estimators_are_biased() -> None:
    """What the script computes is on the page: `make lint` compares them. This is what it must say."""
    page = (Path(__file__).parents[3] / "benchmarks" / "README.md").read_text(encoding="utf-8")
    rows = {row.split(" | ")[0].strip("| "): row for row in page.splitlines() if row.startswith("| `")}
    assert "| unbiased | unbiased |" in rows["`rloo`, `shared`"]
    assert "wrong sign" in rows["`mt_grpo`"]
