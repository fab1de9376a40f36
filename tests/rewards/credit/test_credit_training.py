"""Estimators in a training run: greedy conversations of ReMax, and conversations without the entries that an estimator reads."""

from __future__ import annotations

import importlib
import json
import statistics
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.conversations import a_row
from support.recipes import save_recipe
from support.training import train_silently
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.errors import RolloutError
from turnwise.options.schema import Config
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
