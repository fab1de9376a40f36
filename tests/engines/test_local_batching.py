"""Conversations join and leave between steps, keep what was computed for them, and share what they have in common."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from engines.test_local_tokens import (
    ask,
    greedy,
    is_greedy,
    make,
    one_thread,  # noqa: F401
    own_logprobs,
    tokens,
)
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.cache import SHARED_READS, shared_prefix
from turnwise.types import Completion, Request, Sampling


def speak(conversation: str, prompt: list[int], count: int, seed: int = 0) -> Request:
    return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=count), seed=seed)


def test_a_later_turn_computes_only_what_is_new() -> None:
    engine = LocalEngine(make("qwen3"), threads=1)
    prompt = tokens(50)
    said = ask(engine, speak("a", prompt, 10))[0]
    assert engine.stats.prefilled_tokens == 50
    whole = prompt + list(said.token_ids) + tokens(5, 1)
    ask(engine, speak("a", whole, 10))
    # the last sampled token was never fed
    assert engine.stats.prefilled_tokens == 50 + 5 + 1
    assert engine.stats.reused_tokens == 59
    assert engine.stats.sampled_tokens == 20


def test_a_rewritten_history_keeps_the_common_beginning() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    prompt = tokens(60)
    ask(engine, speak("a", prompt, 10))
    rewritten = prompt[:41] + tokens(9, 2)
    is_greedy(model, rewritten, ask(engine, greedy("a", rewritten))[0])
    assert engine.stats.reused_tokens == 41
    shorter = rewritten[:30]
    is_greedy(model, shorter, ask(engine, greedy("a", shorter))[0])


def test_a_group_computes_its_prompt_once() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    preamble = tokens(48)
    prompts = [preamble + tokens(20 + row, 5 + row) for row in range(4)]
    requests = [greedy(f"{row}/{sample}", prompts[row]) for row in range(4) for sample in range(3)]
    answers = ask(engine, *requests)
    # each distinct token once, and the last one of every other sample, which gives its logits
    distinct = 48 + sum(len(prompt) - 48 for prompt in prompts)
    assert engine.stats.prefilled_tokens == distinct + 8
    for index, answer in enumerate(answers):
        is_greedy(model, prompts[index // 3], answer)


def test_a_new_conversation_takes_over_a_released_one() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    prompt = tokens(64)
    ask(engine, greedy("a", prompt))
    engine.release("a")
    engine.release("nobody")
    other = prompt[:50] + tokens(8, 3)
    is_greedy(model, other, ask(engine, greedy("b", other))[0])
    assert engine.stats.copied_tokens == 50
    assert engine.stats.prefilled_tokens == 64 + 8


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_preamble_that_all_rows_read_once(name: str) -> None:
    model = make(name)
    preamble = tokens(130)
    prompts = [preamble + tokens(3 + index, 9) for index in range(24)]
    assert len(prompts) * len(preamble) > SHARED_READS
    engine = LocalEngine(model, threads=1)
    for prompt, answer in zip(prompts, ask(engine, *[greedy(str(i), p) for i, p in enumerate(prompts)]), strict=True):
        is_greedy(model, prompt, answer)
    # with gaps between the rows
    some = [(str(i), prompts[i] + tokens(i % 5 + 1, i)) for i in range(0, 24) if i not in (3, 4, 11)]
    for (_, prompt), answer in zip(some, ask(engine, *[greedy(*each) for each in some]), strict=True):
        is_greedy(model, prompt, answer)


def test_samples_of_several_long_prompts_read_each_prompt_once() -> None:
    model = make("qwen3")
    prompts = [tokens(200, seed) for seed in range(3)]
    asked = [prompts[index % 3] for index in range(24)]
    assert len(shared_prefix(np.array(asked)).groups) == 3
    engine = LocalEngine(model, threads=1)
    answers = ask(engine, *[speak(str(index), prompt, 6, index) for index, prompt in enumerate(asked)])
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.raw_logprobs == pytest.approx(own_logprobs(model, prompt, answer), abs=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_any_company_any_bound_the_models_own_numbers(seed: int) -> None:
    """Conversations of all kinds at once; whatever is said has the log-probabilities of one pass."""
    model = make("qwen3" if seed % 3 else "gemma3")
    draw = np.random.default_rng(seed)
    engine = LocalEngine(model, threads=1, slots=[2, 5, 40][seed % 3], memory_gb=[1e-4, 3e-4, 1.0][seed % 3])
    preambles = [tokens(size, size) for size in (0, 21, 50)]

    async def one(index: int) -> None:
        history = preambles[draw.integers(3)] + tokens(1 + draw.integers(30), 100)
        for _ in range(3):
            for _ in range(draw.integers(20)):
                await asyncio.sleep(0)
            count, prompt = 1 + int(draw.integers(24)), list(history)
            task = asyncio.create_task(engine.generate(speak(f"{index}", prompt, count, index)))
            if draw.random() < 0.15:
                for _ in range(draw.integers(20)):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
                continue
            said = await task
            assert len(said.token_ids) == count
            assert said.raw_logprobs == pytest.approx(own_logprobs(model, prompt, said), abs=1e-4)
            history = (
                prompt[: draw.integers(1, len(prompt) + 1)] if draw.random() < 0.2 else prompt + list(said.token_ids)
            )
            history += tokens(1 + draw.integers(8), index)
        if draw.random() < 0.7:
            engine.release(f"{index}")

    async def play() -> None:
        await asyncio.gather(*[one(index) for index in range(14)])

    for version in range(2):
        asyncio.run(play())
        asyncio.run(engine.load_weights(version))
    assert not engine._core.cache.running_S.any()


def test_the_generic_pass_shares_too() -> None:
    model = make("gemma3")
    engine = LocalEngine(model, threads=1)
    prompts = [tokens(40) + tokens(10, row) for row in (1, 1, 2)]
    answers = ask(engine, *[greedy(str(index), prompt) for index, prompt in enumerate(prompts)])
    for prompt, answer in zip(prompts, answers, strict=True):
        is_greedy(model, prompt, answer)
    assert engine.stats.prefilled_tokens == 50 + 10 + 1


def test_nobody_waits_for_the_slowest() -> None:
    engine = LocalEngine(make("qwen3"), threads=1)
    ended: list[str] = []

    async def one(request: Request) -> Completion:
        said = await engine.generate(request)
        ended.append(request.conversation)
        return said

    async def play() -> None:
        long = asyncio.create_task(one(speak("long", tokens(9), 150)))
        while engine.stats.sampled_tokens < 20:
            await asyncio.sleep(0)
        await one(speak("short", tokens(30), 5))
        await one(speak("later", tokens(12), 5))
        assert not long.done()
        await long

    asyncio.run(play())
    assert ended == ["short", "later", "long"]
    assert engine.stats.decode_steps == 150


def test_joining_and_leaving_changes_nobodys_tokens() -> None:
    model = make("qwen3")
    requests = [speak(str(i), tokens(5 + 7 * i), 10 + 9 * (i % 5), seed=i) for i in range(12)]
    alone = [ask(LocalEngine(model, threads=1), request)[0].token_ids for request in requests]
    engine = LocalEngine(model, threads=1)

    async def late(index: int) -> Completion:
        for _ in range(4 * index):
            await asyncio.sleep(0)
        return await engine.generate(requests[index])

    async def play() -> list[Completion]:
        return await asyncio.gather(*[late(index) for index in range(12)])

    assert [said.token_ids for said in asyncio.run(play())] == alone


def test_cancelling_frees_the_row_and_leaves_the_slot_consistent() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1, slots=1)
    prompt = tokens(40)

    async def play() -> Completion:
        running = asyncio.create_task(engine.generate(speak("a", prompt, 200)))
        queued = asyncio.create_task(engine.generate(speak("b", tokens(3), 200)))
        while engine.stats.sampled_tokens < 10:
            await asyncio.sleep(0)
        running.cancel()
        queued.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        assert running.cancelled()
        assert queued.cancelled()
        return await engine.generate(greedy("a", prompt + tokens(3, 1)))

    is_greedy(model, prompt + tokens(3, 1), asyncio.run(play()))
    assert engine.stats.reused_tokens == 40
    assert engine.stats.sampled_tokens < 40


def test_a_deadline_cancels_too() -> None:
    engine = LocalEngine(make("qwen3"), threads=1)

    async def play() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.generate(speak("a", tokens(40), 200)), timeout=0.02)
        assert len((await engine.generate(speak("a", tokens(40), 3))).token_ids) == 3

    asyncio.run(play())


def test_two_requests_of_one_conversation_do_not_meet() -> None:
    model = make("qwen3")
    prompts = [tokens(30), tokens(25, 1), tokens(40, 2)]
    answers = ask(LocalEngine(model, threads=1), *[greedy("same", prompt) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        is_greedy(model, prompt, answer)


def test_several_event_loops_one_after_the_other() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)

    async def abandoned() -> None:
        task = asyncio.create_task(engine.generate(speak("a", tokens(40), 200)))
        while engine.stats.sampled_tokens < 5:
            await asyncio.sleep(0)
        assert not task.done()

    asyncio.run(abandoned())
    for _ in range(2):
        is_greedy(model, tokens(40), ask(engine, greedy("a", tokens(40)))[0])


def test_a_queue_longer_than_the_slots() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1, slots=3)
    prompts = [tokens(10 + index) for index in range(11)]
    answers = ask(engine, *[greedy(str(index), prompt) for index, prompt in enumerate(prompts)])
    for prompt, answer in zip(prompts, answers, strict=True):
        is_greedy(model, prompt, answer)


def test_stop_tokens_and_limits() -> None:
    model = make("qwen3")
    prompt = tokens(20)
    own = list(ask(LocalEngine(model, threads=1), greedy("own", prompt))[0].token_ids)
    last = next(token for token in own if own.index(token) >= 3)
    place = own.index(last)
    sampling = Sampling(temperature=0, max_tokens=12, stop_token_ids=(last, 96))
    engine = LocalEngine(model, threads=1)
    stopped, cut = ask(
        engine,
        Request(conversation="a", token_ids=prompt, sampling=sampling),
        Request(conversation="b", token_ids=prompt, sampling=Sampling(temperature=0, max_tokens=2)),
    )
    assert (stopped.token_ids, stopped.finish_reason) == (own[: place + 1], "stop")
    assert (cut.token_ids, cut.finish_reason) == (own[:2], "length")


def test_stop_texts_end_with_the_token_that_completes_them() -> None:
    model = make("qwen3")
    prompt = tokens(20)
    own = list(ask(LocalEngine(model, threads=1), greedy("own", prompt, 40))[0].token_ids)

    def decode(token_ids: list[int]) -> str:
        return "".join(f"{token:02d}." for token in token_ids)

    text = f"{own[5]:02d}.{own[6]:02d}"
    sampling = Sampling(temperature=0, max_tokens=40, stop=("no such text", text))
    engine = LocalEngine(model, threads=1, decode=decode)
    said = ask(engine, Request(conversation="a", token_ids=prompt, sampling=sampling))[0]
    end = next(index for index in range(1, 40) if text in decode(own[: index + 1]))
    assert (list(said.token_ids), said.finish_reason) == (own[: end + 1], "stop")


def test_the_context_ends_a_turn() -> None:
    engine = LocalEngine(make("qwen3"), threads=1, context=50)
    said = ask(engine, speak("a", tokens(45), 100))[0]
    assert (len(said.token_ids), said.finish_reason) == (5, "length")
