"""The embedded engine's scheduler: batches, requests that come and go, cancellation, and the memory of the cache."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from engines.test_local_sampling import (
    ask,
    greedy,
    is_greedy,
    make,
    one_thread,  # noqa: F401
    own_logprobs,
    tokens,
)
from turnwise.engines.engine import Engine, SharedWeights
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.cache import FREE, SHARED_READS, KVCache, KVShape, PrefixCache, PrefixMatch, shared_prefix
from turnwise.engines.local.forward import GenericForward
from turnwise.engines.local.scheduler import LONGEST_WAIT
from turnwise.errors import EngineError
from turnwise.types import Completion, Request, Sampling

# Conversations join and leave between steps, keep what was computed for them, and share what they have in common.


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


@pytest.mark.parametrize(("running", "together"), [(20, [2, 1]), (4, [1, 1, 1])])
def test_requests_that_arrive_one_by_one_start_together_beside_many_others(running: int, together: list[int]) -> None:
    engine, started = LocalEngine(make("qwen3"), threads=1), list[tuple[int, int]]()
    scheduler = engine._core.scheduler
    prefill = scheduler._prefill

    def counted(plan: Any) -> None:
        started.append((engine.stats.decode_steps, len(plan.started)))
        prefill(plan)

    scheduler._prefill = counted

    async def play() -> None:
        asked = [asyncio.create_task(engine.generate(speak(str(i), tokens(10, i), 40, i))) for i in range(running)]
        for step in (5, 6, 20):
            while engine.stats.decode_steps < step:
                await asyncio.sleep(0)
            asked.append(asyncio.create_task(engine.generate(speak(f"at {step}", tokens(9, 50 + step), 3))))
        await asyncio.gather(*asked)

    asyncio.run(play())
    assert [count for _, count in started] == [running, *together]
    assert 20 <= started[-1][0] <= 20 + LONGEST_WAIT


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
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


# The engine's life beside a trainer: new weights, failures, the end, and the models that it refuses.


def change(model: nn.Module) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def life_speak(conversation: str, prompt: list[int], count: int) -> Request:
    return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=count))


def test_it_is_an_engine() -> None:
    engine: Engine = LocalEngine(make("qwen3"), version=4)
    assert engine.version == 4


def test_weights_changed_in_place_are_sampled_with_at_once() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    prompt = tokens(40)
    before = ask(engine, life_speak("a", prompt, 10))[0]
    change(model)
    asyncio.run(engine.load_weights(1))
    whole = prompt + list(before.token_ids)
    after, sibling = ask(engine, life_speak("a", whole, 10), life_speak("b", prompt, 10))
    assert engine.stats.reused_tokens == 0
    assert (list(before.versions), list(after.versions)) == ([0] * 10, [1] * 10)
    assert after.logprobs == pytest.approx(own_logprobs(model, whole, after), abs=1e-4)
    assert sibling.logprobs == pytest.approx(own_logprobs(model, prompt, sibling), abs=1e-4)


def test_weights_change_under_a_running_request() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    prompt = tokens(40)

    async def play() -> Completion:
        running = asyncio.create_task(engine.generate(life_speak("a", prompt, 30)))
        while engine.stats.sampled_tokens < 12:
            await asyncio.sleep(0)
        change(model)
        await engine.load_weights(1)
        # what the old weights have computed is not shared, neither now nor later
        fresh = await engine.generate(life_speak("b", prompt, 5))
        assert fresh.logprobs == pytest.approx(own_logprobs(model, prompt, fresh), abs=1e-4)
        return await running

    said = asyncio.run(play())
    changed = list(said.versions).index(1)
    assert list(said.versions) == [0] * changed + [1] * (30 - changed)
    assert changed in (12, 13)
    assert engine.stats.copied_tokens == 0
    whole = prompt + list(said.token_ids)
    after = ask(engine, life_speak("a", whole, 5))[0]
    assert after.logprobs == pytest.approx(own_logprobs(model, whole, after), abs=1e-4)


def test_weights_by_name() -> None:
    model, other = make("qwen3"), make("qwen3")
    change(other)
    engine = LocalEngine(model, threads=1)
    state = dict(other.state_dict())
    asyncio.run(engine.load_weights(7, state))
    assert engine.version == 7
    is_greedy(other, tokens(30), ask(engine, greedy("a", tokens(30)))[0])
    # of tied weights one is enough
    asyncio.run(engine.load_weights(8, {name: state[name] for name in state if name != "lm_head.weight"}))
    with pytest.raises(EngineError, match=r"not the model's: model\.nothing"):
        asyncio.run(engine.load_weights(9, {**state, "model.nothing": torch.zeros(1)}))
    with pytest.raises(EngineError, match=r"missing: model\.norm\.weight"):
        asyncio.run(engine.load_weights(9, {name: state[name] for name in state if name != "model.norm.weight"}))
    with pytest.raises(EngineError, match="another shape"):
        asyncio.run(engine.load_weights(9, {**state, "model.norm.weight": torch.zeros(3)}))
    assert engine.version == 8


@pytest.mark.parametrize("name", ["qwen3", "gpt2"])
def test_the_trainer_can_train_between_turns(name: str) -> None:
    model = make(name).train()
    threads = torch.get_num_threads()
    engine = LocalEngine(model)
    prompt = tokens(30)
    first = ask(engine, greedy("a", prompt))[0]
    assert model.training
    assert torch.get_num_threads() == threads
    # in training mode GPT-2 has dropout; the engine must not
    is_greedy(model.eval(), prompt, first)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(input_ids=torch.tensor([prompt]), labels=torch.tensor([prompt])).loss.backward()
    optimizer.step()
    asyncio.run(engine.load_weights(1))
    again = ask(engine, greedy("a", prompt))[0]
    is_greedy(model.eval(), prompt, again)


def test_replaced_parameters_are_noticed() -> None:
    model, other = make("qwen3"), make("qwen3")
    change(other)
    engine = LocalEngine(model, threads=1)
    model.load_state_dict(other.state_dict(), assign=True)
    asyncio.run(engine.load_weights(1))
    is_greedy(other, tokens(30), ask(engine, greedy("a", tokens(30)))[0])


def test_a_failing_model_fails_the_requests_and_not_the_engine() -> None:
    model = make("gpt2")
    engine = LocalEngine(model, threads=1)

    def refuse(*_: object) -> None:
        raise RuntimeError("no")

    hook = model.transformer.h[0].register_forward_pre_hook(refuse)

    async def play() -> list[Completion | BaseException]:
        both = [engine.generate(greedy(name, tokens(20))) for name in "ab"]
        return await asyncio.gather(*both, return_exceptions=True)

    for error in asyncio.run(play()):
        assert isinstance(error, EngineError)
        assert "RuntimeError: no" in str(error)
        assert isinstance(error.__cause__, RuntimeError)
    hook.remove()
    is_greedy(model, tokens(20), ask(engine, greedy("a", tokens(20)))[0])


def test_a_cancelled_stepping_task_leaves_nobody_waiting() -> None:
    engine = LocalEngine(make("qwen3"), threads=1)

    async def play() -> None:
        running = asyncio.create_task(engine.generate(life_speak("a", tokens(20), 200)))
        while engine.stats.sampled_tokens < 5:
            await asyncio.sleep(0)
        assert engine._task is not None
        engine._task.cancel()
        with pytest.raises(EngineError, match="cancelled"):
            await running
        assert len((await engine.generate(life_speak("a", tokens(20), 5))).token_ids) == 5

    asyncio.run(play())


def test_a_closed_engine_refuses() -> None:
    engine = LocalEngine(make("qwen3"), threads=1)

    async def play() -> None:
        running = asyncio.create_task(engine.generate(life_speak("a", tokens(20), 200)))
        while engine.stats.sampled_tokens < 5:
            await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(life_speak("b", tokens(20), 5))

    asyncio.run(play())
    assert engine.cache_bytes == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], Sampling(), "empty"),
        ([3, 97], Sampling(), "3 to 97.*0 to 96"),
        ([3] * 256, Sampling(), "256 tokens and the context 256"),
        ([3], Sampling(max_tokens=0), "max_tokens is 0"),
        ([3], Sampling(stop=("x",)), "decode"),
    ],
)
def test_what_cannot_be_served_is_refused(prompt: list[int], sampling: Sampling, message: str) -> None:
    engine = LocalEngine(make("qwen3"), threads=1)
    with pytest.raises(EngineError, match=message):
        ask(engine, Request(conversation="a", token_ids=prompt, sampling=sampling))


def test_a_context_that_the_model_does_not_know_is_refused() -> None:
    with pytest.raises(EngineError, match="context is 257; it must be 2 to 256"):
        LocalEngine(make("qwen3"), context=257)


def test_other_states_than_keys_and_values_are_refused() -> None:
    encoder = T5ForConditionalGeneration(
        T5Config(vocab_size=50, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    )
    with pytest.raises(EngineError, match="cannot run T5ForConditionalGeneration: it has an encoder"):
        LocalEngine(encoder)
    sparse = make("gemma3")
    sparse.config.layer_types = ["full_attention", "compressed_sparse_attention"]
    with pytest.raises(
        EngineError, match="it has layers of the type compressed_sparse_attention; known types are full_"
    ):
        LocalEngine(sparse)
    model = make("gemma3")
    unknown = type("NewLayer", (DynamicLayer,), {})
    forward = model.forward

    def with_unknown_layer(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if output.past_key_values is not None:
            output.past_key_values.layers[1].__class__ = unknown
            output.past_key_values.layers[1].index = torch.zeros(1, 3, 4)
        return output

    model.forward = with_unknown_layer
    with pytest.raises(EngineError, match=r"layer 1 caches a NewLayer.*would need a place for index \[1, 3, 4\]"):
        LocalEngine(model)


def test_a_variation_falls_back_to_the_generic_pass(caplog: pytest.LogCaptureFixture) -> None:
    model = make("qwen3")
    # an architecture that looks like the family and is not
    model.model.layers[1].mlp.act_fn = nn.GELU()
    with caplog.at_level(logging.WARNING):
        engine = LocalEngine(model, threads=1)
    assert isinstance(engine._core.forward, GenericForward)
    assert "fused pass of the embedded engine is off" in caplog.text
    is_greedy(model, tokens(30), ask(engine, greedy("a", tokens(30)))[0])


def test_replaced_projections_run_through_the_generic_pass() -> None:
    model = make("llama")
    inner = model.model.layers[0].self_attn

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down, self.up = base, nn.Linear(32, 2, bias=False), nn.Linear(2, 32, bias=False)

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return self.base(values) + self.up(self.down(values))

    inner.q_proj = Adapted(inner.q_proj)
    engine = LocalEngine(model, threads=1)
    assert isinstance(engine._core.forward, GenericForward)
    is_greedy(model, tokens(30), ask(engine, greedy("a", tokens(30)))[0])


# The bound of the cache holds, and nobody's tokens change because of it.


TOKEN_BYTES = 2 * 2 * 2 * 16 * 4  # of make("qwen3")


def gigabytes(count: int) -> float:
    return count * TOKEN_BYTES / 2**30


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


@pytest.mark.slow
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
    with pytest.raises(EngineError, match=r"80 tokens.*by 40.*100 at most.*engine\.memory_gb=5\.72e-05"):
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
