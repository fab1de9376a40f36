"""The engine's life beside a trainer: new weights, failures, the end, and the models that it refuses."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

from engines.test_local_tokens import ask, greedy, is_greedy, make, one_thread, own_logprobs, tokens  # noqa: F401
from turnwise.engines.engine import Engine
from turnwise.engines.local import LocalEngine
from turnwise.engines.local.forward import GenericForward
from turnwise.errors import EngineError
from turnwise.types import Completion, Request, Sampling


def change(model: nn.Module) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)


def speak(conversation: str, prompt: list[int], count: int) -> Request:
    return Request(conversation=conversation, token_ids=prompt, sampling=Sampling(max_tokens=count))


def test_it_is_an_engine() -> None:
    engine: Engine = LocalEngine(make("qwen3"), version=4)
    assert engine.version == 4


def test_weights_changed_in_place_are_sampled_with_at_once() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    prompt = tokens(40)
    before = ask(engine, speak("a", prompt, 10))[0]
    change(model)
    asyncio.run(engine.load_weights(1))
    whole = prompt + list(before.token_ids)
    after, sibling = ask(engine, speak("a", whole, 10), speak("b", prompt, 10))
    assert engine.stats.reused_tokens == 0
    assert (list(before.versions), list(after.versions)) == ([0] * 10, [1] * 10)
    assert after.logprobs == pytest.approx(own_logprobs(model, whole, after), abs=1e-4)
    assert sibling.logprobs == pytest.approx(own_logprobs(model, prompt, sibling), abs=1e-4)


def test_weights_change_under_a_running_request() -> None:
    model = make("qwen3")
    engine = LocalEngine(model, threads=1)
    prompt = tokens(40)

    async def play() -> Completion:
        running = asyncio.create_task(engine.generate(speak("a", prompt, 30)))
        while engine.stats.sampled_tokens < 12:
            await asyncio.sleep(0)
        change(model)
        await engine.load_weights(1)
        # what the old weights have computed is not shared, neither now nor later
        fresh = await engine.generate(speak("b", prompt, 5))
        assert fresh.logprobs == pytest.approx(own_logprobs(model, prompt, fresh), abs=1e-4)
        return await running

    said = asyncio.run(play())
    changed = list(said.versions).index(1)
    assert list(said.versions) == [0] * changed + [1] * (30 - changed)
    assert changed in (12, 13)
    assert engine.stats.copied_tokens == 0
    whole = prompt + list(said.token_ids)
    after = ask(engine, speak("a", whole, 5))[0]
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
        running = asyncio.create_task(engine.generate(speak("a", tokens(20), 200)))
        while engine.stats.sampled_tokens < 5:
            await asyncio.sleep(0)
        assert engine._task is not None
        engine._task.cancel()
        with pytest.raises(EngineError, match="cancelled"):
            await running
        assert len((await engine.generate(speak("a", tokens(20), 5))).token_ids) == 5

    asyncio.run(play())


def test_a_closed_engine_refuses() -> None:
    engine = LocalEngine(make("qwen3"), threads=1)

    async def play() -> None:
        running = asyncio.create_task(engine.generate(speak("a", tokens(20), 200)))
        while engine.stats.sampled_tokens < 5:
            await asyncio.sleep(0)
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await running
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(speak("b", tokens(20), 5))

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
        return output

    model.forward = with_unknown_layer
    with pytest.raises(EngineError, match="one of its layers caches a NewLayer"):
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
