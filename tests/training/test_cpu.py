"""Layers and memory on CPUs: the values and gradients of torch's own, faster."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from support.hybrids import hybrid
from support.tiny import tiny_model
from training.test_batch import group
from turnwise.models import allocator, cpu
from turnwise.models.allocator import gradients_first
from turnwise.models.cpu import TorchThreads, fewest_rows, linear, onednn_linear, weight_gradient, with_fast_layers
from turnwise.models.loading import ModelSource, load_model, recompute_layers
from turnwise.models.lora import add_adapter
from turnwise.options.algorithm import LoraSection
from turnwise.training.batch import pack
from turnwise.training.local_learner import LocalLearner
from turnwise.training.update import StopFlag
from turnwise.types import Sampling

# Feed-forward layers and norms that are one function of autograd: values and gradients of transformers' own layers.


SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 120,
}

FAMILIES = [
    (LlamaConfig, LlamaForCausalLM),
    (MistralConfig, MistralForCausalLM),
    (Qwen2Config, Qwen2ForCausalLM),
    (Qwen3Config, Qwen3ForCausalLM),
]


@pytest.fixture
def _large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "LARGE_MODEL", 0)


def use_onednn(monkeypatch: pytest.MonkeyPatch, onednn: bool = True) -> None:
    """Compute each product with oneDNN, where torch has it, or none."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: onednn and torch.backends.mkldnn.is_available())
    monkeypatch.setattr(cpu, "_FEWEST_PRODUCTS", 1)
    monkeypatch.setattr(cpu, "_SMALL_WEIGHT", 1)


def new_model(config: Any = LlamaConfig, family: Any = LlamaForCausalLM, **options: Any) -> Any:
    torch.manual_seed(0)
    model = family(config(**SIZES, **options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # new norms have weights of 1, with which a wrong gradient can look right
                parameter.uniform_(0.5, 1.5)
    return model


def loss_of(model: Any) -> torch.Tensor:
    ids = torch.arange(2 * 70).view(2, 70) * 7 % 120
    return -model(ids).logits.float().log_softmax(dim=-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def functions_of(output: torch.Tensor) -> set[str]:
    """The names of all functions of autograd behind a tensor."""
    found, waiting = set[Any](), [output.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is not None and function not in found:
            found.add(function)
            waiting += [before for before, _ in function.next_functions]
    return {type(function).__name__ for function in found}


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(("config", "family"), FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_values_and_gradients_are_those_of_a_float64_model(
    monkeypatch: pytest.MonkeyPatch, config: Any, family: Any, tied: bool, onednn: bool
) -> None:
    use_onednn(monkeypatch, onednn)
    model = new_model(config, family, tie_word_embeddings=tied)
    exact = copy.deepcopy(model).double()
    types = [type(module) for module in model.modules()]
    fast = with_fast_layers(model)
    assert [type(module) for module in fast.modules()] == types
    assert {"_TrainedSwiGLUBackward", "_TrainedNormBackward"} <= functions_of(loss_of(fast))
    assert loss_of(fast).item() == pytest.approx(loss_of(exact).item(), rel=1e-6)
    expected = gradients_of(exact)
    found = gradients_of(fast)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient.double(), expected[name], atol=2e-6, rtol=1e-4, msg=lambda m, n=name: n + m)


def kept(*layers: Any) -> int:
    """Bytes that are kept for the backward pass of layers, each of which computes with the result of the one before."""
    found: dict[int, int] = {}
    weights = {parameter.untyped_storage().data_ptr() for layer in layers for parameter in layer.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    result = torch.randn(64, 96, requires_grad=True) * 1.0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer in layers:
            result = layer(result)
    assert result.requires_grad
    return sum(found.values())


@pytest.mark.usefixtures("_large")
def test_fewer_tensors_are_kept_for_the_backward_pass() -> None:
    plain = new_model().model.layers[0]
    fast = with_fast_layers(new_model()).model.layers[0]
    assert kept(fast.mlp) == 4 * 64 * (96 + 2 * 160) < 0.7 * kept(plain.mlp)
    assert kept(fast.input_layernorm) == 4 * 64 * (96 + 1) < 0.7 * kept(plain.input_layernorm)


@pytest.mark.usefixtures("_large")
def test_the_result_of_a_norm_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch)
    fast = with_fast_layers(new_model()).model.layers[0]
    norm = 4 * 64 * (96 + 1)
    assert kept(fast.post_attention_layernorm, fast.mlp) == norm + 4 * 64 * 2 * 160
    assert kept(fast.input_layernorm, fast.self_attn.q_proj) == norm


@pytest.mark.usefixtures("_large")
def test_a_result_that_is_changed_in_place_is_kept_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch)
    found = []
    for layer in (new_model().model.layers[0], with_fast_layers(new_model()).model.layers[0]):
        torch.manual_seed(1)
        values = torch.randn(64, 96, requires_grad=True)
        normed = layer.post_attention_layernorm(values)
        normed.mul_(2)
        layer.mlp(normed).sum().backward()
        found.append((values.grad, layer.mlp.up_proj.weight.grad))
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("onednn", [True, False])
def test_gradients_are_the_same_with_gradient_checkpointing(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    use_onednn(monkeypatch, onednn)
    expected = gradients_of(with_fast_layers(new_model()))
    model = with_fast_layers(new_model())
    recompute_layers(model)
    found = gradients_of(model)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert torch.equal(gradient, expected[name]), name


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("options", [{"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_feed_forward_layers_of_another_form_are_computed_by_transformers(options: dict[str, Any]) -> None:
    plain, fast = new_model(**options), with_fast_layers(new_model(**options))
    assert "_TrainedSwiGLUBackward" not in functions_of(loss_of(fast))
    assert loss_of(fast).item() == pytest.approx(loss_of(plain).item(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("_large")
def test_feed_forward_layers_with_an_adapter_are_computed_by_transformers() -> None:
    pytest.importorskip("peft")
    adapted = with_fast_layers(new_model())
    add_adapter(adapted, LoraSection(rank=4, alpha=8, target_modules=["gate_proj"]))
    assert {"_TrainedSwiGLUBackward"}.isdisjoint(functions_of(loss_of(adapted)))
    assert all("lora" in name for name in gradients_of(adapted))


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize(("config", "family"), FAMILIES)
def test_with_autocast_values_and_gradients_are_rounded_as_by_transformers(
    monkeypatch: pytest.MonkeyPatch, config: Any, family: Any, onednn: bool
) -> None:
    use_onednn(monkeypatch, onednn)
    plain, exact = new_model(config, family), new_model(config, family).double()
    fast = with_fast_layers(new_model(config, family))
    truth = gradients_of(exact)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, found = loss_of(plain), loss_of(fast)
    assert {"_TrainedSwiGLUBackward", "_TrainedNormBackward"} <= functions_of(found)
    assert found.item() == pytest.approx(expected.item(), rel=1e-3)
    expected.backward()
    found.backward()
    for (name, parameter), other in zip(fast.named_parameters(), plain.parameters(), strict=True):
        assert parameter.grad.dtype == torch.float32
        errors = [(model.grad.double() - truth[name]).norm().item() for model in (parameter, other)]
        assert errors[0] <= 1.3 * errors[1] + 1e-6, name
        assert errors[0] <= 0.05 * truth[name].norm().item() + 1e-6, name


@pytest.mark.usefixtures("_large")
def test_with_autocast_no_converted_copies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch)
    fast = with_fast_layers(new_model()).model.layers[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept(fast.post_attention_layernorm, fast.mlp) == 4 * 64 * (96 + 1) + 2 * 64 * 2 * 160
        assert kept(fast.input_layernorm, fast.self_attn.q_proj) == 4 * 64 * (96 + 1)


@pytest.mark.usefixtures("_large")
def test_in_bfloat16_values_and_gradients_are_rounded_as_by_transformers() -> None:
    plain, fast = new_model().bfloat16(), with_fast_layers(new_model()).bfloat16()
    assert "_TrainedSwiGLUBackward" in functions_of(loss_of(fast))
    assert "_TrainedNormBackward" not in functions_of(loss_of(fast))
    assert torch.equal(loss_of(plain), loss_of(fast))
    expected, found = gradients_of(plain), gradients_of(fast)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=0.05)


@pytest.mark.usefixtures("_large")
def test_frozen_layers_get_no_gradient_and_pass_it_on() -> None:
    plain, fast = new_model(), with_fast_layers(new_model())
    for model in (plain, fast):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("q_proj" in name or "layers.0.mlp.up_proj" in name)
    expected, found = gradients_of(plain), gradients_of(fast)
    assert len(found) == 3
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-6, rtol=1e-4)


@pytest.mark.usefixtures("_large")
def test_small_models_are_computed_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "LARGE_MODEL", 10**6)
    small = with_fast_layers(new_model())
    assert {"_TrainedSwiGLUBackward", "_TrainedNormBackward"}.isdisjoint(functions_of(loss_of(small)))


@pytest.mark.usefixtures("_large")
def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    original = with_fast_layers(new_model())
    other = copy.deepcopy(original)
    before = loss_of(other)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert torch.equal(loss_of(other), before)


@pytest.mark.usefixtures("_large")
@pytest.mark.parametrize("shape", [(300, 80), (80, 300)])
def test_the_gradient_of_a_weight_is_no_view(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """To a view, autograd cannot add the gradient of a tied embedding in place."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: torch.backends.mkldnn.is_available())
    weight, values, gradient = torch.randn(shape), torch.randn(90, shape[1]), torch.randn(90, shape[0])
    found = weight_gradient(gradient, values, weight)
    assert found._base is None
    torch.testing.assert_close(found, gradient.t() @ values, atol=1e-4, rtol=1e-4)


# Linear layers that are computed with oneDNN give the products and the gradients of torch's own layers.


needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which oneDNN is faster."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: True)


# one row; fewer rows than the small step; not a multiple of either step; a multiple; more dimensions
@needs_onednn
@pytest.mark.usefixtures("_onednn")
@pytest.mark.parametrize("shape", [(1, 96), (5, 96), (170, 96), (256, 96), (700, 96), (2, 3, 50, 96)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("large", [0, 10**9])  # from how many multiplications on the number of rows is not rounded
def test_products_and_gradients_are_those_of_a_float64_layer(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], bias: bool, large: int
) -> None:
    monkeypatch.setattr(cpu, "_FEWEST_PRODUCTS", 1)
    monkeypatch.setattr(cpu, "_SMALL_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_LARGE_PRODUCT", large)
    layer = nn.Linear(96, 72, bias=bias)
    exact = copy.deepcopy(layer).double()
    values = torch.randn(shape, requires_grad=True)
    exact_values = values.detach().double().requires_grad_()
    result = linear(values, layer.weight, layer.bias)
    assert result.grad_fn is not None
    assert "Addmm" not in type(result.grad_fn).__name__
    gradient = torch.randn_like(result)
    result.backward(gradient)
    expected = exact(exact_values)
    expected.backward(gradient.double())
    torch.testing.assert_close(result, expected.float(), atol=1e-5, rtol=1e-5)
    assert values.grad is not None
    assert exact_values.grad is not None
    torch.testing.assert_close(values.grad, exact_values.grad.float(), atol=1e-5, rtol=1e-5)
    for parameter, exact_parameter in zip(layer.parameters(), exact.parameters(), strict=True):
        assert parameter.grad is not None
        assert exact_parameter.grad is not None
        torch.testing.assert_close(parameter.grad, exact_parameter.grad.float(), atol=2e-4, rtol=1e-5)


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_small_products_narrow_weights_and_other_dtypes_stay_with_torch() -> None:
    assert fewest_rows(torch.zeros(384, 128), packed=True) == 31  # 31 * 128 * 384 is the first number above 1.5 million
    # a small weight that is not packed, or has few outputs: never
    assert fewest_rows(torch.zeros(384, 128)) == cpu.NEVER
    assert fewest_rows(torch.zeros(384, 384)) == 11
    assert fewest_rows(torch.zeros(128, 384), packed=True) == cpu.NEVER
    assert fewest_rows(torch.zeros(499, 500)) == 7
    assert fewest_rows(torch.zeros(500, 500)) == 1  # a large weight: always
    assert fewest_rows(torch.zeros(8, 4096)) == cpu.NEVER
    assert fewest_rows(torch.zeros(128, 384, dtype=torch.bfloat16)) == cpu.NEVER
    values, weight = torch.randn(10, 384), torch.randn(384, 384)
    assert torch.equal(linear(values, weight, None), nn.functional.linear(values, weight))


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_autocast_computes_in_bfloat16() -> None:
    values, weight = torch.randn(64, 384), torch.randn(128, 384)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(values, weight, None).dtype == torch.bfloat16


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_linear_a_copy_of_a_model_computes_with_its_own_weights(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(cpu, "_FEWEST_PRODUCTS", 1)
    monkeypatch.setattr(cpu, "_SMALL_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_SMALLEST_SIDE", 1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    original = load_model(ModelSource(path=str(model), device="cpu"))
    other = copy.deepcopy(original)
    ids = torch.arange(3, 60).unsqueeze(0) % 50
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
        torch.testing.assert_close(other(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(original(ids).logits, torch.zeros_like(original(ids).logits))


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_frozen_weights_get_no_gradient() -> None:
    values, weight = torch.randn(64, 384, requires_grad=True), torch.randn(384, 384)
    linear(values, weight, None).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(values.grad, weight.sum(dim=0).expand(64, -1), atol=1e-4, rtol=1e-4)


@needs_onednn
@pytest.mark.usefixtures("_onednn")
def test_padding_is_not_part_of_the_result() -> None:
    values, weight, bias = torch.randn(2, 150, 80), torch.randn(70, 80), torch.ones(70)
    result = onednn_linear(values, weight, bias)
    assert result.shape == (2, 150, 70)
    torch.testing.assert_close(result, nn.functional.linear(values, weight, bias), atol=1e-4, rtol=1e-4)


# What training does for large models: memory that is kept during passes, and torch threads from the first step.


def learner_with_unused_parameter(threads: int) -> LocalLearner:
    model = tiny_model()
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(3)))
    return LocalLearner(model, sampling=Sampling(), threads=threads)


def gradients(learner: LocalLearner) -> dict[str, torch.Tensor | None]:
    learner.accumulate(pack(group(), micro_batch_tokens=1).micro_batches, lambda: None, StopFlag())
    return {name: parameter.grad for name, parameter in learner.model.named_parameters()}


# threads=0: several micro-batches in parallel, whose gradients are not accumulated by the backward pass
@pytest.mark.parametrize("threads", [1, 0])
def test_gradients_are_the_same_if_they_are_allocated_first(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    expected = gradients(learner_with_unused_parameter(threads))
    learner = learner_with_unused_parameter(threads)
    assert learner._gradients.parallel == (1 if threads else 2)
    learner._gradients._around = gradients_first
    for _ in range(2):  # the second time, the gradients of the first exist
        actual = gradients(learner)
        assert actual["unused"] is None  # a zero gradient would let AdamW decay it
        assert expected["unused"] is None
        for name, gradient in actual.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("large", "first"), [(True, 3), (False, 1)])
def test_the_first_steps_of_a_large_model_use_all_threads(large: bool, first: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads = TorchThreads(0, large=large)
        with threads.during("learn", 100):
            assert torch.get_num_threads() == first
        with TorchThreads(2, large=large).during("learn", 100):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("large", "other_at"), [(True, 32), (False, 2)])
def test_a_large_model_tries_the_other_number_of_threads_later(large: bool, other_at: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        threads, used = TorchThreads(0, large=large), []
        for _ in range(other_at + 1):
            with threads.during("learn", 100):
                used.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    first, other = (3, 1) if large else (1, 3)
    assert used == [first] * other_at + [other]


FAULTS = """
import resource, torch
from turnwise.models import allocator
torch.set_num_threads(1)
for choose in (allocator.return_freed_blocks, allocator.keep_freed_blocks):  # what is kept would be used again
    choose()
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            torch.ones(2**21)  # 8 MB, or 2,048 pages
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_freed_memory_is_used_again_or_returned() -> None:
    program = [sys.executable, "-c", FAULTS]
    printed = subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout
    returned, kept = map(int, printed.split())
    assert 20_000 <= returned <= 60_000
    assert kept <= 2000


PLACES = """
import ctypes, torch
from turnwise.models import allocator

class Figures(ctypes.Structure):
    _fields_ = [(f"figure_{n}", ctypes.c_size_t) for n in range(10)]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Figures

def mapped():  # MB that are not part of the memory that is kept
    return libc.mallinfo2().figure_4 >> 20

def resident():  # bytes: the difference of two rounded numbers can be one too large
    return int(open("/proc/self/statm").read().split()[1]) * 4096

allocator.keep_freed_blocks()
kept, before = torch.ones(2**21), mapped()
with allocator.long_lived():
    apart = torch.ones(2**21)
print(mapped() - before)
again = torch.ones(2**21)
print(mapped() - before)
blocks = [torch.ones(2**21) for _ in range(40)]
last = torch.ones(2**16)  # behind the blocks: without it, they would be at the end of the memory
before = resident()
del blocks
print(before - resident() >> 20)
allocator.trim_kept()
print(before - resident() >> 20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="options of glibc")
def test_long_lived_blocks_are_apart_from_those_that_are_kept() -> None:
    program = [sys.executable, "-c", PLACES]
    printed = subprocess.run(program, check=True, capture_output=True, text=True, timeout=120).stdout
    apart, again, freed, trimmed = map(int, printed.split())
    assert (apart, again) == (8, 8)
    # 40 blocks of 8 MB, and what the libraries have freed
    assert freed < 40 < 300 < trimmed <= 340


@pytest.mark.parametrize("name", ["granite_hybrid", "nemotron_h", "falcon_h1", "bamba", "zamba2", "mamba2"])
def test_mamba_2_gets_short_chunks_on_a_cpu_and_gives_the_same(name: str) -> None:
    model = hybrid(name, vocabulary=64)
    scans = [module for module in model.modules() if hasattr(module, "A_log")]
    for module in scans:
        module.chunk_size = 256
    ids = torch.arange(150)[None] % 64
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        found = with_fast_layers(model)(ids, use_cache=False).logits
    assert [module.chunk_size for module in scans] == [64] * len(scans)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    with_fast_layers(model)
    scans[0].chunk_size = 16
    with_fast_layers(model)
    assert scans[0].chunk_size == 16
