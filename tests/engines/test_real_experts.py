"""The experts of each token, as vLLM and SGLang themselves record and encode them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import engine_env
import engine_families
import numpy as np
import pytest
import torch
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

from engines.conformance.subjects import MODEL
from turnwise.engines.remote.experts import ExpertLayers
from turnwise.models.experts import Choice, RouterPass, Routers, layers_with_experts

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("experts_in_engine.py")


def mixture(folder: Path) -> Path:
    """A model with experts in the second and the third of three layers, and the tokenizer of the demo."""
    shutil.copytree(MODEL, folder)
    (folder / "generation_config.json").unlink()
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": 512,
    }
    experts: dict[str, Any] = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
    model = Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=760, eos_token_id=2, **sizes, **heads, **experts)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.copy_(0.08 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def chosen(model: Glm4MoeForCausalLM, token_ids: list[int]) -> np.ndarray:
    """The experts that the model itself chooses for the tokens, [T, L, K], sorted."""
    Routers.of(model)
    found: list[torch.Tensor] = []

    def note(choice: Choice) -> None:
        found.append(choice.index_TK)

    with torch.no_grad(), RouterPass(note).active():
        model(input_ids=torch.tensor([token_ids]), use_cache=False)
    return torch.stack(found, dim=1).sort(dim=-1).values.numpy()


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_recorded_experts_are_those_that_the_trainer_would_choose(engine: str, tmp_path: Path) -> None:
    """Recorded and encoded by the engine's own code, without a server (experts_in_engine.py)."""
    path, prompt = mixture(tmp_path / "model"), list(range(5, 75))
    command = [str(engine_env.python(engine)), str(PROGRAM), engine, str(path), json.dumps(prompt)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=400, env=environment, cwd=tmp_path
    )
    answer = next((line for line in result.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert answer is not None, result.stderr[-3000:]
    model = Glm4MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    layers, experts = layers_with_experts(model)
    assert layers == (1, 2)
    served = ExpertLayers(layers, model.config.num_hidden_layers, experts)
    text = answer.removeprefix("RESULT ")
    routes = served.of_npy("s", text) if engine == "vllm" else served.of_int32("s", text, len(prompt))
    assert routes is not None
    assert (routes.layers, routes.top_k, len(routes)) == (2, 2, len(prompt))
    recorded_TLK = np.frombuffer(routes.data, dtype=np.uint8).reshape(-1, 2, 2)
    own_TLK = chosen(model, prompt)
    assert len(np.unique(own_TLK)) == 8
    assert np.array_equal(np.sort(recorded_TLK, axis=-1), own_TLK)


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_update_reaches_all_experts(engine: str, tmp_path: Path) -> None:
    """vLLM 0.32 on a CPU would copy new weights of experts, without packing them, into the place of the packed ones."""
    engine_families.make("Qwen3-MoE", tmp_path / "model")
    (result,) = engine_families.inside(engine, [tmp_path / "model"])
    assert "error" not in result
    assert [deviation < 1e-4 for deviation in result["deviations"]] == [True, True]
