"""SPO: the values of rows, exact expectations on an enumerated problem, and runs with groups of one that learn, and resume."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from credit_toy import SEVERAL_STATES

from support.recipes import save_recipe
from support.training import train_run
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.algorithm import Spo
from turnwise.rewards.credit import credit_of, outcome
from turnwise.rewards.credit.credit import Episode
from turnwise.rewards.credit.tracker import LARGEST_MOVE, ValueTracker
from turnwise.train import assemble

ROW = ("", "row")


def test_values_are_the_counts_of_the_paper() -> None:
    """alpha and beta are multiplied by rho = clip(2^(-D / half_life), rho_min, rho_max), and grow by R and 1 - R."""
    options = Spo(initial=0.25, initial_weight=4, half_life=0.1, rho_min=0.5, rho_max=0.9)
    tracker, alpha, beta = ValueTracker(options), 1.0, 3.0
    moves = (0.05, 0.0, 0.4, 0.01)
    for visit, (reward, move) in enumerate(zip((1.0, 0.0, 1.0, 1.0), moves, strict=True)):
        rho = 1.0 if visit == 0 else min(max(2 ** (-moves[visit - 1] / 0.1), 0.5), 0.9)
        assert tracker.value(*ROW) == pytest.approx(alpha / (alpha + beta))
        tracker.add(*ROW, [reward])
        tracker.move(move)
        assert tracker.value(*ROW) == pytest.approx(alpha / (alpha + beta)), "no conversation of the step is part of it"
        tracker.advance()
        alpha, beta = rho * alpha + reward, rho * beta + 1 - reward
        assert tracker.value(*ROW) == pytest.approx(alpha / (alpha + beta))
    assert (tracker.value("", "other"), tracker.value("agent", "row")) == (0.25, 0.25)


def test_moves_between_visits_add_up_and_a_group_counts_as_often_as_it_has_conversations() -> None:
    tracker = ValueTracker(Spo(initial=0, initial_weight=0, half_life=1, rho_min=0.01, rho_max=1))
    tracker.add(*ROW, [1.0, 1.0, 0.0, 0.0])
    for move in (1.0, 0.5, 0.5):
        tracker.move(move)
        tracker.advance()
    tracker.add(*ROW, [1.0])
    tracker.advance()
    assert tracker.value(*ROW) == pytest.approx((0.25 * 2 + 1) / (0.25 * 4 + 1))
    tracker.add(*ROW, [])  # all conversations have failed: no visit
    tracker.advance()
    assert tracker.value(*ROW) == pytest.approx(0.75)


@pytest.mark.parametrize("move", [math.nan, math.inf, 1e300])
def test_a_step_that_has_torn_the_policy_apart_leaves_a_state_that_can_be_written(move: float) -> None:
    tracker, again = ValueTracker(Spo()), ValueTracker(Spo())
    tracker.add(*ROW, [1.0])
    tracker.move(move)
    tracker.advance()
    again.load(json.loads(json.dumps(tracker.written(), allow_nan=False)))
    assert again.moved == LARGEST_MOVE
    assert again.value(*ROW) == tracker.value(*ROW) == 0.75


# exact expectations


def _gradients(visits: int, options: Spo) -> tuple[np.ndarray, float]:
    """The expected gradient of one conversation after so many visits of the row, and its variance, summed over the parameters:
    sums over all conversations and all histories."""
    kinds = SEVERAL_STATES.conversations()
    mean, square = np.zeros_like(SEVERAL_STATES.true_gradient()), 0.0
    for history in itertools.product(kinds, repeat=visits):
        tracker = ValueTracker(options)
        for kind in history:
            tracker.add(*ROW, [kind.episode.reward])
            tracker.move(0.01)
            tracker.advance()
        for kind in kinds:
            episode = Episode(kind.episode.rewards_T, kind.episode.outcome, baseline=tracker.value(*ROW))
            ((advantages,),) = outcome.spo([[episode]], options)
            gradient = np.array(advantages, dtype=np.float64) @ kind.scores_T
            probability = kind.probability * math.prod(one.probability for one in history)
            mean += probability * gradient
            square += probability * float(gradient @ gradient)
    return mean, square - float(mean @ mean)


@pytest.mark.parametrize("initial", [0.0, 0.5, -7.0])
@pytest.mark.parametrize("visits", [0, 1, 2])
def test_the_expected_gradient_of_groups_of_one_is_the_true_one_whatever_the_history(
    visits: int, initial: float
) -> None:
    """As of REINFORCE with any baseline that does not depend on the conversation."""
    mean, _ = _gradients(visits, Spo(initial=initial, whiten=False))
    assert mean == pytest.approx(SEVERAL_STATES.true_gradient(), abs=1e-13)


def test_the_variance_falls_with_each_visit_towards_that_of_the_exact_value() -> None:
    none, *later = (_gradients(visits, Spo(initial=0, initial_weight=1, whiten=False))[1] for visits in (0, 1, 2))
    (_, exact) = _gradients(0, Spo(initial=SEVERAL_STATES.value(SEVERAL_STATES.start), whiten=False))
    assert none > later[0] > later[1] > exact


# runs

PLACES = """
from turnwise import Opening, Reply, environment

@environment
async def liked(row):
    turn = yield Opening(messages=row.messages)
    ids = turn.completion.token_ids
    yield Reply(reward=sum((n + 1) * id_ for n, id_ in enumerate(ids)) % 997 / 997, done=True)
"""


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "places.py").write_text(PLACES)
    return save_recipe(
        tmp_path,
        model,
        environment={"use": f"{tmp_path / 'places.py'}:liked"},
        limits={"turns": 1, "tokens_per_turn": 8},
        train={"steps": 4, "batch_size": 4, "group_size": 1, "lr": 0.003},
        credit={"name": "spo", "whiten": False},
        checkpoint={"every": 1},
        deterministic=True,
    )


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"initial": 0.1, "initial_weight": 3},
        {"half_life": 0.5, "rho_min": 0.01, "rho_max": 1},
        {"rho_max": 0.9},
        {"rho_min": 0.95},
    ],
    ids=str,
)
def test_groups_of_one_are_trained_on_with_the_values_of_their_rows(
    recipe: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    trajectories, metrics, _ = train_run(recipe, tmp_path / "out", *(f"credit.{k}={v}" for k, v in options.items()))
    tracker = ValueTracker(Spo(**options))
    seen = set[str]()
    for line in metrics:
        of_step = [one for one in trajectories if one["step"] == line["step"]]
        for one in of_step:
            value = tracker.value("", one["row"]["id"])
            assert one["turns"][0]["advantage"] == pytest.approx(one["reward"] - value, abs=1e-12)
        for one in of_step:
            tracker.add("", one["row"]["id"], [one["reward"]])
            seen.add(one["row"]["id"])
        assert line["policy_shift"] > 0
        assert line["grad_norm"] > 0
        tracker.move(line["policy_shift"])
        tracker.advance()
    assert len(seen) < len(trajectories), "some rows came again"
    about = json.loads(next((tmp_path / "out" / "checkpoints").glob("*04/checkpoint.json")).read_text())
    assert about["place"]["values"] == {"": tracker.written()}


def test_a_resumed_run_has_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    options = ["credit.whiten=true", "credit.half_life=0.5", "credit.rho_min=0.01"]
    whole, metrics, _ = train_run(recipe, tmp_path / "whole", *options)
    train_run(recipe, tmp_path / "resumed", *options, "train.steps=2")
    resumed, again, _ = train_run(recipe, tmp_path / "resumed", *options, "resume=auto")

    def seen(trajectories: list[dict[str, Any]]) -> list[Any]:
        return [(one["id"], one["segments"], [turn["advantage"] for turn in one["turns"]]) for one in trajectories]

    assert seen(resumed) == seen(whole)
    assert [line["policy_shift"] for line in again] == [line["policy_shift"] for line in metrics]
    for line in metrics:  # whitened over the batch
        numbers = [one["turns"][0]["advantage"] for one in whole if one["step"] == line["step"]]
        assert np.mean(numbers) == pytest.approx(0, abs=1e-6)
        assert np.std(numbers, ddof=1) == pytest.approx(1, abs=1e-3)


def test_bounds_in_the_wrong_order_are_refused(recipe: Path) -> None:
    with pytest.raises(ConfigError, match=r"rho_min=0\.97 is above rho_max=0\.96: lower rho_min, or raise rho_max"):
        load(recipe, ["credit.rho_min=0.97"])


def test_a_step_of_one_conversation_needs_advantages_that_are_not_whitened(recipe: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"whose advantage is 0: raise train\.batch_size, or set credit\.whiten=false"
    ):
        refuse_without_effect(load(recipe, ["train.batch_size=1", "credit.whiten=true"])[0])
    refuse_without_effect(load(recipe, ["train.batch_size=1"])[0])
    refuse_without_effect(load(recipe, ["credit.whiten=true"])[0])


def test_rows_of_seeds_of_which_none_is_used_twice_are_refused(recipe: Path) -> None:
    """Their values would be stored, and written with each checkpoint, without an end."""
    gym = ["environment={use: 'gymnasium:FrozenLake-v1'}", "data.train=environment:4"]
    with pytest.raises(ConfigError, match=r"credit\.name=spo has no effect on the rows that gymnasium.* makes by seed"):
        assemble(load(recipe, gym)[0])


def test_each_credit_has_values_of_its_own() -> None:
    first, second = credit_of(Spo(), weights={}), credit_of(Spo(), weights={})
    assert first.tracker is not None
    assert first.tracker is not second.tracker
