"""LoRA on weights in 4 bits (QLoRA, `model.quantization`): engine and trainer, saving, merging, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from support import byte_tokenizer
from support.hybrids import save_hybrid
from support.recipes import save_recipe
from support.training import train_silently
from turnwise import assembly
from turnwise.commands.models import write_merged
from turnwise.config.recipe import load
from turnwise.doctor.memory import PassOptions, Workload, read_model_config, traced_pass
from turnwise.errors import ConfigError
from turnwise.models.loading import ModelSource, adapt, load_model, token_logprobs
from turnwise.models.quantization import dequantized, linear_layers, stored_bytes
from turnwise.options.schema import QuantizationSection
from turnwise.train import assemble

MODEL = Path(__file__).resolve().parents[2] / "demo" / "model"
QLORA = ("model.quantization=4", "model.lora.rank=4", "model.device=cpu")
PROMPT = [5, 17, 200, 44, 45, 9, 10, 11]


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


@pytest.mark.parametrize("family", [None, "qwen3_5", "jamba"])
def test_gradients_are_those_of_the_weights_dequantized(family: str | None, tmp_path: Path) -> None:
    path = MODEL if family is None else save_hybrid(tmp_path / "model", family)
    source = assembly.model_source(load(save_recipe(tmp_path, path), list(QLORA))[0])
    ids = torch.tensor([[5, 17, 30, 44, 45, 9, 10, 11]])

    def pass_of(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.no_grad():
            for index, (name, parameter) in enumerate(model.named_parameters()):
                if ".lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(index)) / 10)
            model(ids, use_cache=False)  # as the embedded engine, before a learner
        logits = model(ids, use_cache=False).logits
        logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
        return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    logits, gradients = pass_of(load_model(source))
    plain = dequantized(load_model(source.of_base(path)), "float32")
    adapt(plain, source)
    other_logits, others = pass_of(plain)
    torch.testing.assert_close(logits, other_logits, atol=1e-4, rtol=1e-4)
    assert gradients.keys() == {name for name in others if ".lora_" in name}
    for name, gradient in gradients.items():
        assert bool(gradient.any())
        torch.testing.assert_close(gradient, others[name], atol=1e-3 * float(others[name].abs().max()), rtol=1e-3)


def test_layers_of_other_shapes_are_not_quantized(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The layers with 96 inputs, which are no whole blocks, but not those with one output for each head."""
    path = save_hybrid(tmp_path / "model", "qwen3_5")
    caplog.set_level("INFO")
    model = load_model(assembly.model_source(load(save_recipe(tmp_path, path), list(QLORA))[0]))
    kinds = {name.removesuffix(".base_layer"): layer.weight.dtype for name, layer in linear_layers(model).items()}
    assert set(kinds.values()) == {torch.uint8}
    assert {name.rpartition(".")[2] for name in kinds} >= {
        "in_proj_a",
        "in_proj_b",
        "in_proj_qkv",
        "gate_proj",
        "q_proj",
    }
    down = model.get_submodule("model.layers.0.mlp.down_proj.base_layer").weight
    assert (down.dtype, tuple(down.shape)) == (torch.float32, (64, 96))
    assert "4 linear layers stay in float32, because their inputs are no multiple of 64" in caplog.text
    assert caplog.text.rstrip().endswith(": 4 down_proj")
    model = save_hybrid(tmp_path / "jamba", "jamba")  # Mamba layers multiply with the weight of dt_proj themselves
    load_model(assembly.model_source(load(save_recipe(tmp_path, model), list(QLORA))[0]))
    assert "2 dt_proj" in caplog.text


def test_a_model_of_which_no_layer_can_be_quantized_is_refused(tmp_path: Path) -> None:
    reader = byte_tokenizer()
    reader.save_pretrained(tmp_path / "model")
    GPT2LMHeadModel(GPT2Config(vocab_size=len(reader), n_embd=64, n_layer=1, n_head=2)).save_pretrained(
        tmp_path / "model"
    )
    source = assembly.model_source(load(save_recipe(tmp_path, tmp_path / "model"), list(QLORA))[0])
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layer that can be quantized"):
        load_model(source)


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


@pytest.mark.parametrize("family", [None, "qwen3_5"])
def test_the_prediction_of_memory_counts_4_bits(family: str | None, tmp_path: Path) -> None:
    path = MODEL if family is None else save_hybrid(tmp_path / "model", family)
    recipe = save_recipe(tmp_path, path)
    config = load(recipe, list(QLORA))[0]
    plain = load(recipe, ["model.lora.rank=4", "model.device=cpu"])[0]
    model_config = read_model_config(str(path))
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


def test_a_device_that_is_not_there_is_refused_before_weights_are_quantized_on_it() -> None:
    source = ModelSource(path=str(MODEL), device="cuda:99", quantization=QuantizationSection(bits=4))
    with pytest.raises(ConfigError, match=r"^model\.device=cuda:99 cannot be used: .*Use model\.device=auto"):
        load_model(source)


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
@pytest.mark.parametrize("family", [None, "qwen3_5"])
def test_a_run_in_4_bits_is_exact_resumes_and_is_merged_as_it_was_trained(family: str | None, tmp_path: Path) -> None:
    model = MODEL if family is None else save_hybrid(tmp_path / "model", family)
    train = {"steps": 2, "batch_size": 2, "group_size": 2, "lr": 0.01}
    limits = {"turns": 2, "tokens_per_turn": 8}
    recipe = save_recipe(tmp_path, model, train=train, limits=limits, checkpoint={"every": 1})
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
    base = load_model(ModelSource(path=str(model), device="cpu"))
    assert max(abs(a - b) for a, b in zip(own, token_logprobs(base, PROMPT), strict=True)) > 1e-3
    assert torch.is_floating_point(merged.model.layers[0].mlp.down_proj.weight)
    with pytest.raises(ConfigError, match=r"needs a model directory, and .* is an adapter"):
        load_model(assembly.model_source(load(recipe, [*QLORA, f"model.path={two / 'checkpoint'}"])[0]))
