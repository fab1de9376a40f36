"""An engine's life: cancelled requests, released conversations, the prefix cache between turns, the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from engines.conformance.subjects import SCRIPT, STOP, Subject
from engines.conformance.test_conformance_sampling import assert_exact, prompts
from turnwise.errors import EngineError
from turnwise.types import Completion, Request


async def until_running(subject: Subject, count: int) -> None:
    """Wait until the engine has this number of requests; fail after a minute."""
    deadline = time.monotonic() + 60
    while (running := await subject.running()) != count:
        assert time.monotonic() < deadline, f"{running} requests run, and not {count}"
        await asyncio.sleep(0.02)


async def start_requests(subject: Subject, requests: Sequence[Request]) -> list[asyncio.Task[Completion]]:
    """Send requests, and return their tasks when all of them run. To be called while the subject is slowed."""
    tasks = [asyncio.ensure_future(subject.engine.generate(request)) for request in requests]
    await until_running(subject, len(tasks))
    assert not any(task.done() for task in tasks)
    return tasks


def test_a_cancelled_request_is_freed(subject: Subject) -> None:
    if not subject.claims.samples:
        return  # texts are returned at once: nothing can be cancelled

    async def play() -> None:
        requests = [subject.request(prompt, max_tokens=1500) for prompt in prompts(3)]
        tasks = await start_requests(subject, requests)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        assert tasks[1].cancelled()
        await until_running(subject, 2)
        assert not tasks[0].done()
        assert not tasks[2].done()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await until_running(subject, 0)

    with subject.slowed():
        subject.run(play())
    request = subject.request(prompts(1)[0], max_tokens=8)
    assert_exact(subject, request, *subject.ask(request))


def test_a_conversation_can_be_released_at_any_time(subject: Subject) -> None:
    subject.engine.release("never seen")
    first = subject.request(prompts(1)[0], conversation="released", max_tokens=6, stop_token_ids=(STOP,))
    for _ in range(2):  # a released conversation may begin again
        assert_exact(subject, first, *subject.ask(first))
        subject.engine.release("released")
        subject.engine.release("released")


def test_the_second_turn_takes_the_first_from_the_prefix_cache(subject: Subject) -> None:
    prompt = prompts(1, seed=11)[0] * 4
    (first,) = subject.ask(subject.request(prompt, conversation="two turns", max_tokens=30))
    history = [*prompt, *first.token_ids]
    if not subject.claims.samples:
        assert subject.ask_one(history, conversation="two turns", max_tokens=30).cached_tokens is None
        return
    request = subject.request([*history, *prompts(1, seed=12)[0]], conversation="two turns", max_tokens=5)
    (second,) = subject.ask(request)
    assert_exact(subject, request, second)
    subject.engine.release("two turns")
    block = subject.claims.cache_block
    if block is None:
        assert second.cached_tokens is None
        return
    # the last sampled token was never an input
    assert second.cached_tokens is not None
    assert (len(history) - 1) // block * block <= second.cached_tokens <= len(history)
    assert second.prompt_tokens == len(request.token_ids)


def test_a_conversation_has_its_turns_in_order(subject: Subject) -> None:
    """Two turns of several conversations at once: nobody receives the turn of another."""
    starts = prompts(8, seed=13)
    first = [
        subject.request(prompt, conversation=f"turns {index}", max_tokens=12, temperature=0.0)
        for index, prompt in enumerate(starts)
    ]
    answers = subject.ask(*first)
    second = [
        subject.request(
            [*prompt, *answer.token_ids, 5, 6], conversation=f"turns {index}", max_tokens=12, temperature=0.0
        )
        for index, (prompt, answer) in enumerate(zip(starts, answers, strict=True))
    ]
    for request, completion in zip([*first, *second], [*answers, *subject.ask(*second)], strict=True):
        assert_exact(subject, request, completion)
    if not subject.claims.samples:
        text = subject.renderer.encode(SCRIPT[1])
        assert list(subject.ask_one([1], conversation="turns 0", max_tokens=99).token_ids) != text
    for index in range(8):
        subject.engine.release(f"turns {index}")


def test_an_engine_that_is_closed_refuses(fresh_subject: Subject) -> None:
    """For engines in this process; servers are closed at the end of the suite."""
    subject = fresh_subject
    subject.run(subject.engine.close())
    subject.run(subject.engine.close())
    if subject.claims.samples:
        with pytest.raises(EngineError, match="closed"):
            subject.ask_one([5], max_tokens=3)
