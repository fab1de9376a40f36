"""The copies of weights in oneDNN's layout: used where oneDNN is faster, and never older than the weights."""

from __future__ import annotations

import asyncio

import pytest
import torch

from engines.test_local_tokens import (
    ask,
    greedy,
    is_greedy,
    make,
    one_thread,  # noqa: F401
    tokens,
)
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.fused import FusedForward
from turnwise.models import cpu
from turnwise.models.cpu import PackedLayers, onednn_linear, packed, packed_bytes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")


@pytest.fixture(autouse=True)
def _onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine on which oneDNN is faster, for weights of any size."""
    monkeypatch.setattr(cpu, "uses_onednn", lambda: True)
    monkeypatch.setattr(cpu, "_LARGE_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_SMALL_WEIGHT", 1)
    monkeypatch.setattr(cpu, "_SMALLEST_SIDE", 1)


@pytest.mark.parametrize("rows", [1, 5, 16, 37, 300])
@pytest.mark.parametrize("bias", [False, True])
def test_a_packed_weight_gives_the_product(rows: int, bias: bool) -> None:
    values, weight, added = torch.randn(rows, 96), torch.randn(72, 96), torch.randn(72) if bias else None
    expected = torch.nn.functional.linear(values.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(onednn_linear(values, packed(weight), added).double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])  # without biases, with all of them, in the attention only
@pytest.mark.parametrize("known", [True, False])  # whether torch counts the change
@pytest.mark.parametrize("few", [False, True])  # whether products of few rows are left to torch
def test_the_engine_samples_from_the_present_weights(
    monkeypatch: pytest.MonkeyPatch, name: str, known: bool, few: bool
) -> None:
    model, prompt = make(name), tokens(30)
    if few:
        monkeypatch.setattr(cpu, "_LARGE_WEIGHT", cpu.NEVER)
        monkeypatch.setattr(cpu, "_FEWEST_PRODUCTS", 8 * max(map(len, model.parameters())) ** 2)
    assert packed_bytes(model) > 0
    engine = LocalEngine(model, threads=1)
    first = ask(engine, greedy("a", prompt))[0]
    is_greedy(model, prompt, first)
    with torch.no_grad():
        for parameter in model.parameters():
            (parameter if known else parameter.data).add_(torch.randn_like(parameter), alpha=0.3)
    asyncio.run(engine.load_weights(1))
    second = ask(engine, greedy("b", prompt))[0]
    is_greedy(model, prompt, second)
    assert first.token_ids != second.token_ids


def test_a_weight_is_packed_again_only_after_a_change() -> None:
    model = make("qwen3")
    copies, weight = PackedLayers(), model.model.layers[0].mlp.up_proj.weight
    first = copies.of(weight)
    assert first is not weight
    assert copies.of(weight) is first
    with torch.no_grad():
        weight.mul_(2)
    second = copies.of(weight)
    assert second is not first
    torch.testing.assert_close(second.to_dense(), weight.detach())
    copies.clear()
    assert copies.of(weight) is not second


def test_copies_are_freed_before_an_update_and_made_again_after_it() -> None:
    model, prompt = make("qwen2"), tokens(30)
    engine = LocalEngine(model, threads=1)
    forward = engine._core.forward
    assert isinstance(forward, FusedForward)
    assert forward._packed is not None
    first = ask(engine, greedy("a", prompt))[0]
    joined = forward._parameters.layers[0].qkv.parts
    assert len(joined) == 1  # queries, keys and values are one product
    engine.free_cache()
    assert not forward._packed._copies
    parts = forward._parameters.layers[0].qkv.parts
    assert all(part.onednn_weight.data_ptr() == part.weight_IO.data_ptr() for part in parts)
    # a request in the middle of an update is sampled without copies
    assert ask(engine, greedy("b", prompt))[0].token_ids == first.token_ids
    asyncio.run(engine.load_weights(1))
    assert len(forward._parameters.layers[0].qkv.parts) == 1
    assert ask(engine, greedy("c", prompt))[0].token_ids == first.token_ids


def test_several_weights_are_packed_as_one_again_after_a_change_of_one() -> None:
    layer = make("qwen3").model.layers[0].self_attn
    copies, weights = PackedLayers(), [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    first = copies.of(*weights)
    assert copies.of(*weights) is first
    with torch.no_grad():
        weights[1].mul_(2)
    torch.testing.assert_close(copies.of(*weights).to_dense(), torch.cat(weights).detach())


def test_weights_that_take_too_much_memory_or_are_not_for_onednn_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("qwen3")
    total = packed_bytes(model)
    weights = {id(module.weight): module.weight for module in model.modules() if isinstance(module, torch.nn.Linear)}
    assert total == 4 * sum(weight.numel() for weight in weights.values())
    monkeypatch.setattr(cpu, "MOST_BYTES", total - 1)
    assert packed_bytes(model) == 0
    assert FusedForward(model)._packed is None
    monkeypatch.setattr(cpu, "MOST_BYTES", total)
    monkeypatch.setattr(cpu, "uses_onednn", lambda: False)
    assert packed_bytes(model) == 0
