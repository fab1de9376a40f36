"""Objects of other people's classes: made, asked and closed beside the event loop, on every path out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import pytest

from support.conversations import Says, a_row, call, hold, hold_all
from turnwise.environments.environment import environment, user_message
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import Failed
from turnwise.rollout.context import Limits
from turnwise.types import Opening, Reply, Row, Turn
from turnwise.user_code.threads import ThreadedObject, columns_for


class Thing:
    """Counts how often it is closed."""

    def __init__(self, wait: Callable[[], Any] = bool) -> None:
        wait()
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def a_foreign(make: Callable[[], Thing], made: list[Thing]) -> ThreadedObject[Thing]:
    def remembered() -> Thing:
        made.append(make())
        return made[-1]

    return ThreadedObject(remembered, lambda thing: thing.close(), name="thing")


def test_it_is_closed_once_however_often_that_is_asked() -> None:
    made: list[Thing] = []

    async def twice() -> None:
        foreign = a_foreign(Thing, made)
        await foreign.make()
        await foreign.close()
        await foreign.close()

    asyncio.run(twice())
    assert [thing.closed for thing in made] == [1]


def test_what_was_never_made_is_not_closed() -> None:
    made: list[Thing] = []
    asyncio.run(a_foreign(Thing, made).close())
    assert made == []


def test_what_is_made_after_its_conversation_is_closed_by_the_thread_that_made_it() -> None:
    made: list[Thing] = []
    gate = threading.Event()

    async def given_up() -> None:
        foreign = a_foreign(lambda: Thing(gate.wait), made)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await foreign.make()
        closing = asyncio.create_task(foreign.close())
        await closing
        assert made == []
        gate.set()

    asyncio.run(given_up())
    deadline = time.monotonic() + 60
    while not (made and made[0].closed) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert [thing.closed for thing in made] == [1]


def test_one_that_hangs_is_closed_all_the_same() -> None:
    made: list[Thing] = []
    gate = threading.Event()

    async def hangs() -> None:
        foreign = a_foreign(Thing, made)
        await foreign.make()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await foreign.ask(gate.wait)
        await foreign.close()

    asyncio.run(hangs())
    gate.set()
    assert [thing.closed for thing in made] == [1]


def test_one_that_is_busy_comes_to_an_end_before_it_is_closed() -> None:
    made: list[Thing] = []
    seen: list[int] = []

    async def busy() -> None:
        foreign = a_foreign(Thing, made)
        await foreign.make()

        def work() -> None:
            time.sleep(0.1)
            seen.append(made[0].closed)

        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await foreign.ask(work)
        await foreign.close()

    asyncio.run(busy())
    assert seen == [0]
    assert made[0].closed == 1


def test_what_it_raises_is_a_failure_of_the_environment() -> None:
    async def raises() -> None:
        with pytest.raises(Failed, match="ZeroDivisionError"):
            await a_foreign(lambda: Thing(lambda: 1 // 0), []).make()

    asyncio.run(raises())


def test_a_function_is_given_the_columns_that_it_names() -> None:
    row = a_row(secret=5, hint="h")

    def some(secret: int, other: int = 3) -> None: ...

    def every(**row: Any) -> None: ...

    def none() -> None: ...

    def missing(secret: int, colour: str) -> None: ...

    assert columns_for(some, row, name="f") == {"secret": 5}
    assert columns_for(every, row, name="f", extra={"prompt": "p"}) == {"secret": 5, "hint": "h", "prompt": "p"}
    assert columns_for(none, row, name="f") == {}
    with pytest.raises(KeyError) as error:
        columns_for(missing, row, name="Game.reset")
    assert error.value.args[0] == (
        "Game.reset needs the column 'colour', and row '1' has no such column; its columns are: hint, secret. Add the column to "
        "the data, or map another column to it: data.columns.colour=<column>"
    )


# sync generators


CLOSED: list[str] = []


@environment
def blocks(row: Row, seconds: float = 0.0) -> Generator[Opening | Reply, Turn, None]:
    """A sync interaction."""
    try:
        turn = yield Opening(messages=row.messages)
        time.sleep(seconds)
        turn = yield user_message("Sure?", reward=0.25)
        if turn.text == "raise":
            raise RuntimeError("no")
    finally:
        CLOSED.append(row.id)


def test_a_sync_generator_is_an_environment_too() -> None:
    CLOSED.clear()
    trajectory = hold(Says("a", "b"), blocks)
    assert [message["content"] for message in trajectory.messages] == ["Hi", "a", "Sure?", "b"]
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.0]
    assert (trajectory.stop, CLOSED) == ("done", ["1"])


def test_a_sync_generator_that_raises_fails_its_conversation_and_is_cleaned_up() -> None:
    CLOSED.clear()
    trajectory = hold(Says("a", "raise"), blocks)
    assert trajectory.error is not None
    assert (trajectory.error.kind, trajectory.error.message, CLOSED) == ("environment", "RuntimeError: no", ["1"])


def test_a_sync_generator_is_cleaned_up_where_a_limit_ends_its_conversation() -> None:
    CLOSED.clear()
    trajectory = hold(Says("a"), blocks, limits=Limits(turns=1, tokens_per_turn=99))
    assert (trajectory.stop, trajectory.turns[0].reward, CLOSED) == ("max_turns", 0.25, ["1"])


def test_eight_sync_interactions_wait_together() -> None:
    started = time.perf_counter()
    trajectories = hold_all(Says("a", "b"), lambda: blocks(seconds=1.5), size=8)
    assert [one.stop for one in trajectories] == ["done"] * 8
    assert 1.5 <= time.perf_counter() - started < 10  # one after the other, 12


def test_eight_conversations_with_a_sync_tool_wait_together() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once

    def sleepy() -> str:
        """Sleep."""
        gate.wait()
        return "slept"

    trajectories = hold_all(Says(call("sleepy"), "b"), lambda: Tools([sleepy]), size=8)
    assert [one.turns[0].outcomes[0].content for one in trajectories] == ["slept"] * 8


# the last word


class Last:
    """Earns something at the end, whoever ended it."""

    def __init__(self, earns: Any = 0.5) -> None:
        self.asked = 0
        self._earns = earns

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        return Reply(done=True) if turn.text == "over" else user_message("And?", reward=0.125)

    async def final_reward(self) -> float:
        self.asked += 1
        return self._earns / 1

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("said", "limits", "stop", "rewards", "asked"),
    [
        (["a", "b"], Limits(turns=2, tokens_per_turn=99), "max_turns", [0.125, 0.625], 1),
        (["a", "long" * 9], Limits(turns=4, tokens_per_turn=8), "length", [0.125, 0.5], 1),
        (["a", "over"], Limits(turns=4, tokens_per_turn=99), "done", [0.125, 0.0], 0),
        (["a", RuntimeError("gone")], Limits(turns=4, tokens_per_turn=99), "error", [0.125], 0),
    ],
)
@pytest.mark.parametrize("in_front", [False, True])
def test_an_environment_has_the_last_word_where_a_limit_ends_a_conversation(
    said: list[Any], limits: Limits, stop: str, rewards: list[float], asked: int, in_front: bool
) -> None:
    last = Last()
    trajectory = hold(Says(*said), lambda: Tools([], then=last) if in_front else last, limits=limits)
    assert (trajectory.stop, [turn.reward for turn in trajectory.turns], last.asked) == (stop, rewards, asked)


def test_a_last_word_that_cannot_be_said_fails_its_conversation() -> None:
    trajectory = hold(Says("a"), lambda: Last("x"), limits=Limits(turns=1, tokens_per_turn=99))
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert "TypeError" in trajectory.error.message
