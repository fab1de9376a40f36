"""`turnwise train` with a real server: the weights that are trained are the weights that sample."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import engine_env
import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.servers import Probe
from turnwise.models.loading import token_logprobs
from turnwise.options.schema import Config

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


@pytest.mark.engines
def test_sglang_takes_weights_of_a_vocabulary_that_it_does_not_fill_up(tmp_path: Path) -> None:
    """Gemma 3 has an embedding of its own in SGLang, without rows of zeros behind a vocabulary that is no multiple of 64."""
    shutil.copytree(ROOT / "demo" / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "sliding_window": 128}
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=1003, eos_token_id=2, **sizes, **heads)).float().eval()
    model.save_pretrained(tmp_path / "model")
    recipe = {
        "model": {"path": str(tmp_path / "model"), "device": "cpu"},
        "data": {"train": str(ROOT / "demo" / "train.jsonl")},
        "engine": {"name": "sglang", "python": str(engine_env.python("sglang")), "memory_gb": 0.1},
        "output": str(tmp_path / "run"),
    }
    engine = assembly.engine(Config.model_validate(recipe), Renderer.from_pretrained(tmp_path / "model"), model)
    assert isinstance(engine, RemoteEngine)

    async def update() -> None:
        try:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.01)
            weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
            logprobs = partial(token_logprobs, model)
            await engine.update(1, weights, Probe(prompt=[5, 17, 300], tokens=24, logprobs=logprobs, tolerance=1e-4))
        finally:
            await engine.close()

    asyncio.run(update())
    assert engine.version == 1
