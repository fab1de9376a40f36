"""LoRA, also on weights in 4 bits: the engine samples from the adapter, checkpoints hold it, and a run resumes exactly."""

from __future__ import annotations

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from support import byte_tokenizer
from support.hybrids import save_hybrid
from support.recipes import save_recipe
from support.tiny import save_model, tiny_model
from support.training import train_silently
from test_train import lines, run, timeless
from training.test_batch import group
from turnwise import assembly
from turnwise.cli import main
from turnwise.commands.models import write_merged
from turnwise.config.recipe import checked, load
from turnwise.config.train_checks import refuse_without_effect
from turnwise.doctor.memory import PassOptions, Workload, read_model_config, traced_pass
from turnwise.errors import ConfigError, RunError
from turnwise.models.loading import ModelSource, adapt, load_model, token_logprobs
from turnwise.models.lora import add_adapter, without_adapter
from turnwise.models.quantization import dequantized, linear_layers, stored_bytes
from turnwise.options.algorithm import LoraSection, PpoClip
from turnwise.options.schema import QuantizationSection
from turnwise.train import assemble
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.types import Sampling

LORA = ("model.lora.rank=4", "model.lora.alpha=16")


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 3, "batch_size": 2, "group_size": 4, "lr": 0.02},
        loss={"kl_coef": 0.1},
        deterministic=True,
    )


def weights(path: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(path).state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # of peft
def test_a_run_trains_the_adapter_samples_from_it_saves_it_and_resumes_exactly(
    recipe: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel  # torch.distributed and more: a second of each process that collects this file

    made = run(recipe, *LORA, f"output={tmp_path / 'straight'}")
    metrics = lines(tmp_path / "straight" / "metrics.jsonl")
    assert max(line["ratio/max_deviation"] for line in metrics) < 1e-4
    assert metrics[0]["kl"] == 0.0  # a new adapter changes nothing
    assert metrics[2]["kl"] > 1e-5  # the reference is the model without the adapter
    trained = made.learner.model  # type: ignore[attr-defined]

    run(recipe, *LORA, "train.steps=2", f"output={tmp_path / 'parts'}")
    run(recipe, *LORA, "resume=auto", f"output={tmp_path / 'parts'}")
    assert timeless(lines(tmp_path / "parts" / "metrics.jsonl")) == timeless(metrics)

    checkpoint = tmp_path / "straight" / "checkpoint"
    assert not list(checkpoint.glob("model*.safetensors"))
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = trained(ids).logits
        base = AutoModelForCausalLM.from_pretrained(model)
        plain = base(ids).logits
        of_peft = PeftModel.from_pretrained(base, checkpoint)(ids).logits
        of_turnwise = load_model(ModelSource(path=str(checkpoint), device="cpu"))(ids).logits
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(of_peft, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(of_turnwise, expected, atol=1e-4, rtol=1e-4)

    assert main(["merge", str(tmp_path / "straight"), "--out", str(tmp_path / "merged")]) == 0
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=1e-4)
    assert main(["merge", str(tmp_path / "straight"), "--out", str(tmp_path / "merged")]) == 1
    assert main(["merge", str(model), "--out", str(tmp_path / "nothing")]) == 1

    rollout = ["rollout", str(recipe), f"model.path={checkpoint}", "rollout.max_rows=1", "--out", str(tmp_path / "out")]
    assert main(rollout) == 0
    assert main(["show", str(tmp_path / "straight")]) == 0
    capsys.readouterr()
    assert main(["doctor", str(checkpoint)]) == 0
    assert "log-probs" in capsys.readouterr().out


@pytest.mark.slow
def test_other_base_weights_do_not_resume(recipe: Path, model: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    save_model(own)
    run(recipe, *LORA, f"model.path={own}", "train.steps=1")
    save_model(own, seed=1)
    with pytest.raises(RunError, match=r"holds the adapter only, and the weights in model.path=.*changed"):
        run(recipe, *LORA, f"model.path={own}", "train.steps=2", "resume=auto")


def learner(model: object, **loss: float) -> LocalLearner:
    return LocalLearner(model, sampling=Sampling(), loss=make_loss(PpoClip(**loss)), threads=1)


@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True}, {"target_modules": ["q_proj", "down_proj"]}])
def test_only_the_adapter_is_trained_and_the_reference_shares_the_base_weights(options: dict[str, object]) -> None:
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    add_adapter(model, LoraSection(rank=4, alpha=8.0, **options))  # type: ignore[arg-type]
    one = learner(model, kl_coef=0.5)
    first = asyncio.run(one.update([pack(group())], lr=1e-2))
    second = asyncio.run(one.update([pack(group())], lr=1e-2))
    assert first.kl == pytest.approx(0.0, abs=1e-6)
    assert second.kl > 1e-4
    base = without_adapter(model)
    for name, tensor in base.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert all(parameter.data_ptr() in own for parameter in base.parameters())
    assert one.base_fingerprint() == learner(tiny_model()).fingerprint()
    scaled = one.model.model.layers[0].self_attn.q_proj.scaling["default"]
    assert scaled == (8.0 / 4**0.5 if options.get("rslora") else 8.0 / 4)


def test_an_adapter_on_bfloat16_weights_is_float32() -> None:
    model = tiny_model().to(torch.bfloat16)
    add_adapter(model, LoraSection(rank=4, alpha=8.0))
    one = learner(model)
    asyncio.run(one.update([pack(group())], lr=1e-2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    assert all(master is parameter for master, parameter in zip(one._optimizer.masters, trained, strict=True))


def test_layers_that_the_model_lacks_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"has no linear layer 'qproj'; did you mean 'q_proj'\?; it has .*down_proj.*q_proj"
    ):
        add_adapter(tiny_model(), LoraSection(rank=4, alpha=8.0, target_modules=["qproj"]))
    with pytest.raises(ConfigError, match="both the embedding and the output layer"):
        add_adapter(tiny_model(), LoraSection(rank=4, alpha=8.0, target_modules=["lm_head"]))


def test_an_adapter_on_the_output_layer_gets_its_gradient_in_chunks() -> None:
    from training.test_forward import both

    model = tiny_model(tie_word_embeddings=False)
    add_adapter(model, LoraSection(rank=4, alpha=8.0, target_modules=["lm_head", "q_proj"]))
    with torch.no_grad():
        model.lm_head.lora_B["default"].weight.normal_()
    for expected, actual in zip(*both(model, entropy=True), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)


def test_options_of_an_adapter_without_rank_are_refused(model: Path) -> None:
    tree = {"model": {"path": str(model), "lora": {"alpha": 8}}, "data": {"train": "rows.jsonl"}}
    with pytest.raises(ConfigError, match=r"model.lora.alpha has no effect without an adapter: set model.lora.rank"):
        refuse_without_effect(checked(tree, source="recipe"))
    with pytest.raises(ConfigError, match=r"lora_rank; it is called model.lora.rank here"):
        checked({**tree, "lora_rank": 8}, source="recipe")


# LoRA on weights in 4 bits (QLoRA, `model.quantization`): engine and trainer, saving, merging, memory


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


@pytest.mark.slow
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
