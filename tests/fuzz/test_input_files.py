"""Damaged recipes, overrides and data files: each is read, or refused with a `TurnwiseError`; nothing else is ever raised."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuzz.mutations import RAW, VALUES, accepted_or_refused, mutated_text, mutated_tree, places, write
from turnwise.config.recipe import load
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import refuse_without_effect
from turnwise.data.conversations import read_conversations
from turnwise.data.rows import read_rows
from turnwise.errors import TurnwiseError
from turnwise.options.schema import Config

ROUNDS = 250
"""Data files of each test."""
RECIPE_ROUNDS = 80
"""Recipes of each test: PyYAML is slow."""

ROOT = Path(__file__).parent.parent.parent
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
ROWS: list[dict[str, Any]] = [
    {
        "prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "<image> hi"}],
        "images": [f"data:image/png;base64,{PNG}"],
        "answer": 3,
        "id": "x",
    },
    {"prompt": "Q", "answer": "#### 2", "extra_info": {"a": [1, 2]}},
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
            {"role": "tool", "content": "z", "tool_call_id": "1"},
            {"role": "assistant", "content": "done", "weight": 0.5},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    },
]


def whole_recipe() -> dict[str, Any]:
    config, _ = load(RECIPES[0])
    return config.model_dump(mode="json")


@pytest.mark.parametrize("seed", range(2))
def test_a_damaged_recipe_is_read_or_refused_with_a_message(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    outcomes: list[bool] = []
    for _ in range(RECIPE_ROUNDS):
        text = draw.choice(RECIPES).read_text(encoding="utf-8")
        kind = draw.random()
        if kind < 0.4:
            tree = yaml.safe_load(text) if draw.random() < 0.6 else whole_recipe()
            text = yaml.dump(mutated_tree(tree, draw))
        elif kind < 0.7:
            lines = text.split("\n")
            place = draw.randrange(len(lines))
            lines[place] = f"{lines[place].partition(':')[0]}: {draw.choice(RAW)}"
            text = "\n".join(lines)
        else:
            text = mutated_text(text, draw)
        loaded = accepted_or_refused(load, write(tmp_path / "recipe.yaml", text))
        outcomes.append(loaded is not None)
        if loaded is not None:
            accepted_or_refused(refuse_without_effect, loaded[0])
            accepted_or_refused(refuse_sft_without_effect, loaded[0])
    assert set(outcomes) == {True, False}  # the damage is neither harmless nor total


def test_a_damaged_override_is_read_or_refused_with_a_message() -> None:
    draw = random.Random(0)
    keys = [".".join(map(str, place)) for place in places(whole_recipe())]
    keys += ["a..b", ".", "", "x", "engine.name", "train.lr.x", "tools.0.use", "environment.arguments.x"]
    for _ in range(RECIPE_ROUNDS):
        value = draw.choice(RAW) if draw.random() < 0.5 else str(draw.choice(VALUES))
        override = f"{draw.choice(keys)}{draw.choice(['=', '=', '=', ''])}{value}"
        loaded = accepted_or_refused(load, draw.choice(RECIPES), [override])
        assert loaded is None or isinstance(loaded[0], Config)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("read", [read_rows, read_conversations])
def test_a_damaged_row_is_read_or_refused_with_a_message(read: Any, seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    for _ in range(ROUNDS):
        text = json.dumps(mutated_tree(draw.choice(ROWS), draw))
        if draw.random() < 0.3:
            text = mutated_text(text, draw)
        columns = draw.choice([{}, {}, {"answer": "answer"}, {"id": "id"}, {"prompt": "messages"}])
        rows = accepted_or_refused(read, str(write(tmp_path / "rows.jsonl", text)), columns=columns, system="s")
        for row in rows or ():
            assert str(row).encode("utf-8")  # no half of a surrogate pair came through


# values that were accepted once, and made a run wrong


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.betas=[5, 9]", "train.betas.0: input should be less than 1"),
        ("train.lr=.inf", "train.lr: input should be a finite number"),
        ("train.weight_decay=.inf", "train.weight_decay: input should be a finite number"),
        ("loss.entropy_coef=.nan", "loss.entropy_coef: input should be a finite number"),
        ("sampling.temperature=.inf", "sampling.temperature: input should be a finite number"),
        ('data.train=""', "data.train: it must not be empty"),
        ('model.path="  "', "model.path: it must not be empty"),
        ('output="a\\0b"', "contains a NUL character"),
        ('sampling.stop=[""]', "sampling.stop.0: string should have at least 1 character"),
        ("environment.arguments.x=!!set {a}", "is a set; write a text, a number, a list or a mapping"),
        (f"seed={'9' * 5000}", "is not YAML: an integer has more than 4,300 digits; write it as a text"),
        (f"seed=!!int {'z' * 5000}", "a value does not fit its type: invalid literal for int() with base 10: 'zzz"),
        (f"seed={'9' * 40}", "an integer does not fit into 64 bits"),
        ("environment.arguments={a: 1, a: 2}", "the key 'a' occurs twice"),
        ("environment.arguments.x=&a [*a]", "nested deeper than 64 levels, or an alias contains itself"),
    ],
)
def test_values_that_make_no_sense_are_refused(override: str, message: str) -> None:
    with pytest.raises(TurnwiseError) as error:
        load(ROOT / "recipes" / "calculator.yaml", [override])
    assert message in str(error.value)
    assert len(str(error.value)) < 500


def test_a_date_in_a_recipe_stays_a_text() -> None:
    config, _ = load(ROOT / "recipes" / "calculator.yaml", ["environment.arguments.day=2020-01-31"])
    assert config.environment.arguments["day"] == "2020-01-31"


def test_aliases_that_expand_to_billions_of_values_are_refused(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    with pytest.raises(TurnwiseError, match="contains more than 1,000,000 values"):
        load(write(tmp_path / "recipe.yaml", "\n".join(lines)))


def test_options_of_turnwise_rollout_are_refused_in_training() -> None:
    config, _ = load(ROOT / "recipes" / "calculator.yaml", ["rollout.max_rows=3"])
    with pytest.raises(TurnwiseError, match=r"rollout\.max_rows has no effect in training"):
        refuse_without_effect(config)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"prompt": "Q", "answer": null}', "the column 'answer' is null, and the recipe uses it as 'answer'"),
        ('{"prompt": "Q", "answer": 1, "answer": 2}', "the key 'answer' occurs twice"),
        ('{"prompt": "\\ud800", "answer": 1}', "contains half of a surrogate pair"),
        ('{"prompt": [{"role": "wizard", "content": "Q"}], "answer": 1}', "message 1 has the role 'wizard'"),
        ('{"prompt": [{"role": "user", "content": 7}], "answer": 1}', "message 1 has the content 7"),
        ('{"prompt": [{"role": "user", "content": [{"type": "text"}]}], "answer": 1}', "has a part without a text"),
        (f'{{"prompt": "Q", "answer": {"[" * 100}{"]" * 100}}}', "nested deeper than 64 levels"),
        (f'{{"prompt": "Q", "answer": {"9" * 5000}}}', "an integer has more than 4,300 digits; write it as a text"),
    ],
)
def test_rows_that_make_no_sense_are_refused(row: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(TurnwiseError) as error:
        read_rows(str(write(tmp_path / "rows.jsonl", row)), columns={"answer": "answer"})
    assert message in str(error.value)
    assert "rows.jsonl:1" in str(error.value)
