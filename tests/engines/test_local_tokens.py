"""The embedded engine says what the model says: token for token and number for number, on both forward passes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from turnwise.engines.local import LocalEngine
from turnwise.engines.local.forward import GenericForward
from turnwise.engines.local.fused import FusedForward, unsupported_reason
from turnwise.types import Completion, Request, Sampling

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
PARTS = {"vocab_size": 97, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Beside other tests, two threads are slower than one."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    model = {
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, mlp_bias=True, attention_bias=True)),
        "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
        "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=9)),
        "qwen3-window": lambda: Qwen3ForCausalLM(
            Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=9, max_window_layers=1)
        ),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(
                **SIZES, head_dim=16, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
            )
        ),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**PARTS, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
        "neox": lambda: GPTNeoXForCausalLM(
            GPTNeoXConfig(
                **PARTS,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=256,
            )
        ),
    }[name]()
    # random weights say the same token for ever; larger ones do not
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(6.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


FUSED = ("qwen3", "qwen2", "llama", "mistral")
GENERIC = ("mistral-window", "qwen3-window", "gemma3", "gpt2", "neox")


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, count]).integers(0, 97, count).tolist()


def ask(engine: LocalEngine, *requests: Request):
    async def all_of_them():
        return await asyncio.gather(*[engine.generate(request) for request in requests])

    return asyncio.run(all_of_them())


def own_greedy(model: PreTrainedModel, prompt: list[int], said: Sequence[int]) -> list[int]:
    """What the model finds most probable at each of the sampled tokens, in one pass: `said` itself, if it was greedy."""
    whole = torch.tensor([[*prompt, *said]])
    with torch.no_grad():
        return model(input_ids=whole).logits[0, len(prompt) - 1 : -1].argmax(dim=-1).tolist()


def own_logprobs(model: PreTrainedModel, prompt: list[int], said: Completion) -> list[float]:
    """The raw log-probabilities of the sampled tokens, in one pass."""
    whole = torch.tensor([[*prompt, *said.token_ids]])
    with torch.no_grad():
        rows = model(input_ids=whole).logits[0, len(prompt) - 1 : -1].log_softmax(dim=-1)
    return rows.gather(1, torch.tensor(said.token_ids).unsqueeze(1)).squeeze(1).tolist()


def is_greedy(model: PreTrainedModel, prompt: list[int], said: Completion) -> None:
    assert said.token_ids == own_greedy(model, prompt, said.token_ids)
    assert len(said.token_ids) == 12


def greedy(conversation: str, prompt: list[int], count: int = 12) -> Request:
    return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(temperature=0, max_tokens=count))


@pytest.mark.parametrize("name", [*FUSED, *GENERIC])
def test_greedy_is_what_the_model_says_over_two_turns(name: str) -> None:
    model = make(name)
    engine = LocalEngine(model, threads=1)
    prompts = [tokens(count) for count in (1, 5, 23, 40)]
    first = ask(engine, *[greedy(str(i), prompt) for i, prompt in enumerate(prompts)])
    for prompt, said in zip(prompts, first, strict=True):
        assert said.token_ids == own_greedy(model, prompt, said.token_ids)
    assert len({tuple(each.token_ids) for each in first}) > 1
    seconds = [prompt + list(said.token_ids) + tokens(7, 3) for prompt, said in zip(prompts, first, strict=True)]
    again = ask(engine, *[greedy(str(i), prompt) for i, prompt in enumerate(seconds)])
    for prompt, said in zip(seconds, again, strict=True):
        assert said.token_ids == own_greedy(model, prompt, said.token_ids)


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_pass_is_taken(name: str) -> None:
    model = make(name)
    assert unsupported_reason(model) is None
    assert isinstance(LocalEngine(model)._core.forward, FusedForward)


@pytest.mark.parametrize("name", GENERIC)
def test_the_generic_pass_is_taken(name: str) -> None:
    assert isinstance(LocalEngine(make(name))._core.forward, GenericForward)


def test_generate_of_transformers_agrees() -> None:
    model = make("qwen3")
    prompt = tokens(30)
    own = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, 30:].tolist()
    assert ask(LocalEngine(model), greedy("a", prompt, 20))[0].token_ids == own
