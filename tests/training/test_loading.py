"""A model is loaded with all of its weights, or refused with the names of those that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.tiny import save_model, tiny_model
from turnwise.cli import main
from turnwise.errors import ConfigError
from turnwise.models.loading import ModelOptions, load_model

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
        load_model(ModelOptions(path=path, dtype="float32", device="cpu"))
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
        model = load_model(ModelOptions(path=tied, dtype="float32", device="cpu"))
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, tiny_model().lm_head.weight)


def test_untied_weights_stay_apart(untied: Path) -> None:
    model = load_model(ModelOptions(path=untied, dtype="float32", device="cpu"))
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
