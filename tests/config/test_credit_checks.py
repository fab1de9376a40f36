"""Estimators of advantages that a recipe cannot use: each refusal, and the nearest recipe that is accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from turnwise.config.recipe import load
from turnwise.config.train_checks import chosen_estimator, refuse_without_effect
from turnwise.errors import ConfigError

REWARD = "reward.trajectory=[r.py:right]"
TURN_REWARD = "reward.turns=[r.py:step]"
ENVIRONMENT = "environment=mine.py:game"
SINGLE = "train.group_size=1"
ONE_TURN = "limits.turns=1"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}}))
    return path


def check(recipe: Path, *overrides: str) -> None:
    config, _ = load(recipe, overrides)
    refuse_without_effect(config)


COMPARING = [
    *(
        "grpo",
        "rloo",
        "opo",
        "gpg",
        "gdpo",
        "reinforce_pp_baseline",
        "turn_return",
        "shared",
        "discounted",
        "kevin",
        "gigpo",
    ),
    *("mt_grpo", "igpo", "turn_potential"),
]


@pytest.mark.parametrize("name", COMPARING)
def test_an_estimator_that_compares_needs_several_conversations_of_a_row(recipe: Path, name: str) -> None:
    given = (f"credit.name={name}", REWARD, TURN_REWARD, ENVIRONMENT)
    message = (
        f"train.group_size=1 is too small: credit.name={name} compares the trajectories of one row. Set train.group_size to 2 or "
        f"more"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check(recipe, *given, SINGLE)
    check(recipe, *given, "train.group_size=2")


@pytest.mark.parametrize(
    "credit",
    ["{name: remax}", "{name: reinforce_pp}", "{name: shared, baseline: none}", "{name: discounted, baseline: none}"],
)
def test_an_estimator_that_does_not_compare_accepts_one_conversation_of_a_row(recipe: Path, credit: str) -> None:
    check(recipe, f"credit={credit}", SINGLE)


GDPO = (
    "credit.name=gdpo needs two parts of the reward to normalise, and the recipe has {}: add a reward function, or set "
    "credit.name=grpo"
)
OF_TURNS = (
    "credit.name={} needs rewards of turns: limits.turns must be above 1, and the recipe must have a function in reward.turns, "
    "tools, or an environment that gives rewards. For one reward of the conversation set credit.name=grpo"
)
POTENTIAL = (
    "credit.name=turn_potential needs scores in turn.info: environment=turnwise.environments.environment:SingleTurn sets none, "
    "and the recipe has no function in reward.turns that could. Use an environment that sets them, or set credit.name=grpo"
)
IDLE = "credit.{} has no effect with limits.turns=1, because there are no later turns: remove it, or raise limits.turns"


@pytest.mark.parametrize(
    ("refused", "message", "accepted"),
    [
        (["credit.name=gdpo"], GDPO.format(0), ["credit.name=gdpo", "reward.trajectory=[r.py:right, r.py:short]"]),
        (["credit.name=gdpo", REWARD], GDPO.format(1), ["credit.name=gdpo", REWARD, ENVIRONMENT]),
        (["credit.name=gdpo", TURN_REWARD], GDPO.format(1), ["credit.name=gdpo", REWARD, TURN_REWARD]),
        *(
            ([f"credit.name={name}", *options], OF_TURNS.format(name), [f"credit.name={name}", *accepted])
            for name in ("mt_grpo", "igpo")
            for options, accepted in (
                ([REWARD], [TURN_REWARD]),
                ([TURN_REWARD, ONE_TURN], [TURN_REWARD, "limits.turns=2"]),
                ([ENVIRONMENT, ONE_TURN], [ENVIRONMENT, "limits.turns=2"]),
                ([], ["tools=[t.py:tool]"]),
            )
        ),
        (["credit.name=turn_potential", REWARD], POTENTIAL, ["credit.name=turn_potential", ENVIRONMENT]),
        (["credit.name=turn_potential"], POTENTIAL, ["credit.name=turn_potential", TURN_REWARD]),
        *(
            (
                [f"credit={{name: {name}, {option}: 0.3}}", ONE_TURN, ENVIRONMENT],
                IDLE.format(option),
                [*kept, ENVIRONMENT],
            )
            for name, option in (
                ("turn_return", "gamma"),
                ("discounted", "gamma"),
                ("kevin", "gamma"),
                ("gigpo", "gamma"),
                ("turn_potential", "decay"),
            )
            for kept in (
                [f"credit={{name: {name}, {option}: 0.3}}", "limits.turns=2"],
                [f"credit={{name: {name}}}", ONE_TURN],
            )
        ),
    ],
)
def test_what_an_estimator_needs_and_options_without_effect(
    recipe: Path, refused: list[str], message: str, accepted: list[str]
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        check(recipe, *refused)
    check(recipe, *accepted)


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([REWARD], "grpo"),
        (["environment=turnwise.environments.users:ScriptedUser", REWARD], "grpo"),
        ([TURN_REWARD], "turn_return"),
        (["tools=[t.py:tool]"], "turn_return"),
        ([ENVIRONMENT], "turn_return"),
        ([ENVIRONMENT, TURN_REWARD, ONE_TURN], "grpo"),
    ],
)
def test_the_estimator_of_a_recipe_that_names_none(recipe: Path, overrides: list[str], name: str) -> None:
    config, _ = load(recipe, [*overrides, "credit.scale=none"])
    estimator = chosen_estimator(config)
    assert (estimator.name, estimator.model_dump()["scale"]) == (name, "none")
