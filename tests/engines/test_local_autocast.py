"""The embedded engine with autocast: bfloat16 copies of the weights, which follow the trainer; and with LoRA adapters."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from engines.test_local_tokens import FUSED, ask, make, tokens
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.forward import GenericForward
from turnwise.engines.local.fused import FusedForward
from turnwise.models.lora import LoraOptions, add_adapter
from turnwise.models.precision import autocast
from turnwise.types import Completion, Request, Sampling


def sampled(engine: LocalEngine, conversation: str, prompt: list[int], seed: int = 0) -> Completion:
    request = Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=16), seed=seed)
    return ask(engine, request)[0]


def own_logprobs(model: Any, prompt: list[int], said: Completion, *, mixed: bool) -> torch.Tensor:
    """The log-probabilities of the sampled tokens under the model's own forward."""
    ids = torch.tensor([[*prompt, *said.token_ids]])
    with torch.no_grad(), autocast(torch.device("cpu"), mixed):
        rows = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(said.token_ids).unsqueeze(1)).squeeze(1)


def scaled(name: str) -> Any:
    """A model whose logits are not so large that the rounding of bfloat16 shows most."""
    model = make(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(0.3)
    return model


@pytest.mark.parametrize("name", [*FUSED, "gemma3", "gpt2", "qwen3-window"])
def test_log_probabilities_are_those_of_the_models_own_forward_under_autocast(name: str) -> None:
    model = scaled(name)
    engine = LocalEngine(model, threads=1, autocast=True)
    assert type(engine._core.forward) is (FusedForward if name in FUSED else GenericForward)
    assert {tensor.dtype for tensor in engine._core.cache.kv.tensors} == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    prompt = tokens(30)
    for turn in range(2):
        said = sampled(engine, "a", prompt, seed=turn)
        difference = torch.tensor(said.logprobs) - own_logprobs(model, prompt, said, mixed=True)
        assert float(difference.abs().max()) < 0.06
        prompt = [*prompt, *said.token_ids, *tokens(5, turn)]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_new_weights_reach_the_copies(name: str) -> None:
    model = scaled(name)
    engine = LocalEngine(model, threads=1, autocast=True)
    prompt = tokens(30)
    sampled(engine, "a", prompt)
    for parameter in model.parameters():
        # by another name of the same memory: torch does not count this change
        parameter.detach().numpy()[...] *= 0.8
    asyncio.run(engine.load_weights(1))
    said = sampled(engine, "b", prompt)
    assert set(said.versions) == {1}
    difference = torch.tensor(said.logprobs) - own_logprobs(model, prompt, said, mixed=True)
    assert float(difference.abs().max()) < 0.06


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_copies_are_freed_before_an_update_and_made_again_for_the_next_request(name: str) -> None:
    engine = LocalEngine(scaled(name), threads=1, autocast=True)
    forward, prompt = engine._core.forward, tokens(30)
    assert isinstance(forward, FusedForward | GenericForward)
    first = sampled(engine, "a", prompt)
    engine.free_cache()
    assert forward._copy is not None
    assert forward._copy.freed
    assert {parameter.dtype for parameter in forward._copy.model.parameters()} == {torch.float32}
    second = sampled(engine, "b", prompt)
    assert not forward._copy.freed
    assert second.token_ids == first.token_ids
    torch.testing.assert_close(torch.tensor(second.logprobs), torch.tensor(first.logprobs))


@pytest.mark.parametrize("mixed", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")], ids=["all layers", "two layers"])
def test_an_adapter_is_computed_in_the_fused_pass(targets: tuple[str, ...] | None, mixed: bool) -> None:
    model = scaled("qwen3")
    prompt = tokens(30)
    plain = own_logprobs(model, prompt, sampled(LocalEngine(model, threads=1), "a", prompt), mixed=False)
    add_adapter(model, LoraOptions(rank=4, alpha=8.0, target_modules=targets))
    engine = LocalEngine(model, threads=1, autocast=mixed)
    assert isinstance(engine._core.forward, FusedForward)
    said = sampled(engine, "a", prompt)
    if not mixed:  # a new adapter changes nothing
        torch.testing.assert_close(torch.tensor(said.logprobs), plain)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    asyncio.run(engine.load_weights(1))
    said = sampled(engine, "b", prompt)
    actual, expected = torch.tensor(said.logprobs), own_logprobs(model, prompt, said, mixed=mixed)
    assert float((actual - expected).abs().max()) < (0.08 if mixed else 1e-4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    assert float((own_logprobs(model, prompt, said, mixed=mixed) - expected).abs().max()) > 0.1


def test_an_adapter_that_is_more_than_a_product_takes_the_generic_pass() -> None:
    model = make("qwen3")
    add_adapter(model, LoraOptions(rank=4, alpha=8.0, target_modules=None, dora=True))
    assert isinstance(LocalEngine(model)._core.forward, GenericForward)


def test_an_adapter_beside_bfloat16_weights_is_not_rounded_away() -> None:
    """Merged into bfloat16 weights, an adapter of a thousandth of the weights would hardly change them."""
    model = scaled("llama").to(torch.bfloat16)
    add_adapter(model, LoraOptions(rank=4, alpha=8.0, target_modules=None))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1.0)
    engine, prompt = LocalEngine(model, threads=1), tokens(30)
    assert isinstance(engine._core.forward, FusedForward)
    said = sampled(engine, "a", prompt)
    difference = torch.tensor(said.logprobs) - own_logprobs(model, prompt, said, mixed=False)
    assert float(difference.abs().max()) < 0.15


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2"])
def test_the_output_layer_is_in_float32_so_that_large_logits_are_not_rounded_to_steps(name: str) -> None:
    model = scaled(name)
    engine = LocalEngine(model, threads=1, autocast=True)
    forward = engine._core.forward
    sampled(engine, "a", tokens(30))
    if isinstance(forward, FusedForward):
        assert forward._parameters.head.weight_IO.dtype == torch.float32
        assert forward._parameters.layers[0].o.weight_IO.dtype == torch.bfloat16
    else:
        assert isinstance(forward, GenericForward)
        assert forward._model.get_output_embeddings().weight.dtype == torch.float32
    values = torch.full((1, model.get_output_embeddings().in_features), 1.0, requires_grad=True)
    with torch.no_grad():
        model.get_output_embeddings().weight.fill_(40.1 / values.shape[1])
    for one in (model, *([forward._model] if isinstance(forward, GenericForward) else [])):
        with autocast(torch.device("cpu"), True):
            logits = one.get_output_embeddings()(values.to(torch.bfloat16))
        assert logits.dtype == torch.float32
        assert float(logits.detach()[0, 0]) == pytest.approx(40.1, abs=1e-3)  # bfloat16 has 40.0 and 40.25
