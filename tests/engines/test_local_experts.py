"""The embedded engine records the experts of each token: those that computed the keys and values that it reads.

What was recorded is compared with one pass over the whole sequence. The conversations share prompts in groups, have several
turns, are cut inside a turn, and lose their rows.
"""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from support.mixtures import CONFIGS, VOCABULARY, disturb_routers, mixture
from turnwise.engines.local import LocalEngine
from turnwise.errors import ConfigError
from turnwise.models.experts import RouterPass, Routers
from turnwise.training.batch import routes_of
from turnwise.types import Request, Routes, Sampling, Segment

QUICK = ["qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5_moe", "glm4_moe", "llama4"]
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]


def recorded(segment: Segment) -> torch.Tensor:
    """The experts of the tokens of a segment, [T, L, K]; all but the last are known."""
    assert segment.routes is not None
    assert len(segment.routes) == len(segment) - 1
    routes = routes_of(segment, len(segment))
    assert routes is not None
    return torch.from_numpy(routes)


def one_pass(
    model: PreTrainedModel, tokens: list[int], replay_TLK: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The log-probabilities [T, V] and the experts [T, L, K] of a pass without a cache."""
    used: list[torch.Tensor] = []
    assert Routers.of(model) is not None
    with torch.no_grad(), RouterPass(lambda choice: used.append(choice.index_TK), replay_TLK).active():
        logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits_TV.float().log_softmax(-1), torch.stack(used, dim=1)


async def converse(engine: LocalEngine, number: int, prompt: list[int], turns: int) -> Segment:
    random, segment = np.random.default_rng(number), Segment()
    segment.append_context(prompt)
    for turn in range(turns):
        request = Request(
            conversation=f"c{number}",
            token_ids=list(segment.token_ids),
            sampling=Sampling(max_tokens=int(random.integers(3, 9))),
            seed=100 * number + turn,
            routes=segment.routes,
        )
        segment.append_completion(turn, await engine.generate(request))
        if turn == 1 and number % 3 == 0:
            segment.truncate(len(segment) - 2)
            continue  # goes on directly after a token that was computed before
        if turn < turns - 1:
            segment.append_context(random.integers(3, VOCABULARY, int(random.integers(1, 9))).tolist())
    engine.release(f"c{number}")
    return segment


def hold(model: PreTrainedModel, *, rows: int | None = None, turns: int = 4) -> list[Segment]:
    """Eight conversations in two groups, all at the same time. `rows`: the memory that so many long conversations need."""

    async def run() -> list[Segment]:
        engine = LocalEngine(model, threads=1, context=512, record_routes=True)
        if rows is not None:
            kv = engine._core.cache.kv
            memory = rows * (kv.row_bytes + 100 * kv.token_bytes) / 2**30
            engine = LocalEngine(model, threads=1, context=512, record_routes=True, memory_gb=memory)
        random = np.random.default_rng(0)
        prompts = [random.integers(3, VOCABULARY, 20 + 7 * n).tolist() for n in range(2)]
        held = await asyncio.gather(*(converse(engine, n, prompts[n // 4], turns) for n in range(8)))
        if rows is not None:
            assert engine.stats.evictions + engine.stats.preemptions > 0
        await engine.close()
        return held

    return asyncio.run(run())


@pytest.mark.parametrize("rows", [None, 3], ids=["all resident", "evicted"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_recorded_experts_are_those_of_one_pass(family: str, rows: int | None) -> None:
    model = mixture(family)
    for segment in hold(model, rows=rows):
        _, own_TLK = one_pass(model, list(segment.token_ids))
        assert torch.equal(recorded(segment)[:-1].long(), own_TLK[:-1])


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_known_experts_are_used_again_where_tokens_are_computed_again(family: str) -> None:
    model = mixture(family)
    tokens = np.random.default_rng(5).integers(3, VOCABULARY, 30).tolist()
    _, own_TLK = one_pass(model, tokens)
    # as if other weights had chosen: a recorded conversation whose rows are lost
    others_TLK = (own_TLK + 3) % int(own_TLK.max() + 1)
    routes = Routes(*others_TLK.shape[1:], 1, others_TLK.numpy().astype(np.uint8).tobytes())

    async def run() -> list[Segment]:
        engine = LocalEngine(model, threads=1, context=128, record_routes=True)
        segments: list[Segment] = []
        for number, known in enumerate((None, routes, routes.first(20), None)):
            segment = Segment()
            segment.append_context(tokens)
            request = Request(
                conversation=f"{number}", token_ids=tokens, sampling=Sampling(max_tokens=6), seed=1, routes=known
            )
            segment.append_completion(0, await engine.generate(request))
            segments.append(segment)
        await engine.close()
        return segments

    plain, other, half, again = asyncio.run(run())
    assert torch.equal(recorded(plain)[: len(tokens)].long(), own_TLK)
    assert torch.equal(recorded(other)[: len(tokens)].long(), others_TLK)  # the equal prompt before was not copied
    assert torch.equal(recorded(half)[:20].long(), others_TLK[:20])
    assert torch.equal(recorded(again)[:20], recorded(other)[:20]) or torch.equal(recorded(again), recorded(plain))
    for segment in (plain, other, half, again):
        ids = list(segment.token_ids)
        logprob_TV, used_TLK = one_pass(model, ids, recorded(segment).long())
        assert torch.equal(used_TLK[:-1], recorded(segment)[:-1].long())
        own = logprob_TV[len(tokens) - 1 : -1].gather(1, torch.tensor(ids)[len(tokens) :, None]).squeeze(1)
        assert (own - torch.tensor(list(segment.logprobs))[len(tokens) :]).abs().max() < 2e-5


def test_new_weights_do_not_change_the_experts_of_a_conversation_that_goes_on() -> None:
    model = mixture("qwen3_moe")

    async def run() -> tuple[Segment, Routes]:
        engine = LocalEngine(model, threads=1, context=128, record_routes=True)
        segment = Segment()
        segment.append_context([5, 6, 7, 8, 9, 10, 11, 12, 13])
        for turn in range(2):
            request = Request(
                conversation="c",
                token_ids=list(segment.token_ids),
                sampling=Sampling(max_tokens=8),
                seed=turn,
                routes=segment.routes,
            )
            segment.append_completion(turn, await engine.generate(request))
            if turn == 0:
                assert segment.routes is not None
                first = segment.routes
                disturb_routers(model)
                await engine.load_weights(1)
        await engine.close()
        return segment, first

    segment, first = asyncio.run(run())
    assert segment.routes is not None
    assert segment.routes.first(len(first)) == first
    _, new_TLK = one_pass(model, list(segment.token_ids))
    assert not torch.equal(new_TLK[: len(first)], recorded(segment)[: len(first)].long())
    # the tokens of the second turn were computed after these keys and values
    _, used_TLK = one_pass(model, list(segment.token_ids), recorded(segment).long())
    assert torch.equal(used_TLK[:-1], recorded(segment)[:-1].long())


def test_routes_are_in_the_memory_bound_and_only_recorded_when_asked_for() -> None:
    model = mixture("qwen3_moe")
    plain, recording = LocalEngine(model, threads=1), LocalEngine(model, threads=1, record_routes=True)
    assert (
        recording._core.cache.kv.token_bytes == plain._core.cache.kv.token_bytes + 3 * 2
    )  # layers, experts of a token

    async def sample() -> Routes | None:
        request = Request(conversation="c", token_ids=[5, 6], sampling=Sampling(max_tokens=2))
        return (await plain.generate(request)).routes

    assert asyncio.run(sample()) is None


def test_a_model_without_experts_is_refused() -> None:
    from support.tiny import tiny_model

    with pytest.raises(ConfigError, match=r"model\.router_replay=true: Qwen3ForCausalLM is no mixture of experts"):
        LocalEngine(tiny_model(), record_routes=True)
