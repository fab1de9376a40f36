"""The composite reward of the recipe, and functions of dictionaries."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.conversations import a_row, call, hold, scripted
from turnwise import assembly
from turnwise.compat.trajectory_dict import DictReward, DictTurnReward, as_dictionary
from turnwise.config.recipe import load
from turnwise.environments.calculator import calculator
from turnwise.environments.environment import SingleTurn, environment
from turnwise.environments.tools.tool import Tool
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.record.metrics import conversation_metrics
from turnwise.rewards.functions import TurnReward
from turnwise.rewards.scorer import Scorer
from turnwise.types import Group, Opening, Reply

ROOT = Path(__file__).parents[2]
GOOD, BAD = call("calculator", '{"expression": "6*7"}'), call("calculator", '{"expression": "6*"}')


def conversations(*texts: list[str]) -> Group:
    row = a_row("What is 6 * 7?", answer="42")
    held = [hold(scripted(turns), lambda: Tools([Tool.of(calculator)], then=SingleTurn()), row=row) for turns in texts]
    return Group(id="1", row=row, trajectories=held)


def test_the_parts_of_the_recipe_are_weighted_summed_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, _ = load(ROOT / "recipes" / "composite_reward.yaml")
    scorer = assembly.scorer(config)
    scorer.refuse_unknown_columns(assembly.rows(config, limit=4))
    group = conversations([GOOD, "#### 42"], [BAD, GOOD, "#### 41"], ["#### 42"])
    asyncio.run(scorer.score([group]))
    right, wrong, guessed = group.trajectories
    assert right.rewards == pytest.approx({"turns": 0.0, "correctness": 0.6, "efficiency": 0.16, "tool_quality": 0.2})
    assert wrong.rewards == pytest.approx({"turns": 0.0, "correctness": 0.0, "efficiency": 0.14, "tool_quality": 0.1})
    assert guessed.rewards == pytest.approx({"turns": 0.0, "correctness": 0.6, "efficiency": 0.18})
    assert [one.reward for one in group.trajectories] == pytest.approx([0.96, 0.24, 0.78])
    metrics = conversation_metrics([group])
    assert metrics["rewards/tool_quality/mean"] == pytest.approx(0.15)  # of the two that it applies to
    assert metrics["rewards/tool_quality/std"] == pytest.approx(0.05)
    assert metrics["rewards/efficiency/mean"] == pytest.approx(0.16)


def test_a_trajectory_as_a_dictionary() -> None:
    @environment
    async def pays(row: Any):  # type: ignore[no-untyped-def]
        yield Opening(messages=[{"role": "system", "content": "Count."}, *row.messages])
        yield Reply(messages=[{"role": "user", "content": [{"type": "text", "text": "And?"}]}], reward=0.5)
        yield Reply(messages=[{"role": "user", "content": "Thanks."}], reward=1.0, done=True)

    one = hold(scripted(["<think>Hm.</think>One.", "Two."]), pays, row=a_row("Go.", level=3))
    assert as_dictionary(one) == {
        "turns": [
            {"role": "system", "content": "Count."},
            {"role": "user", "content": "Go."},
            {**one.turns[0].message, "content": "<think>Hm.</think>One."},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Two."},
        ],
        "reward": 1.5,
        "per_turn_rewards": [0.0, 0.0, 0.5, 0.0, 1.0],
        "prompt": "Go.",
        "response": "Two.",
        "row": {"level": 3},
    }


def test_the_functions_of_dictionaries_on_the_page_give_rewards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "recipes" / "composite_reward.md").read_text(encoding="utf-8")
    (code,), (reward,) = (re.findall(rf"^```{kind}\n(.*?)^```", page, re.M | re.S) for kind in ("python", "yaml"))
    (tmp_path / "my.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    config = Config.model_validate({"model": {"path": "m"}, "data": {"train": "d"}, **yaml.safe_load(reward)})
    group = conversations([GOOD, "#### 42"], ["#### 41"])
    asyncio.run(assembly.scorer(config).score([group]))
    right, wrong = group.trajectories
    assert right.rewards == pytest.approx({"turns": 0.0, "multiturn_reward": 0.96, "turn_rewards": 0.1})
    assert [turn.reward for turn in right.turns] == pytest.approx([0.1, 0.0])
    assert wrong.rewards == pytest.approx({"turns": 0.0, "multiturn_reward": 0.18, "turn_rewards": 0.0})


def turn_error(values: Any) -> str:
    group = conversations([GOOD, "#### 42"])
    (one,) = group.trajectories
    scorer = Scorer(turns=[TurnReward("f", DictTurnReward(lambda trajectory: values))])
    asyncio.run(scorer.score([group]))
    if one.error is None:
        return str([turn.reward for turn in one.turns])
    assert one.error.kind == "reward"
    return one.error.message


def test_the_rewards_of_turns_are_one_for_each_entry_or_for_each_turn_of_the_model() -> None:
    assert turn_error([0, 0.5, 0, 1.0]) == turn_error([0.5, 1.0]) == "[0.5, 1.0]"
    rule = "it must give a list with one number for each of the 4 entries of trajectory['turns'], or for each of the 2 turns"
    assert rule in turn_error([1.0])
    assert rule in turn_error(None)
    assert "an entry that the model did not write cannot have a reward: give 0" in turn_error([1.0, 0, 0, 1.0])
    assert "gave nan; a reward must be a finite number" in turn_error([0.5, float("nan")])


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"reward\.trajectory: arguments\.function: json:__name__ is a str; it must be"
    ):
        DictReward("json:__name__")
