"""The adapter that answers all live conversations together."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from support.conversations import RENDERER, Says
from turnwise.engines.engine import Batched
from turnwise.errors import EngineError
from turnwise.types import Completion, Request, Sampling


def a_request(name: str) -> Request:
    return Request(conversation=name, token_ids=[1], sampling=Sampling())


def asked(engine: Says) -> list[str]:
    return [request.conversation for request in engine.requests]


def test_nobody_is_answered_before_all_have_asked_and_then_in_their_order() -> None:
    engine = Says("x")
    batched = Batched(engine, ["a", "b", "c"])

    async def run() -> list[str]:
        first = [asyncio.create_task(batched.generate(a_request(name))) for name in ("c", "a")]
        await asyncio.sleep(0.005)
        assert asked(engine) == []
        assert not any(task.done() for task in first)
        answers = await asyncio.gather(*first, batched.generate(a_request("b")))
        return [RENDERER.decode(answer.token_ids) for answer in answers]

    assert asyncio.run(run()) == ["x<|im_end|>"] * 3
    assert asked(engine) == ["a", "b", "c"]
    assert engine.together == 3


def test_who_is_released_is_no_longer_waited_for() -> None:
    engine = Says("x", "y")
    batched = Batched(engine, ["a", "b", "c"])

    async def run() -> None:
        tasks = [asyncio.create_task(batched.generate(a_request(name))) for name in ("a", "b")]
        await asyncio.sleep(0.002)
        batched.release("c")
        await asyncio.gather(*tasks)
        batched.release("a")
        await batched.generate(a_request("b"))
        batched.release("unknown")

    asyncio.run(run())
    assert asked(engine) == ["a", "b", "b"]
    assert engine.released == ["c", "a", "unknown"]


def test_an_error_reaches_only_the_one_who_asked() -> None:
    class Picky(Says):
        async def generate(self, request: Request) -> Completion:
            if request.conversation == "b":
                raise EngineError("not you")
            return await super().generate(request)

    batched = Batched(Picky("x"), ["a", "b", "c"])

    async def run() -> list[Any]:
        return await asyncio.gather(*(batched.generate(a_request(name)) for name in "abc"), return_exceptions=True)

    a, b, c = asyncio.run(run())
    assert (a.token_ids, c.token_ids) == ([90, 2], [90, 2])
    assert isinstance(b, EngineError)
    assert str(b) == "not you"


def test_who_cancels_is_not_answered_and_the_others_are() -> None:
    engine = Says("x", seconds=0.2)
    batched = Batched(engine, ["a", "b"])

    async def run() -> Completion:
        early = asyncio.create_task(batched.generate(a_request("a")))
        await asyncio.sleep(0)
        early.cancel()  # before the batch has begun
        with contextlib.suppress(asyncio.CancelledError):
            await early
        other = asyncio.create_task(batched.generate(a_request("b")))
        await asyncio.sleep(0.002)
        assert asked(engine) == []  # `a` is alive, and may ask again
        again = asyncio.create_task(batched.generate(a_request("a")))
        await asyncio.sleep(0.01)
        again.cancel()  # in the middle of the batch
        answer = await other
        assert again.cancelled()
        return answer

    assert asyncio.run(run()).token_ids == [90, 2]
    assert asked(engine) == ["a", "b"]


def test_versions_weights_and_closing_are_those_of_the_engine() -> None:
    class Closes(Says):
        closed = 0

        async def close(self) -> None:
            self.closed += 1

    engine = Closes("x")
    batched = Batched(engine, ["a"])
    asyncio.run(batched.load_weights(3))
    asyncio.run(batched.close())
    assert (batched.version, engine.version, engine.closed) == (3, 3, 1)
