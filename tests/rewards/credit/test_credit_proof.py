"""The expected gradient of each estimator, by enumeration, against the true gradient of the expected reward."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from turnwise.rewards.credit import critic, outcome, turns

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from credit_toy import LARGE, SEVERAL_STATES, Problem, expected_gradient, large_group_gradient, stopping

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
    TurnGae,
    TurnReturn,
)

NO_SCALE = {"scale": "none"}
UNBIASED: dict[str, Callable[..., Any]] = {
    "rloo": outcome.rloo,
    "shared": turns.shared,
    "shared without baseline": partial(turns.shared, options=Shared(baseline="none")),
    "turn_return": partial(turns.turn_return, options=TurnReturn(scale="none")),
    "remax": outcome.remax,
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


def test_the_page_shows_what_the_script_computes() -> None:
    import generated_pages

    rows = {row.split(" | ")[0].strip("| "): row for row in generated_pages.credit_table().splitlines()}
    page = (generated_pages.DOCS / "credit.md").read_text(encoding="utf-8")
    assert len(rows) == len(generated_pages.ESTIMATORS) + 2
    assert all(row in page for row in rows.values())
    assert "| unbiased | unbiased |" in rows["`rloo`, `shared`"]
    assert "wrong sign" in rows["`mt_grpo`"]
