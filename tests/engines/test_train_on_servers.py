"""`turnwise train` with a real server: the weights that are trained are the weights that sample."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import engine_env
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["sglang", "vllm", "vllm in_process"])
def test_a_run_of_the_demo(engine: str, tmp_path: Path) -> None:
    name, _, mode = engine.partition(" ")
    python = engine_env.python(name) if mode else sys.executable  # in the process: turnwise runs in vLLM's environment
    recipe = f"recipes/{name}.yaml"
    command = [str(python), "-m", "turnwise", "train", recipe]
    options = {
        **({"engine.mode": mode, "engine.python": "null"} if mode else {"engine.python": engine_env.python(name)}),
        "model.device": "cpu",
        "train.steps": 2,
        "train.batch_size": 4,
        "train.group_size": 4,
        "eval.max_rows": 4,
        "output": tmp_path / "run",
    }
    command += [f"{name}={value}" for name, value in options.items()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert result.returncode == 0, result.stderr[-3000:] + result.stdout[-3000:]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2]
    for line in steps:
        assert line["failed"] == 0
        assert line["engine/prefix_hit_rate"] > 0.3
        # before the optimizer step, the trainer's log-probabilities are those of the server, with the weights of the step before
        assert line["ratio/max_deviation"] < 1e-4
        assert line["version/newest"] == line["step"] - 1
