"""Estimators in a training run: greedy conversations of ReMax, missing entries, and SPO's values of rows."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import statistics
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from credit_toy import SEVERAL_STATES
from transformers import AutoModelForCausalLM

from support.conversations import a_row
from support.recipes import save_recipe
from support.training import train_run, train_silently
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError, RolloutError
from turnwise.options.algorithm import Spo
from turnwise.options.schema import Config
from turnwise.rewards.credit import credit_of, outcome
from turnwise.rewards.credit.credit import Episode
from turnwise.rewards.credit.tracker import LARGEST_MOVE, ValueTracker
from turnwise.train import assemble
from turnwise.training.batch import Batch
from turnwise.types import Group, Segment, Trajectory, Turn

training = importlib.import_module("turnwise.train")  # `turnwise.train` is the function

STEPS, ROWS, SAMPLES = 2, 3, 4

PLACES = '''
"""Environments and rewards of the test."""

from turnwise import Opening, Reply, environment


@environment
async def scores(row, key="potential", sometimes=False, value=0.5):
    """Two turns, with a score or a name of the state in `turn.info`. `sometimes`: not for even rows."""
    info = {} if sometimes and int(row.id) % 2 == 0 else {key: value}
    turn = yield Opening(messages=row.messages)
    turn = yield Reply(messages=[{"role": "user", "content": "And?"}], reward=liking(turn), info=info)
    yield Reply(reward=liking(turn), done=True, info=info)


def liking(turn):
    ids = turn.completion.token_ids
    return sum((n + 1) * id_ for n, id_ in enumerate(ids)) % 997 / 997


def no_greedy_reward_for_even_rows(trajectory):
    if trajectory.group.endswith(":greedy") and int(trajectory.row.id) % 2 == 0:
        raise ValueError("no reward for you")
    return 0.0
'''


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "places.py").write_text(PLACES)
    return save_recipe(
        tmp_path,
        model,
        environment={"use": f"{tmp_path / 'places.py'}:scores"},
        limits={"turns": 3, "tokens_per_turn": 64},
        train={"steps": STEPS, "batch_size": ROWS, "group_size": SAMPLES, "lr": 0.01},
    )


def run(recipe: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train. The lines of metrics.jsonl and trajectories.jsonl."""
    config, _ = load(recipe, overrides)
    train_silently(training.assemble(config))
    metrics, trajectories = (
        [json.loads(line) for line in (recipe.parent / "run" / name).read_text().splitlines()]
        for name in ("metrics.jsonl", "trajectories.jsonl")
    )
    return metrics, trajectories


def advantages(trajectory: dict[str, Any]) -> list[float | None]:
    return [turn["advantage"] for turn in trajectory["turns"]]


def split(trajectories: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The conversations of the groups, and the greedy conversation by the id of its group."""
    suffix = ":greedy"
    greedy = [one for one in trajectories if one["group"].endswith(suffix)]
    by_group = {one["group"].removesuffix(suffix): one for one in greedy}
    assert len(by_group) == len(greedy)
    return [one for one in trajectories if one not in greedy], by_group


@pytest.mark.slow
def test_remax_compares_with_one_greedy_conversation_of_each_group(
    recipe: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[str] = []
    pack_groups = training.pack_groups

    def packing(run: Any, policy: Any, groups: Sequence[Group]) -> list[Batch]:
        packed.extend(t.id for group in groups for t in group.trajectories)
        return pack_groups(run, policy, groups)

    monkeypatch.setattr(training, "pack_groups", packing)
    metrics, trajectories = run(recipe, "credit.name=remax")
    sampled, greedy = split(trajectories)
    assert len(greedy) == STEPS * ROWS
    assert len(sampled) == STEPS * ROWS * SAMPLES
    assert {one["group"] for one in sampled} == set(greedy)
    assert sorted(packed) == sorted(one["id"] for one in sampled)
    for one in sampled:
        baseline = greedy[one["group"]]
        assert baseline["row"] == one["row"]
        assert advantages(one) == pytest.approx([one["reward"] - baseline["reward"]] * len(one["turns"]))
    assert any(number for one in sampled for number in advantages(one))
    assert {number for one in greedy.values() for number in advantages(one)} == {None}
    assert all(one["reward"] == pytest.approx(sum(t["reward"] for t in one["turns"])) for one in greedy.values())
    assert len({one["reward"] for one in greedy.values()}) > 1
    for line in metrics:  # the reward curve is that of the sampled conversations
        rewards = [one["reward"] for one in sampled if one["step"] == line["step"]]
        assert line["reward/mean"] == pytest.approx(statistics.fmean(rewards))

    before = AutoModelForCausalLM.from_pretrained(model)
    for one in greedy.values():
        if one["step"] > 1:
            continue
        for segment in one["segments"]:
            with torch.no_grad():
                likeliest = before(torch.tensor([segment["token_ids"]])).logits[0].argmax(dim=-1).tolist()
            places = [n for n, turn in enumerate(segment["turn"]) if turn >= 0]
            assert [segment["token_ids"][n] for n in places] == [likeliest[n - 1] for n in places]


def test_other_estimators_sample_no_greedy_conversations(recipe: Path) -> None:
    _, trajectories = run(recipe, "credit.name=rloo")
    assert split(trajectories)[1] == {}
    assert len(trajectories) == STEPS * ROWS * SAMPLES


def test_a_group_whose_greedy_conversation_failed_is_not_trained_on(recipe: Path) -> None:
    reward = f"reward.trajectory=[{recipe.parent / 'places.py'}:no_greedy_reward_for_even_rows]"
    metrics, trajectories = run(recipe, "credit.name=remax", reward)
    sampled, greedy = split(trajectories)
    assert [line["step"] for line in metrics] == [1, 2]
    failed = {group for group, one in greedy.items() if one["error"] is not None}
    assert failed == {group for group, one in greedy.items() if int(one["row"]["id"]) % 2 == 0}
    assert 0 < len(failed) < len(greedy)
    assert all("no reward for you" in greedy[group]["error"]["message"] for group in failed)
    for one in sampled:
        assert one["reward"] is not None
        assert (set(advantages(one)) == {None}) is (one["group"] in failed)


NEEDS = {
    "turn_potential": (
        [],
        "potential",
        "no turn has an entry turn.info['potential'] (other entries: none); credit.name=turn_potential needs the score of the "
        "state after at least one turn, or None for no score. Let the environment set the entry "
        "(Reply(info={'potential': ...})), or set credit.key to the key that the environment uses",
    ),
    "gigpo": (
        ["credit.state_key=board"],
        "board",
        "no turn has an entry turn.info['board'] (other entries: none); credit.name=gigpo with credit.state_key=board needs "
        "the name of the state after at least one turn before the last. Let the environment set the entry "
        "(Reply(info={'board': ...})), or remove credit.state_key to compare the messages that the model received",
    ),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_conversation_without_the_entry_that_the_estimator_reads_fails_and_the_run_goes_on(
    recipe: Path, name: str
) -> None:
    options, key, message = NEEDS[name]
    arguments = f"environment.arguments={{key: {key}, sometimes: true}}"
    metrics, trajectories = run(recipe, f"credit.name={name}", *options, arguments)
    assert [line["step"] for line in metrics] == [1, 2]
    without = [one for one in trajectories if int(one["row"]["id"]) % 2 == 0]
    assert 0 < len(without) < len(trajectories)
    for one in trajectories:
        if one in without:
            assert (one["error"]["kind"], one["error"]["message"]) == ("reward", message)
            assert (one["reward"], set(advantages(one))) == (None, {None})
        else:
            assert one["error"] is None
            assert None not in advantages(one)
    assert [line["failed"] * ROWS * SAMPLES for line in metrics] == [
        sum(one["step"] == step for one in without) for step in (1, 2)
    ]


@pytest.mark.parametrize("name", NEEDS)
def test_a_run_whose_conversations_all_lack_the_entry_ends_with_the_reason(recipe: Path, name: str) -> None:
    options, _, message = NEEDS[name]
    with pytest.raises(RolloutError, match="all conversations of step 1 failed") as error:
        run(recipe, f"credit.name={name}", *options, "environment.arguments={key: other}")
    assert message.replace("entries: none", "entries: 'other'") in str(error.value)


def test_a_state_without_a_score_is_no_failure(recipe: Path) -> None:
    _, trajectories = run(recipe, "credit.name=turn_potential", "environment.arguments={value: null}")
    assert [one["error"] for one in trajectories] == [None] * len(trajectories)


@pytest.mark.parametrize("value", [".nan", "much", "[1]"])
def test_a_score_that_is_no_finite_number_fails_its_conversation(recipe: Path, value: str) -> None:
    arguments = f"environment.arguments={{value: {value}}}"
    with pytest.raises(RolloutError, match=r"turn\.info\['potential'\] of turn 0"):
        run(recipe, "credit.name=turn_potential", arguments)


def test_a_turn_that_a_limit_cut_needs_no_score() -> None:
    """The environment does not see such a turn. Its conversation has the advantage of grpo."""
    cut, scored = (
        Trajectory(id=name, group="g", row=a_row(), reward=reward, turns=[Turn(index=0, message={}, text="")])
        for name, reward in (("cut", 1.0), ("scored", 0.0))
    )
    cut.turns[0].finish_reason = "length"
    scored.turns[0].info["potential"] = 0.25
    for one in (cut, scored):
        one.segments = [Segment(array("i", [5, 6]), array("f", [0, -1]), array("i", [-1, 0]), array("i", [-1, 0]))]
    group = Group(id="g", row=a_row(), trajectories=[cut, scored])
    section = {
        "model": {"path": "m"},
        "data": {"train": "rows.jsonl"},
        "credit": {"name": "turn_potential", "scale": "none"},
    }
    config = Config.model_validate(section)
    assembly.credit(config, assembly.scorer(config))([group])
    assert (cut.error, cut.advantages) == (None, [0.5])
    assert (scored.error, scored.advantages) == (None, [-0.25])


# SPO: the values of rows, exact expectations on an enumerated problem, and runs with groups of one that learn, and
# resume


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

PLACES_SPO = """
from turnwise import Opening, Reply, environment

@environment
async def liked(row):
    turn = yield Opening(messages=row.messages)
    ids = turn.completion.token_ids
    yield Reply(reward=sum((n + 1) * id_ for n, id_ in enumerate(ids)) % 997 / 997, done=True)
"""


@pytest.fixture
def recipe_spo(model: Path, tmp_path: Path) -> Path:
    (tmp_path / "places.py").write_text(PLACES_SPO)
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
    recipe_spo: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    trajectories, metrics, _ = train_run(recipe_spo, tmp_path / "out", *(f"credit.{k}={v}" for k, v in options.items()))
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


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(recipe_spo: Path, tmp_path: Path) -> None:
    options = ["credit.whiten=true", "credit.half_life=0.5", "credit.rho_min=0.01"]
    whole, metrics, _ = train_run(recipe_spo, tmp_path / "whole", *options)
    train_run(recipe_spo, tmp_path / "resumed", *options, "train.steps=2")
    resumed, again, _ = train_run(recipe_spo, tmp_path / "resumed", *options, "resume=auto")

    def seen(trajectories: list[dict[str, Any]]) -> list[Any]:
        return [(one["id"], one["segments"], [turn["advantage"] for turn in one["turns"]]) for one in trajectories]

    assert seen(resumed) == seen(whole)
    assert [line["policy_shift"] for line in again] == [line["policy_shift"] for line in metrics]
    for line in metrics:  # whitened over the batch
        numbers = [one["turns"][0]["advantage"] for one in whole if one["step"] == line["step"]]
        assert np.mean(numbers) == pytest.approx(0, abs=1e-6)
        assert np.std(numbers, ddof=1) == pytest.approx(1, abs=1e-3)


def test_bounds_in_the_wrong_order_are_refused(recipe_spo: Path) -> None:
    with pytest.raises(ConfigError, match=r"rho_min=0\.97 is above rho_max=0\.96: lower rho_min, or raise rho_max"):
        load(recipe_spo, ["credit.rho_min=0.97"])


def test_a_step_of_one_conversation_needs_advantages_that_are_not_whitened(recipe_spo: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"whose advantage is 0: raise train\.batch_size, or set credit\.whiten=false"
    ):
        refuse_without_effect(load(recipe_spo, ["train.batch_size=1", "credit.whiten=true"])[0])
    refuse_without_effect(load(recipe_spo, ["train.batch_size=1"])[0])
    refuse_without_effect(load(recipe_spo, ["credit.whiten=true"])[0])


def test_rows_of_seeds_of_which_none_is_used_twice_are_refused(recipe_spo: Path) -> None:
    """Their values would be stored, and written with each checkpoint, without an end."""
    gym = ["environment={use: 'gymnasium:FrozenLake-v1'}", "data.train=environment:4"]
    with pytest.raises(ConfigError, match=r"credit\.name=spo has no effect on the rows that gymnasium.* makes by seed"):
        assemble(load(recipe_spo, gym)[0])


def test_each_credit_has_values_of_its_own() -> None:
    first, second = credit_of(Spo(), weights={}), credit_of(Spo(), weights={})
    assert first.tracker is not None
    assert first.tracker is not second.tracker
