"""A model is loaded with all of its weights, in one go or part by part, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from support.hybrids import hybrid
from support.tiny import save_model, tiny_model
from turnwise.cli import main
from turnwise.errors import ConfigError
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
