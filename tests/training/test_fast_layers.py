"""Feed-forward layers and norms that are one function of autograd: values and gradients of transformers' own layers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnwise.models import allocator, cpu
from turnwise.models.cpu import weight_gradient, with_fast_layers
from turnwise.models.loading import recompute_layers
from turnwise.models.lora import LoraOptions, add_adapter

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


@pytest.fixture(autouse=True)
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


def test_fewer_tensors_are_kept_for_the_backward_pass() -> None:
    plain = new_model().model.layers[0]
    fast = with_fast_layers(new_model()).model.layers[0]
    assert kept(fast.mlp) == 4 * 64 * (96 + 2 * 160) < 0.7 * kept(plain.mlp)
    assert kept(fast.input_layernorm) == 4 * 64 * (96 + 1) < 0.7 * kept(plain.input_layernorm)


def test_the_result_of_a_norm_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch)
    fast = with_fast_layers(new_model()).model.layers[0]
    norm = 4 * 64 * (96 + 1)
    assert kept(fast.post_attention_layernorm, fast.mlp) == norm + 4 * 64 * 2 * 160
    assert kept(fast.input_layernorm, fast.self_attn.q_proj) == norm


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


@pytest.mark.parametrize("options", [{"mlp_bias": True}, {"hidden_act": "gelu"}])
def test_feed_forward_layers_of_another_form_are_computed_by_transformers(options: dict[str, Any]) -> None:
    plain, fast = new_model(**options), with_fast_layers(new_model(**options))
    assert "_TrainedSwiGLUBackward" not in functions_of(loss_of(fast))
    assert loss_of(fast).item() == pytest.approx(loss_of(plain).item(), rel=1e-6)


def test_feed_forward_layers_with_an_adapter_are_computed_by_transformers() -> None:
    pytest.importorskip("peft")
    adapted = with_fast_layers(new_model())
    add_adapter(adapted, LoraOptions(rank=4, alpha=8, target_modules=("gate_proj",)))
    assert {"_TrainedSwiGLUBackward"}.isdisjoint(functions_of(loss_of(adapted)))
    assert all("lora" in name for name in gradients_of(adapted))


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


def test_with_autocast_no_converted_copies_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    use_onednn(monkeypatch)
    fast = with_fast_layers(new_model()).model.layers[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert kept(fast.post_attention_layernorm, fast.mlp) == 4 * 64 * (96 + 1) + 2 * 64 * 2 * 160
        assert kept(fast.input_layernorm, fast.self_attn.q_proj) == 4 * 64 * (96 + 1)


def test_in_bfloat16_values_and_gradients_are_rounded_as_by_transformers() -> None:
    plain, fast = new_model().bfloat16(), with_fast_layers(new_model()).bfloat16()
    assert "_TrainedSwiGLUBackward" in functions_of(loss_of(fast))
    assert "_TrainedNormBackward" not in functions_of(loss_of(fast))
    assert torch.equal(loss_of(plain), loss_of(fast))
    expected, found = gradients_of(plain), gradients_of(fast)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-4, rtol=0.05)


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


def test_small_models_are_computed_by_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator, "LARGE_MODEL", 10**6)
    small = with_fast_layers(new_model())
    assert {"_TrainedSwiGLUBackward", "_TrainedNormBackward"}.isdisjoint(functions_of(loss_of(small)))


def test_a_copy_of_a_model_computes_with_its_own_weights() -> None:
    original = with_fast_layers(new_model())
    other = copy.deepcopy(original)
    before = loss_of(other)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
    assert torch.equal(loss_of(other), before)


@pytest.mark.parametrize("shape", [(300, 80), (80, 300)])
def test_the_gradient_of_a_weight_is_no_view(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]) -> None:
    """To a view, autograd cannot add the gradient of a tied embedding in place."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: torch.backends.mkldnn.is_available())
    weight, values, gradient = torch.randn(shape), torch.randn(90, shape[1]), torch.randn(90, shape[0])
    found = weight_gradient(gradient, values, weight)
    assert found._base is None
    torch.testing.assert_close(found, gradient.t() @ values, atol=1e-4, rtol=1e-4)
