"""The embedded engine samples from the model's distribution, token for token, and from several models on one base."""

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

from support.hybrids import hybrid
from support.mixtures import disturb_routers, mixture
from support.tiny import tiny_model
from turnwise.engines.engine import Engine
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.forward import GenericForward
from turnwise.engines.local.fused import FusedForward, unsupported_reason
from turnwise.engines.local.scheduler import SamplingTensors, random_stream, sample_tokens, uniforms
from turnwise.errors import EngineError
from turnwise.models.distribution import sampling_logits
from turnwise.models.lora import add_adapter, with_second_adapter, without_adapter
from turnwise.options.algorithm import LoraSection
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


# Several models with the same base weights in one embedded engine: each token of a batch has the adapter of its own
# model


FAMILIES = ["qwen3", "qwen3_5", "falcon_h1", "lfm2", "granite_hybrid", "qwen3_moe", "qwen3_next"]
"""Attention; linear attention, Mamba 2 and convolutions beside it; experts, also with adapters on a shared expert (Granite,
Qwen3-Next)."""
PROMPTS = [[5, 9, 11, 30, 7, 21, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53], [8, 6, 7, 5, 3, 10, 9]]


def family(name: str) -> PreTrainedModel:
    if name == "qwen3":
        return tiny_model()
    if name != "qwen3_moe":
        return hybrid(name)
    model = mixture(name)
    disturb_routers(model)
    return model


def models_of(base: PreTrainedModel) -> list[PreTrainedModel]:
    """Three models on the weights of `base`: two adapters of different ranks and layers, and none."""
    add_adapter(base, LoraSection(rank=4), seed=0)
    targets = ["o_proj" if "lfm" not in base.config.model_type else "out_proj", "k_proj"]
    second = with_second_adapter(base, LoraSection(rank=2, alpha=5, target_modules=targets), seed=1)
    generator = torch.Generator().manual_seed(2)
    for model in (base, second):
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3
    return [base, second, without_adapter(base)]


def engines_of(models: Sequence[PreTrainedModel]) -> list[Engine]:
    first = LocalEngine(models[0], threads=1, context=256)
    others = [first.with_model(model, version=10 * number) for number, model in enumerate(models) if number]
    return [first, *(other for other in others if other is not None)]


async def converse(engine: Engine, name: str, prompt: list[int], seed: int) -> list[tuple[list[int], Completion]]:
    """Two turns: the tokens before each completion, and the completion."""
    tokens, said = list(prompt), list[tuple[list[int], Completion]]()
    for turn in range(2):
        sampling = Sampling(max_tokens=4 + seed % 3)
        request = Request(conversation=name, token_ids=list(tokens), sampling=sampling, seed=10 * seed + turn)
        completion = await engine.generate(request)
        said.append((list(tokens), completion))
        tokens += [*completion.token_ids, 12 + turn]
    return said


def play(engines: Sequence[Engine]) -> list[list[list[tuple[list[int], Completion]]]]:
    """By engine: four conversations on two prompts. All conversations run at the same time."""

    async def run() -> list[list[list[tuple[list[int], Completion]]]]:
        tasks = [
            [converse(engine, f"{number}-{seed}", PROMPTS[seed % 2], seed) for seed in range(4)]
            for number, engine in enumerate(engines)
        ]
        return [list(part) for part in await asyncio.gather(*(asyncio.gather(*part) for part in tasks))]

    return asyncio.run(run())


@torch.no_grad()
def difference(model: PreTrainedModel, before: list[int], completion: Completion) -> float:
    """The largest difference from the log-probabilities of the model's own pass."""
    ids = torch.tensor([[*before, *completion.token_ids]])
    logprobs_TV = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    own = [float(logprobs_TV[len(before) - 1 + n, token]) for n, token in enumerate(completion.token_ids)]
    return float(np.abs(np.array(own) - np.array(completion.logprobs)).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_models_of_one_base_sample_in_one_batch_what_each_of_them_says(name: str) -> None:
    models = models_of(family(name))
    engines = engines_of(models)
    assert len(engines) == 3
    together = play(engines)
    for number, (model, other) in enumerate(zip(models, [*models[1:], models[0]], strict=True)):
        turns = [turn for conversation in together[number] for turn in conversation]
        assert max(difference(model, *turn) for turn in turns) < 2e-5
        assert max(difference(other, *turn) for turn in turns) > 1e-2
        assert {version for _, completion in turns for version in completion.versions} == {10 * number}
        alone = play([LocalEngine(model, threads=1, context=256)])[0]
        for (_, one), (_, two) in zip(turns, [turn for conversation in alone for turn in conversation], strict=True):
            assert one.token_ids == two.token_ids
            assert np.abs(np.array(one.logprobs) - np.array(two.logprobs)).max() < 1e-5


def test_a_batch_of_two_models_takes_the_steps_of_one_and_keeps_their_prefixes_apart() -> None:
    models = models_of(tiny_model())[:2]
    first, second = engines_of(models)
    assert isinstance(first, LocalEngine)
    both = play([first, second])
    only = LocalEngine(models[0], threads=1, context=256)
    play([only])
    assert first.stats.decode_steps == only.stats.decode_steps
    # each model has computed the two prompts once, and its other conversations have copied them
    assert first.stats.prefilled_tokens == 2 * only.stats.prefilled_tokens
    assert first.stats.copied_tokens == 2 * only.stats.copied_tokens > 0
    assert [len(part) for part in both] == [4, 4]


def test_new_weights_of_one_model_leave_the_cache_of_the_other_and_are_used_at_once() -> None:
    models = models_of(tiny_model())[:2]
    first, second = engines_of(models)

    async def run() -> tuple[list[Completion], list[Completion]]:
        request = Request(conversation="a", token_ids=PROMPTS[0], sampling=Sampling(max_tokens=5), seed=3)
        before = [await engine.generate(request) for engine in (first, second)]
        for name, parameter in models[1].named_parameters():
            if "lora_B" in name:
                parameter.data.neg_()
        await second.load_weights(11)
        return before, [await engine.generate(request) for engine in (first, second)]

    before, after = asyncio.run(run())
    assert [completion.versions[0] for completion in (*before, *after)] == [0, 10, 0, 11]
    assert before[0].logprobs == pytest.approx(after[0].logprobs, abs=1e-6)
    assert difference(models[1], PROMPTS[0], after[1]) < 2e-5 < difference(models[1], PROMPTS[0], before[1])


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5", "qwen3_moe"])
def test_new_weights_of_a_base_are_new_weights_of_all_that_are_on_it(name: str) -> None:
    """The first model has no adapter and is changed in place; the second one's keys, values and states of old weights are not
    used again, and its running request goes on with the new weights."""
    base = family(name)
    targets = ["q_proj", "k_proj", "v_proj"]
    second = with_second_adapter(base, LoraSection(rank=3, target_modules=targets), seed=1)
    for parameter in [one for part, one in second.named_parameters() if "lora_B" in part]:
        parameter.data.normal_(generator=torch.Generator().manual_seed(4)).mul_(0.3)
    assert [part for part, one in second.named_parameters() if one.requires_grad and ".lora_" not in part] == []
    assert all(one.requires_grad for one in base.parameters())
    engines = engines_of([base, second])
    assert len(engines) == 2, "one engine computes both"
    first = engines[0]
    assert isinstance(first, LocalEngine)

    prompt = [5 + (7 * place) % 90 for place in range(60)]

    def ask(conversation: str, length: int = 5) -> Request:
        return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=length), seed=3)

    async def both(conversation: str) -> list[Completion]:
        return [await engine.generate(ask(f"{conversation}{number}")) for number, engine in enumerate(engines)]

    async def run() -> tuple[list[list[Completion]], Completion, list[list[Completion]]]:
        before = [await both("a"), await both("b")]
        running = asyncio.create_task(engines[1].generate(ask("long", 80)))
        sampled = first.stats.sampled_tokens
        while first.stats.sampled_tokens < sampled + 10:
            await asyncio.sleep(0)
        with torch.no_grad():
            for parameter in base.parameters():
                parameter.mul_(1.1)
        await first.load_weights(1)
        after = [await both("a"), await both("b")]
        assert not running.done()
        long = await running
        return before, long, [*after, await both("c")]

    before, long, after = asyncio.run(run())
    assert [[set(one.versions) for one in part] for part in before] == [[{0}, {10}]] * 2
    assert set(long.versions) == {10, 1}
    assert [[set(one.versions) for one in part] for part in after] == [[{1}, {1}]] * 3
    for number, model in enumerate((base, second)):
        assert [bool(part[number].cached_tokens) for part in before] == [False, True]
        assert [bool(part[number].cached_tokens) for part in after] == [False, True, True]
        assert min(difference(model, prompt, part[number]) for part in before) > 1e-3, "the weights have changed"
        assert max(difference(model, prompt, part[number]) for part in after) < 2e-5


def test_an_adapter_that_is_not_finite_fails_its_own_requests_only() -> None:
    models = models_of(tiny_model())[:2]
    first, second = engines_of(models)
    next(parameter for name, parameter in models[1].named_parameters() if "lora_B" in name).data.fill_(float("nan"))

    async def run() -> tuple[Completion, BaseException]:
        def ask(name: str, length: int) -> Request:
            return Request(conversation=name, token_ids=PROMPTS[0], sampling=Sampling(max_tokens=length), seed=3)

        good, bad = await asyncio.gather(
            first.generate(ask("a", 6)), second.generate(ask("b", 6)), return_exceptions=True
        )
        assert isinstance(good, Completion)
        assert isinstance(bad, BaseException)
        return good, bad

    good, bad = asyncio.run(run())
    assert isinstance(bad, EngineError)
    assert "NaN or infinite logits" in str(bad)
    assert difference(models[0], PROMPTS[0], good) < 2e-5


def test_other_base_weights_and_closed_engines_are_refused() -> None:
    models = models_of(tiny_model())[:2]
    first, second = engines_of(models)
    assert isinstance(first, LocalEngine)
    assert first.with_model(tiny_model(), 0) is None
    asyncio.run(second.close())
    request = Request(conversation="a", token_ids=PROMPTS[0], sampling=Sampling(max_tokens=2))
    with pytest.raises(EngineError, match="closed"):
        asyncio.run(second.generate(request))
    assert asyncio.run(first.generate(request)).token_ids
