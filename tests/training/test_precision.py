"""Attention and mixed precision: what the model's config asks for, and nearly the gradients of float32."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from support.tiny import tiny_model
from training.test_batch import group
from turnwise.engines.local import LocalEngine
from turnwise.errors import EngineError
from turnwise.models.loading import ModelSource, load_model, recompute_layers
from turnwise.models.lora import add_adapter
from turnwise.models.precision import Bfloat16Linears, autocast, ignored_by_sdpa, output_layer_in_float32
from turnwise.options.algorithm import LoraSection, PpoClip
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.local_critic import LocalCritic
from turnwise.training.local_learner import LocalLearner
from turnwise.training.value_model import ValueForward, new_value_head
from turnwise.types import Completion, Request, Sampling

# Attention is computed as the model's config asks for it, in the trainer and in the embedded engine.


SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FULL = ["full_attention"] * 2

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

CONFIGS = {
    "soft cap and windows": lambda: hf.Gemma2Config(**SIZES, attn_logit_softcapping=2.0, sliding_window=6),
    "soft cap": lambda: hf.Gemma2Config(**SIZES, attn_logit_softcapping=2.0, layer_types=FULL),
    "soft cap of another family": lambda: hf.VaultGemmaConfig(**SIZES, attn_logit_softcapping=2.0, layer_types=FULL),
    "sinks and windows": lambda: hf.GptOssConfig(**SIZES, **EXPERTS, sliding_window=6),
    "sinks": lambda: hf.GptOssConfig(**SIZES, **EXPERTS, layer_types=FULL),
}


def made(config: Any, **options: Any) -> Any:
    """Random weights, large enough for a soft cap to show."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(3.0)
    return model


def plain(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Log-probabilities [T, V] of one plain forward pass."""
    with torch.no_grad():
        return model(torch.tensor([list(token_ids)]), use_cache=False).logits[0].log_softmax(-1)


def generate(model: Any, prompt: list[int]) -> Completion:
    async def ask() -> Completion:
        engine = LocalEngine(model, slots=2, threads=1)
        completion = await engine.generate(
            Request(conversation="c", token_ids=prompt, sampling=Sampling(max_tokens=20), seed=1)
        )
        await engine.close()
        return completion

    return asyncio.run(ask())


@pytest.mark.parametrize("name", CONFIGS)
def test_trainer_and_engine_compute_what_the_reference_attention_computes(name: str, tmp_path: Path) -> None:
    reference = made(CONFIGS[name](), attn_implementation="eager")
    reference.save_pretrained(tmp_path)
    model = load_model(ModelSource(path=str(tmp_path), device="cpu"))
    assert try_tree_attention(model)  # which computes sinks and soft caps, too

    (micro,) = pack([group()[0]], share_prompts=False).micro_batches
    ids = group()[0].segments[0].token_ids
    expected = [plain(reference, ids)[place, ids[place + 1]] for place in (2, 3, 4, 7, 8)]
    found_N, _ = Forward(model, Sampling()).logprobs(micro)
    torch.testing.assert_close(found_N.detach(), torch.stack(expected), atol=1e-5, rtol=1e-5)

    prompt = list(range(5, 17))
    completion = generate(model, prompt)
    logprob_TV = plain(reference, [*prompt, *completion.token_ids])
    own = [float(logprob_TV[11 + place, token]) for place, token in enumerate(completion.token_ids)]
    assert list(completion.logprobs) == pytest.approx(own, abs=1e-4)


@pytest.fixture
def gemma2_has_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in transformers below 5.24, and in models with code of their own: the class says that it computes with sdpa."""
    monkeypatch.setattr(hf.Gemma2PreTrainedModel, "_supports_sdpa", True)


@pytest.mark.usefixtures("gemma2_has_sdpa")
def test_a_soft_cap_that_sdpa_would_ignore_is_told_when_the_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(CONFIGS["soft cap"]()).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert load_model(ModelSource(path=str(tmp_path), device="cpu")).config._attn_implementation == "eager"
    assert "Gemma2ForCausalLM uses softcap in its attention, which sdpa ignores" in caplog.text


@pytest.mark.usefixtures("gemma2_has_sdpa")
def test_a_model_that_asks_for_nothing_further_keeps_sdpa(tmp_path: Path) -> None:
    for number, config in enumerate(
        [tiny_model().config, hf.Gemma2Config(**SIZES, attn_logit_softcapping=None), hf.Gemma3TextConfig(**SIZES)]
    ):
        model = made(config)
        assert ignored_by_sdpa(model) == []
        model.save_pretrained(tmp_path / str(number))
        loaded = load_model(ModelSource(path=str(tmp_path / str(number)), device="cpu"))
        assert loaded.config._attn_implementation == "sdpa"


def test_an_attention_that_cannot_be_shared_is_left_as_it_was() -> None:
    config = hf.XGLMConfig(vocab_size=260, d_model=32, ffn_dim=64, num_layers=2, attention_heads=4, dropout=0.0)
    model = made(config)  # its attention takes no other function
    before = plain(model, range(5, 25))
    assert not try_tree_attention(model)
    assert torch.equal(plain(model, range(5, 25)), before)


@pytest.mark.usefixtures("gemma2_has_sdpa")
def test_the_engine_refuses_a_model_whose_attention_ignores_its_soft_cap() -> None:
    with pytest.raises(EngineError, match=r'uses softcap in its attention, which sdpa ignores.*"eager"'):
        LocalEngine(made(CONFIGS["soft cap"](), attn_implementation="sdpa"))


@pytest.mark.parametrize(
    "config",
    [
        lambda: hf.BloomConfig(vocab_size=260, hidden_size=32, n_layer=2, n_head=4),
        lambda: hf.FalconConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True),
    ],
    ids=["bloom", "falcon"],
)
def test_the_engine_refuses_position_biases_that_need_a_mask_of_two_dimensions(config: Any) -> None:
    with pytest.raises(EngineError, match=r"embedded engine cannot run .*: it does not take our cache and masks"):
        LocalEngine(made(config()), context=128)


def test_the_engine_keeps_attention_in_chunks() -> None:
    chunks = {"attention_chunk_size": 40, "num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}
    model = made(hf.Llama4TextConfig(**SIZES, **chunks))
    prompt = [5 + n % 200 for n in range(90)]  # longer than two chunks, and than what is tried out at the start
    completion = generate(model, prompt)
    logprob_TV = plain(model, [*prompt, *completion.token_ids])
    own = [float(logprob_TV[89 + place, token]) for place, token in enumerate(completion.token_ids)]
    assert list(completion.logprobs) == pytest.approx(own, abs=1e-4)


def test_the_engine_scales_the_attention_of_llama_4_by_the_index_of_each_token_in_its_row() -> None:
    chunks = {"attention_chunk_size": 40, "num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}
    model = made(
        hf.Llama4TextConfig(**SIZES, **chunks, floor_scale=30, attn_scale=4.0)
    )  # 8192 and 0.1 in the published models
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.mul_(20)  # random attention is nearly uniform, whatever its scale
    prompts = [[5 + n % 200 for n in range(length)] for length in (20, 90)]

    async def ask() -> list[Completion]:
        engine = LocalEngine(model, slots=2, threads=1)
        requests = [
            Request(conversation=str(n), token_ids=prompt, sampling=Sampling(max_tokens=20), seed=n)
            for n, prompt in enumerate(prompts)
        ]
        completions = await asyncio.gather(*map(engine.generate, requests))
        await engine.close()
        return completions

    for prompt, completion in zip(prompts, asyncio.run(ask()), strict=True):
        logprob_TV = plain(model, [*prompt, *completion.token_ids])
        own = [float(logprob_TV[len(prompt) - 1 + n, token]) for n, token in enumerate(completion.token_ids)]
        assert list(completion.logprobs) == pytest.approx(own, abs=1e-4)


def test_a_window_longer_than_what_is_tried_out_is_kept_by_the_engine() -> None:
    model = made(hf.Phi3Config(**SIZES, sliding_window=100))
    prompt = [5 + n % 200 for n in range(150)]
    completion = generate(model, prompt)
    logprob_TV = plain(model, [*prompt, *completion.token_ids])
    own = [float(logprob_TV[149 + place, token]) for place, token in enumerate(completion.token_ids)]
    assert list(completion.logprobs) == pytest.approx(own, abs=1e-4)
    assert model.config.sliding_window == 100


def test_a_window_in_the_config_that_the_model_itself_ignores_is_found_out() -> None:
    model = made(hf.StableLmConfig(**{name: value for name, value in SIZES.items() if name != "head_dim"}))
    model.config.sliding_window = 100
    with pytest.raises(
        EngineError, match=r"embedded engine cannot run StableLmForCausalLM: over our cache, its logits differ"
    ):
        LocalEngine(model)


def test_logits_that_are_no_numbers_are_named_as_such() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(EngineError, match=r"Qwen3ForCausalLM gives logits that are NaN or infinite"):
        LocalEngine(model)


# Mixed precision: bfloat16 matrix products give nearly the gradients of float32, which stay float32.


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
        add_adapter(model, LoraSection(rank=4, alpha=8.0))
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


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_the_output_layer_computes_in_float32_and_its_gradients_from_bfloat16(bias: bool) -> None:
    model = wide_model(tie_word_embeddings=False)
    model.lm_head = head = torch.nn.Linear(64, 260, bias=bias)
    values = torch.randn(2, 3, 64, requires_grad=True)
    expected = head(values)
    wanted = torch.autograd.grad(expected.square().sum(), [values, *head.parameters()])
    output_layer_in_float32(model)
    with autocast(torch.device("cpu"), True):
        logits = head(values)
        found = torch.autograd.grad(logits.square().sum(), [values, *head.parameters()])
    assert torch.equal(logits, expected)
    for gradient, other in zip(found, wanted, strict=True):
        assert gradient.dtype == torch.float32
        assert gradient.shape == other.shape
        assert relative_difference([gradient], [other]) < 2**-8
    assert not torch.equal(found[0], wanted[0])
    values_of_frozen = torch.randn(3, 64, requires_grad=True)
    head.requires_grad_(False)
    head(values_of_frozen).sum().backward()
    assert values_of_frozen.grad is not None
    assert head.weight.grad is None


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
    # the gradients of each chunk are rounded to bfloat16 before they are added up
    assert relative_difference(actual, expected) < 2**-8
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
