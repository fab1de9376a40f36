"""Recipes made of ms-swift's arguments run: plugins, engines and the rollout server."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.swift_client import mirror
from turnwise.assembly import environment_factory
from turnwise.cli import main
from turnwise.compat.conversion import ConversionReport
from turnwise.compat.swift.convert import from_rollout_arguments, from_swift_arguments
from turnwise.config.engine_checks import refuse_engine
from turnwise.config.recipe import load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.schema import Config

# The recipe with a plugin of ms-swift runs as it is, and the commands make recipes that run.


ROOT = Path(__file__).parents[3]


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recipes name files relative to where one runs them."""
    monkeypatch.chdir(ROOT)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.usefixtures("from_the_root")
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


@pytest.mark.usefixtures("from_the_root")
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


@pytest.mark.usefixtures("from_the_root")
@pytest.mark.slow
def test_a_converted_recipe_trains(tmp_path: Path) -> None:
    # the script's engine is vLLM; the embedded engine needs no server
    assert main(["train", str(converted(tmp_path)), "engine={name: local}"]) == 0
    (metrics,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert (metrics["failed"], metrics["template_mismatch"]) == (0, 0)
    assert len(lines(tmp_path / "run" / "trajectories.jsonl")) == 4


@pytest.mark.usefixtures("from_the_root")
def test_words_of_a_command_line_are_converted_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["swift", "rlhf", "--model", "M", "--dataset", "d.jsonl", "--max_steps", "3", "--made_up", "1"]
    assert main(["convert", "--from", "swift", "--", *words]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["train"]["steps"] == 3
    assert "# CHANGES THE TRAINING, left out: made_up=1: turnwise knows no such argument of ms-swift" in printed
    assert main(["convert", "--from", "swift", "absent.sh"]) == 1
    assert "absent.sh cannot be read: No such file" in capsys.readouterr().err


# ms-swift's arguments about vLLM and its rollout server become the sections `engine` and `rollout_server`.


FULL = "--rlhf_type grpo --model M --dataset d.jsonl --tuner_type full --max_steps 10 "

SERVER = "rollout " + FULL + "--vllm_mode server "
"""With `rollout`, the arguments of `swift rollout` are known: without a scheduler, conversations have one turn."""


def engine_converted(words: str) -> ConversionReport:
    return from_swift_arguments(shlex.split(words))


def valid(found: ConversionReport) -> Config:
    config = Config.model_validate(found.recipe)
    refuse_without_effect(config)
    refuse_engine(config)
    return config


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        ("", []),
        ("--vllm_gpu_memory_utilization 0.8", ["--gpu-memory-utilization", "0.8"]),
        ("--gpu_memory_utilization 0.5", ["--gpu-memory-utilization", "0.5"]),
        ("--vllm_tensor_parallel_size 1 --vllm_data_parallel_size 1", []),
        ("--vllm_pipeline_parallel_size 2 --vllm_max_num_seqs 64",
         ["--pipeline-parallel-size", "2", "--max-num-seqs", "64"]),
        ("--vllm_enforce_eager true --vllm_disable_cascade_attn false", ["--enforce-eager"]),
        ("--vllm_enable_prefix_caching false", ["--no-enable-prefix-caching"]),
        ("--vllm_enable_prefix_caching true --vllm_enable_lora true --vllm_max_lora_rank 8", []),
        ("""--vllm_limit_mm_per_prompt '{"image": 5}'""", ["--limit-mm-per-prompt", '{"image": 5}']),
        ("""--vllm_engine_kwargs '{"seed": 1, "async_scheduling": false, "enable_log_requests": true}'""",
         ["--seed", "1", "--no-async-scheduling", "--enable-log-requests"]),
    ],
)  # fmt: skip
def test_arguments_of_vllm_become_arguments_of_the_engine(words: str, arguments: list[str]) -> None:
    found = engine_converted(f"{FULL} --use_vllm true {words}")
    engine: Any = valid(found).engine
    assert (engine.name, engine.arguments, engine.sleep) == ("vllm", arguments, False)
    assert found.unsupported == []
    assert set(re.findall(r"--(vllm_\w+)", words)) <= set(found.converted)


def test_the_sizes_of_parallel_engines_are_options() -> None:
    engine: Any = valid(
        engine_converted(f"{FULL} --use_vllm true --vllm_tensor_parallel_size 4 --vllm_data_parallel_size 2")
    ).engine
    assert (engine.tensor_parallel, engine.data_parallel, engine.arguments) == (4, 2, [])


def test_sleeping_is_for_one_gpu_with_the_trainer() -> None:
    assert valid(engine_converted(FULL + "--use_vllm true --vllm_mode colocate --sleep_level 1")).engine.sleep  # type: ignore[union-attr]
    for words in ("--vllm_mode colocate --sleep_level 0", "--vllm_mode colocate --sleep_level 1 --async_generate true"):
        assert not valid(engine_converted(f"{FULL} --use_vllm true {words}")).engine.sleep  # type: ignore[union-attr]
    (left,) = engine_converted(SERVER + "--sleep_level 1").unsupported
    assert (left.key, "has no effect with vllm_mode server" in left.reason) == ("sleep_level", True)


@pytest.mark.parametrize(
    ("words", "url"),
    [
        ("", "http://127.0.0.1:8000"),
        ("--vllm_server_host 10.0.0.7 --vllm_server_port 8123", "http://10.0.0.7:8123"),
        ("--vllm_server_host 0.0.0.0", "http://127.0.0.1:8000"),
        ("--vllm_server_host fe80::1 --vllm_server_port 9000", "http://[fe80::1]:9000"),
        ("--vllm_server_base_url http://any:secret@host:8000", "http://any:secret@host:8000"),
    ],
)
def test_a_server_becomes_the_rollout_server(words: str, url: str) -> None:
    found = engine_converted(SERVER + words + " --vllm_server_pass_dataset true --vllm_server_timeout 300")
    config = Config.model_validate(found.recipe)
    assert (config.rollout_server.url, config.rollout_server.timeout) == (url, 300.0)
    assert config.engine.name == "vllm"
    assert found.unsupported == []
    assumed = {assumption.key: assumption.reason for assumption in found.assumptions}
    assert "turnwise serve RECIPE rollout_server.url=null" in assumed["rollout_server.url"]


def test_of_several_servers_the_first_is_used_and_the_others_are_reported() -> None:
    found = engine_converted(SERVER + "--vllm_server_host a b --vllm_server_port 8000 8001")
    assert found.recipe["rollout_server"] == {"url": "http://a:8000"}
    assert {left.key for left in found.unsupported} == {"vllm_server_host", "vllm_server_port"}
    assert all("start that server with several replicas" in left.reason for left in found.unsupported)


def test_without_vllm_the_embedded_engine_samples() -> None:
    for words in ("", "--use_vllm false"):
        assert "engine" not in engine_converted(FULL + words).recipe
    found = engine_converted(FULL + "--vllm_gpu_memory_utilization 0.5")
    assert "engine" not in found.recipe
    (left,) = found.unsupported
    assert (left.key, "has no effect without use_vllm" in left.reason) == ("vllm_gpu_memory_utilization", True)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vllm_tensor_parallel_size: 'two' is not an integer"):
        engine_converted(FULL + "--vllm_tensor_parallel_size two")
    with pytest.raises(ConfigError, match="--vllm_engine_kwargs: 'seed' is not a mapping in JSON"):
        engine_converted(FULL + "--vllm_engine_kwargs seed")


def test_the_arguments_of_swift_rollout_for_a_server() -> None:
    words = (
        "--model M --use_async_engine true --multi_turn_scheduler tool_call_scheduler --max_turns 4 --vllm_max_model_len 4096 "
        "--vllm_gpu_memory_utilization 0.8 --vllm_tensor_parallel_size 2 --vllm_data_parallel_size 2 --host 0.0.0.0 --port 8001"
    )
    report, address = from_rollout_arguments(words.split())
    assert address == {"host": "0.0.0.0", "port": 8001}
    assert report.unsupported == []
    config = Config.model_validate(report.recipe)
    engine: Any = config.engine
    assert (engine.name, engine.arguments) == ("vllm", ["--gpu-memory-utilization", "0.8"])
    assert (engine.tensor_parallel, engine.data_parallel) == (2, 2)
    assert (config.limits.context, config.limits.turns) == (4096, 4)
    gym, _ = from_rollout_arguments(
        ["--model", "M", "--use_gym_env", "true", "--gym_env", "math", "--max_turns", "2", "--use_vllm", "false"]
    )
    assert gym.recipe["environment"]["arguments"] == {
        "name": "gym_scheduler", "max_turns": 2, "use_gym_env": True, "gym_env": "math",
    }  # fmt: skip
    assert "engine" not in gym.recipe


def test_ms_swifts_own_scripts_with_swift_rollout(tmp_path: Path) -> None:
    """Every argument is in the recipe, or is reported. The values are compared with those that a search in the text finds."""
    repo = ["git", f"--git-dir={mirror('modelscope+ms-swift')}"]
    listed = subprocess.run([*repo, "ls-tree", "-r", "--name-only", "HEAD"], capture_output=True, text=True, check=True)
    read = 0
    for name in listed.stdout.split():
        if not (name.startswith("examples/") and "grpo" in name and name.endswith(".sh")):
            continue
        text = subprocess.run([*repo, "show", f"HEAD:{name}"], capture_output=True, text=True, check=True).stdout
        if "swift rollout" not in text or "<node1" in text:
            continue
        script = tmp_path / "run.sh"
        script.write_text(text)
        found = from_swift_arguments(script)
        recipe, read = found.recipe, read + 1
        given = dict(re.findall(r"--(\w+) ([^\s\\]+)", re.sub(r"swift deploy.*?\n\n", "", text, flags=re.DOTALL)))
        reported = {*found.converted, *(left.key for left in found.unsupported)}
        names = {"use_async_engine": "vllm_use_async_engine"}
        for key in given:
            if key.startswith(("vllm_", "use_", "gym_")):
                assert names.get(key, key) in reported, (name, key)
        assert recipe["engine"]["name"] == "vllm"
        arguments = recipe["engine"].get("arguments", [])
        if (memory := given.get("vllm_gpu_memory_utilization", "1")) != "1":
            assert arguments[arguments.index("--gpu-memory-utilization") + 1] == memory, name
        for option in ("tensor_parallel", "data_parallel"):
            if (size := given.get(f"vllm_{option}_size", "1")) != "1":
                assert recipe["engine"][option] == int(size), name
        if "vllm_max_model_len" in given:
            assert recipe["limits"]["context"] == int(given["vllm_max_model_len"])
        address = f"http://{given.get('vllm_server_host', '127.0.0.1')}:{given.get('vllm_server_port', 8000)}"
        assert recipe["rollout_server"]["url"] == address, name
        if "multi_turn_scheduler" in given:
            assert recipe["environment"]["arguments"]["name"] == given["multi_turn_scheduler"], name
    assert read >= 12
