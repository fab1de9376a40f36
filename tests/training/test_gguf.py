"""Models in GGUF files: dequantized once, then trained, sampled from and saved as any other."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from support import merging_tokenizer
from support.tiny import save_rows
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.errors import ConfigError
from turnwise.models.gguf import dequantized

gguf = pytest.importorskip("gguf")

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def in_file(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{IN_LAYER['.'.join(middle)]}.{kind}"


def save_gguf(folder: Path, *, without: str = "") -> tuple[Any, str]:
    """A tiny model, and the name of a file with its matrices in 8 bits and a tokenizer with a template. The file lacks the tensor
    `without`."""
    reader = merging_tokenizer()
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=len(reader),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=512,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=False,
        )
    )
    folder.mkdir()
    writer = gguf.GGUFWriter(folder / "tiny.Q8_0.gguf", "qwen2")
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(len(reader))
    state = json.loads(reader.backend_tokenizer.to_str())
    by_id = sorted(reader.get_vocab().items(), key=lambda item: item[1])
    special = {token["content"] for token in state["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([word for word, _ in by_id])
    writer.add_token_types([3 if word in special else 1 for word, _ in by_id])
    writer.add_token_merges([" ".join(pair) for pair in state["model"].get("merges", [])])
    writer.add_eos_token_id(reader.eos_token_id)
    writer.add_chat_template(reader.chat_template)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if in_file(name) == without:
            continue
        if values.ndim == 1:
            writer.add_tensor(in_file(name), values)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            rounded = gguf.quants.quantize(values, kind)
            writer.add_tensor(in_file(name), rounded, raw_dtype=kind)
            tensor.copy_(torch.from_numpy(np.array(gguf.quants.dequantize(rounded, kind))))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model, "tiny.Q8_0.gguf"


def recipe(folder: Path, name: str) -> Path:
    path = folder / "recipe.yaml"
    tree = {
        "model": {"path": str(folder / "model"), "gguf_file": name, "device": "cpu"},
        "data": {"train": str(save_rows(folder / "train.jsonl"))},
        "reward": {"trajectory": [f"{Path(__file__).parents[1] / 'support' / 'places.py'}:length"]},
        "limits": {"turns": 1, "tokens_per_turn": 8},
        "train": {"batch_size": 2, "group_size": 2, "steps": 1},
        "output": str(folder / "run"),
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_gguf_file_is_dequantized_once_and_trained_and_saved_as_safetensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, name = save_gguf(tmp_path / "model")
    file = recipe(tmp_path, name)
    found = Path(load(file)[0].model.path)
    assert found.parent == tmp_path / "cache" / "turnwise" / "gguf"
    read = AutoModelForCausalLM.from_pretrained(found).state_dict()
    assert read.keys() == model.state_dict().keys()
    assert all(torch.equal(read[key], value) for key, value in model.state_dict().items())
    before = os.stat(found / "model.safetensors").st_mtime_ns
    assert main(["train", str(file)]) == 0
    assert os.stat(found / "model.safetensors").st_mtime_ns == before
    assert [entry.name for entry in found.parent.iterdir()] == [found.name]
    (line,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert line["ratio/max_deviation"] < 1e-5
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").is_file()
    assert "quantization_config" not in json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())
    assert Path(load(file, ["model.dtype=bfloat16"])[0].model.path) != found


def test_a_file_that_is_not_there_or_not_readable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    file = recipe(tmp_path, "absent.gguf")
    with pytest.raises(
        ConfigError, match=r"model\.gguf_file=absent\.gguf: there is no file .*model/absent\.gguf; model\.path"
    ):
        load(file)
    (tmp_path / "model" / "absent.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(
        ConfigError, match=r"model\.gguf_file=absent\.gguf could not be read: .*use the model's safetensors"
    ):
        load(file)
    assert list((tmp_path / "cache" / "turnwise" / "gguf").iterdir()) == []


def test_a_file_without_a_parameter_is_refused_and_not_filled_with_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    _, name = save_gguf(tmp_path / "model", without="blk.1.ffn_up.weight")
    with pytest.raises(
        ConfigError, match=r"no values for 1 parameters .*model\.layers\.1\.mlp\.up_proj\.weight.*safetensors files"
    ):
        load(recipe(tmp_path, name))
    assert list((tmp_path / "cache" / "turnwise" / "gguf").iterdir()) == []


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_named_before_the_file_is_read(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers asks for accelerate only when it reads the file: `make demo-real` failed there in a fresh environment."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else found(name))
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"the package `{package}`: pip install 'turnwise\[gguf\]'"):
        dequantized(str(tmp_path), "model.gguf", "float32")
