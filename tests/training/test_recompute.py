"""Gradient checkpointing: the same gradients with fewer saved tensors, from layers that are computed twice."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_attention import SIZES, made
from training.test_batch import group
from turnwise.engines.local import LocalEngine
from turnwise.errors import ConfigError
from turnwise.models.loading import recompute_layers
from turnwise.models.lora import LoraOptions, add_adapter, without_adapter
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import Request, Sampling


def gradients(model: Any, *, share_prompts: bool) -> tuple[list[torch.Tensor], int, int]:
    """The gradients of all trained parameters, the bytes that the forward pass saves, and the calls of the first layer's MLP."""
    calls: list[None] = []
    handle = model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = {parameter.data_ptr() for parameter in model.parameters()}
    saved: dict[int, int] = {}

    def count(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    (micro,) = pack(group(), share_prompts=share_prompts).micro_batches
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        logprob_N, _ = Forward(model, Sampling(temperature=0.9)).logprobs(micro)
        loss = (logprob_N * micro.targets.advantage_N).sum()
    calls_before = len(calls)
    result = torch.autograd.grad(loss, parameters)
    handle.remove()
    return list(result), sum(saved.values()), len(calls) - calls_before


@pytest.mark.parametrize("share_prompts", [True, False], ids=["trees", "rows"])
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_gradients_are_equal_and_activations_are_not_kept(lora: bool, share_prompts: bool) -> None:
    model = tiny_model(num_hidden_layers=4)
    if lora:
        add_adapter(model, LoraOptions(rank=4, alpha=8.0, target_modules=None))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
    if share_prompts:
        assert try_tree_attention(model)
    expected, kept, again = gradients(model, share_prompts=share_prompts)
    assert again == 0
    recompute_layers(model)
    assert not any(module.training for module in model.modules())
    actual, less, again = gradients(model, share_prompts=share_prompts)
    assert again == 1
    assert less < kept / 3
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_the_engine_samples_from_the_same_model_with_its_cache() -> None:
    """Also in the engine's generic pass, which runs the model's own layers with a key-value cache."""
    plain = made(__import__("transformers").Qwen2Config(**{**SIZES, "hidden_act": "gelu"}))
    recomputed = copy.deepcopy(plain)
    recompute_layers(recomputed)

    async def sampled(model: Any) -> list[int]:
        engine = LocalEngine(model, threads=1)
        request = Request(token_ids=[3, 4, 5], sampling=Sampling(max_tokens=8), seed=1, conversation="c")
        tokens = list((await engine.generate(request)).token_ids)
        await engine.close()
        return tokens

    assert asyncio.run(sampled(recomputed)) == asyncio.run(sampled(plain))


def test_a_copy_and_the_model_without_adapter_run_their_own_layers() -> None:
    model = tiny_model()
    add_adapter(model, LoraOptions(rank=4, alpha=8.0, target_modules=None))
    recompute_layers(model)
    ids = torch.arange(9)[None]
    other, base = copy.deepcopy(model), without_adapter(model)
    with torch.no_grad():
        before = base(ids).logits
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        assert torch.equal(base(ids).logits, before)
        assert torch.equal(other(ids).logits, before)
        assert not torch.equal(model(ids).logits, before)


def test_a_model_without_layers_of_transformers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.gradient_checkpointing: Linear does not support it"):
        recompute_layers(torch.nn.Linear(2, 2))
