"""`turnwise serve` as a process of its own, and `turnwise train` that uses it."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.recipes import save_recipe
from support.tiny import save_model
from turnwise.commands import serve
from turnwise.compat.swift.convert import from_rollout_arguments
from turnwise.config.recipe import checked

TURNWISE = [sys.executable, "-m", "turnwise"]
SWIFT = (
    "--model demo/model --use_async_engine true --multi_turn_scheduler thinking_tips_scheduler --vllm_max_model_len 512 "
    "--vllm_gpu_memory_utilization 0.8 --vllm_tensor_parallel_size 1 --vllm_data_parallel_size 1 --max_turns 3 "
    "--host 0.0.0.0 --port 8123"
)


def test_the_arguments_of_swift_rollout_make_a_recipe() -> None:
    report, address = from_rollout_arguments(SWIFT.split())
    assert address == {"host": "0.0.0.0", "port": 8123}
    assert report.refused() == []
    config = checked(report.recipe, source="the arguments")
    assert config.environment.arguments == {"name": "thinking_tips_scheduler", "max_turns": 3}
    engine: Any = config.engine
    assert (engine.name, engine.arguments) == ("vllm", ["--gpu-memory-utilization", "0.8"])
    assert (config.limits.turns, config.limits.context, config.model.lora.rank) == (3, 512, None)


def test_options_of_the_recipe_come_before_the_arguments_of_swift_rollout() -> None:
    options = argparse.Namespace(
        recipe="engine.python=/env/python",
        overrides=["model.device=cpu", *SWIFT.split()],
        multi_turn_scheduler=None,
        external_plugins=[],
        max_turns=None,
    )
    config, _, given = serve._from_swift(options)
    engine: Any = config.engine
    assert (engine.name, engine.python, engine.arguments) == (
        "vllm",
        "/env/python",
        ["--gpu-memory-utilization", "0.8"],
    )
    assert (config.model.device, given["port"]) == ("cpu", 8123)


@pytest.mark.slow
def test_a_server_process_serves_a_training_process(tmp_path: Path) -> None:
    recipe = save_recipe(
        tmp_path,
        save_model(tmp_path / "model"),
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01},
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TURNWISE_SERVER_TOKEN", None)
    words = [*TURNWISE, "serve", str(recipe), "--port", "0"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        assert server.stdout is not None
        url = token = ""
        for line in server.stdout:
            url = match.group(1) if (match := re.search(r" at (http://\S+) ", line)) else url
            token = match.group(1) if (match := re.search(r"^token: (\S+)", line)) else token
            if "to train with it" in line:
                break
        try:
            done = subprocess.run(
                [*TURNWISE, "train", str(recipe), f"rollout_server.url={url}"],
                env={**environment, "TURNWISE_SERVER_TOKEN": token},
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 143
    lines = (tmp_path / "run" / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["error"] for line in lines] == [None] * 8
