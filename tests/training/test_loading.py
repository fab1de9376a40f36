"""A model is loaded with all of its weights, in one go or part by part, from safetensors or GGUF, or refused."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from support import merging_tokenizer
from support.hybrids import hybrid
from support.tiny import save_model, save_rows, tiny_model
from turnwise.cli import main
from turnwise.config.recipe import load
from turnwise.errors import ConfigError
from turnwise.models.gguf import dequantized
from turnwise.models.loading import ModelSource, load_model, of_model
from turnwise.models.loading import save_model as save_loaded
from turnwise.models.lora import initialize_magnitudes
from turnwise.models.staged_loading import IncompleteWeights, StagedModel, open_staged
from turnwise.options.algorithm import LoraSection

# A model is loaded with all of its weights, or refused with the names of those that are wrong.


PLACES = Path(__file__).parent.parent / "support" / "places.py"

Weights = dict[str, torch.Tensor]


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


@pytest.fixture
def untied(tmp_path: Path) -> Path:
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def change_weights(path: Path, change: Callable[[Weights], object]) -> None:
    file = path / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def change_config(path: Path, **options: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))


def refused(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_model(ModelSource(path=str(path), device="cpu"))
    return str(caught.value)


def test_a_missing_weight_is_refused_by_name(tied: Path) -> None:
    change_weights(tied, lambda weights: weights.pop("model.layers.1.mlp.down_proj.weight"))
    message = refused(tied)
    assert message.startswith(
        f"{tied}: the checkpoint lacks the weight model.layers.1.mlp.down_proj.weight, which Qwen3"
    )
    assert "it would be random numbers" in message
    assert "Use a complete checkpoint" in message


def test_many_missing_weights_are_counted_and_the_first_are_named(tied: Path) -> None:
    change_config(tied, num_hidden_layers=3, layer_types=["full_attention"] * 3)
    message = refused(tied)
    assert "lacks 11 weights (model.layers.2.input_layernorm.weight, " in message
    assert ", ...)" in message


def test_an_unexpected_weight_is_refused_by_name(tied: Path) -> None:
    change_weights(tied, lambda weights: weights.update({"value_head.weight": torch.ones(1, 32)}))
    message = refused(tied)
    assert "holds the weight value_head.weight, for which Qwen3ForCausalLM has no place; it would be dropped" in message


def test_a_weight_of_another_shape_is_refused_by_name(tied: Path) -> None:
    change_weights(tied, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))
    assert "no model could be loaded" in refused(tied)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused_by_name(tied: Path, value: float) -> None:
    def spoil(weights: Weights) -> None:
        weights["model.layers.0.self_attn.q_proj.weight"][3, 4] = value

    change_weights(tied, spoil)
    assert "the weight model.layers.0.self_attn.q_proj.weight holds values that are NaN or infinite" in refused(tied)


def test_an_output_layer_that_is_missing_because_it_was_tied_is_refused_with_that_fix(tied: Path) -> None:
    change_config(tied, tie_word_embeddings=False)
    message = refused(tied)
    assert "lacks the weight lm_head.weight" in message
    assert "set tie_word_embeddings to true in config.json" in message


def test_an_output_layer_of_its_own_in_a_model_that_is_said_to_be_tied_is_refused_with_that_fix(untied: Path) -> None:
    change_config(untied, tie_word_embeddings=True)
    message = refused(untied)
    assert "config.json ties lm_head.weight to model.embed_tokens.weight" in message
    assert "Set tie_word_embeddings to false" in message


def test_tied_weights_are_one_parameter_whichever_of_them_the_checkpoint_holds(tied: Path) -> None:
    for change in (
        lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
        lambda weights: weights.pop("model.embed_tokens.weight"),
    ):
        change_weights(tied, change)
        model = load_model(ModelSource(path=str(tied), device="cpu"))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, tiny_model().lm_head.weight)


def test_untied_weights_stay_apart(untied: Path) -> None:
    model = load_model(ModelSource(path=str(untied), device="cpu"))
    assert not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("command", ["train", "sft", "rollout"])
def test_every_command_refuses_a_model_that_lacks_a_weight(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model")
    change_weights(model, lambda weights: weights.pop("model.norm.weight"))
    rows = tmp_path / "rows.jsonl"
    said = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    row = {"messages": said} if command == "sft" else {"prompt": "1+1?"}
    rows.write_text(json.dumps(row) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        json.dumps({"model": {"path": str(model)}, "data": {"train": str(rows)}, "output": str(tmp_path / "run")})
    )
    more = {"train": [f"reward.trajectory=['{PLACES}:length']"], "rollout": ["--out", str(tmp_path / "run")], "sft": []}
    assert main([command, str(tmp_path / "recipe.yaml"), *more[command]]) == 1
    assert "the checkpoint lacks the weight model.norm.weight" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# A model that is read part by part is the model that `load_model` loads, or is not read part by part.


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

SIZES |= {"num_key_value_heads": 2, "head_dim": 8}

ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}

VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 32}

CONFIGS: dict[str, Any] = {
    "tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "scaled positions": LlamaConfig(
        **SIZES, tie_word_embeddings=False, rope_parameters={**ROPE, "original_max_position_embeddings": 64}
    ),
    "experts": Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
    "vision": Qwen2_5_VLConfig(
        text_config={
            **SIZES,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config=VISION,
        **TOKENS,
    ),
}

ADAPTERS = {
    "all weights": LoraSection(),
    "lora": LoraSection(rank=2, alpha=4, target_modules=["q_proj"]),
    "dora": LoraSection(rank=2, alpha=4, target_modules=["q_proj", "o_proj"], dora=True),
}


def saved(folder: Path, name: str) -> Path:
    auto = AutoModelForImageTextToText if name == "vision" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name])
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def filled(options: ModelSource) -> tuple[StagedModel, list[set[str]]]:
    """The model, layer by layer, and the names of the tensors of each part."""
    staged = open_staged(options)
    assert staged is not None
    layers = [part for part in staged.model.get_decoder().modules() if isinstance(part, GradientCheckpointingLayer)]
    staged.to_meta()
    names = [set(staged.fill(part)) for part in [*layers, staged.model]]
    staged.check()
    if staged.new_magnitudes:
        initialize_magnitudes(staged.model.modules())
    return staged, names


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_parts_together_are_the_model(tmp_path: Path, name: str, adapter: str, dtype: str) -> None:
    options = ModelSource(path=str(saved(tmp_path, name)), dtype=dtype, device="cpu", lora=ADAPTERS[adapter])
    expected = load_model(options)
    staged, names = filled(options)
    actual = staged.model
    assert type(actual) is type(expected)
    assert len(names) == 3
    assert not names[0] & names[1]
    state, expected_state = actual.state_dict(), expected.state_dict()
    assert list(state) == list(expected_state)
    for key, tensor in expected_state.items():
        assert state[key].dtype == tensor.dtype
        assert torch.equal(state[key], tensor), key
    for (key, buffer), (_, expected_buffer) in zip(actual.named_buffers(), expected.named_buffers(), strict=True):
        assert torch.equal(buffer, expected_buffer), key
    trained, expected_trained = ({n: p.requires_grad for n, p in m.named_parameters()} for m in (actual, expected))
    assert trained == expected_trained
    assert actual.config.to_dict() == expected.config.to_dict()
    assert actual.generation_config.to_dict() == expected.generation_config.to_dict()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(actual(ids).logits, expected(ids).logits)
    if adapter == "all weights":  # the names of the checkpoint's files come back
        actual.save_pretrained(tmp_path / "again")
        expected.save_pretrained(tmp_path / "expected")
        files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "expected")]
        assert files[0].keys() == files[1].keys()


def changed(folder: Path, change: Any) -> ModelSource:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for file in set(index["weight_map"].values()):
        tensors |= load_file(folder / file)
        (folder / file).unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return ModelSource(path=str(folder), device="cpu")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"),
        lambda tensors: tensors.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(2)}),
        lambda tensors: tensors["model.layers.0.mlp.up_proj.weight"].fill_(float("nan")),
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}),
        lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}),
    ],
    ids=["missing", "unexpected", "not finite", "tied and different", "another shape"],
)
def test_a_checkpoint_with_other_weights_is_left_to_load_model(tmp_path: Path, change: Any) -> None:
    options = changed(saved(tmp_path, "tied"), change)
    with pytest.raises(IncompleteWeights):
        filled(options)


def test_tied_weights_that_are_both_in_the_files_are_one_tensor(tmp_path: Path) -> None:
    def both(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    model = filled(changed(saved(tmp_path, "tied"), both))[0].model
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_a_directory_without_safetensors_is_not_read_part_by_part(tmp_path: Path) -> None:
    folder = saved(tmp_path, "tied")
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert open_staged(ModelSource(path=str(folder), device="cpu")) is None


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [("qwen3_next", "full_attention_interval", 2), ("nemotron_h", "hybrid_override_pattern", "M*-E")],
)
def test_a_saved_model_keeps_the_keys_that_servers_read_and_transformers_turns_into_others(
    tmp_path: Path, name: str, key: str, value: object
) -> None:
    made = hybrid(name)
    made.save_pretrained(tmp_path / "published")
    file = tmp_path / "published" / "config.json"
    published = {**json.loads(file.read_text()), key: value, "torch_dtype": "float64"}
    del published["layer_types" if name == "qwen3_next" else "layers_block_type"]
    file.write_text(json.dumps(published))
    loaded = load_model(ModelSource(path=str(tmp_path / "published"), device="cpu"))
    (tmp_path / "saved").mkdir()
    save_loaded(loaded, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved[key] == value
    assert saved["dtype"] == "float32"
    assert "torch_dtype" not in saved
    again = load_model(ModelSource(path=str(tmp_path / "saved"), device="cpu"))
    assert again.config.layer_types == loaded.config.layer_types == made.config.layer_types
    assert of_model(again) == of_model(made)


def test_a_key_that_changes_what_is_read_is_not_kept(tmp_path: Path) -> None:
    hybrid("nemotron_h").save_pretrained(tmp_path / "published")
    loaded = load_model(ModelSource(path=str(tmp_path / "published"), device="cpu"))
    file = tmp_path / "published" / "config.json"
    changed = {
        "mamba_n_groups": 7,
        "mamba_d_conv": loaded.config.conv_kernel,
    }  # the first is not that of the saved model
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    (tmp_path / "saved").mkdir()
    save_loaded(loaded, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "mamba_n_groups" not in saved
    assert saved["mamba_d_conv"] == loaded.config.conv_kernel


# Models in GGUF files: dequantized once, then trained, sampled from and saved as any other


reads_gguf = pytest.mark.skipif(find_spec("gguf") is None, reason="needs turnwise[gguf]")

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
    import gguf

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


@pytest.mark.slow
@reads_gguf
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


@reads_gguf
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


@reads_gguf
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


@reads_gguf
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
