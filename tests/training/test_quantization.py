"""LoRA on weights in 4 bits (QLoRA, `model.quantization`): engine and trainer, saving, merging, memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from support.recipes import save_recipe
from support.training import train_silently
from turnwise import assembly
from turnwise.commands.models import write_merged
from turnwise.config.recipe import load
from turnwise.doctor.memory import PassOptions, Workload, read_model_config, traced_pass
from turnwise.errors import ConfigError
from turnwise.models.loading import ModelSource, load_model, token_logprobs
from turnwise.models.quantization import linear_layers, stored_bytes
from turnwise.options.schema import QuantizationSection
from turnwise.train import assemble

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
QLORA = ("model.quantization=4", "model.lora.rank=4", "model.device=cpu")
PROMPT = [5, 17, 300, 44, 45, 9, 10, 11]


def test_products_use_the_weights_in_4_bits_and_only_the_adapter_is_trained(tmp_path: Path) -> None:
    config = load(save_recipe(tmp_path, MODEL), list(QLORA))[0]
    model = load_model(assembly.model_source(config))
    layers = {name: layer for name, layer in linear_layers(model).items() if "layers." in name}
    assert {str(layer.weight.dtype) for layer in layers.values()} == {"torch.uint8"}
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in model.named_parameters())
    plain = load_model(ModelSource(path=str(MODEL), device="cpu"))
    first, other = token_logprobs(model, PROMPT), token_logprobs(plain, PROMPT)
    assert 0.001 < max(abs(a - b) for a, b in zip(first, other, strict=True)) < 3
    layer = plain.model.layers[0].mlp.down_proj.weight
    stored = next(layer for name, layer in layers.items() if name.startswith("model.layers.0.mlp.down_proj"))
    assert stored.weight.numel() == layer.numel() // 2


@pytest.mark.parametrize("option", ["type=fp4", "double=false"])
def test_how_weights_are_quantized_changes_them(option: str, tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, MODEL)
    usual, other = (
        token_logprobs(load_model(assembly.model_source(load(recipe, [*QLORA, *more])[0])), PROMPT)
        for more in ([], [f"model.quantization.{option}"])
    )
    assert max(abs(a - b) for a, b in zip(usual, other, strict=True)) > 1e-4


@pytest.mark.parametrize(("options", "bytes_of_64"), [((True,), 33.015625), ((False,), 36.0)])
def test_bytes_of_a_weight(options: tuple[bool], bytes_of_64: float) -> None:
    (double,) = options
    assert stored_bytes(QuantizationSection(bits=4, double=double), 64) == bytes_of_64


def test_the_prediction_of_memory_counts_4_bits(tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, MODEL)
    config = load(recipe, list(QLORA))[0]
    plain = load(recipe, ["model.lora.rank=4", "model.device=cpu"])[0]
    model_config = read_model_config(str(MODEL))
    workload = Workload(conversations=2, tokens=40, prompt_tokens=20)
    quantized, full = (
        traced_pass(
            PassOptions(
                source=assembly.model_source(each),
                workload=workload,
                micro_batch_tokens=64,
                mixed=False,
                on_gpu=False,
                on_ranks=False,
            ),
            model_config,
        )
        for each in (config, plain)
    )
    model = load_model(assembly.model_source(plain))
    numbers = {id(layer.weight): layer.weight.numel() for layer in linear_layers(model).values()}
    saved = sum(4 * count - stored_bytes(QuantizationSection(bits=4), count) for count in numbers.values())
    assert full.weights - quantized.weights == pytest.approx(saved, abs=2)
    assert quantized.peak > full.peak  # a weight is dequantized for its product
    loaded = load_model(assembly.model_source(config))
    real = sum(parameter.numel() * parameter.element_size() for parameter in loaded.parameters())
    assert real < quantized.weights < 1.1 * real  # without the scales, which are no parameters


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["model.quantization.bits=4"], "needs an adapter, because weights in 4 bits cannot be trained"),
        (["model.lora.rank=4", "model.quantization.type=fp4"], "type has no effect without model.quantization.bits"),
        ([*QLORA, "model.lora.dora=true"], "cannot be combined with model.lora.dora"),
        ([*QLORA, "model.autocast=true"], "cannot be combined with model.autocast"),
        ([*QLORA, "cluster=local"], "cannot be used with several ranks"),
        ([*QLORA, "engine.name=vllm"], "its servers would sample with weights that are not quantized"),
    ],
)
def test_what_cannot_be_trained_in_4_bits_is_refused(options: list[str], message: str, tmp_path: Path) -> None:
    config = load(save_recipe(tmp_path, MODEL), options)[0]
    with pytest.raises(ConfigError, match=message):
        assemble(config)


def test_names_of_other_trainers_lead_to_the_option(tmp_path: Path) -> None:
    recipe = save_recipe(tmp_path, MODEL)
    for name, hint in (
        ("model.load_in_4bit=true", r"model\.quantization\.bits=4 with model\.lora\.rank"),
        ("model.bnb_4bit_quant_type=nf4", r"model\.quantization\.type"),
        ("model.load_in_8bit=true", "no weights in 8 bits"),
    ):
        with pytest.raises(ConfigError, match=hint):
            load(recipe, [name])


def steps(folder: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line]


@pytest.mark.slow
def test_a_run_in_4_bits_is_exact_resumes_and_is_merged_as_it_was_trained(tmp_path: Path) -> None:
    train = {"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01}
    limits = {"turns": 2, "tokens_per_turn": 8}
    recipe = save_recipe(tmp_path, MODEL, train=train, limits=limits, checkpoint={"every": 1})
    exact = [*QLORA, "deterministic=true"]
    train_silently(assemble(load(recipe, [*exact, f"output={tmp_path / 'whole'}"])[0]))
    whole = steps(tmp_path / "whole")
    assert [line["ratio/max_deviation"] < 1e-4 for line in whole] == [True] * 2
    # a second run that stops after a step, and goes on
    two = tmp_path / "resumed"
    options = [*exact, f"output={two}"]
    train_silently(assemble(load(recipe, [*options, "train.steps=1"])[0]))
    train_silently(assemble(load(recipe, [*options, "resume=auto"])[0]))
    assert [line["loss"] for line in steps(two)] == [line["loss"] for line in whole]
    # merged: the trained model, in ordinary weights
    trained = load_model(assembly.model_source(load(recipe, options)[0], two / "checkpoint"))
    write_merged(two, tmp_path / "merged")
    merged = load_model(ModelSource(path=str(tmp_path / "merged"), device="cpu"))
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    own, other = token_logprobs(trained, PROMPT), token_logprobs(merged, PROMPT)
    assert other == pytest.approx(own, abs=1e-4)
    base = load_model(ModelSource(path=str(MODEL), device="cpu"))
    assert max(abs(a - b) for a, b in zip(own, token_logprobs(base, PROMPT), strict=True)) > 1e-3
    assert torch.is_floating_point(merged.model.layers[0].mlp.down_proj.weight)
    with pytest.raises(ConfigError, match=r"needs a model directory, and .* is an adapter"):
        load_model(assembly.model_source(load(recipe, [*QLORA, f"model.path={two / 'checkpoint'}"])[0]))
