"""A real SGLang server with too little memory for its prompts. Death of servers is in the suite of all engines."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from engines.conformance.servers import Server, Sglang
from engines.conformance.test_conformance_sampling import assert_exact
from turnwise.errors import EngineError

TOKEN_BYTES = 2 * 3 * 2 * 32 * 4
"""A token in the KV cache of the demo's model: keys and values, 3 layers, 2 heads of 32 numbers."""


class SmallSglang(Sglang):
    """A KV cache of 1,200 tokens: less than the context of the model."""

    memory_gb = 1200 * TOKEN_BYTES / 2**30


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    server = SmallSglang()
    yield server
    server.close()


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, 760) for _ in range(length)]


@pytest.mark.engines
def test_prompts_that_need_more_memory_than_there_is_wait_for_each_other(small: Server) -> None:
    requests = [small.request(prompt(700, seed), max_tokens=40) for seed in range(6)]
    for request, completion in zip(requests, small.ask(*requests), strict=True):
        assert len(completion.token_ids) > 0
        assert_exact(small, request, completion)
    assert small.process.starts == 1


@pytest.mark.engines
def test_a_prompt_that_is_longer_than_the_memory_fails_alone(small: Server) -> None:
    good = small.request(prompt(300, 1), max_tokens=8)

    async def both() -> tuple[object, object]:
        long = small.request(prompt(1500, 2), max_tokens=8)
        found = await asyncio.gather(small.engine.generate(long), small.engine.generate(good), return_exceptions=True)
        return found[0], found[1]

    failed, answered = small.run(both())
    assert isinstance(failed, EngineError)
    assert "1500" in str(failed)
    assert not isinstance(answered, BaseException)
    assert_exact(small, good, answered)  # type: ignore[arg-type]
    assert small.process.starts == 1
