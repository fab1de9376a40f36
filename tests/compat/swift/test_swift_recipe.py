"""The recipe with a plugin of ms-swift runs as it is, and the commands make recipes that run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from turnwise.assembly import environment_factory
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to where one runs them."""
    monkeypatch.chdir(ROOT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_recipe_takes_two_steps_with_the_plugin_as_it_is(tmp_path: Path) -> None:
    out = tmp_path / "run"
    small = ["train.steps=2", "train.batch_size=4", "train.group_size=4", "eval.max_rows=2"]
    assert main(["train", "recipes/swift_scheduler.yaml", *small, f"output={out}"]) == 0
    metrics, conversations = lines(out / "metrics.jsonl"), lines(out / "trajectories.jsonl")
    assert [one["step"] for one in metrics] == [1, 2]
    assert all(one["failed"] == 0 and one["template_mismatch"] == 0 for one in metrics)
    assert all(0 < one["ratio/max_deviation"] < 1e-3 for one in metrics)
    assert not [name for name in metrics[0] if "ess" in name.split("/")]  # nothing is corrected, so nothing is claimed
    assert len(conversations) == 32
    assert {one["stop"] for one in conversations} <= {"done", "length"}
    assert {one["reward"] for one in conversations} <= {0.0, 0.5, 1.0}
    assert max(one["reward"] for one in conversations) == 1.0
    for one in conversations:
        assert one["rewards"] == {"turns": 0.0, "right_answer": one["reward"]}
        roles = [message["role"] for message in one["messages"]]
        assert roles[:2] == ["user", "assistant"]
        told = [turn["info"].get("told") for turn in one["turns"]]
        assert told.count(True) == sum(message["role"] == "user" for message in one["messages"][1:])
    assert any("tool" in [message["role"] for message in one["messages"]] for one in conversations)


def converted(tmp_path: Path) -> Path:
    """The recipe of a script for the tiny model and the plugin."""
    (tmp_path / "run.sh").write_text(
        "swift rollout --model demo/model --multi_turn_scheduler calculator_scheduler --max_turns 4 \\\n"
        "    --external_plugins recipes/plugins/swift_calculator.py\n"
        "swift rlhf --rlhf_type grpo --model demo/model --tuner_type full --dataset demo/train.jsonl#8 \\\n"
        "    --reward_funcs right_answer --external_plugins recipes/plugins/swift_calculator.py \\\n"
        "    --num_generations 2 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --max_steps 1 \\\n"
        "    --learning_rate 1e-5 --beta 0 --temperature 1.0 --max_completion_length 48 --deepspeed zero2 \\\n"
        f"    --output_dir {tmp_path}/run --save_steps 1\n"
    )
    recipe = tmp_path / "recipe.yaml"
    assert main(["convert", "--from", "swift", str(tmp_path / "run.sh"), "--out", str(recipe)]) == 0
    return recipe


def test_a_script_is_converted_into_a_recipe_and_what_is_left_out_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, notes = load(converted(tmp_path))
    refuse_without_effect(config)
    assert notes == []
    assert environment_factory(config)() is not None
    assert (config.train.steps, config.train.batch_size, config.train.group_size, config.limits.turns) == (1, 2, 2, 4)
    told = capsys.readouterr().out
    assert "left out: deepspeed='zero2': has no effect with one process" in told
    assert "CHANGES THE TRAINING" not in told


@pytest.mark.slow
def test_a_converted_recipe_trains(tmp_path: Path) -> None:
    # the script's engine is vLLM; the embedded engine needs no server
    assert main(["train", str(converted(tmp_path)), "engine={name: local}"]) == 0
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert (metrics["failed"], metrics["template_mismatch"]) == (0, 0)
    assert len(lines(tmp_path / "run" / "trajectories.jsonl")) == 4


def test_words_of_a_command_line_are_converted_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swift", "rlhf", "--model", "M", "--dataset", "d.jsonl", "--max_steps", "3", "--made_up", "1"]
    assert main(["convert", "--from", "swift", "--", *words]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["train"]["steps"] == 3
    assert "# CHANGES THE TRAINING, left out: made_up=1: turnwise knows no such argument of ms-swift" in printed
    assert main(["convert", "--from", "swift", "absent.sh"]) == 1
    assert "absent.sh cannot be read: No such file" in capsys.readouterr().err
