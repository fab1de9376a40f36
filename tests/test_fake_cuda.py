"""Training, sampling and resuming on a device that is not the host (`support/fake_cuda.py`): no operation mixes the two, and the
host waits no more often than it did when this was written."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.utils._pytree import tree_leaves

import test_train
from runs.test_trained_policies import GAME
from support.fake_cuda import Traffic, fake_cuda, on_device
from support.recipes import save_recipe
from support.tiny import BLOCKS_OF_4_BITS, save_model, tiny_model
from support.vision import picture, save_vision_model
from training import test_vision
from training.test_batch import conversations
from training.test_kernels import installed_kernels
from turnwise.doctor import fit
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.scheduler import _inverse_cdf
from turnwise.errors import ConfigError, RunError
from turnwise.models import device, loading
from turnwise.models.device import GpuMemory
from turnwise.models.distribution import sampling_logits
from turnwise.models.loading import ModelSource, load_model
from turnwise.models.quantization import linear_layers
from turnwise.options.algorithm import Gmpo, Gspo, LoraSection, LossSection, OptimizationSection, PpoClip
from turnwise.options.schema import QuantizationSection
from turnwise.runs.training_run import TrainingRun
from turnwise.training.batch import pack
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.losses import make_loss
from turnwise.training.optimizer import Optimizer
from turnwise.training.value_batch import ValuePacking, pack_states, pack_value_targets
from turnwise.types import Request, Sampling


@pytest.fixture
def traffic() -> Iterator[Traffic]:
    with fake_cuda() as counted:
        yield counted
    assert not counted.mixed


@pytest.fixture
def recipe(model: Path, tmp_path: Path) -> Path:
    return save_recipe(
        tmp_path,
        model,
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 1, "batch_size": 2, "group_size": 3, "lr": 0.01},
    )


IN_4_BITS = ("model.quantization.bits=4", "model.lora.rank=4")


def trained(recipe: Path, *options: str, device: str = "cuda") -> list[dict[str, Any]]:
    """The metrics of a run."""
    exact = [] if any(option.startswith("model.dtype") for option in options) else ["model.dtype=float32"]
    made = test_train.run(recipe, f"model.device={device}", *exact, *options)
    assert next(made.learner.model.parameters()).device.type == device
    return test_train.lines(recipe.parent / "run" / "metrics.jsonl")


QUICK = {
    "LoRA, critic, top-p": ["model.lora.rank=4", "credit=gae", "sampling.top_p=0.9", "sampling.temperature=0.7"],
    "bfloat16, generic pass": ["model.dtype=bfloat16", "train.share_prompts=never", "train.micro_batch_tokens=100"],
}
SLOW = {
    "prompts shared": [],
    "prompts apart": ["train.share_prompts=never", "train.micro_batch_tokens=100"],
    "staleness": ["train.max_staleness=1"],
    "autocast": ["model.autocast=true"],
    "gradient checkpointing": ["model.gradient_checkpointing=true"],
    "KL, entropy, epochs": ["loss.kl_coef=0.1", "loss.entropy_coef=0.01", "train.ppo_epochs=2", "train.minibatches=2"],
    "KL in the reward": ["reward.kl.coef=0.1"],
    "gspo": ["loss.name=gspo"],
    "kahan": ["model.dtype=bfloat16", "train.optimizer.master_weights=kahan"],
    "stochastic": ["model.dtype=bfloat16", "train.optimizer.master_weights=stochastic_rounding"],
    "offload": ["model.dtype=bfloat16", "train.optimizer.offload=cpu"],
    "float32 gradients": ["model.dtype=bfloat16", "train.optimizer.grad_accum_dtype=float32"],
    "adafactor": ["train.optimizer.name=adafactor"],
    "correction": ["correction.action=truncate", "train.max_staleness=1"],
    "reference sync": ["loss.kl_coef=0.1", "reference.source=copy", "reference.sync_every=1"],
    "LoRA": ["model.lora.rank=4"],
    "critic": ["credit=gae"],
    "4 bits, KL": [*IN_4_BITS, "loss.kl_coef=0.1", "train.share_prompts=never", "train.micro_batch_tokens=100"],
    "4 bits, critic, checkpointing": [*IN_4_BITS, "credit=gae", "model.gradient_checkpointing=true"],
    "4 bits, bfloat16": [*IN_4_BITS, "model.dtype=bfloat16", "model.quantization.double=false"],
    "top-k, min-p": ["sampling.top_k=5", "sampling.min_p=0.05"],
}


@pytest.mark.slow
def test_a_run_with_fused_kernels_mixes_nothing(
    recipe: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with installed_kernels(monkeypatch) as library, caplog.at_level("INFO"):
        (metrics,) = trained(recipe, "model.lora.rank=4", "model.gradient_checkpointing=true", "loss.kl_coef=0.1")
        assert library.CALLS["silu_mul"] > library.CALLS["rope"] / 2 > 0
    assert "model.kernels=auto: liger-kernel 0.8.5 computes 2 rotary embeddings, 9 RMSNorm, 2 SwiGLU" in caplog.text
    assert metrics["tokens/trained"] > 0
    assert metrics["failed"] == 0
    assert metrics["ratio/max_deviation"] < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("options", QUICK.values(), ids=QUICK)
def test_a_run_on_the_device_mixes_nothing(
    options: list[str], recipe: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "model.dtype=bfloat16" in options:
        monkeypatch.setattr(
            "turnwise.engines.local.fused.unsupported_reason", lambda model: "the generic pass is tried"
        )
    for metrics in trained(recipe, *options):
        assert metrics["tokens/trained"] > 0
        assert metrics["failed"] == 0
        assert metrics["ratio/max_deviation"] < (0.3 if "model.dtype=bfloat16" in options else 1e-3)


@pytest.mark.slow
def test_several_trained_policies_mix_nothing(recipe: Path, traffic: Traffic) -> None:
    game = recipe.parent / "game.py"
    game.write_text(GAME, encoding="utf-8")
    (metrics,) = trained(
        recipe,
        f"environment={game}:game",
        "model.lora.rank=4",
        "policies={second: {train: true, lora: {rank: 2, target_modules: [q_proj]}}}",
    )
    assert metrics["failed"] == 0
    for policy in ("", "policies/second/"):
        assert metrics[f"{policy}tokens/trained"] > 0
        assert metrics[f"{policy}grad_norm"] > 0
        assert metrics[f"{policy}ratio/max_deviation"] < 1e-3


@pytest.mark.slow
def test_weights_in_4_bits_mix_nothing_and_resume_what_a_cpu_has_begun(recipe: Path) -> None:
    save_model(recipe.parent / "wide", **BLOCKS_OF_4_BITS)
    options = [*IN_4_BITS, f"model.path={recipe.parent / 'wide'}", "checkpoint.every=1"]
    first = trained(recipe, *options, device="cpu")
    with fake_cuda() as traffic:
        metrics = trained(recipe, *options, "train.steps=2", "resume=auto")
    assert not traffic.mixed
    assert metrics[:1] == first
    assert [one["step"] for one in metrics] == [1, 2]
    for one in metrics:
        assert one["tokens/trained"] > 0
        assert one["failed"] == 0
        assert one["ratio/max_deviation"] < 1e-3


def in_4_bits(folder: Path, device: str = "cuda") -> Any:
    path = str(save_model(folder / "wide", **BLOCKS_OF_4_BITS))
    return load_model(
        ModelSource(path=path, device=device, quantization=QuantizationSection(bits=4), lora=LoraSection(rank=4))
    )


def test_weights_in_4_bits_are_loaded_on_the_device_with_their_scales(traffic: Traffic, tmp_path: Path) -> None:
    quantized = linear_layers(model := in_4_bits(tmp_path))
    for layer in quantized.values():
        state = layer.weight.quant_state
        kept = (layer.weight, state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
        assert [one.device.type for one in kept] == ["cuda"] * 6
        assert layer.weight.dtype == torch.uint8
    assert len(quantized) == 7 * model.config.num_hidden_layers
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    layer, states = model.model.layers[0].mlp.down_proj, torch.ones(2, 64, device="cuda")
    assert not traffic.mixed
    before = layer(states)
    layer.weight.quant_state.absmax = layer.weight.quant_state.absmax.cpu()
    layer(states)
    assert traffic.mixed.total() == 1
    traffic.mixed.clear()
    moved = on_device(in_4_bits(tmp_path, "cpu").model.layers[0].mlp.down_proj.weight)
    assert moved.quant_state.absmax.device.type == "cuda"
    assert moved.tolist() == layer.weight.tolist()
    layer.base_layer.weight = moved
    assert layer(states).tolist() == before.tolist()


@pytest.mark.parametrize("bits", [None, 4])
def test_a_card_that_is_too_small_for_the_weights_is_named(
    bits: Any, model: Path, tmp_path: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(transformers.PreTrainedModel, "to", full)
    if bits:  # transformers catches what is raised while it quantizes
        monkeypatch.setattr("bitsandbytes.functional.quantize_4bit", full)
        model = save_model(tmp_path / "wide", **BLOCKS_OF_4_BITS)
    card = GpuMemory("NVIDIA L4", 24 * 2**30, 4 * 2**30)
    monkeypatch.setattr(loading, "gpu_memory", lambda device: card)
    source = ModelSource(path=str(model), device="cuda", quantization=QuantizationSection(bits=bits))
    with pytest.raises(ConfigError) as told:
        load_model(source)
    said = str(told.value)
    assert (
        "not fit into the memory of model.device=cuda (NVIDIA L4 with 24.0 GiB, of which other processes use 20.0)"
        in said
    )
    assert "Use model.dtype=bfloat16, " in said
    assert ("model.quantization.bits=4 with model.lora.rank" in said) == (bits is None)


@pytest.mark.slow
@pytest.mark.parametrize("options", SLOW.values(), ids=SLOW)
def test_every_way_to_train_mixes_nothing(options: list[str], recipe: Path, traffic: Traffic) -> None:
    if "model.quantization.bits=4" in options:
        options = [*options, f"model.path={save_model(recipe.parent / 'wide', **BLOCKS_OF_4_BITS)}"]
    for metrics in trained(recipe, "train.steps=2", *options):
        assert metrics["tokens/trained"] > 0
        assert metrics["failed"] == 0


@pytest.mark.slow
def test_a_run_of_a_cpu_goes_on_on_the_device(recipe: Path) -> None:
    trained(recipe, "checkpoint.every=1", device="cpu")
    with fake_cuda() as traffic:
        metrics = trained(recipe, "train.steps=2", "checkpoint.every=1", "resume=auto")
    assert [one["step"] for one in metrics] == [1, 2]
    assert not traffic.mixed


@pytest.mark.slow
def test_a_run_goes_on_on_another_card(recipe: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed for the first card is computed anew; its data type is part of the run."""
    card, capability = GpuMemory("NVIDIA H100", 80 * 2**30, 80 * 2**30), (9, 0)
    monkeypatch.setattr(fit, "sees_gpu", lambda: True)
    monkeypatch.setattr(fit, "gpu_memory", lambda device: card)
    monkeypatch.setattr(device, "sees_gpu", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: capability)
    made: list[TrainingRun] = []
    plain = test_train.run
    monkeypatch.setattr(test_train, "run", lambda *given: made.append(plain(*given)) or made[-1])
    options = ["model.dtype=auto", "checkpoint.every=1"]
    trained(recipe, *options)
    card, capability = GpuMemory("Tesla T4", 2**30, 2**30), (7, 5)
    with pytest.raises(RunError, match=r"model\.dtype=auto is bfloat16 on GPUs .* write model\.dtype=bfloat16"):
        trained(recipe, *options, "train.steps=2", "resume=auto")
    options[0] = "model.dtype=bfloat16"
    assert [one["step"] for one in trained(recipe, *options, "train.steps=2", "resume=auto")] == [1, 2]
    first, second = (one.config for one in made)
    assert (first.model.dtype, second.model.dtype) == ("bfloat16", "bfloat16")
    assert first.engine.embedded is not None
    assert second.engine.embedded is not None
    assert second.engine.embedded.memory_gb < first.engine.embedded.memory_gb
    assert first.train.micro_batch_tokens == 16384
    assert second.train.micro_batch_tokens is not None


@pytest.mark.slow
def test_images_on_the_device(tmp_path: Path, traffic: Traffic) -> None:
    picture(16, 8, seed=1).save(tmp_path / "1.png")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>What is it?", "images": ["1.png"]}) + "\n")
    recipe = save_recipe(
        tmp_path,
        save_vision_model(tmp_path / "model"),
        data={"train": str(tmp_path / "rows.jsonl")},
        environment=f"{test_vision.PLACES}:shows_another",
        limits={"turns": 2, "tokens_per_turn": 6},
        train={"steps": 1, "batch_size": 1, "group_size": 2, "lr": 1e-3},
    )
    (metrics,) = trained(recipe)
    assert metrics["tokens/trained"] > 0
    assert metrics["failed"] == 0


# Optimizers


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "kahan": {"master_weights": "kahan"},
    "stochastic rounding": {"master_weights": "stochastic_rounding"},
    "offload": {"offload": "cpu"},
    "adafactor": {"name": "adafactor"},
}


def stepped(
    options: dict[str, Any], state: Any = None, *, device: str = "cuda", dtype: Any = torch.bfloat16
) -> Optimizer:
    """An optimizer after a step on two parameters, which begins with the state of another one."""
    parameters: list[Any] = [torch.nn.Parameter(torch.ones(8, 8, dtype=dtype)) for _ in range(2)]
    if device == "cuda":
        parameters = [on_device(one) for one in parameters]
    optimizer = Optimizer(parameters, OptimizationSection.model_validate({"optimizer": options}))
    if state is not None:
        optimizer.load_state(state)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-2)
    assert not any(bool((parameter == 1).all()) for parameter in parameters)
    return optimizer


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_steps_and_resumes_on_the_device(options: dict[str, Any], traffic: Traffic) -> None:
    resumed = stepped(options, stepped(options).state())
    assert resumed.steps == 2


OF_STEPS: dict[str, dict[str, Any]] = {
    **{name: options for name, options in OPTIMIZERS.items() if name != "offload"},
    "8 bits": {"name": "adamw_8bit"},
    "float32": {},
}


def of_steps(optimizer: Optimizer) -> list[torch.Tensor]:
    """The tensors of an optimizer that only steps need, but single numbers."""
    state = [one for values in optimizer._optimizer.state.values() for one in values.values()]
    copies = optimizer.masters if optimizer.keeps_copies else []
    return [one for one in (*copies, *optimizer.errors, *state) if isinstance(one, torch.Tensor) and one.dim()]


def saved(optimizer: Optimizer) -> dict[str, Any]:
    """Its state, as a checkpoint brings it back."""
    torch.save(optimizer.state(), file := io.BytesIO())
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def flat(state: Any) -> list[Any]:
    return [one.tolist() if isinstance(one, torch.Tensor) else one for one in tree_leaves(state)]


@pytest.mark.parametrize("kind", OF_STEPS)
def test_what_only_steps_need_leaves_the_device_and_changes_nothing(
    kind: str, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "8 bits":
        monkeypatch.setattr("bitsandbytes.optim.optimizer.sync_gpu", lambda tensor: None)
    exact = kind in ("8 bits", "float32")

    def new(offload: str) -> Optimizer:
        torch.manual_seed(0)
        tensors = [torch.nn.Parameter(torch.randn(64, 80)) for _ in range(2)]
        parameters: list[Any] = [on_device(one if exact else one.bfloat16()) for one in tensors]
        options = {"optimizer": {**OF_STEPS[kind], "offload": offload}}
        return Optimizer(parameters, OptimizationSection.model_validate(options))

    def step(optimizer: Optimizer, number: int) -> list[Any]:
        torch.manual_seed(number)
        for parameter in optimizer.parameters:
            parameter.grad = on_device(torch.randn(64, 80).to(parameter.dtype))
        optimizer.step(1e-2)
        return [parameter.tolist() for parameter in optimizer.parameters]

    stays, leaves = new("none"), new("sampling")
    for number in range(3):
        stays.leave()
        leaves.leave()
        assert {one.device.type for one in of_steps(stays)} <= {"cuda"}
        assert {one.device.type for one in of_steps(leaves)} <= {"cpu"}
        assert all(parameter.grad is None for parameter in (*stays.parameters, *leaves.parameters))
        assert flat(saved(leaves)) == flat(saved(stays))
        assert step(leaves, number) == step(stays, number)
    assert {one.device.type for one in of_steps(leaves)} == {"cuda"}
    leaves.leave()
    kept = [one.data_ptr() for one in of_steps(leaves)]
    assert kept
    resumed = new("sampling")
    resumed.leave()
    resumed.load_state(saved(leaves))
    with torch.no_grad():
        for own, other in zip(resumed.parameters, stays.parameters, strict=True):
            own.copy_(other)
    assert step(resumed, 3) == step(leaves, 3) == step(stays, 3)
    leaves.leave()
    assert [one.data_ptr() for one in of_steps(leaves)] == kept  # pinned memory takes long to get


IN_TURNS = {
    "all weights, critic": ["model.dtype=bfloat16", "credit=gae"],
    "LoRA, two steps an update": ["model.lora.rank=4", "train.minibatches=2"],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", IN_TURNS.values(), ids=IN_TURNS)
def test_optimizers_leave_the_device_while_conversations_are_sampled(
    options: list[str], recipe: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizers: list[Optimizer] = []
    sampling: list[set[str]] = []
    made, generate = Optimizer.__init__, LocalEngine.generate

    def make(self: Optimizer, *arguments: Any, **given: Any) -> None:
        made(self, *arguments, **given)
        optimizers.append(self)

    async def sample(self: LocalEngine, request: Request) -> Any:
        sampling.append({one.device.type for optimizer in optimizers for one in of_steps(optimizer)})
        return await generate(self, request)

    monkeypatch.setattr(Optimizer, "__init__", make)
    monkeypatch.setattr(LocalEngine, "generate", sample)

    def results(*more: str) -> tuple[list[dict[str, Any]], list[set[str]]]:
        optimizers.clear()
        sampling.clear()
        found = trained(recipe, *options, "checkpoint.every=1", *more)
        return test_train.timeless(found), [*filter(None, sampling)]

    stayed, on_device = results("train.steps=2")
    left, on_host = results("train.steps=2", "replace=true", "train.optimizer.offload=sampling")
    assert left == stayed
    assert on_device.count({"cuda"}) == len(on_device) == len(on_host) == on_host.count({"cpu"}) > 0
    results("replace=true", "train.optimizer.offload=sampling")
    resumed, on_host = results("train.steps=2", "resume=auto", "train.optimizer.offload=sampling")
    assert resumed == stayed
    assert on_host.count({"cpu"}) == len(on_host) > 0


@pytest.mark.parametrize("source", ["cpu", "ranks"])
def test_the_number_of_steps_is_on_the_device_whatever_has_saved_it(source: str, traffic: Traffic) -> None:
    """AdamW's fused kernel reads it there: on a GPU, a number of the host is an illegal memory access."""
    state = stepped({}, device="cpu").state()
    if source == "ranks":  # `complete_state` of training/sharded/shards.py: no options
        state["optimizer"]["param_groups"] = [{"params": [0, 1]}]
    resumed = stepped({}, state)
    assert resumed.steps == 2
    group = resumed._optimizer.param_groups[0]
    assert group["fused"] is True
    steps = [values["step"] for values in resumed._optimizer.state.values()]
    assert [(step.device.type, step.tolist()) for step in steps] == [("cuda", 2.0)] * 2


def test_the_first_steps_beside_a_gpu_use_all_threads_of_the_host(traffic: Traffic) -> None:
    """They are those of an optimizer on the CPU: whatever else runs with torch's threads is on the GPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for device, number in (("cpu", 1), ("cuda", 3)):
            learner = LocalLearner(tiny_model().to(device), sampling=Sampling(), loss=make_loss(PpoClip()))
            with learner._threads.during("optimizer", 100):
                assert torch.get_num_threads() == number
    finally:
        torch.set_num_threads(before)


# How often the host waits: each of these costs a GPU 10 to 50 us in which it computes nothing


def tokens(engine: LocalEngine, count: int, requests: int = 4) -> int:
    """Sample; returns the number of decode steps."""

    async def main() -> None:
        await asyncio.gather(
            *(
                engine.generate(
                    Request(
                        conversation=f"{count}-{n}",
                        token_ids=[5 + n, 7, 9],
                        sampling=Sampling(max_tokens=count),
                        seed=n,
                    )
                )
                for n in range(requests)
            )
        )

    before = engine.stats.decode_steps
    asyncio.run(main())
    return engine.stats.decode_steps - before


MODELS: dict[str, tuple[Callable[[Path], Any], float]] = {
    "fused pass": (lambda folder: tiny_model().to("cuda"), 3.5),  # rows that grow are indexed once more
    "4 bits, generic pass": (in_4_bits, 2.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "copies"), MODELS.values(), ids=MODELS)
def test_a_decode_step_copies_its_indices_there_and_once_back(
    make: Callable[[Path], Any], copies: float, traffic: Traffic, tmp_path: Path
) -> None:
    engine = LocalEngine(make(tmp_path), memory_gb=0.1)
    counts: list[np.ndarray] = []
    for length in (10, 30):
        traffic.clear()
        steps = tokens(engine, length)
        counts.append(np.array([*traffic.totals(), steps]))
    to_device, to_host, waits, steps = (counts[1] - counts[0]).tolist()
    assert steps == 20
    assert to_device / steps <= copies
    assert (to_host / steps, waits / steps) == (1, 0)


def test_a_turn_after_a_cached_one_is_read_by_a_fast_kernel(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """No fast kernel of GPUs takes a mask together with grouped heads, and the mask is made on the device."""
    seen: list[Any] = []
    plain = F.scaled_dot_product_attention

    def note(*arguments: Any, **options: Any) -> torch.Tensor:
        seen.append((options.get("attn_mask"), bool(options.get("enable_gqa"))))
        return plain(*arguments, **options)

    engine = LocalEngine(tiny_model().to("cuda"), memory_gb=0.1)
    monkeypatch.setattr(F, "scaled_dot_product_attention", note)

    async def turn(ids: list[int]) -> list[int]:
        request = Request(conversation="a", token_ids=ids, sampling=Sampling(max_tokens=2), seed=1)
        return [*ids, *(await engine.generate(request)).token_ids]

    async def main() -> None:
        await turn([*await turn([5, 7, 9]), 11, 13, 15])

    asyncio.run(main())
    masked = [(mask, grouped) for mask, grouped in seen if mask is not None]
    assert masked
    for mask, grouped in masked:
        assert not grouped
        assert mask.is_cuda
        assert mask.stride(0) % 8 == 0


def test_a_single_row_is_summed_beside_another(traffic: Traffic, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives a row alone to a kernel of GPUs whose sums may fall: a token of probability 0 could be drawn."""
    rows: list[int] = []
    plain = torch.Tensor.cumsum

    def note(tensor: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows.append(len(tensor))
        return plain(tensor, *arguments, **options)

    monkeypatch.setattr(torch.Tensor, "cumsum", note)
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    for place, summed in (("cuda", 2), ("cpu", 1)):
        rows.clear()
        kept = sampling_logits(logits.to(place), top_p_N=0.7).cpu()
        assert kept.tolist() == [[-torch.inf, 3.0, 2.0, -torch.inf]]
        probs = kept.softmax(dim=-1).to(place)
        drawn = [_inverse_cdf(probs, np.array([uniform], np.float32)).item() for uniform in (0.0, 0.7, 0.999999)]
        assert drawn == [1, 1, 2]
        assert set(rows) == {summed}


def test_attention_on_a_gpu_makes_no_plans_of_cudnn(
    model: Path, traffic: Traffic, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", chosen.append)
    load_model(ModelSource(path=str(model), device="cpu"))
    assert chosen == []
    load_model(ModelSource(path=str(model), device="cuda"))
    assert chosen == [False]


LOSSES: dict[str, LossSection] = {"ppo_clip": PpoClip(), "gspo": Gspo(), "turns": Gspo(level="turn"), "gmpo": Gmpo()}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_micro_batch_is_copied_at_once_and_what_it_measures_is_read_with_the_others(
    in_chunks: bool, loss: LossSection, traffic: Traffic
) -> None:
    """Nothing more for logits in chunks: nothing is copied for a chunk."""
    learner = LocalLearner(tiny_model().to("cuda").to(torch.bfloat16), sampling=Sampling(), loss=make_loss(loss))
    if in_chunks:
        assert learner._forward._head is not None
        learner._forward._head._max_chunk = 2
    counts: list[list[int]] = []
    for tokens in (1000, 12):
        batch = pack(conversations(), micro_batch_tokens=tokens, version=0)
        traffic.clear()
        stats = asyncio.run(learner.update([batch], lr=1e-3))
        assert stats.tokens == batch.tokens
        counts.append([len(batch.micro_batches), *traffic.totals()])
    (one, *of_one), (several, *of_several) = counts
    assert (one, several) == (1, 3)
    # metrics and the norm of the gradient are read; transformers looks for packed sequences in the positions of each pass
    assert of_one == [1, 2, 1]
    assert of_several == [several, 2, several]


def test_a_step_of_the_critic_is_read_at_once(traffic: Traffic) -> None:
    critic = LocalCritic(tiny_model().to("cuda").to(torch.bfloat16))
    trajectories = conversations()
    for trajectory in trajectories:
        trajectory.values = trajectory.returns = [1.0 for _ in trajectory.turns]
    packing = ValuePacking(level="turn", micro_batch_tokens=12)
    states, targets = pack_states(trajectories, packing), pack_value_targets(trajectories, packing)
    traffic.clear()
    asyncio.run(critic.values(states))
    several = len(states.micro_batches)
    assert several > 1
    assert traffic.totals() == (several, 1, several)
    traffic.clear()
    asyncio.run(critic.update([targets], lr=1e-3))
    several = len(targets.micro_batches)
    assert several > 1
    assert traffic.totals() == (several, 2, several)


@pytest.mark.parametrize("options", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_small_parameters_are_stepped_together(options: dict[str, Any], traffic: Traffic) -> None:
    """Those that together have no more values than the largest: the step needs no more memory than for that one alone."""
    counts: list[np.ndarray] = []
    for small in (4, 20):
        parameters: Any = [
            torch.nn.Parameter(torch.ones(size, 8, dtype=torch.bfloat16)) for size in (160, *[8] * small)
        ]
        parameters = [on_device(one) for one in parameters]
        optimizer = Optimizer(parameters, OptimizationSection.model_validate({"optimizer": options}))
        for _ in range(2):  # the first step makes the state
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            traffic.clear()
            optimizer.step(1e-2)
        counts.append(np.array([traffic.operations, *traffic.totals()]))
    operations, to_device, to_host, waits = (counts[1] - counts[0]).tolist()
    assert (to_device, to_host) == (0, 0)
    if options in ({}, {"offload": "cpu"}):
        assert (operations, waits) == (0, 0)
