"""Mixed precision: bfloat16 matrix products give nearly the gradients of float32, which stay float32."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.models.loading import recompute_layers
from turnwise.models.lora import LoraOptions, add_adapter
from turnwise.models.precision import Bfloat16Linears, autocast, output_layer_in_float32
from turnwise.options.algorithm import PpoClip
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.value_model import ValueForward, new_value_head
from turnwise.types import Sampling


def wide_model(**options: Any) -> Any:
    return tiny_model(hidden_size=64, intermediate_size=128, head_dim=16, **options)


def gradients(
    model: Any, *, chunk_bytes: int = 1 << 27, enabled: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities [N], and the gradients of all trained parameters."""
    (micro,) = pack(group()).micro_batches
    forward = Forward(model, Sampling(temperature=0.9), chunk_bytes=chunk_bytes, autocast=enabled)
    logprob_N, _ = forward.logprobs(micro)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    loss = (logprob_N * micro.targets.advantage_N).sum()
    return logprob_N.detach(), list(torch.autograd.grad(loss, parameters))


def relative_difference(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The norm of the difference of two gradients, divided by the norm of the second."""
    pairs = zip(actual, expected, strict=True)
    difference = torch.stack([(one - other).norm() for one, other in pairs]).norm()
    return float(difference / torch.stack([other.norm() for other in expected]).norm())


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "lora"])
def test_gradients_are_those_of_float32_but_for_the_rounding_of_bfloat16(lora: bool) -> None:
    model = wide_model()
    if lora:
        add_adapter(model, LoraOptions(rank=4, alpha=8.0, target_modules=None))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
    assert try_tree_attention(model)
    exact_N, expected = gradients(model, enabled=False)
    logprob_N, actual = gradients(model)
    assert logprob_N.dtype == torch.float32
    assert {gradient.dtype for gradient in actual} == {torch.float32}
    assert 0 < float((logprob_N - exact_N).abs().max()) < 0.03
    assert 0 < relative_difference(actual, expected) < 0.02


@pytest.mark.parametrize("trained", [True, False], ids=["head trained", "head frozen"])
def test_chunks_that_the_backward_pass_computes_again_are_in_the_same_precision(trained: bool) -> None:
    model = wide_model(tie_word_embeddings=False)
    model.lm_head.requires_grad_(trained)
    dtypes: list[torch.dtype] = []
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: dtypes.append(output.dtype))
    whole_N, expected = gradients(model)
    dtypes.clear()
    logprob_N, actual = gradients(model, chunk_bytes=4 * 260)
    torch.testing.assert_close(logprob_N, whole_N, atol=2e-6, rtol=0)
    assert relative_difference(actual, expected) < 1e-5
    assert len(dtypes) > 5
    assert set(dtypes) == {torch.float32}


def test_layers_that_gradient_checkpointing_computes_again_are_in_the_same_precision() -> None:
    model = wide_model()
    assert try_tree_attention(model)
    expected_N, expected = gradients(model)
    recompute_layers(model)
    logprob_N, actual = gradients(model)
    assert torch.equal(logprob_N, expected_N)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_a_pass_without_gradients_in_another_thread_takes_no_gradient_away() -> None:
    """torch's own cache of converted weights is shared by all threads: with it, the weight would have no gradient."""
    layer, values = torch.nn.Linear(8, 8), torch.randn(3, 8)

    def convert() -> None:
        with torch.no_grad(), autocast(torch.device("cpu"), True):
            layer(values)

    with autocast(torch.device("cpu"), True):
        other = threading.Thread(target=convert)
        other.start()
        other.join()
        convert()
        layer(values).float().sum().backward()
    assert layer.weight.grad is not None


def test_a_step_changes_float32_weights() -> None:
    learner = LocalLearner(wide_model(), sampling=Sampling(), autocast=True)
    before = [parameter.detach().clone() for parameter in learner.model.parameters()]
    asyncio.run(learner.update([pack(group())], lr=1e-6))
    for parameter, old in zip(learner.model.parameters(), before, strict=True):
        assert parameter.dtype == torch.float32
        assert 0 < float((parameter - old).detach().abs().max()) < 2e-6


def test_the_reference_is_computed_in_the_same_precision() -> None:
    from turnwise.training.losses import make_loss

    learner = LocalLearner(wide_model(), sampling=Sampling(), loss=make_loss(PpoClip(kl_coef=1.0)), autocast=True)
    (micro,) = pack(group()).micro_batches
    assert learner._reference is not None
    with torch.no_grad():
        assert torch.equal(learner._reference.logprobs(micro), learner._forward.logprobs(micro)[0])
    assert asyncio.run(learner.update([pack(group())], lr=0.0)).kl == 0.0


def test_values_of_a_critic_are_those_of_float32_but_for_rounding() -> None:
    model = wide_model()
    head = new_value_head(model)
    torch.nn.init.normal_(head.weight)
    (micro,) = pack(group()).micro_batches
    with torch.no_grad():
        exact_N, value_N = (ValueForward(model, head, autocast=enabled).values(micro) for enabled in (False, True))
    assert value_N.dtype == torch.float32
    assert 0 < float((value_N - exact_N).abs().max()) < 0.05 * float(exact_N.abs().max())
    assert LocalCritic(model, autocast=True)._forward._autocast


def test_the_second_model_follows_the_weights_and_shares_the_other_parameters() -> None:
    model = wide_model()
    output_layer_in_float32(model)
    linears = Bfloat16Linears(model)
    second, ids = linears.model, torch.tensor([[3, 4, 5]])
    own, other = model.model.layers[0], second.model.layers[0]
    assert other.input_layernorm.weight is own.input_layernorm.weight
    assert second.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert second.lm_head.weight is model.lm_head.weight

    def logits() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad(), autocast(torch.device("cpu"), True):
            return model(ids).logits, second(ids).logits

    assert torch.equal(*logits())
    with torch.no_grad():
        own.mlp.up_proj.weight.mul_(2.0)
    assert not torch.equal(*logits())
    linears.refresh(force=False)
    assert torch.equal(*logits())
    own.mlp.up_proj.weight.data.numpy()[:] *= 2.0  # a change that torch does not count
    linears.refresh(force=False)
    assert not torch.equal(*logits())
    linears.refresh()
    assert torch.equal(*logits())
    own.mlp.up_proj.weight = torch.nn.Parameter(own.mlp.up_proj.weight.detach() * 2)  # another tensor
    linears.refresh(force=False)
    assert torch.equal(*logits())
    assert other.mlp.up_proj.weight.dtype == torch.bfloat16
    assert own.mlp.up_proj.weight.dtype == torch.float32
