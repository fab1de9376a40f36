"""Faults of real servers: too little memory for the prompts, and a server that hangs. Death is in the suite of all engines."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engines.conformance.servers import Server, Sglang, Vllm
from engines.conformance.test_conformance import assert_exact, start_requests
from turnwise.errors import EngineError
from turnwise.types import Completion

TOKEN_BYTES = 2 * 3 * 2 * 32 * 4
"""A token in the KV cache of the demo's model: keys and values, 3 layers, 2 heads of 32 numbers."""


class SmallVllm(Vllm):
    """A KV cache of about one conversation of 2,048 tokens; with less, vLLM does not start."""

    memory_gb = 2400 * TOKEN_BYTES / 2**30


class TinyVllm(Vllm):
    """A KV cache of 600 tokens: less than the context of the model."""

    memory_gb = 600 * TOKEN_BYTES / 2**30


class SmallSglang(Sglang):
    """A KV cache of 1,200 tokens: less than the context of the model."""

    memory_gb = 1200 * TOKEN_BYTES / 2**30


@pytest.fixture(scope="module", params=[SmallVllm, SmallSglang], ids=lambda kind: kind.name)
def small(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = request.param()
    yield server
    server.close()


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 760) for _ in range(length)]


@pytest.mark.engines
def test_vllm_with_too_little_memory_is_not_started() -> None:
    with pytest.raises(EngineError, match=r"(?s)vLLM server 0 has ended .*KV cache"):
        TinyVllm()


@pytest.mark.engines
def test_prompts_that_need_more_memory_than_there_is_wait_for_each_other(small: Server) -> None:
    requests = [small.request(prompt(700, seed), max_tokens=40) for seed in range(6)]
    for request, completion in zip(requests, small.ask(*requests), strict=True):
        assert len(completion.token_ids) > 0
        assert_exact(small, request, completion)
    assert small.process.starts == 1


@pytest.mark.engines
def test_a_prompt_that_is_longer_than_the_memory_fails_alone(small: Server) -> None:
    """vLLM has the memory for each prompt that it accepts; see `test_vllm_with_too_little_memory_is_not_started`."""
    good = small.request(prompt(300, 1), max_tokens=8)

    async def both() -> tuple[object, object]:
        long = small.request(prompt(1500, 2), max_tokens=8)
        found = await asyncio.gather(small.engine.generate(long), small.engine.generate(good), return_exceptions=True)
        return found[0], found[1]

    first, answered = small.run(both())
    if isinstance(small, Vllm):
        assert isinstance(first, Completion)
        assert len(first.token_ids) == 8
    else:
        assert isinstance(first, EngineError)
        assert "1500" in str(first)
    assert isinstance(answered, Completion)
    assert_exact(small, good, answered)
    assert small.process.starts == 1


@pytest.mark.engines
@pytest.mark.parametrize("small", [SmallVllm], indirect=True, ids=["vllm"])  # the limits of answers know no engine
def test_a_server_that_hangs_is_started_again_and_its_requests_go_on(small: Server) -> None:
    limits = small.server.limits
    requests = [small.request(prompt(40, seed), max_tokens=300) for seed in (3, 4, 5)]

    async def play() -> list[Completion]:
        with small.slowed():
            tasks = await start_requests(small, requests[:2])
            starts, group = small.process.starts, small.process.pid
            assert group is not None
            os.killpg(group, signal.SIGSTOP)
            # the limit is short only while the server hangs, so that a slow machine is not taken for a hanging server
            small.server.limits = replace(limits, idle=2.0)
            tasks.append(asyncio.ensure_future(small.engine.generate(requests[2])))
            while small.process.starts == starts:
                assert not any(task.done() for task in tasks)
                await asyncio.sleep(0.05)
            small.server.limits = limits
        return await asyncio.gather(*tasks)

    for request, completion in zip(requests, small.run(play()), strict=True):
        assert len(completion.token_ids) == 300
        assert_exact(small, request, completion)
    assert small.process.starts == 2
