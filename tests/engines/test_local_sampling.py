"""The embedded engine samples from the model's distribution, token for token and number for number."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from typing import Any

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
from turnwise.engines.local.scheduler import SamplingTensors, random_stream, sample_tokens, uniforms
from turnwise.models.distribution import sampling_logits
from turnwise.types import Completion, LogprobKind, Request, Sampling

# The embedded engine says what the model says: token for token and number for number, on both forward passes.


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


# What the embedded engine draws, and the log-probabilities that it reports of it.


SAMPLINGS = {
    "plain": Sampling(max_tokens=24),
    "temperature": Sampling(temperature=0.7, max_tokens=24),
    "top-p": Sampling(top_p=0.8, max_tokens=24),
    "top-k": Sampling(temperature=1.3, top_k=5, max_tokens=24),
    "min-p": Sampling(min_p=0.05, max_tokens=24),
    "all": Sampling(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, max_tokens=24),
    "greedy": Sampling(temperature=0, max_tokens=24),
}


def request(name: str, seed: int = 0, conversation: str | None = None) -> Request:
    prompt = tokens(20 + len(name))
    return Request(conversation=conversation or name, token_ids=prompt, sampling=SAMPLINGS[name], seed=seed)


def logits_of(model: torch.nn.Module, asked: Request, said: Completion) -> torch.Tensor:
    """The model's own logits [N, V] at the sampled tokens, in one pass."""
    whole = torch.tensor([[*asked.token_ids, *said.token_ids]])
    with torch.no_grad():
        return model(input_ids=whole).logits[0, len(asked.token_ids) - 1 : -1].float()


def picked(logits_NV: torch.Tensor, said: Completion) -> list[float]:
    ids_N1 = torch.tensor(said.token_ids).unsqueeze(1)
    return logits_NV.log_softmax(dim=-1).gather(1, ids_N1).squeeze(1).tolist()


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_log_probabilities_are_those_of_one_pass(family: str) -> None:
    model = make(family)
    requests = [request(name) for name in SAMPLINGS]
    for asked, said in zip(requests, ask(LocalEngine(model, threads=1), *requests), strict=True):
        logits_NV = logits_of(model, asked, said)
        assert said.raw_logprobs == pytest.approx(picked(logits_NV, said), abs=1e-4)
        assert said.logprob_kind is LogprobKind.SAMPLED
        sampling = asked.sampling
        if sampling.temperature == 0:
            assert list(said.logprobs) == [0.0] * 24
            assert list(said.token_ids) == logits_NV.argmax(dim=-1).tolist()
            continue
        sampled_NV = sampling_logits(
            logits_NV,
            temperature_N=sampling.temperature,
            top_k_N=sampling.top_k,
            top_p_N=sampling.top_p,
            min_p_N=sampling.min_p,
        )
        assert said.logprobs == pytest.approx(picked(sampled_NV, said), abs=1e-4)


def test_a_request_draws_the_same_in_whatever_company() -> None:
    model = make("qwen3")
    alone = [ask(LocalEngine(model, threads=1), request("plain", seed))[0].token_ids for seed in range(3)]
    others = [request("top-p", 7), request("greedy"), *[request("plain", seed, f"c{seed}") for seed in range(3)]]
    together = [said.token_ids for said in ask(LocalEngine(model, threads=1), *others)[2:]]
    assert together == alone
    assert len({tuple(each) for each in alone}) == 3


def test_one_thread_repeats_every_bit() -> None:
    model = make("qwen3")
    requests = [request(name, seed, f"{name}{seed}") for seed in range(4) for name in SAMPLINGS]
    first, second = (ask(LocalEngine(model, threads=1), *requests) for _ in range(2))
    assert first == second


def test_draws_follow_the_distribution() -> None:
    count = 20_000
    logits_NV = torch.tensor([0.0, 1.0, 2.0, -torch.inf, 0.5]).expand(count, 5)
    sampling = Sampling(temperature=0.8)
    numbers_N = uniforms(np.full(count, random_stream(3)), np.arange(count))
    drawn = sample_tokens(logits_NV, SamplingTensors.of([sampling] * count, torch.device("cpu")), numbers_N)
    share_V = np.bincount(drawn.tokens_B, minlength=5) / count
    expected_V = (logits_NV[0] / 0.8).softmax(dim=-1).numpy()
    # four standard deviations of the largest share
    assert share_V == pytest.approx(expected_V, abs=4 * 0.5 / count**0.5)
    assert share_V[3] == 0


@pytest.mark.parametrize("number", [0.0, 1.0 - 2.0**-24])
def test_the_ends_of_the_stream_draw_no_impossible_token(number: float) -> None:
    logits_1V = torch.tensor([[-torch.inf, 0.0, -60.0, 0.3, -torch.inf, -torch.inf]])
    drawn = sample_tokens(
        logits_1V, SamplingTensors.of([Sampling()], torch.device("cpu")), np.array([number], dtype=np.float32)
    )
    assert drawn.tokens_B[0] in (1, 3)
    assert np.isfinite(drawn.logprobs_B).all()


def test_the_stream_is_even_and_neighbours_are_strangers() -> None:
    streams_N = np.array([random_stream(seed) for seed in range(-500, 500)], dtype=np.uint64)
    numbers_NI = np.stack([uniforms(streams_N, np.full(1000, index)) for index in range(100)], axis=1)
    assert numbers_NI.min() >= 0
    assert numbers_NI.max() < 1
    assert numbers_NI.mean() == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(numbers_NI[:-1].ravel(), numbers_NI[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(numbers_NI[:, :-1].ravel(), numbers_NI[:, 1:].ravel())[0, 1]) < 0.02


def test_half_precision() -> None:
    model = make("qwen3").to(torch.bfloat16)
    asked = request("temperature")
    said = ask(LocalEngine(model, threads=1), asked)[0]
    own = picked(logits_of(model, asked, said), said)
    assert said.raw_logprobs is not None
    assert np.abs(np.array(said.raw_logprobs) - own).mean() < 0.1


# The distribution sampled from, held against a plain loop over one row's tokens; each filter by itself at its edges.


LOGITS = [3.0, 1.0, 2.5, -4.0, 2.0, -9.0]


def kept(logits: list[float], *, temperature: float, top_k: int, top_p: float, min_p: float) -> list[float]:
    """The probabilities of the tokens: temperature, the `top_k` most probable, of these the fewest that reach `top_p`, and
    those of at least `min_p` times the largest probability."""
    scaled = [logit / temperature for logit in logits]
    order = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    if top_k:
        order = order[:top_k]
    total = sum(math.exp(scaled[token]) for token in order)
    if top_p < 1:
        chosen, reached = [], 0.0
        for token in order:
            if chosen and reached >= top_p:
                break
            chosen.append(token)
            reached += math.exp(scaled[token]) / total
        order = chosen
    order = [token for token in order if math.exp(scaled[token] - max(scaled)) >= min_p]
    total = sum(math.exp(scaled[token]) for token in order)
    return [math.exp(scaled[token]) / total if token in order else 0.0 for token in range(len(logits))]


OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    *({"top_k": k} for k in (1, 2, 5, 6, 99)),
    *({"top_p": p} for p in (1e-9, 0.5, 0.8, 0.98, 0.9999)),
    *({"min_p": p} for p in (1e-6, 1e-3, 0.3, 0.7, 0.999)),
    {"top_k": 3, "top_p": 0.7},
    {"top_k": 1, "min_p": 0.5},
    {"top_p": 0.95, "min_p": 0.5},
    {"temperature": 0.3, "top_k": 4, "top_p": 0.9, "min_p": 0.05},
]

PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_each_filter_leaves_what_a_plain_loop_leaves(options: dict[str, Any]) -> None:
    given = {f"{name}_N": value for name, value in options.items()}
    found = sampling_logits(torch.tensor([LOGITS]), **given)[0].softmax(-1)
    assert found.tolist() == pytest.approx(kept(LOGITS, **{**PLAIN, **options}), abs=1e-6)


def test_rows_have_options_of_their_own() -> None:
    rows = [{**PLAIN, **options} for options in OPTIONS]
    columns = {f"{name}_N": torch.tensor([row[name] for row in rows]) for name in PLAIN}
    found_NV = sampling_logits(torch.tensor([LOGITS] * len(rows)), **columns).softmax(-1)
    for found, row in zip(found_NV, rows, strict=True):
        assert found.tolist() == pytest.approx(kept(LOGITS, **row), abs=1e-6)


@pytest.mark.parametrize("options", [{"top_k_N": 1}, {"top_p_N": 1e-9}, {"min_p_N": 0.999}])
def test_the_token_that_was_sampled_is_never_left_out(options: dict[str, Any]) -> None:
    found = sampling_logits(torch.tensor([LOGITS]), keep_N=torch.tensor([4]), **options)[0].softmax(-1)
    pair = [math.exp(3.0), math.exp(2.0)]
    expected = [0.0] * 6
    expected[0], expected[4] = pair[0] / sum(pair), pair[1] / sum(pair)
    assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_without_an_option_the_logits_are_the_same_tensor() -> None:
    logits_NV = torch.tensor([LOGITS])
    assert sampling_logits(logits_NV) is logits_NV
