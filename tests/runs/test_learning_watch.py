"""A run that cannot learn is refused before it begins, or told once, with the likely cause and the fix."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from support.tiny import save_model, save_rows
from turnwise.config.train_checks import refuse_without_reward
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.record.metrics import conversation_metrics
from turnwise.runs.health import LearningWatch
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train
from turnwise.types import Failure, Group, Row, Stop, Trajectory, Turn

PLACES = Path(__file__).parents[1] / "support" / "places.py"


def made(**options: Any) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **options})


def warned(model: Path, path: Path, caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """What training says, step by step."""
    config = made(
        **{
            "model": {"path": str(model)},
            "data": {"train": str(save_rows(path / "train.jsonl"))},
            "environment": f"{PLACES}:low_bytes",
            "limits": {"turns": 2, "tokens_per_turn": 64},
            "train": {"steps": 5, "batch_size": 2, "group_size": 4, "lr": 0.01},
            "output": str(path / "run"),
            **options,
        }
    )
    with open(os.devnull, "w") as nowhere:
        asyncio.run(train(assemble(config), TrainReport(Console(file=nowhere))))
    return [one.getMessage() for one in caplog.records if one.getMessage().startswith("step ")]


# before it begins


@pytest.mark.parametrize(
    "environment",
    [
        "turnwise.environments.environment:SingleTurn",
        "turnwise.environments.users:ScriptedUser",
        "turnwise.environments.users:ModelledUser",
    ],
)
def test_a_recipe_in_which_nothing_gives_a_reward_is_refused(environment: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"nothing gives a reward: environment={environment} .*Set reward\.trajectory"
    ):
        refuse_without_reward(made(environment=environment))


def test_reward_functions_of_weight_zero_are_no_source_of_rewards() -> None:
    functions = {"batch": [{"use": "my.py:f", "weight": 0}], "trajectory": [{"use": "my.py:g", "weight": 0}]}
    with pytest.raises(
        ConfigError, match=r"all reward functions \(my\.py:g, my\.py:f\) have weight=0, and environment="
    ):
        refuse_without_reward(made(reward=functions))
    functions["batch"][0]["weight"] = 1
    refuse_without_reward(made(reward=functions))


@pytest.mark.parametrize(
    "source",
    [
        {"environment": "turnwise.environments.users:checked_answer"},
        {"environment": "my.py:environment"},
        {"reward": {"trajectory": ["my.py:f"]}},
        {"reward": {"turns": ["my.py:f"]}},
        {"reward": {"group": ["my.py:f"]}},
        {"tools": ["my.py:tool"]},
        {"mcp": {"servers": "servers.json"}},
    ],
    ids=str,
)
def test_whatever_may_give_a_reward_is_taken(source: dict[str, Any]) -> None:
    refuse_without_reward(made(**source))


def test_training_asks_before_the_model_is_loaded(tmp_path: Path) -> None:
    rows = {"train": str(save_rows(tmp_path / "train.jsonl"))}
    with pytest.raises(ConfigError, match="nothing gives a reward"):
        assemble(made(data=rows, output=str(tmp_path / "run")))


# while it runs


def test_a_run_that_learns_is_told_nothing(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert warned(model, tmp_path, caplog) == []


def test_answers_that_are_all_cut_are_told_once_with_the_limit(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = json.loads((model / "generation_config.json").read_text())
    ends_never = save_model(tmp_path / "model")
    (ends_never / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 2}))
    (told,) = warned(
        ends_never,
        tmp_path,
        caplog,
        limits={"turns": 2, "tokens_per_turn": 3},
        reward={"trajectory": [f"{PLACES}:first_byte"]},
    )
    assert told.startswith("step 1: all 8 conversations ended in the middle of an answer (stop/length 1), cut by ")
    assert "limits.tokens_per_turn=3" in told
    assert "raise limits.tokens_per_turn" in told


def test_rewards_that_never_differ_are_told_once_after_three_steps(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"use": f"{PLACES}:indifferent", "arguments": {"reward": 0.25}}
    (told,) = warned(model, tmp_path, caplog, environment=environment)
    assert told.startswith("step 3: in each of the first 3 steps, all conversations of a row had the same reward")
    assert "Every reward of the last step was 0.25. Either the task is too hard or too easy" in told
    assert f"call {PLACES}:indifferent on an answer" in told


def test_an_environment_that_gives_0_is_told_from_one_that_gives_nothing(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    environment = {"use": f"{PLACES}:indifferent", "arguments": {"reward": 0.0}}
    (told,) = warned(model, tmp_path, caplog, environment=environment)
    assert f"All rewards are 0: environment={PLACES}:indifferent gave no other number to the" in told
    assert "If it gives a reward for right answers, all answers were wrong" in told
    assert "add a reward function" not in told
    caplog.clear()
    (tmp_path / "none").mkdir()
    (told,) = warned(model, tmp_path / "none", caplog, environment={**environment, "arguments": {"reward": None}})
    assert f"the recipe has no reward function, and environment={PLACES}:indifferent gave none of the" in told
    assert "add a reward function (reward.trajectory)" in told


def test_answers_that_are_the_same_are_told_as_the_cause(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *_, told = warned(model, tmp_path, caplog, sampling={"top_k": 1})  # greedy, this model never ends a turn either
    assert "All answers to a row are identical: raise sampling.temperature (1)" in told


def test_a_rule_that_weighs_nothing_is_told_once(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = warned(model, tmp_path, caplog, loss_mask=f"{PLACES}:weighs_nothing")
    assert told.startswith(f"step 1: loss_mask={PLACES}:weighs_nothing gives all turns the weight 0")


# what is told of which step


def step(*rewards: tuple[float, ...], texts: str = "different", stop: Stop = Stop.DONE) -> list[Group]:
    """Groups of conversations with these rewards, of one turn each."""
    groups = []
    for number, group in enumerate(rewards):
        row = Row(id=str(number), messages=[])
        trajectories = []
        for place, reward in enumerate(group):
            one = Trajectory(id=f"{number}/{place}", group=str(number), row=row, reward=reward, stop=stop)
            one.turns.append(Turn(index=0, message={}, text=str(place) if texts == "different" else "same"))
            one.advantages = [reward - sum(group) / len(group)]
            trajectories.append(one)
        groups.append(Group(id=str(number), row=row, trajectories=trajectories))
    return groups


def problems(watch: LearningWatch, number: int, groups: list[Group], grad_norm: float = 1.0) -> list[str]:
    line = {"step": number, "grad_norm": grad_norm, **conversation_metrics(groups)}
    return [finding.text for finding in watch.problems(line, groups)]


def test_one_group_with_a_difference_is_enough() -> None:
    watch = LearningWatch(made())
    for number in (1, 2):
        assert problems(watch, number, step((1.0, 1.0), (0.0, 0.0))) == []
    assert problems(watch, 3, step((1.0, 1.0), (0.0, 1.0))) == []
    assert problems(watch, 4, step((1.0, 1.0), (0.0, 0.0))) == []  # it has learnt before


def test_a_run_that_is_gone_on_with_late_is_not_at_its_first_steps() -> None:
    watch = LearningWatch(made())
    assert [problems(watch, number, step((1.0, 1.0))) for number in (7, 8, 9, 10)] == [[]] * 4


def test_the_number_of_first_steps_is_that_of_the_recipe() -> None:
    for first_steps, expected in ((2, [0, 1, 0, 0, 0]), (5, [0, 0, 0, 0, 1]), (None, [0, 0, 0, 0, 0])):
        watch = LearningWatch(made(health={"constant_reward": first_steps}))
        assert [len(problems(watch, number, step((1.0, 1.0)))) for number in range(1, 6)] == expected


def test_groups_of_one_are_compared_with_each_other() -> None:
    options: dict[str, Any] = {"train": {"group_size": 1}}
    watch = LearningWatch(made(**options))
    assert [problems(watch, number, step((1.0,), (0.0,))) for number in range(1, 15)] == [[]] * 14
    watch = LearningWatch(made(**options))
    assert [len(problems(watch, number, step((1.0,), (1.0,)))) for number in range(1, 5)] == [0, 0, 1, 0]


def test_rows_that_are_too_easy_or_too_hard_are_told_as_such() -> None:
    watch = LearningWatch(made())
    told = [problems(watch, number, step((1.0, 1.0), (0.0, 0.0))) for number in (1, 2, 3, 4)]
    assert [len(one) for one in told] == [0, 0, 1, 0]
    assert "the rows are too easy or too hard for this model" in told[2][0]


def test_a_run_of_fewer_steps_is_told_at_its_end() -> None:
    watch = LearningWatch(made(train={"steps": 1}, reward={"trajectory": ["my.py:f"]}))
    (told,) = problems(watch, 1, step((1.0, 1.0)))
    assert "Every reward of the last step was 1. Either the task is too hard or too easy" in told
    assert "call the reward functions (my.py:f) on an answer" in told


@pytest.mark.parametrize(
    ("stop", "limit"),
    [(Stop.LENGTH, "tokens_per_turn=256"), (Stop.MAX_TOKENS, "tokens=70"), (Stop.MAX_RESPONSE, "response_tokens=80")],
)
def test_the_limit_that_cut_is_named(stop: Stop, limit: str) -> None:
    watch = LearningWatch(made(limits={"tokens": 70, "response_tokens": 80}))
    (told,) = problems(watch, 1, step((0.0, 1.0), stop=stop))
    assert f"(stop/{stop} 1), cut by limits.{limit}:" in told
    assert problems(watch, 2, step((0.0, 1.0), stop=stop)) == []


def test_one_answer_that_was_not_cut_is_enough() -> None:
    groups = step((0.0, 1.0), stop=Stop.LENGTH)
    groups[0].trajectories[0].stop = Stop.DONE
    assert problems(LearningWatch(made()), 1, groups) == []


def test_a_gradient_of_zero_beside_advantages_is_told_with_its_cause() -> None:
    watch = LearningWatch(made(loss_mask="last_turn"))
    assert problems(watch, 1, step((0.0, 1.0)), grad_norm=1e-9) == []
    (told,) = problems(watch, 2, step((0.0, 1.0)), grad_norm=0.0)
    assert "the gradient is 0 although advantages are not" in told
    masked = step((0.0, 1.0))
    for one in masked[0].trajectories:
        one.turns.append(Turn(index=1, message={}, text=""))
        one.turns[0].weight, one.advantages = 0.0, [one.advantages[0], 0.0]
    (told,) = problems(LearningWatch(made(loss_mask="last_turn")), 1, masked, grad_norm=0.0)
    assert "loss_mask=last_turn gives the weight 0 to all turns with an advantage" in told


def test_rows_whose_conversations_failed_but_one_are_not_told_that_their_answers_are_identical() -> None:
    watch = LearningWatch(made(train={"steps": 1}, output="runs/x"))
    groups = step((1.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0))
    for group in groups:
        for one in group.trajectories[1:]:
            one.fail(Failure("environment", "KeyError: 'answer'"))
    (told,) = problems(watch, 1, groups)
    assert "6 of 8 conversations of the last step failed, so no row had two rewards to compare" in told
    assert "`turnwise show runs/x --failed` prints their errors" in told
    assert "temperature" not in told


def test_a_filter_that_removes_everything_is_named_and_not_the_loss_mask() -> None:
    def cut(*numbers: int) -> list[Group]:
        groups = step((0.0, 1.0), (1.0, 0.0))
        for number, one in enumerate(one for group in groups for one in group.trajectories):
            one.turns[0].weight = 0.0
            if number in numbers:
                one.turns[0].finish_reason, one.stop = "length", Stop.LENGTH
        return groups

    recipe = made(train={"overlong_filter": True}, limits={"tokens_per_turn": 9})
    (told,) = [
        text for text in problems(LearningWatch(recipe), 1, cut(0, 1, 2, 3), grad_norm=0.0) if "overlong" in text
    ]
    assert told.startswith(
        "train.overlong_filter excludes the 4 conversations whose last answer was cut by a limit, so no turn"
    )
    assert "raise the limit that cuts (limits.tokens_per_turn=9), set train.overlong_filter=false" in told
    (told,) = problems(LearningWatch(recipe), 1, cut(0), grad_norm=0.0)
    assert (
        "cut by a limit, and of the others loss_mask=all gives all turns the weight 0, so no turn is trained on" in told
    )


def test_a_correction_that_rejects_all_tokens_is_the_cause_of_a_gradient_of_zero() -> None:
    groups = step((0.0, 1.0))
    line = {"step": 1, "grad_norm": 0.0, "correction/rejected": 1.0, **conversation_metrics(groups)}
    (told,) = [finding.text for finding in LearningWatch(made()).problems(line, groups)]
    assert told.startswith("the gradient is 0: correction.rejection removed all tokens from the loss")


@pytest.mark.parametrize("grad_norm", [0.0, 1e-7])
def test_identical_answers_with_different_rewards_are_told_as_such(grad_norm: float) -> None:
    watch = LearningWatch(made(reward={"trajectory": ["judge.py:judge"]}))
    told = problems(watch, 1, step((0.0, 1.0), (1.0, 1.0), texts="same"), grad_norm=grad_norm)
    assert told[0].startswith(
        "in all 1 groups with reward differences, the answers are identical and only their rewards differ (row 0: 0, 1)"
    )
    assert "learnt. The reward functions (judge.py:judge) must give identical conversations the same reward" in told[0]
    assert not any("top_k" in text for text in told)
    assert problems(LearningWatch(made()), 1, step((0.0, 1.0)), grad_norm=1.0) == []


def test_rewards_that_no_function_gave_are_told_as_such() -> None:
    watch = LearningWatch(made(reward={"trajectory": ["my.py:f"]}))
    groups = step((1.0, 1.0))
    for trajectory in groups[0].trajectories:
        trajectory.reward, trajectory.advantages = None, []
    told = [problems(watch, number, groups) for number in (1, 2, 3)]
    assert (
        "None of the 2 conversations of the last step has a reward: the reward functions (my.py:f) returned None"
        in (told[2][0])
    )
