"""Which model families vLLM and SGLang take weights of, tried with tiny models on the CPU (found: benchmarks/README.md).

    python scripts/engine_families.py                          # all families, both engines
    python scripts/engine_families.py LFM2 Jamba               # these only
    python scripts/engine_families.py --engine vllm            # one engine

For each family, a tiny model of transformers is saved as a checkpoint, its weights are changed, and the changed weights are given
to the engine by the names under which turnwise sends them (`published_weights`). Inside the engine's own environment
(scripts/engine_env.py), `scripts/engines/load_weights.py` makes the engine's model from the checkpoint's config and loads the
weights with the engine's own code. Every parameter of the engine's model must then have a new value, and every value that was
sent must be there. Where its CPU build can, the engine also computes with the model, before and after the update: then the
log-probabilities are compared with those of transformers. Needs both environments; takes about 15 minutes of CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import engine_env
import torch
import transformers as hf
from safetensors.torch import save_file

from turnwise.models.loading import published_weights, token_logprobs

ROOT = Path(__file__).resolve().parent.parent
INSIDE = Path(__file__).parent / "engines" / "load_weights.py"
EQUAL = 1e-3
"""Log-probabilities that differ by less are the same."""
PROMPT = [5, 17, 30, 41, 7, 9, 100, 33, 12, 90, 64, 3]
"""Tokens whose log-probabilities are compared."""

_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS = {"head_dim": 32}
_CHOICE = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_EXPERTS = {**_CHOICE, "num_experts": 8}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 64}
_ROUTED = {**_CHOICE, "n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    **_HEADS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 32,
}
_CONV = {"conv_dim": 128, "conv_dim_out": 128, "block_dim": 128}
"""Of published checkpoints; transformers does not know these names, and the engines read them."""
_VISION = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 128,
    "patch_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [],
}
_IMAGES = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}

FAMILIES: dict[str, Callable[[], Any]] = {
    "Qwen3": lambda: hf.Qwen3Config(**_SIZES, **_HEADS),
    "Qwen3-MoE": lambda: hf.Qwen3MoeConfig(**_SIZES, **_HEADS, **_EXPERTS),
    "Qwen3-Next": lambda: hf.Qwen3NextConfig(**_SIZES, **_LINEAR, **_SHARED_EXPERT),
    "Qwen3.5, text": lambda: hf.Qwen3_5TextConfig(**_SIZES, **_LINEAR),
    "Qwen3.5": lambda: hf.Qwen3_5Config(text_config={**_SIZES, **_LINEAR}, vision_config=_VISION, **_IMAGES),
    "Qwen3.5-MoE, text": lambda: hf.Qwen3_5MoeTextConfig(**_SIZES, **_LINEAR, **_SHARED_EXPERT),
    "Qwen3.5-MoE": lambda: hf.Qwen3_5MoeConfig(
        text_config={**_SIZES, **_LINEAR, **_SHARED_EXPERT}, vision_config=_VISION, **_IMAGES
    ),
    "LFM2": lambda: hf.Lfm2Config(
        **_SIZES, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3, block_multiple_of=8, **_CONV
    ),
    "LFM2-MoE": lambda: hf.Lfm2MoeConfig(
        **_SIZES, **_EXPERTS, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3, num_dense_layers=1, **_CONV
    ),
    "Granite 4 hybrid": lambda: hf.GraniteMoeHybridConfig(
        **_SIZES,
        **_MAMBA2,
        layers_block_type=["mamba", "attention"] * 2,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
    ),
    "Nemotron-H": lambda: hf.NemotronHConfig(
        **_SIZES,
        **_HEADS,
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=8,  # as published: SGLang does not read it
        conv_kernel=4,
        chunk_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        moe_shared_expert_intermediate_size=64,
    ),
    "Nemotron-H, dense": lambda: hf.NemotronHConfig(
        **_SIZES,
        **_HEADS,
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=32,
        n_groups=8,  # as published: SGLang does not read it
        conv_kernel=4,
        chunk_size=32,
    ),
    "Falcon-H1": lambda: hf.FalconH1Config(**_SIZES, **_MAMBA2, **_HEADS, mamba_d_ssm=256),
    "OLMo hybrid": lambda: hf.OlmoHybridConfig(
        **_SIZES,
        layer_types=_LINEAR["layer_types"],
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    ),
    "Kimi Linear": lambda: hf.KimiLinearConfig(
        **{**_SIZES, **_LATENT}, layer_types=_LINEAR["layer_types"], head_dim=32, moe_intermediate_size=64
    ),
    "Bamba": lambda: hf.BambaConfig(**_SIZES, **_MAMBA2, attn_layer_indices=[1, 3]),
    "Jamba": lambda: hf.JambaConfig(
        **_SIZES,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
        use_mamba_kernels=False,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=8,
        num_experts_per_tok=2,
    ),
    "Llama 4, text": lambda: hf.Llama4TextConfig(
        **_SIZES,
        **_HEADS,
        attention_chunk_size=16,
        layer_types=["chunked_attention", "full_attention"] * 2,
        num_local_experts=8,
        num_experts_per_tok=1,
        intermediate_size_mlp=192,
    ),
    "gpt-oss": lambda: hf.GptOssConfig(**_SIZES, **_HEADS, num_experts_per_tok=2, num_local_experts=8),
    "DeepSeek V3": lambda: hf.DeepseekV3Config(
        **{**_SIZES, **_LATENT, **_ROUTED, "n_group": 2}, topk_method="noaux_tc", scoring_func="sigmoid"
    ),
    "GLM 4 MoE": lambda: hf.Glm4MoeConfig(**_SIZES, **_HEADS, **_ROUTED),
    "MiniMax M2": lambda: hf.MiniMaxM2Config(**_SIZES, **_HEADS, num_experts_per_tok=2, num_local_experts=8),
    "Mixtral": lambda: hf.MixtralConfig(**_SIZES, num_experts_per_tok=2, num_local_experts=8),
    "Gemma 4": lambda: hf.Gemma4TextConfig(
        **_SIZES,
        **_HEADS,
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=64,
        enable_moe_block=True,
        layer_types=["full_attention"] * 4,
    ),
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3.5": {"full_attention_interval": 2},
    "Qwen3-Next": {"full_attention_interval": 2},
    "Nemotron-H, dense": {"hybrid_override_pattern": "M*-M", "layers_block_type": None},
    "Nemotron-H": {"hybrid_override_pattern": "M*-E", "layers_block_type": None},
    "MiniMax M2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
}
"""Keys of published config.json files, by the beginning of the family's name; None: they do not have it."""
VLLM: dict[str, dict[str, Any]] = {"LFM2": {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}}
"""Arguments of vLLM, by the beginning of the family's name.

LFM2 gives the rotary embedding queries of shape (tokens, heads, head_dim). vLLM's CPU kernel takes them for (heads, head_dim),
rotates the first of `num_attention_heads` parts of them by positions that are not theirs, and leaves the others. The PyTorch form
of the same operation is right.
"""


def make(name: str, folder: Path) -> None:
    """Save a checkpoint of a family, and beside it other weights as turnwise sends them, and log-probabilities of both."""
    config = FAMILIES[name]()
    sees = config.get_text_config() is not config
    family = hf.AutoModelForImageTextToText if sees else hf.AutoModelForCausalLM
    torch.manual_seed(0)
    model: Any = family.from_config(config, dtype=torch.float32).eval()
    logprobs: list[list[float]] = []
    for round_ in range(2):
        with torch.no_grad():
            # different values everywhere, also where a fresh model has zeros or ones
            for parameter in model.parameters():
                if parameter.ndim < 2:
                    parameter.add_(0.05 * torch.randn_like(parameter))
                else:
                    parameter.copy_(0.06 * torch.randn_like(parameter))
        if round_ == 0:
            model.save_pretrained(folder)
            _add_published_keys(name, folder / "config.json")
        logprobs.append(token_logprobs(model, PROMPT))
    weights = {key: tensor.contiguous().clone() for key, tensor in published_weights(model).items()}
    save_file(weights, folder / "update.sent")
    (folder / "expected.json").write_text(
        json.dumps({"prompt": PROMPT, "logprobs": logprobs, "equal": EQUAL, "vllm": _of_family(VLLM, name)})
    )


def _add_published_keys(name: str, file: Path) -> None:
    """Give a config.json the keys of published checkpoints that transformers reads, does not write, and the engines need."""
    values = json.loads(file.read_text())
    text = values.get("text_config", values)
    text.update(_of_family(PUBLISHED, name))
    for key in [key for key, value in _of_family(PUBLISHED, name).items() if value is None]:
        del text[key]
    file.write_text(json.dumps(values))


def _of_family(table: Mapping[str, dict[str, Any]], name: str) -> dict[str, Any]:
    return next((values for start, values in table.items() if name.startswith(start)), {})


def inside(engine: str, folders: Iterable[Path]) -> Iterable[dict[str, Any]]:
    """What the engine says of each folder, as soon as it has been tried."""
    python = engine_env.python(engine)
    path = os.pathsep.join([str(ROOT / "src"), str(engine_env.make_vision())])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [str(python), str(INSIDE), engine, *map(str, folders)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, cwd=tempfile.gettempdir()
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                yield json.loads(line.removeprefix("RESULT "))


def verdict(result: Mapping[str, Any]) -> str:
    """A cell of the table."""
    if result.get("error"):
        return f"no: {result['error']}"
    if result.get("unset"):
        return f"no: these get no value: {', '.join(result['unset'][:3])}"
    if result.get("lost"):
        return f"no: these are lost: {', '.join(result['lost'][:3])}"
    if (deviation := result.get("deviation")) is None:
        return f"weights load (does not run: {result.get('not_run', 'only loaded')})"
    return "runs, equal" if deviation < EQUAL else f"no: log-probabilities differ by {deviation:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", help="names of families (default: all)")
    parser.add_argument("--engine", choices=("vllm", "sglang"), action="append")
    arguments = parser.parse_args()
    names = arguments.families or list(FAMILIES)
    hf.logging.set_verbosity_error()
    cells: dict[str, dict[str, str]] = {name: {} for name in names}
    with tempfile.TemporaryDirectory() as directory:
        folders = {str(Path(directory) / str(number)): name for number, name in enumerate(names)}
        for folder, name in folders.items():
            make(name, Path(folder))
        for engine in arguments.engine or ("vllm", "sglang"):
            for result in inside(engine, map(Path, folders)):
                name = folders[result["folder"]]
                cells[name][engine] = verdict(result)
                print(f"{engine:7s} {name:20s} {cells[name][engine]}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
