"""ms-swift's arguments about vLLM and its rollout server become the sections `engine` and `rollout_server`."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from support.swift_client import mirror
from turnwise.compat.conversion import ConversionReport
from turnwise.compat.swift.convert import from_rollout_arguments, from_swift_arguments
from turnwise.config.engine_checks import refuse_engine
from turnwise.config.train_checks import refuse_without_effect
from turnwise.errors import ConfigError
from turnwise.options.schema import Config

FULL = "--rlhf_type grpo --model M --dataset d.jsonl --tuner_type full --max_steps 10 "
SERVER = "rollout " + FULL + "--vllm_mode server "
"""With `rollout`, the arguments of `swift rollout` are known: without a scheduler, conversations have one turn."""


def converted(words: str) -> ConversionReport:
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
    found = converted(f"{FULL} --use_vllm true {words}")
    engine: Any = valid(found).engine
    assert (engine.name, engine.arguments, engine.sleep) == ("vllm", arguments, False)
    assert found.unsupported == []
    assert set(re.findall(r"--(vllm_\w+)", words)) <= set(found.converted)


def test_the_sizes_of_parallel_engines_are_options() -> None:
    engine: Any = valid(
        converted(f"{FULL} --use_vllm true --vllm_tensor_parallel_size 4 --vllm_data_parallel_size 2")
    ).engine
    assert (engine.tensor_parallel, engine.data_parallel, engine.arguments) == (4, 2, [])


def test_sleeping_is_for_one_gpu_with_the_trainer() -> None:
    assert valid(converted(FULL + "--use_vllm true --vllm_mode colocate --sleep_level 1")).engine.sleep  # type: ignore[union-attr]
    for words in ("--vllm_mode colocate --sleep_level 0", "--vllm_mode colocate --sleep_level 1 --async_generate true"):
        assert not valid(converted(f"{FULL} --use_vllm true {words}")).engine.sleep  # type: ignore[union-attr]
    (left,) = converted(SERVER + "--sleep_level 1").unsupported
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
    found = converted(SERVER + words + " --vllm_server_pass_dataset true --vllm_server_timeout 300")
    config = Config.model_validate(found.recipe)
    assert (config.rollout_server.url, config.rollout_server.timeout) == (url, 300.0)
    assert config.engine.name == "vllm"
    assert found.unsupported == []
    assumed = {assumption.key: assumption.reason for assumption in found.assumptions}
    assert "turnwise serve RECIPE rollout_server.url=null" in assumed["rollout_server.url"]


def test_of_several_servers_the_first_is_used_and_the_others_are_reported() -> None:
    found = converted(SERVER + "--vllm_server_host a b --vllm_server_port 8000 8001")
    assert found.recipe["rollout_server"] == {"url": "http://a:8000"}
    assert {left.key for left in found.unsupported} == {"vllm_server_host", "vllm_server_port"}
    assert all("start that server with several replicas" in left.reason for left in found.unsupported)


def test_without_vllm_the_embedded_engine_samples() -> None:
    for words in ("", "--use_vllm false"):
        assert "engine" not in converted(FULL + words).recipe
    found = converted(FULL + "--vllm_gpu_memory_utilization 0.5")
    assert "engine" not in found.recipe
    (left,) = found.unsupported
    assert (left.key, "has no effect without use_vllm" in left.reason) == ("vllm_gpu_memory_utilization", True)


def test_a_value_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vllm_tensor_parallel_size: 'two' is not an integer"):
        converted(FULL + "--vllm_tensor_parallel_size two")
    with pytest.raises(ConfigError, match="--vllm_engine_kwargs: 'seed' is not a mapping in JSON"):
        converted(FULL + "--vllm_engine_kwargs seed")


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
