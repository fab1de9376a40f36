"""Loss masks: which turns each rule keeps, and that the gradient is that of a plain loop over the tokens that it keeps."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_pages import main as generated_pages
from rich.console import Console

from support.tiny import save_rows
from support.training import train_silently
from turnwise import assembly
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.schema import LOSS_MASKS, Config
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, TurnWeighting, custom, without_cut_turns
from turnwise.runs.sampling_only import collect
from turnwise.train import assemble
from turnwise.types import Row, Stop, ToolCall, ToolOutcome, Trajectory, Turn

SUPPORT = Path(__file__).parents[1] / "support"


def said(*roles: str, turns: int | None = None, cut: tuple[int, ...] = ()) -> Trajectory:
    """A conversation of these roles; `turns` are those of the model, all assistant messages unless there are fewer."""
    one = Trajectory(id="x", group="x", row=Row(id="x", messages=[]))
    one.messages = [{"role": role, "content": str(n)} for n, role in enumerate(roles)]
    count = roles.count("assistant") if turns is None else turns
    one.turns = [Turn(index=n, message={}, text=str(n), kept_tokens=1 if n in cut else None) for n in range(count)]
    return one


def kept(rule: TurnWeighting, one: Trajectory) -> list[float]:
    rule(one)
    return [turn.weight for turn in one.turns]


TWO_QUESTIONS = ("system", "user", "assistant", "tool", "assistant", "user", "assistant", "tool", "assistant")


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("all", [1, 1, 1, 1]),
        ("last_turn", [0, 0, 0, 1]),
        ("after_last_user", [0, 0, 1, 1]),
        ("last_round", [0, 0, 0, 1]),
    ],
)
def test_each_rule_keeps_its_turns_of_a_conversation_with_two_questions_and_tools(
    name: str, weights: list[int]
) -> None:
    assert kept(TURN_WEIGHTINGS[name], said(*TWO_QUESTIONS)) == weights


def called(*turns: str, stop: Stop = Stop.DONE) -> Trajectory:
    """A conversation whose turns have calls: `+` succeeded, `-` failed, `?` could not be parsed, and none without a sign."""
    one = said("user", *("assistant", "tool") * len(turns))
    one.stop = stop
    for turn, signs in zip(one.turns, turns, strict=True):
        ids = [f"{turn.index}.{n}" for n in range(len(signs))]
        turn.calls = tuple(
            ToolCall(id=id, name="f", arguments={}, text="", error="no JSON" if sign == "?" else None)
            for id, sign in zip(ids, signs, strict=True)
        )
        turn.outcomes = tuple(
            ToolOutcome(id=id, name="f", arguments={}, content="", error="raised" if sign == "-" else None)
            for id, sign in zip(ids, signs, strict=True)
            if sign != "?"
        )
    return one


@pytest.mark.parametrize(
    ("turns", "failed_calls", "void_turns"),
    [
        (("+", "-", "+-", "--", "?", ""), [1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 1, 1]),
        (("+", "", "+", ""), [1, 1, 1, 1], [0, 0, 0, 0]),  # the second turn neither calls nor answers
        (("",), [1], [1]),
        ((), [], []),
    ],
)
def test_turns_whose_calls_failed_and_conversations_with_void_turns_are_left_out(
    turns: tuple[str, ...], failed_calls: list[int], void_turns: list[int]
) -> None:
    assert kept(TURN_WEIGHTINGS["without_failed_calls"], called(*turns)) == failed_calls
    assert kept(TURN_WEIGHTINGS["without_void_turns"], called(*turns)) == void_turns


@pytest.mark.parametrize(("last", "weights"), [("", [0, 0]), ("+", [1, 1])])
def test_an_answer_that_a_limit_cut_is_void_unless_it_calls_a_tool(last: str, weights: list[int]) -> None:
    one = called("+", last, stop=Stop.LENGTH)
    one.turns[-1].finish_reason = "length"
    assert kept(TURN_WEIGHTINGS["without_void_turns"], one) == weights


def test_a_rule_says_the_same_when_it_is_asked_again_and_undoes_another() -> None:
    one = said(*TWO_QUESTIONS)
    assert kept(TURN_WEIGHTINGS["last_turn"], one) == kept(TURN_WEIGHTINGS["last_turn"], one)
    assert kept(TURN_WEIGHTINGS["all"], one) == [1, 1, 1, 1]
    assert kept(TURN_WEIGHTINGS["last_turn"], said("user", turns=0)) == []


def test_a_last_message_that_nobody_answered_begins_no_round() -> None:
    one = said("user", "assistant", "user", "assistant", "tool", "assistant", "user")
    assert kept(TURN_WEIGHTINGS["after_last_user"], one) == [0, 1, 1]
    assert kept(TURN_WEIGHTINGS["last_round"], said("user", "assistant", "tool", "assistant", "tool", "tool")) == [0, 1]


def test_two_answers_in_a_row_are_one_round_and_two_turns() -> None:
    one = said("user", "assistant", "user", "assistant", "assistant")
    assert kept(TURN_WEIGHTINGS["last_round"], one) == kept(TURN_WEIGHTINGS["after_last_user"], one) == [0, 1, 1]
    assert kept(TURN_WEIGHTINGS["last_turn"], one) == [0, 0, 1]


def test_answers_in_the_opening_are_no_turns() -> None:
    few_shot = ("user", "assistant", "user", "assistant", "user", "assistant")
    assert kept(TURN_WEIGHTINGS["after_last_user"], said(*few_shot, turns=1)) == [1]
    assert kept(TURN_WEIGHTINGS["after_last_user"], said(*few_shot, turns=2)) == [0, 1]
    assert kept(TURN_WEIGHTINGS["after_last_user"], said("assistant", "assistant", turns=1)) == [1]


def test_turns_that_a_rewritten_history_left_out_are_before_it() -> None:
    one = said("user", "assistant", "tool", "assistant", turns=5)
    one.previous_histories = [[{"role": "user", "content": "as it was"}]]
    assert kept(TURN_WEIGHTINGS["after_last_user"], one) == [0, 0, 0, 1, 1]


def test_turns_that_the_environment_declares_to_be_learnt_from_are_in_every_round() -> None:
    one = said(*TWO_QUESTIONS)
    one.turns[1].train_on = True
    assert kept(TURN_WEIGHTINGS["last_round"], one) == [0, 1, 0, 1]
    assert kept(TURN_WEIGHTINGS["after_last_user"], one) == [0, 1, 1, 1]
    assert kept(TURN_WEIGHTINGS["last_turn"], one) == [0, 0, 0, 1]


def test_an_answer_that_was_cut_and_continued_is_one() -> None:
    # turns 2, 3 and 4 are a single message
    one = said("user", "assistant", "user", "assistant", "tool", "assistant", turns=5, cut=(2, 3))
    assert kept(TURN_WEIGHTINGS["last_turn"], one) == [0, 0, 1, 1, 1]
    assert kept(TURN_WEIGHTINGS["after_last_user"], one) == [0, 1, 1, 1, 1]
    assert kept(TURN_WEIGHTINGS["last_turn"], said("user", "assistant", turns=1, cut=(0,))) == [1]


# a function of one's own


def halves(turn: Turn) -> float:
    return 1 / (turn.index + 1)


def last_only(turn: Turn, trajectory: Trajectory) -> bool:
    return turn is trajectory.turns[-1]


def with_default(turn: Turn, trajectory: Trajectory | None = None) -> int:
    return len(trajectory.turns) if trajectory is not None else 0


def test_a_function_gives_the_weight_of_each_turn_and_may_take_the_trajectory() -> None:
    one = said(*TWO_QUESTIONS)
    assert kept(custom(halves, name="halves"), one) == [1, 1 / 2, 1 / 3, 1 / 4]
    assert kept(custom(last_only, name="last_only"), one) == [0, 0, 0, 1]
    assert kept(custom(with_default, name="with_default"), one) == [4, 4, 4, 4]
    assert kept(custom(lambda turn, scale=2: torch.tensor([scale]), name="tensor"), one) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda turn: -1.0, "the loss mask 'mine' gave -1.0 for turn 0; a weight must be a finite number, 0 or more"),
        (lambda turn: float("nan"), "gave nan for turn 0;"),
        (lambda turn: float("inf") if turn.index == 2 else 1, "gave inf for turn 2;"),
        (lambda turn: None, "gave None for turn 0;"),
        (lambda turn: "1", "gave '1' for turn 0;"),
        (lambda turn: [1.0, 2.0], "TypeError: float() argument must be"),
        (lambda turn: turn.info["weight"], "KeyError: weight"),
    ],
)
def test_a_function_that_breaks_or_gives_no_weight_breaks_its_conversation_only(function: Any, message: str) -> None:
    broken, other = said(*TWO_QUESTIONS), said(*TWO_QUESTIONS)
    broken.id = "broken"
    rule = custom(lambda turn, trajectory: function(turn) if trajectory.id == "broken" else 0.5, name="mine")
    rule(broken)
    rule(other)
    assert broken.error is not None
    assert (broken.error.kind, broken.stop, broken.reward) == ("loss_mask", Stop.ERROR, None)
    assert message in broken.error.message
    assert [turn.weight for turn in broken.turns] == [1, 1, 1, 1]
    assert [turn.weight for turn in other.turns] == [0.5] * 4
    before = broken.error
    rule(broken)  # what is broken is not asked about
    assert broken.error is before


# recipes


MINE = """
def weight(turn, scale: float):
    return scale * turn.index

def of_both(turn, trajectory):
    return len(trajectory.turns)

async def waits(turn):
    return 1

def of_three(turn, trajectory, further):
    return 1
"""


def recipe(path: Path, *overrides: str) -> Config:
    (path / "mine.py").write_text(MINE)
    (path / "recipe.yaml").write_text("model: {path: m}\ndata: {train: rows.jsonl}\n")
    return load(path / "recipe.yaml", [one.replace("mine.py", f"{path}/mine.py") for one in overrides])[0]


def test_a_recipe_names_a_rule_or_a_function(tmp_path: Path) -> None:
    assert tuple(TURN_WEIGHTINGS) == LOSS_MASKS
    one = said(*TWO_QUESTIONS)
    assert assembly.turn_weighting(recipe(tmp_path)) is TURN_WEIGHTINGS["all"]
    assert assembly.turn_weighting(recipe(tmp_path, "loss_mask=last_round")) is TURN_WEIGHTINGS["last_round"]
    scaled = assembly.turn_weighting(recipe(tmp_path, "loss_mask=mine.py:weight", "loss_mask.arguments.scale=0.5"))
    assert kept(scaled, one) == [0, 0.5, 1, 1.5]
    assert kept(assembly.turn_weighting(recipe(tmp_path, "loss_mask={use: mine.py:of_both}")), one) == [4] * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "loss_mask=last_trun",
            "loss_mask: there is no loss mask of this name; the loss masks are all, last_turn, after_last_user, last_",
        ),
        ("loss_mask=last_trun", "did you mean 'last_turn'?; got 'last_trun'"),
        (
            "loss_mask={use: last_turn, arguments: {n: 2}}",
            "loss_mask: the loss mask last_turn takes no arguments: remove them",
        ),
        ("loss_mask=mine.py:weigth", "mine.py has no 'weigth'; did you mean 'weight'?"),
        ("loss_mask=mine.py:weight", "cannot be called with the arguments {}: missing a required"),
        (
            "loss_mask={use: mine.py:of_both, arguments: {n: 2}}",
            "cannot be called with the arguments {'n': 2}: got an un",
        ),
        (
            "loss_mask=mine.py:of_three",
            "cannot be called with the arguments {}: missing a required argument: 'further'",
        ),
        ("loss_mask=mine.py:waits", "is async; a loss mask waits for nothing: write def instead of async def"),
    ],
)
def test_what_is_no_loss_mask_is_told(override: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        assembly.turn_weighting(recipe(tmp_path, override))
    assert message in str(error.value)


def test_a_rule_among_one_turn_is_refused_and_a_function_is_not(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_mask=last_turn has no effect with limits\.turns=1, .*raise limits\.turns"
    ):
        refuse_without_effect(recipe(tmp_path, "loss_mask=last_turn", "limits.turns=1"))
    refuse_without_effect(recipe(tmp_path, "loss_mask=all", "limits.turns=1"))
    refuse_without_effect(recipe(tmp_path, "loss_mask=last_turn"))
    refuse_without_effect(recipe(tmp_path, "loss_mask=mine.py:of_both", "limits.turns=1"))


# runs


BREAKS = """
def first_rows(turn, trajectory):
    return 0.5 if int(trajectory.row.id) <= 4 else -1
"""


def options(model: Path, path: Path, **further: Any) -> Config:
    (path / "breaks.py").write_text(BREAKS)
    tree = {
        "model": {"path": str(model)},
        "data": {"train": str(save_rows(path / "train.jsonl"))},
        "environment": f"{SUPPORT / 'places.py'}:low_bytes",
        "limits": {"turns": 3, "tokens_per_turn": 8},
        "train": {"steps": 1, "batch_size": 4, "group_size": 4, "lr": 0.01},
        "output": str(path / "run"),
    }
    return Config.model_validate({**tree, **further})


def held(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "trajectories.jsonl").read_text().splitlines()]


def learn(config: Config) -> dict[str, Any]:
    train_silently(assemble(config))
    return json.loads((Path(config.output) / "metrics.jsonl").read_text())


def test_a_run_trains_on_the_turns_of_the_mask_only_and_records_the_weights(model: Path, tmp_path: Path) -> None:
    metrics = learn(options(model, tmp_path, loss_mask="last_turn", sampling={"temperature": 1.5}))
    trajectories = held(tmp_path / "run")
    assert {len(one["turns"]) for one in trajectories} >= {2}
    assert all(
        [turn["weight"] for turn in one["turns"]] == [0.0] * (len(one["turns"]) - 1) + [1.0] for one in trajectories
    )
    last = {(one["group"], str(one["segments"]), one["turns"][-1]["advantage"]): one for one in trajectories}
    counted = sum(segment["turn"].count(len(one["turns"]) - 1) for one in last.values() for segment in one["segments"])
    assert 0 < metrics["tokens/trained"] <= counted < metrics["tokens/sampled"]
    assert metrics["grad_norm"] > 0


def test_a_function_that_breaks_costs_its_conversations_and_not_the_run(model: Path, tmp_path: Path) -> None:
    config = options(
        model,
        tmp_path,
        loss_mask=f"{tmp_path}/breaks.py:first_rows",
        train={"steps": 1, "batch_size": 8, "group_size": 2},
    )
    metrics = learn(config)
    assert metrics["failed"] == 0.5
    for one in held(tmp_path / "run"):
        if int(one["row"]["id"]) <= 4:
            assert {turn["weight"] for turn in one["turns"]} == {0.5}
            assert one["turns"][0]["advantage"] is not None
        else:
            assert one["error"]["kind"] == "loss_mask"
            assert "'first_rows' gave -1 for turn 0" in one["error"]["message"]
            assert one["turns"][0]["advantage"] is None


def test_a_mask_that_leaves_nothing_is_told(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "none.py").write_text("def none(turn): return 0")
    with caplog.at_level(logging.WARNING):
        metrics = learn(options(model, tmp_path, loss_mask=f"{tmp_path}/none.py:none"))
    assert (
        f"step 1: loss_mask={tmp_path}/none.py:none gives all turns the weight 0, so no turn is trained on"
        in caplog.text
    )
    assert (metrics["tokens/trained"], metrics["loss"]) == (0, 0.0)


def test_a_rollout_records_the_weights_too(model: Path, tmp_path: Path) -> None:
    asyncio.run(collect(options(model, tmp_path, loss_mask="last_round"), tmp_path / "out", Console(quiet=True)))
    for one in held(tmp_path / "out"):
        assert [turn["weight"] for turn in one["turns"]] == [0.0] * (len(one["turns"]) - 1) + [1.0]


def test_the_view_in_the_documentation_is_what_the_rules_give() -> None:
    assert generated_pages(["--check", "loss_masks"]) == 0


def test_only_a_limit_of_the_recipe_makes_a_cut_trajectory_overlong() -> None:
    for stop, kept_weights in ((Stop.LENGTH, [0]), (Stop.CONTEXT, [0]), (Stop.DONE, [1])):
        one = said("user", "assistant", turns=1)
        one.turns[-1].finish_reason, one.stop = "length", stop  # DONE: an agent asked for few tokens, and then ended
        assert kept(without_cut_turns(TURN_WEIGHTINGS["all"]), one) == kept_weights
