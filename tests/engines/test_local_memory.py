"""The bound of the cache holds, and nobody's tokens change because of it."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from engines.test_local_tokens import ask, greedy, is_greedy, make, one_thread, own_logprobs, tokens  # noqa: F401
from turnwise.engines.engine import SharedWeights
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.cache import FREE, KVCache, KVShape, PrefixCache, PrefixMatch
from turnwise.errors import EngineError
from turnwise.types import Completion, Request, Sampling

TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # of make("qwen3")


def gigabytes(count: int) -> float:
    return count * TOKEN_BYTES / 2**30


def speak(conversation: str, prompt: list[int], count: int, seed: int = 0) -> Request:
    return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=count), seed=seed)


def conversations(engine: LocalEngine, count: int) -> list[list[Completion]]:
    """Three turns each, of lengths that differ, all at once."""

    async def one(index: int) -> list[Completion]:
        history, turns = tokens(20 + 3 * index), []
        for turn in range(3):
            turns.append(await engine.generate(speak(str(index), history, 8 + (index * 5 + turn * 7) % 24, index)))
            history = history + list(turns[-1].token_ids) + tokens(6, turn)
            assert engine.cache_bytes <= engine._core.cache.kv.budget_bytes
            for _ in range(index):
                await asyncio.sleep(0)
        return turns

    async def all_of_them() -> list[list[Completion]]:
        return await asyncio.gather(*[one(index) for index in range(count)])

    return asyncio.run(all_of_them())


def test_a_small_cache_says_the_same() -> None:
    model = make("qwen3")
    plenty = LocalEngine(model, threads=1)
    expected = conversations(plenty, 9)
    assert (plenty.stats.evictions, plenty.stats.preemptions) == (0, 0)
    little = LocalEngine(model, threads=1, memory_gb=gigabytes(600))
    answers = conversations(little, 9)
    assert [[turn.token_ids for turn in turns] for turns in answers] == [
        [turn.token_ids for turn in turns] for turns in expected
    ]
    gap = [
        np.abs(np.array(one.logprobs) - other.logprobs).max()
        for turns, others in zip(answers, expected, strict=True)
        for one, other in zip(turns, others, strict=True)
    ]
    assert max(gap) < 1e-3
    assert little.stats.evictions > 0


def test_a_large_cache_is_freed_before_an_update_unless_a_request_is_running(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LocalEngine(make("qwen3"), threads=1)
    publisher = SharedWeights(engine, engine.free_cache)

    async def play() -> None:
        first = await engine.generate(speak("a", tokens(20), 8))
        small = engine.cache_bytes
        await publisher.before_update()
        assert engine.cache_bytes == small > 0
        monkeypatch.setattr("turnwise.engines.local.engine.LARGE_CACHE", small)
        running = asyncio.create_task(engine.generate(speak("b", tokens(20), 30)))
        while engine.stats.sampled_tokens < 12:
            await asyncio.sleep(0)
        await publisher.before_update()
        assert engine.cache_bytes == small
        assert len((await running).token_ids) == 30
        await publisher.before_update()
        assert engine.cache_bytes == 0
        again = await engine.generate(speak("a", tokens(20), 8))
        assert (again.token_ids, again.cached_tokens) == (first.token_ids, 0)
        await publisher.publish(1)
        assert (await engine.generate(speak("a", tokens(20), 8))).versions == [1] * 8

    asyncio.run(play())


def test_the_youngest_makes_way_and_loses_nothing() -> None:
    model = make("qwen3")
    requests = [speak(str(index), tokens(30, index), 150, seed=index) for index in range(4)]
    expected = [ask(LocalEngine(model, threads=1), request)[0] for request in requests]
    engine = LocalEngine(model, threads=1, memory_gb=gigabytes(400))
    answers = ask(engine, *requests)
    assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
    for one, other in zip(answers, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
    assert engine.stats.preemptions > 0
    assert engine.stats.sampled_tokens == 4 * 150


def test_an_evicted_conversation_is_computed_again() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1, slots=2)
    prompts = [tokens(20 + 9 * index) for index in range(3)]
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            is_greedy(model, prompt, ask(engine, greedy(str(index), prompt))[0])
    assert engine.stats.evictions >= 3


@pytest.mark.parametrize("last", ["a", "b", "c"])
def test_the_conversation_that_spoke_longest_ago_loses_its_slot(last: str) -> None:
    prompts = {name: tokens(20, seed) for seed, name in enumerate("abcd")}
    engine = LocalEngine(make("qwen3"), threads=1, slots=3)
    order = [*(name for name in "abc" if name != last), last]
    for name in ["a", "b", "c", *order]:
        ask(engine, greedy(name, prompts[name]))
    assert engine.stats.evictions == 0
    ask(engine, greedy("d", prompts["d"]))
    assert engine.stats.evictions == 1
    for name in order[1:]:  # they are where they were
        before = engine.stats.prefilled_tokens
        ask(engine, greedy(name, prompts[name]))
        assert engine.stats.prefilled_tokens - before <= 1
    assert engine.stats.evictions == 1
    ask(engine, greedy(order[0], prompts[order[0]]))
    assert engine.stats.evictions == 2


def test_a_long_conversation_does_not_keep_the_rows_long() -> None:
    engine = LocalEngine(make("qwen3"), threads=1, memory_gb=gigabytes(400))
    ask(engine, speak("a", tokens(200), 50))
    asyncio.run(engine.load_weights(1))
    ask(engine, *[speak(str(index), tokens(20, index), 20) for index in range(5)])
    assert engine.stats.decode_steps == 50 + 20
    assert (engine.stats.evictions, engine.stats.preemptions) == (0, 0)


def test_making_room_for_somebody_who_must_wait_moves_those_who_run() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1, memory_gb=gigabytes(500))

    async def play() -> tuple[Completion, Completion]:
        short = [
            asyncio.create_task(engine.generate(speak(name, tokens(10, index), 4))) for index, name in enumerate("ab")
        ]
        running = asyncio.create_task(engine.generate(speak("c", tokens(12, 3), 60)))
        await asyncio.gather(*short)
        while engine.stats.decode_steps < 12:
            await asyncio.sleep(0)
        # its rows are so long that there is only one of them, and that is taken
        return await asyncio.gather(running, engine.generate(speak("d", tokens(200), 20)))

    for prompt, said in zip((tokens(12, 3), tokens(200)), asyncio.run(play()), strict=True):
        assert said.raw_logprobs == pytest.approx(own_logprobs(model, prompt, said), abs=1e-4)
    assert engine.stats.evictions == 3


def test_what_can_never_fit_is_refused_with_the_fix() -> None:
    engine = LocalEngine(make("qwen3"), threads=1, memory_gb=gigabytes(100))
    with pytest.raises(EngineError, match=r"80 tokens.*by 40.*100 at most.*memory_gb=5\.72e-05"):
        ask(engine, speak("a", tokens(80), 40))
    assert len(ask(engine, speak("a", tokens(80), 20))[0].token_ids) == 20


def test_rows_keep_their_contents_when_they_grow_move_and_shrink() -> None:
    kv = KVCache(
        [KVShape(2, 3, 4), KVShape(1, 1, 2)], dtype=torch.float32, device=torch.device("cpu"), budget_bytes=1 << 20
    )
    assert kv.token_bytes == (24 + 2) * 4
    kv.resize(2, 8)
    for tensor in kv.tensors:
        tensor[:, 0], tensor[:, 1] = 1.0, 2.0
    kv.resize(4, 16)
    assert [tensor.shape[1] for tensor in kv.tensors] == [4, 4]
    assert all((tensor[:, 1, :, :8] == 2).all() and not tensor[:, 1, :, 8:].any() for tensor in kv.tensors)
    kv.swap_rows([0], [1], 8)
    kv.copy_rows([0], [3], 4)
    assert all((tensor[:, 0, :, :8] == 2).all() and (tensor[:, 1, :, :8] == 1).all() for tensor in kv.tensors)
    assert all((tensor[:, 3, :, :4] == 2).all() and not tensor[:, 3, :, 4:].any() for tensor in kv.tensors)
    kv.resize(1, 4)
    assert kv.bytes == 4 * kv.token_bytes
    assert all((tensor == 2).all() for tensor in kv.tensors)


@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        ([0, 0, 0, 1, 1, 0], [2, 3, 4, 5, 7, 6]),  # neighbouring targets with the same source, and others
        ([5, 1, 5], [7, 2, 0]),
        ([0, 1, 2], [1, 2, 0]),  # rows that are source and target
        ([3], [3]),
    ],
)
def test_rows_are_copied_at_the_same_time(sources: list[int], targets: list[int]) -> None:
    kv = KVCache([KVShape(2, 3, 4)] * 2, dtype=torch.float32, device=torch.device("cpu"), budget_bytes=1 << 20)
    kv.resize(8, 16)
    for tensor in kv.tensors:
        tensor.copy_(torch.randn_like(tensor))
    before = [tensor.clone() for tensor in kv.tensors]
    kv.copy_rows(sources, targets, 9, start=2)
    for tensor, old in zip(kv.tensors, before, strict=True):
        for row in range(8):
            source = dict(zip(targets, sources, strict=True)).get(row, row)
            assert tensor[:, row, :, 2:9].equal(old[:, source, :, 2:9])
        assert tensor[:, :, :, :2].equal(old[:, :, :, :2])
        assert tensor[:, :, :, 9:].equal(old[:, :, :, 9:])


def test_the_search_finds_the_longest_prefix_token_for_token() -> None:
    kv = KVCache([KVShape(1, 1, 1)], dtype=torch.float32, device=torch.device("cpu"), budget_bytes=1 << 20)
    cache = PrefixCache(kv, num_slots=8, context=512)
    texts = [np.array(tokens(70)), np.array(tokens(70)[:53] + tokens(30, 1)), np.array(tokens(40, 2))]
    for index, text in enumerate(texts):
        slot = cache.allocate(len(text) + 1, ())
        assert slot == index
        cache.start_request(slot, str(index), text, 0)
        cache.finish_prefill(slot, len(text))
    for wanted, expected in (
        (texts[0], (0, 70)),
        (texts[1][:60], (1, 60)),
        (np.concatenate([texts[0][:66], texts[2]]), (0, 66)),
        (np.concatenate([texts[2][:37], texts[0]]), (2, 37)),
        (texts[2][:11], (2, 11)),
    ):
        computed, in_round = cache.longest_prefix(wanted.astype(np.int32))
        assert (computed.slot, computed.tokens) == expected
        assert in_round.slot == FREE
    # without the slot itself, and not at all if no other slot can share as many tokens
    assert cache.longest_prefix(texts[0], besides=0) == (PrefixMatch(1, 53), PrefixMatch())
    assert cache.longest_prefix(texts[0], besides=0, at_least=53) == (PrefixMatch(1, 53), PrefixMatch())
    assert cache.longest_prefix(texts[0], besides=0, at_least=80) == (PrefixMatch(), PrefixMatch())
    for slot in range(3):
        cache.finish_request(slot)
    cache.invalidate()
    assert cache.longest_prefix(texts[0])[0].tokens == 0
