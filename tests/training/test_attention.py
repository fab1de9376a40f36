"""Attention is computed as the model's config asks for it, in the trainer and in the embedded engine."""

from __future__ import annotations

import asyncio
import logging
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
from turnwise.models.loading import ModelOptions, load_model
from turnwise.models.precision import ignored_by_sdpa
from turnwise.training.batch import pack
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.types import Completion, Request, Sampling

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
    model = load_model(ModelOptions(path=tmp_path, dtype="float32", device="cpu"))
    assert not try_tree_attention(model)

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


def test_a_soft_cap_that_sdpa_would_ignore_is_told_when_the_model_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made(CONFIGS["soft cap"]()).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        assert (
            load_model(ModelOptions(path=tmp_path, dtype="float32", device="cpu")).config._attn_implementation
            == "eager"
        )
    assert "Gemma2ForCausalLM uses softcap in its attention, which sdpa ignores" in caplog.text


def test_a_model_that_asks_for_nothing_further_keeps_sdpa(tmp_path: Path) -> None:
    for number, config in enumerate(
        [tiny_model().config, hf.Gemma2Config(**SIZES, attn_logit_softcapping=None), hf.Gemma3TextConfig(**SIZES)]
    ):
        model = made(config)
        assert ignored_by_sdpa(model) == []
        model.save_pretrained(tmp_path / str(number))
        loaded = load_model(ModelOptions(path=tmp_path / str(number), dtype="float32", device="cpu"))
        assert loaded.config._attn_implementation == "sdpa"


def test_an_attention_that_cannot_be_shared_is_left_as_it_was() -> None:
    model = made(CONFIGS["sinks"]())
    before = plain(model, range(5, 25))
    assert not try_tree_attention(model)
    assert torch.equal(plain(model, range(5, 25)), before)


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
    with pytest.raises(EngineError, match=r"cannot be run by the embedded engine: it does not take a mask"):
        LocalEngine(made(config()), context=128)


def test_the_engine_keeps_attention_in_chunks() -> None:
    chunks = {"attention_chunk_size": 40, "num_local_experts": 2, "intermediate_size_mlp": 32, "no_rope_layers": [1, 0]}
    model = made(hf.Llama4TextConfig(**SIZES, **chunks))
    prompt = [5 + n % 200 for n in range(90)]  # longer than two chunks, and than what is tried out at the start
    completion = generate(model, prompt)
    logprob_TV = plain(model, [*prompt, *completion.token_ids])
    own = [float(logprob_TV[89 + place, token]) for place, token in enumerate(completion.token_ids)]
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
    with pytest.raises(EngineError, match=r"StableLmForCausalLM cannot be run by the embedded engine.*logits differ"):
        LocalEngine(model)


def test_logits_that_are_no_numbers_are_named_as_such() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight[0] = float("nan")
    with pytest.raises(EngineError, match=r"Qwen3ForCausalLM gives logits that are NaN or infinite"):
        LocalEngine(model)
