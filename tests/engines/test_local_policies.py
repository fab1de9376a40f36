"""Several models with the same base weights in one embedded engine: each token of a batch has the adapter of its own model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.hybrids import hybrid
from support.mixtures import disturb_routers, mixture
from support.tiny import tiny_model
from turnwise.engines.engine import Engine
from turnwise.engines.local import LocalEngine
from turnwise.errors import EngineError
from turnwise.models.lora import add_adapter, with_second_adapter, without_adapter
from turnwise.options.algorithm import LoraSection
from turnwise.types import Completion, Request, Sampling

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
