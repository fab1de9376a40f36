"""verl's configuration at the command line: trained by, or made a recipe of; the data sets are parquet files as verl has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from compat.verl.test_verl_arguments import a_row
from compat.verl.verl_files import written
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.data.rows import read_rows

INTERACTION = """\
interaction:
  - name: "gsm8k"
    class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
    config: {}
"""

CONFIGURATION = """\
hydra:
  searchpath:
    - file://verl/trainer/config

defaults:
  - ppo_trainer
  - _self_

data:
  max_prompt_length: 600
  max_response_length: 300
  train_batch_size: 2
  return_raw_chat: True

actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn:
      enable: True
      max_user_turns: 2
"""


def parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


@pytest.fixture
def words(model: Path, tmp_path: Path) -> list[str]:
    """The command line of verl's example with an interaction, `python -m verl.trainer.main_ppo` left off."""
    rows = [
        a_row(extra_info={"index": n, "interaction_kwargs": {"name": "gsm8k", "query": "?", "ground_truth": "7"}})
        for n in range(4)
    ]
    written(tmp_path / "gsm8k_multiturn_grpo_w_interaction.yaml", CONFIGURATION)
    interaction = written(tmp_path / "gsm8k_interaction_config.yaml", INTERACTION)
    return [
        f"--config-path={tmp_path}",
        "--config-name=gsm8k_multiturn_grpo_w_interaction",
        "algorithm.adv_estimator=grpo",
        "data.filter_overlong_prompts=True",
        "data.truncation=error",
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.model.use_remove_padding=True",
        "+actor_rollout_ref.model.enable_activation_offloading=True",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
        "actor_rollout_ref.rollout.n=3",
        f"actor_rollout_ref.rollout.multi_turn.interaction_config_path={interaction}",
        f"data.train_files={parquet(tmp_path / 'train.parquet', rows)}",
        "trainer.n_gpus_per_node=1",
        "trainer.balance_batch=True",
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.total_epochs=1",
    ]


def test_rows_of_parquet_are_read_as_they_are(tmp_path: Path) -> None:
    kwargs = {"gsm8k": {"create_kwargs": {"ground_truth": "7"}}}
    (row,) = read_rows(parquet(tmp_path / "r.parquet", [a_row(extra_info={"index": 3, "tools_kwargs": kwargs})]))
    assert row.messages == [{"role": "user", "content": "What is 3 + 4?"}]
    assert row["data_source"] == "openai/gsm8k"
    assert row["reward_model"]["ground_truth"] == "7"
    assert row["extra_info"] == {"index": 3, "tools_kwargs": kwargs}


@pytest.mark.slow
def test_verl_s_command_line_trains(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 0
    told = capsys.readouterr().out
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [one["step"] for one in metrics] == [1, 2]  # four rows, two a step, once
    held = [json.loads(line) for line in (tmp_path / "run" / "trajectories.jsonl").read_text().splitlines()]
    assert len(held) == 2 * 2 * 3
    assert {one["stop"] for one in held} <= {"done", "max_response"}
    answers = {message["content"] for one in held for message in one["messages"][2::2]}
    assert answers == {"Your response is incorrect! You need to reflect on your answer and try again."}
    assert all(len(one["turns"]) == 2 for one in held if one["stop"] == "done")  # max_user_turns
    assert "left out: trainer.balance_batch=True: how verl distributes work" in told


def test_what_would_be_another_training_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words, "algorithm.use_pf_ppo=True", "actor_rollout_ref.model.trust_remote_code=True"]) == 1
    told = capsys.readouterr().err
    assert "algorithm.use_pf_ppo=True: turnwise does not support it" in told
    assert "actor_rollout_ref.model.trust_remote_code=True: turnwise does not run code of a model repository" in told
    assert "Change these keys, or remove them (~key)" in told


def test_convert_writes_the_recipe_and_names_what_it_left_out(
    words: list[str], model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "recipes" / "r.yaml"
    command = ["convert", *words, "algorithm.use_pf_ppo=True", "--out", str(out)]
    assert main(command) == 0
    told = capsys.readouterr().out
    assert "CHANGES THE TRAINING, left out: algorithm.use_pf_ppo=True: turnwise does not support it" in told
    assert "left out: trainer.balance_batch=True: how verl distributes work" in told
    assert "1 of which change the training" in told
    config, _ = load(out)
    assert (config.model.path, config.train.steps, config.train.group_size) == (str(model), 2, 3)
    head = out.read_text().partition("\n\n")[0].splitlines()
    assert all(line.startswith("# ") for line in head)
    assert any("trainer.balance_batch" in line for line in head)
    assert main(command) == 1
    assert "exists already: choose another file, or remove it" in capsys.readouterr().err


def test_convert_prints_the_recipe_where_no_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "actor_rollout_ref.model.path=m", "data.train_files=/nowhere.parquet"]) == 0
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert (recipe["model"]["path"], recipe["data"]["train"]) == ("m", "/nowhere.parquet")


def test_arguments_of_ms_swift_are_converted_by_their_own_reader(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["convert", "--from", "swift", "--", "--model", "m", "--dataset", "d.jsonl", "--num_generations", "4"])
        == 0
    )
    recipe = yaml.safe_load(capsys.readouterr().out)
    assert (recipe["model"]["path"], recipe["train"]["group_size"]) == ("m", 4)
    assert main(["convert", "--from", "swift", "--config-name", "x", "--", "--model", "m"]) == 1
    assert "--config-path and --config-name are options for --from verl: remove them" in capsys.readouterr().err


def test_a_recipe_and_a_configuration_are_not_both_trained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "recipes/calculator.yaml", "--config-path", "."]) == 1
    assert (
        "the recipe recipes/calculator.yaml and --config-path are both given: give one of them"
        in capsys.readouterr().err
    )
    assert main(["train"]) == 1
    assert "give a recipe, such as recipes/calculator.yaml, or verl's --config-path" in capsys.readouterr().err
