"""Estimators of advantages: what a recipe names, the examples of their docstrings, the proofs of the page, and users' own."""

from __future__ import annotations

import doctest
import functools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from credit_toy import LARGE, SEVERAL_STATES, Problem, expected_gradient, large_group_gradient, stopping
from hypothesis import given
from hypothesis import strategies as st

from rewards.credit.test_credit_invariance import batch
from support.conversations import a_row
from turnwise import assembly
from turnwise.config.recipe import checked, load
from turnwise.config.resume_rules import RULES, option_values
from turnwise.config.train_checks import chosen_estimator, needs_critic, refuse_without_effect
from turnwise.doctor.recipe import own_estimator
from turnwise.errors import ConfigError
from turnwise.options.algorithm import (
    BilevelGae,
    CriticCredit,
    Gae,
    Gigpo,
    Grpo,
    Igpo,
    Kevin,
    MtGrpo,
    OwnCredit,
    Rloo,
    Shared,
    Spo,
    TurnGae,
    TurnReturn,
)
from turnwise.options.schema import Config
from turnwise.recipe import Recipe
from turnwise.rewards import credit
from turnwise.rewards.credit import Credit, credit_of, critic, outcome, turns
from turnwise.rewards.credit.credit import Episode, Scale
from turnwise.rewards.credit.own import own
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


# `credit: file.py:function`: an estimator of the user, its arguments, what it declares, and what it may return


SOURCE = """
import statistics
import turnwise
from turnwise.rewards.credit.credit import ValueEstimates

CALLS = []

def centred(batch, *, power: float = 1.0, words: list[str] = ()):
    def of(group):
        mean = statistics.fmean(episode.reward for episode in group)
        return [[(episode.reward - mean) * power] * episode.turns for episode in group]
    return [of(group) for group in batch]

def by_token(batch):
    return [[[[0.5] * count for count in episode.tokens_T] for episode in group] for group in batch]

@turnwise.needs(critic="turn")
def with_critic(batch):
    def of(episode):
        return [reward - value for reward, value in zip(episode.received, episode.values_T)]
    return ValueEstimates(
        [[of(episode) for episode in group] for group in batch],
        [[episode.received for episode in group] for group in batch],
    )

@turnwise.needs(critic="token")
def forgets_returns(batch):
    return by_token(batch)

@turnwise.needs(baseline=True)
def greedy(batch):
    return [[[episode.reward - episode.baseline] * episode.turns for episode in group] for group in batch]

def undeclared(batch):
    return ValueEstimates(by_token(batch), by_token(batch))

def none(batch): pass
def one_each(batch): return [[episode.reward for episode in group] for group in batch]
def too_few(batch): return [[[0.0] * episode.turns for episode in group[1:]] for group in batch]
def one_turn(batch): return [[[0.0] for episode in group] for group in batch]
def tokens_of_none(batch): return [[[[0.0]] * episode.turns for episode in group] for group in batch]
def nan(batch): return [[[float("nan")] * episode.turns for episode in group] for group in batch]
def text(batch): return [[["1"] * episode.turns for episode in group] for group in batch]
def raises(batch): return batch[0][0].nothing
def needs_more(batch, *, power: float): return centred(batch, power=power)
def no_parameter(): return []
async def waits(batch): return []
class Kind: pass
number = 3

def of_the_order(batch): return [[[float(n)] * episode.turns for n, episode in enumerate(group)] for group in batch]
def of_the_groups(batch): return [[[float(n)] * episode.turns for episode in group] for n, group in enumerate(batch)]
def of_earlier_calls(batch):
    CALLS.append(1)
    return [[[float(len(CALLS))] * episode.turns for episode in group] for group in batch]
def writes(batch):
    found = centred(batch)
    for group in batch:
        for episode in group:
            episode.rewards_T[0] = 0.0
    return found
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(dedent(SOURCE), encoding="utf-8")
    return str(path)


def recipe(credit: Any, **more: Any) -> Config:
    return checked({"model": "m", "data": {"train": "r.jsonl"}, "credit": credit, **more}, source="the test")


def credited(credit: Any, groups: list[Group]) -> list[Any]:
    config = recipe(credit)
    assembly.credit(config, assembly.scorer(config))(groups)
    return [one.advantages for group in groups for one in group.trajectories]


def test_a_reference_is_short_for_a_section_with_a_function(file: str, tmp_path: Path) -> None:
    use = f"{file}:centred"
    short, long = recipe(use), recipe({"name": "own", "use": use})
    assert short == long == recipe({"use": use})
    assert short.credit == OwnCredit(use=use)
    assert recipe(short.model_dump()["credit"]) == short  # config.yaml of a run is a recipe
    assert Recipe(model="m", rows="r.jsonl", credit=use).config.credit == short.credit
    given = Recipe(model="m", rows="r.jsonl", credit=credit_of).config.credit
    assert given == OwnCredit(use="turnwise.rewards.credit:credit_of")
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"model: m\ndata: {{train: r.jsonl}}\ncredit: {{use: '{use}', arguments: {{power: 3}}}}\n", encoding="utf-8"
    )
    assert load(path)[0].credit == OwnCredit(use=use, arguments={"power": 3})
    assert load(path, ["credit.arguments.power=4"])[0].credit == OwnCredit(use=use, arguments={"power": 4})
    other, notes = load(path, [f"credit={file}:by_token"])
    assert other.credit == OwnCredit(use=f"{file}:by_token")
    assert ["credit.arguments" in note for note in notes] == [True]
    ours, notes = load(path, ["credit=rloo"])
    assert ours.credit == Rloo()
    assert notes == ["credit=rloo removes the recipe's credit.use, credit.arguments, which belonged to 'own'"]
    path.write_text("model: m\ndata: {train: r.jsonl}\ncredit: {name: gigpo, omega: 2}\n", encoding="utf-8")
    config, notes = load(path, [f"credit={use}", "credit.arguments={power: 2}"])
    assert config.credit == OwnCredit(use=use, arguments={"power": 2})
    assert ["credit.omega" in note for note in notes] == [True]
    path.write_text(f"model: m\ndata: {{train: r.jsonl}}\ncredit: {use}\n", encoding="utf-8")
    assert load(path, ["credit.arguments.power=4"])[0].credit == OwnCredit(use=use, arguments={"power": 4})


def test_the_advantages_are_those_that_the_function_returns(file: str) -> None:
    first, second = batch(1), batch(1)
    assert credited("shared", first) != credited({"use": f"{file}:centred", "arguments": {"power": 2}}, second)
    for group in second:
        mean = sum(one.reward or 0.0 for one in group.trajectories) / len(group.trajectories)
        for one in group.trajectories:
            assert one.advantages == pytest.approx([2 * ((one.reward or 0.0) - mean)] * len(one.turns))
    by_token = credited(f"{file}:by_token", batch(1))
    counts = [
        [one.segments[0].turn.count(n) for n in range(len(one.turns))] for g in batch(1) for one in g.trajectories
    ]
    assert by_token == [[[0.5] * count for count in of_one] for of_one in counts]


def test_groups_without_a_reward_are_not_shown_to_the_function(file: str) -> None:
    groups = batch(2, groups=3)
    for one in groups[1].trajectories:
        one.reward = None
    found = credited(f"{file}:centred", groups)  # fmean of nothing would raise
    assert [bool(entry) for entry in found] == [True] * 4 + [False] * 4 + [True] * 4
    assert own([[]], OwnCredit(use=f"{file}:centred")) == [[]]


def test_a_function_says_that_it_needs_a_critic_or_a_greedy_conversation(file: str) -> None:
    plain, critic, greedy = (recipe(f"{file}:{name}") for name in ("centred", "with_critic", "greedy"))
    assert [needs_critic(one) for one in (plain, critic, greedy)] == [False, True, False]
    assert chosen_estimator(critic).needs_values == "turn"
    made = [assembly.credit(one, assembly.scorer(one)) for one in (plain, critic, greedy)]
    assert [(one.needs_values, one.needs_baseline) for one in made] == [(None, False), ("turn", False), (None, True)]
    groups = batch(3)
    made[1](groups)
    one = groups[0].trajectories[0]
    rewards = [turn.reward for turn in one.turns]
    rewards[-1] += (one.reward or 0.0) - sum(rewards)
    firsts = [values[0] if values else 0.0 for values in one.values]  # type: ignore[index, union-attr]
    assert one.returns == pytest.approx(rewards)
    assert one.advantages == pytest.approx([reward - value for reward, value in zip(rewards, firsts, strict=True)])
    made[2](groups)
    greedy_reward = groups[0].baseline.reward or 0.0  # type: ignore[union-attr]
    assert one.advantages == pytest.approx([(one.reward or 0.0) - greedy_reward] * len(one.turns))
    refuse_without_effect(recipe(f"{file}:with_critic", critic={"lr": 1e-4}))
    with pytest.raises(ConfigError, match=r"critic\.lr has no effect .*@turnwise\.needs\(critic='turn'\)"):
        refuse_without_effect(recipe(f"{file}:centred", critic={"lr": 1e-4}))


def test_one_conversation_for_each_row_is_enough_for_a_function(file: str) -> None:
    refuse_without_effect(recipe(f"{file}:by_token", train={"group_size": 1}))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "centred",
            {"pwer": 2},
            r"mine.py:centred\(batch, \*, power: float = 1.0.* has no argument 'pwer' for a recipe; did you mean 'power'",
        ),
        ("centred", {"batch": []}, r"has no argument 'batch' for a recipe"),
        (
            "centred",
            {"power": "two"},
            r"credit\.arguments\.power='two' is not .* takes: input should be a valid number",
        ),
        (
            "centred",
            {"words": [1]},
            r"credit\.arguments\.words=\[1\] is not what .* takes: input should be a valid string",
        ),
        ("needs_more", {}, r"needs_more\(batch, \*, power: float\) needs power: add them to the recipe"),
        ("no_parameter", {}, r"no_parameter\(\) must take 1 positional argument \(batch\)"),
        ("waits", {}, "waits is async"),
        ("Kind", {}, "Kind is a class; it must be a function"),
        ("number", {}, "number is a int; it must be a function"),
        ("centrd", {}, "has no 'centrd'; did you mean 'centred'"),
        (
            "none",
            {},
            r"none returned None in place of .* each group of the batch \(4\): is a `return` missing",
        ),
        (
            "one_each",
            {},
            r"returned 1\.7 in place of .* each turn of conversation 0 of group 0 .*; .* \[advantage\] \* episode\.turns",
        ),
        (
            "too_few",
            {},
            r"too_few returned 2 entries for group 0, .* each conversation of group 0 \(3\)",
        ),
        ("one_turn", {}, r"one_turn returned 1 entries for conversation 0 of group 0"),
        (
            "tokens_of_none",
            {},
            r"1 entries for turn 0 of conversation 0 of group 0, .* each sampled token of turn 0 of .* \(3\)",
        ),
        ("nan", {}, "nan gave nan for turn 0 of conversation 0 of group 0; an advantage must be a finite number"),
        ("text", {}, "turn 0 of conversation 0 of group 0: .* gave the text '1'; an advantage must be a number"),
        (
            "raises",
            {},
            r"raises raised AttributeError: 'Episode' object has no attribute 'nothing'(.|\n)*line \d+, in raises",
        ),
        (
            "undeclared",
            {},
            r"undeclared returned ValueEstimates, and declares no critic: write @needs\(critic='turn'\)",
        ),
        ("forgets_returns", {}, r"forgets_returns returned list, and declares a critic \(@needs\)"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_the_first_step(
    file: str, name: str, arguments: dict[str, Any], message: str
) -> None:
    config = recipe({"use": f"{file}:{name}", "arguments": arguments})
    with pytest.raises(ConfigError, match=message):
        assembly.credit(config, assembly.scorer(config))


def test_what_goes_wrong_in_a_step_ends_the_run_with_its_place(file: str) -> None:
    path = Path(file)
    path.write_text(
        "def late(batch):\n    return [[[1.0 if e.reward < 50 else None] * e.turns for e in g] for g in batch]\n",
        encoding="utf-8",
    )
    config = recipe(f"{file}:late")
    credit = assembly.credit(config, assembly.scorer(config))
    groups = batch(1)
    groups[1].trajectories[2].reward = 60.0
    with pytest.raises(ConfigError, match=r"turn 0 of conversation 2 of group 1: .*late gave None"):
        credit(groups)


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("of_the_order", "the order of the conversations in a group changes their advantages"),
        ("of_the_groups", "the order of the groups changes their advantages"),
        ("of_earlier_calls", "a second call with the same batch gives other advantages"),
        ("writes", "it changes the rewards of the conversations that it is given"),
    ],
)
def test_the_doctor_names_the_invariant_that_a_function_breaks(file: str, name: str, broken: str) -> None:
    check = own_estimator(recipe(f"{file}:{name}"))
    assert check.status == "fail"
    assert f"{name}: " in check.text
    assert broken in check.text


@pytest.mark.parametrize("name", ["centred", "by_token", "with_critic", "greedy"])
def test_the_doctor_finds_nothing_in_a_function_that_keeps_them(file: str, name: str) -> None:
    check = own_estimator(recipe(f"{file}:{name}"))
    assert (check.name, check.status) == ("estimator", "ok")


def test_another_function_or_argument_is_a_change_when_a_run_is_resumed(file: str) -> None:
    values = option_values(recipe({"use": f"{file}:centred", "arguments": {"power": 2.0}}))
    assert (values["credit.use"], values["credit.arguments"]) == (f"{file}:centred", {"power": 2.0})
    assert RULES["credit.use"] == RULES["credit.arguments"] == "named"
