"""Linear layers that are computed with oneDNN give the products and the gradients of torch's own layers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from turnwise.models import cpu
from turnwise.models.cpu import fewest_rows, linear, onednn_linear
from turnwise.models.loading import ModelOptions, load_model

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which oneDNN is faster."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: True)


# one row; fewer rows than the small step; not a multiple of either step; a multiple; more dimensions
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


def test_autocast_computes_in_bfloat16() -> None:
    values, weight = torch.randn(64, 384), torch.randn(128, 384)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(values, weight, None).dtype == torch.bfloat16


def test_a_copy_of_a_model_computes_with_its_own_weights(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    monkeypatch.setattr(cpu, "_FEWEST_PRODUCTS", 1)
    monkeypatch.setattr(cpu, "_SMALL_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_SMALLEST_SIDE", 1)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    original = load_model(ModelOptions(path=str(model), dtype="float32", device="cpu"))
    other = copy.deepcopy(original)
    ids = torch.arange(3, 60).unsqueeze(0) % 50
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.zero_()
        torch.testing.assert_close(other(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(original(ids).logits, torch.zeros_like(original(ids).logits))


def test_frozen_weights_get_no_gradient() -> None:
    values, weight = torch.randn(64, 384, requires_grad=True), torch.randn(384, 384)
    linear(values, weight, None).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(values.grad, weight.sum(dim=0).expand(64, -1), atol=1e-4, rtol=1e-4)


def test_padding_is_not_part_of_the_result() -> None:
    values, weight, bias = torch.randn(2, 150, 80), torch.randn(70, 80), torch.ones(70)
    result = onednn_linear(values, weight, bias)
    assert result.shape == (2, 150, 70)
    torch.testing.assert_close(result, nn.functional.linear(values, weight, bias), atol=1e-4, rtol=1e-4)
