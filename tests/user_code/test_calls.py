"""The code of users can neither hold up nor end a run, whatever it does."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import math
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest

from support.conversations import Says, a_row, a_table, call, hold, hold_all, scripted
from turnwise.data.order import Curriculum
from turnwise.environments.environment import Environment, SingleTurn, environment, user_message
from turnwise.environments.tools import toolbox
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.environments.users import ScriptedUser
from turnwise.record.metrics import conversation_metrics, lowest_correlation
from turnwise.rewards.credit.credit import centred
from turnwise.rollout import rollout
from turnwise.rollout.context import Limits
from turnwise.rollout.pipeline import has_reward_differences
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Failure, Group, Opening, Reply, Row, Stop, Trajectory, Turn
from turnwise.user_code.calls import LoopWatch, _line, loop_watch
from turnwise.user_code.reward_number import equal_rewards, reaches


class Mean(BaseException):
    """No Exception."""


class Unspeakable(Exception):
    """Cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


async def cancels_itself() -> None:
    task = asyncio.create_task(asyncio.sleep(10))
    await asyncio.sleep(0)
    task.cancel()
    await task


async def raises(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


TROUBLES: dict[str, tuple[Callable[[], Any], str]] = {
    "cancelled": (cancels_itself, "CancelledError: the call cancelled itself, or awaited a task that was cancelled"),
    "base": (lambda: raises(Mean("no Exception")), "Mean: no Exception"),
    "exit": (lambda: raises(SystemExit(3)), "the code tried to exit the process (status 3)"),
    "generator exit": (lambda: raises(GeneratorExit()), "GeneratorExit"),
    "unspeakable": (lambda: raises(Unspeakable()), "Unspeakable: <Unspeakable, whose __str__ raised RuntimeError>"),
    "long": (lambda: raises(ValueError("x" * 10_000)), "ValueError: " + "x" * 3988 + " [...]"),
}


class Troubled(SingleTurn):
    """Breaks in one place."""

    def __init__(self, place: str, trouble: Callable[[], Any]) -> None:
        self.place, self.trouble, self.closed = place, trouble, 0

    async def begin(self, row: Row) -> Opening:
        if self.place == "begin":
            await self.trouble()
        return await super().begin(row)

    async def step(self, turn: Turn) -> Reply:
        if self.place == "step":
            await self.trouble()
        return Reply(reward=1.0)

    async def final_reward(self) -> float:
        if self.place == "final_reward":
            await self.trouble()
        return 0.0

    async def close(self) -> None:
        self.closed += 1
        if self.place == "close":
            await self.trouble()


@pytest.mark.parametrize("place", ["begin", "step", "final_reward"])
@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_an_environment_raises_ends_its_own_conversation_only(place: str, trouble: str) -> None:
    function, message = TROUBLES[trouble]
    made = iter([Troubled(place, function), Troubled("nowhere", function)])
    bad, good = hold_all(Says("a"), lambda: next(made), size=2, limits=Limits(turns=1))
    assert bad.error == Failure("environment", message)
    assert (good.error, good.stop) == (None, Stop.MAX_TURNS)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_closing_an_environment_raises_is_logged(trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    function, message = TROUBLES[trouble]
    one = hold(Says("a"), lambda: Troubled("close", function), limits=Limits(turns=1))
    assert (one.error, one.stop) == (None, Stop.MAX_TURNS)
    assert caplog.messages == [f"the environment of 1/0 could not be closed: {message}"]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_whatever_an_async_tool_raises_is_told_to_the_model(trouble: str) -> None:
    function, message = TROUBLES[trouble]

    async def f() -> str:
        """Do it."""
        await function()
        return "done"

    trajectory = hold(Says(call("f"), "bye"), lambda: Tools([f]))
    assert (trajectory.error, trajectory.stop) == (None, Stop.DONE)
    (outcome,) = trajectory.turns[0].outcomes
    assert outcome.error == "raised"
    assert outcome.content.startswith(f"Error: {message.removeprefix('ValueError: ')}"[:900])


@pytest.mark.parametrize("error", [Mean("no"), asyncio.CancelledError(), SystemExit(1)])
def test_an_environment_that_cannot_be_made_ends_its_own_conversation_only(error: BaseException) -> None:
    makes = iter([True, False])

    def make() -> Environment:
        if next(makes):
            raise error
        return SingleTurn()

    bad, good = hold_all(Says("a"), make, size=2)
    assert bad.error is not None
    assert bad.error.kind == "environment"
    assert type(error).__name__ in bad.error.message or "exit" in bad.error.message
    assert good.stop is Stop.DONE


def test_an_error_of_our_own_ends_its_own_conversation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(Says):
        async def generate(self, request: Any) -> Any:
            answer = await super().generate(request)
            return None if request.conversation == "1/0" else answer

    bad, good = hold_all(Odd("a"), SingleTurn, size=2)
    assert bad.failed
    assert good.stop is Stop.DONE


# tracebacks


def test_a_failure_keeps_the_users_own_frames() -> None:
    def helper() -> None:
        raise KeyError("answer")

    class Breaks(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            try:
                helper()
            except KeyError:
                raise ValueError("there is no answer") from None
            return Reply()

    error = hold(Says("a"), Breaks).error
    assert error is not None
    lines = error.traceback.splitlines()
    assert lines[0].startswith(f'  File "{__file__}", line ')
    assert lines[0].endswith("in step")
    assert 'raise ValueError("there is no answer") from None' in lines[1]
    assert "turnwise" not in error.traceback.replace(__file__, "")


def test_a_failure_tells_what_led_to_it_and_leaves_most_of_a_deep_recursion_out() -> None:
    def deeper(n: int) -> int:
        return deeper(n + 1)

    class Breaks(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            try:
                deeper(0)
            except RecursionError as error:
                raise ValueError("too deep") from error
            return Reply()

    error = hold(Says("a"), Breaks).error
    assert error is not None
    assert "RecursionError: maximum recursion depth exceeded" in error.traceback
    assert "This led to:" in error.traceback
    assert "frames left out ...]" in error.traceback
    assert error.traceback.count("in deeper") < 25


# deadlines


class Swallows(SingleTurn):
    """Answers a cancellation with more work."""

    ended = 0

    def __init__(self, place: str) -> None:
        self.place = place

    async def begin(self, row: Row) -> Opening:
        await self._work("begin")
        return await super().begin(row)

    async def step(self, turn: Turn) -> Reply:
        await self._work("step")
        return Reply(done=True)

    async def close(self) -> None:
        await self._work("close")

    async def _work(self, place: str) -> None:
        if place != self.place:
            return
        try:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)
        finally:
            Swallows.ended += 1


@pytest.mark.parametrize("place", ["begin", "step"])
def test_deadlines_hold_for_an_environment_that_swallows_cancellation(place: str) -> None:
    ended, started = Swallows.ended, time.monotonic()
    made = iter([Swallows(place), SingleTurn()])
    bad, good = hold_all(Says("a"), lambda: next(made), size=2, limits=Limits(seconds_per_turn=2.0))
    assert bad.stop is Stop.DEADLINE
    assert good.stop is Stop.DONE
    assert time.monotonic() - started < 20
    assert Swallows.ended == ended + 1  # its `finally` ran


def test_closing_ends_for_an_environment_that_swallows_cancellation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout, "_CLOSING_SECONDS", 0.2)
    started = time.monotonic()
    assert hold(Says("a"), lambda: Swallows("close")).stop is Stop.DONE
    assert time.monotonic() - started < 20
    assert caplog.messages == ["the environment of 1/0 could not be closed: no answer in 0.2 s"]


def test_a_tool_and_its_environment_that_both_hang_when_they_are_closed_are_both_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnwise.environments.tools.toolbox._CLOSE_TIMEOUT", 0.2)

    class Hangs:
        async def look(self) -> str:
            """Look."""
            return "nothing"

        async def close(self) -> None:
            await asyncio.sleep(3600)

    started = time.monotonic()
    assert hold(Says("a"), lambda: Tools([Hangs], then=Swallows("close"))).stop is Stop.DONE
    assert time.monotonic() - started < 20
    assert caplog.messages == [
        "the environment of 1/0 could not be closed: the tools Hangs did not close in 0.2 s; the environment Swallows did "
        "not close in 0.2 s"
    ]


def test_the_close_of_a_tool_that_swallows_cancellation_leaves_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turnwise.environments.tools.toolbox._CLOSE_TIMEOUT", 0.2)

    class Stays:
        async def look(self) -> str:
            """Look."""
            return "nothing"

        async def close(self) -> None:
            for _ in range(3):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600)

    async def run() -> set[str]:
        group = new_group(a_row(), size=4, seed=0)
        await rollout_groups([group], a_table(Says(call("look"), "a"), lambda: Tools([Stays])))
        for _ in range(200):
            await asyncio.sleep(0.05)
            if len(asyncio.all_tasks()) == 1:
                break
        return {task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()}

    assert asyncio.run(run()) == set()


def test_in_lockstep_the_time_of_a_conversation_does_not_run_while_it_waits_for_others() -> None:
    class Hangs(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            await asyncio.sleep(3600)
            return Reply(done=True)

    made = iter([Hangs(), *(ScriptedUser(["And?"]) for _ in range(4))])
    limits = Limits(seconds=3.0, seconds_per_turn=None)
    first, *others = hold_all(Says("a", "b"), lambda: next(made), size=5, lockstep=True, limits=limits)
    assert first.stop is Stop.DEADLINE
    assert [one.stop for one in others] == [Stop.DONE] * 4


# a blocked event loop


class Blocks(SingleTurn):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def step(self, turn: Turn) -> Reply:
        time.sleep(self.seconds)
        return user_message("And?")


def test_a_blocked_loop_is_charged_to_who_blocks_it_and_named_with_function_and_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = Limits(turns=2, seconds_per_turn=1.5, seconds=2.5)
    trajectories = hold_all(Says("a", "b"), lambda: Blocks(0.3), size=8, limits=limits)
    assert [one.stop for one in trajectories] == [Stop.MAX_TURNS] * 8  # though each waited for 4 seconds
    (message,) = caplog.messages
    assert re.match(r"the environment Blocks\.step blocked the event loop for \d\.\d s in Blocks\.step \(", message)
    assert f"{__file__}:" in message
    for way in ("set environment.thread: true", "asyncio.to_thread(function, ...)"):
        assert way in message


def test_a_machine_that_is_slow_to_run_a_new_thread_blames_nobody(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Starts(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            slow = threading.Thread(target=lambda: None)
            run = slow._bootstrap  # type: ignore[attr-defined]
            monkeypatch.setattr(slow, "_bootstrap", lambda: (time.sleep(1.0), run()))
            slow.start()
            slow.join()
            return Reply(done=True)

    (one,) = hold_all(Says("a"), Starts)
    assert (one.stop, caplog.messages) == (Stop.DONE, [])


def test_the_thread_that_watches_an_event_loop_ends_with_it() -> None:
    async def watched() -> LoopWatch:
        watch = loop_watch()
        watch.end(watch.begin("a call", advice=""))
        return watch

    watcher = asyncio.run(watched())._watcher
    assert watcher is not None
    watcher.join(60)
    assert not watcher.is_alive()


def test_who_blocks_the_loop_for_too_long_meets_its_own_deadline() -> None:
    made = iter([Blocks(4.0), *(ScriptedUser(["And?"]) for _ in range(3))])
    limits = Limits(turns=2, seconds=2.0)
    first, *others = hold_all(Says("a", "b", seconds=0.01), lambda: next(made), size=4, limits=limits)
    assert first.stop is Stop.DEADLINE
    assert [one.stop for one in others] == [Stop.DONE] * 3


def test_a_tool_that_blocks_the_loop_does_not_time_out_the_others() -> None:
    async def slow() -> str:
        """Take time."""
        time.sleep(0.3)
        await asyncio.sleep(0.01)
        return "done"

    from turnwise.environments.tools.tool import Tool

    tool = Tool.of(slow, timeout=0.8)
    trajectories = hold_all(Says(call("slow"), "bye"), lambda: Tools([tool]), size=8)
    assert [one.turns[0].outcomes[0].error for one in trajectories] == [None] * 8


# context variables

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


def test_all_calls_of_an_environment_share_their_context_and_no_other_conversation_does() -> None:
    seen: list[tuple[str, str, str]] = []

    class Remembers(SingleTurn):
        async def begin(self, row: Row) -> Opening:
            self.before = WHO.get()
            self.token = WHO.set(f"{id(self)}")
            return await super().begin(row)

        async def step(self, turn: Turn) -> Reply:
            await asyncio.sleep(0.01)
            return Reply(done=True)

        async def close(self) -> None:
            seen.append((str(id(self)), WHO.get(), self.before))
            WHO.reset(self.token)
            assert WHO.get() == "nobody"

    hold_all(Says("a"), Remembers, size=3)
    assert len(seen) == 3
    assert all((me, before) == (who, "nobody") for me, who, before in seen)
    assert WHO.get() == "nobody"


def test_a_sync_generator_keeps_its_context_from_thread_to_thread() -> None:
    seen: list[str] = []

    @environment
    def user(row: Row):  # type: ignore[no-untyped-def]
        WHO.set("me")
        turn = yield Opening(messages=row.messages)
        seen.append(WHO.get())
        WHO.set(turn.text)
        yield user_message("And?")
        seen.append(WHO.get())

    hold(Says("a", "b"), user)
    assert seen == ["me", "a"]


def test_the_calls_of_a_tool_class_share_their_context_from_init_to_close() -> None:
    seen: list[str] = []

    class Counter:
        def __init__(self) -> None:
            WHO.set("made")

        def sync(self) -> str:
            """Sync."""
            seen.append(WHO.get())
            WHO.set("sync")
            return ""

        async def later(self) -> str:
            """Async."""
            seen.append(WHO.get())
            WHO.set("later")
            return ""

        def close(self) -> None:
            seen.append(WHO.get())

    hold(Says(call("sync") + call("later"), "bye"), lambda: Tools([Counter]))
    assert seen == ["made", "sync", "later"]


def test_what_tools_that_run_together_set_is_seen_by_none_of_the_others() -> None:
    async def f(name: str) -> str:
        """Say who it is."""
        WHO.set(name)
        await asyncio.sleep(0.01)
        return WHO.get()

    said = call("f", '{"name": "x"}') + call("f", '{"name": "y"}')
    trajectory = hold(Says(said, "bye"), lambda: Tools([f]))
    assert [one.content for one in trajectory.turns[0].outcomes] == ["x", "y"]


# nothing is left behind


@pytest.mark.slow
def test_asyncio_complains_of_nothing_after_many_faulty_conversations() -> None:
    complaints: list[str] = []

    class Several(Troubled):
        async def begin(self, row: Row) -> Opening:
            opening = await super().begin(row)
            return Opening(messages=opening.messages)

    async def f(n: int) -> str:
        """Do it."""
        await list(TROUBLES.values())[n % len(TROUBLES)][0]()
        return ""

    def g(n: int) -> str:
        """Do it."""
        raise Mean("no")

    places = ["begin", "step", "final_reward", "close", "nowhere"]
    functions = [function for function, _ in TROUBLES.values()]
    numbers = iter(range(10_000))

    def make() -> Environment:
        n = next(numbers)
        return Tools([f, g], then=Several(places[n % 5], functions[n % len(functions)]))

    async def run(lockstep: bool) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        said = (
            call("f", '{"n": 1}') + call("g", '{"n": 2}') + call("f", '{"n": 3}'),
            "b",
            RuntimeError("the engine is dead"),
        )
        groups = [new_group(a_row(id=str(n)), size=4, seed=0) for n in range(25)]
        limits = Limits(turns=4, seconds_per_turn=0.5)
        await rollout_groups(groups, a_table(Says(*said), make, lockstep=lockstep, limits=limits))
        gc.collect()
        await asyncio.sleep(0.01)

    logging.disable(logging.WARNING)
    try:
        asyncio.run(run(False))
        asyncio.run(run(True))
        gc.collect()
    finally:
        logging.disable(logging.NOTSET)
    assert complaints == []


def test_an_error_of_who_writes_conversations_down_cancels_the_others_and_leaves_nothing() -> None:
    complaints: list[str] = []
    before = threading.active_count()  # threads of other tests may still hang, as those tests want it

    async def done(trajectory: Trajectory) -> None:
        raise OSError("the disk is full")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        group = new_group(a_row(), size=5, seed=0)
        with pytest.raises(OSError, match="the disk is full"):
            await rollout_groups([group], a_table(Says("a", seconds=0.01)), on_finished=done)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    gc.collect()
    assert complaints == []
    assert threading.active_count() <= before + 2


def test_a_garbage_collection_is_not_taken_for_a_call_that_blocks(caplog: pytest.LogCaptureFixture) -> None:
    from turnwise.user_code.calls import collector_time

    @environment
    async def collects(row: Row):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        began = time.monotonic()
        collector_time("start", {})
        while time.monotonic() - began < 0.4:  # computes, as a collection does
            pass
        collector_time("stop", {})
        yield Reply(done=True)

    with caplog.at_level(logging.WARNING):
        hold(Says("a"), collects)
    assert not [one for one in caplog.records if "blocked the event loop" in one.message]


def test_the_finally_of_a_generator_may_take_longer_than_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    cleaned: list[str] = []

    @environment
    async def slow_to_clean_up(row: Row):  # type: ignore[no-untyped-def]
        try:
            yield Opening(messages=row.messages)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(1.5)  # stops a container, say
            cleaned.append(row.id)

    with caplog.at_level(logging.WARNING):
        trajectory = hold(Says("a"), slow_to_clean_up, limits=Limits(seconds=0.2))
    assert trajectory.stop is Stop.DEADLINE
    assert cleaned == ["1"]
    assert not [one.message for one in caplog.records if "could not be closed" in one.message]


def test_a_generator_that_swallows_cancellation_is_abandoned_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from turnwise.environments import environment as module

    monkeypatch.setattr(module, "_CLEANING_SECONDS", 0.3)

    @environment
    async def swallows(row: Row):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)

    began = time.monotonic()
    trajectory = hold(Says("a"), swallows, limits=Limits(seconds=0.2))
    assert trajectory.stop is Stop.DEADLINE
    assert time.monotonic() - began < 50


# code that leaves its place


def forks(how: str) -> int:
    """Fork a child that ends as `how` says. Returns the status of the child in the parent."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if how == "exits":
        sys.exit(3)
    if how == "raises":
        raise RuntimeError("in the child")
    return -1  # the child returns as if it were the run


@pytest.mark.parametrize(("how", "status"), [("exits", 3), ("raises", 1), ("returns", 0)])
@pytest.mark.parametrize("place", ["environment", "sync environment", "tool", "constructor"])
def test_a_child_that_user_code_forks_ends_where_the_code_ends(place: str, how: str, status: int) -> None:
    found: list[int] = []

    @environment
    async def in_loop(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        found.append(forks(how))

    @environment
    def in_thread(row: Row) -> Generator[Opening | Reply, Turn, None]:
        yield Opening(messages=row.messages)
        found.append(forks(how))

    def look() -> str:
        """Look."""
        found.append(forks(how))
        return "seen"

    class Constructed(SingleTurn):
        def __init__(self) -> None:
            found.append(forks(how))

    made: dict[str, Any] = {
        "environment": in_loop,
        "sync environment": in_thread,
        "tool": lambda: Tools([look]),
        "constructor": Constructed,
    }
    (trajectory,) = hold_all(Says(call("look"), "b"), made[place])
    assert trajectory.error is None
    assert found == [status]  # and this process is the only one that comes here


@pytest.mark.parametrize("limit", ["seconds_per_turn", "seconds"])
def test_a_call_that_blocks_for_good_ends_with_the_limit_of_its_conversation(limit: str) -> None:
    class Sleeps(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            if turn.text == "a":
                time.sleep(1000)
            return Reply(done=True)

    limits = Limits(turns=2, **{"seconds_per_turn": None, "seconds": None, limit: 0.5})  # type: ignore[arg-type]
    started = time.monotonic()
    stuck, other = hold_all(scripted(["a"], ["b"]), Sleeps, size=2, limits=limits)
    assert time.monotonic() - started < 60
    assert stuck.error is not None
    assert (stuck.stop, stuck.error.kind) == (Stop.DEADLINE, "deadline")
    assert f"limits.{limit}=0.5" in stuck.error.message
    assert (other.stop, other.error) == (Stop.DONE, None)


def test_a_tool_that_blocks_the_loop_meets_its_own_timeout_and_the_model_is_told() -> None:
    async def look() -> str:
        """Look."""
        time.sleep(1000)
        return "seen"

    (trajectory,) = hold_all(Says(call("look"), "b"), lambda: Tools([Tool.of(look, timeout=0.5)]))
    assert trajectory.error is None
    assert trajectory.turns[0].outcomes[0].error == "timeout"
    assert trajectory.stop is Stop.DONE


def test_an_interrupted_call_that_catches_everything_is_interrupted_again() -> None:
    class Stubborn(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            for _ in range(2):
                with contextlib.suppress(BaseException):
                    time.sleep(1000)
            return Reply(done=True, reward=1.0)

    (trajectory,) = hold_all(Says("a"), Stubborn, limits=Limits(turns=2, seconds_per_turn=0.3))
    assert trajectory.stop is not None  # it ends


def test_a_call_is_not_interrupted_while_an_object_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python prints an exception of `__del__`, and goes on: the interruption would be lost, and what it frees half freed."""
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)
    freed: list[bool] = []

    class Slow:
        def __del__(self) -> None:
            time.sleep(0.5)
            freed.append(True)

    class Frees(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            Slow()
            time.sleep(1000)
            return Reply(done=True)

    (trajectory,) = hold_all(Says("a"), Frees, limits=Limits(turns=2, seconds_per_turn=0.2))
    assert (trajectory.stop, freed, lost) == (Stop.DEADLINE, [True], [])


@pytest.mark.parametrize("how", ["blocks", "waits", "swallows", "thread"])
def test_an_environment_is_closed_though_its_tools_do_not_close(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolbox, "_CLOSE_TIMEOUT", 0.5)
    closed: list[str] = []

    class Hangs:
        def look(self) -> str:
            """Look."""
            return "seen"

        async def close(self) -> None:
            if how == "blocks":
                time.sleep(1000)
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    if how == "waits":
                        raise

    class HangsInThread(Hangs):
        def close(self) -> None:  # type: ignore[override]
            time.sleep(20)

    class Inner(SingleTurn):
        async def close(self) -> None:
            closed.append("inner")

    kind = HangsInThread if how == "thread" else Hangs
    (trajectory,) = hold_all(Says("a"), lambda: Tools([kind], then=Inner()))
    assert trajectory.error is None
    assert closed == ["inner"]


def test_the_line_of_a_call_is_never_that_which_started_the_loop() -> None:
    """A call of a library alone has no line of a user's, and the script below the loop has not blocked it."""

    async def main() -> str:
        loop = asyncio.get_running_loop()
        place: asyncio.Future[str] = loop.create_future()
        lexer = shlex.shlex("a")
        lexer.read_token = lambda: place.set_result(_line(sys._getframe(1))) or ""  # its frame is a user's
        loop.call_soon(lexer.get_token)
        return await place

    assert asyncio.run(main()).startswith("shlex.get_token (")


# When two rewards are equal: the same answer for advantages, metrics, dynamic sampling, pass rates and the curriculum


ROW = Row(id="r", messages=[])


def group(*rewards: float) -> Group:
    trajectories = [Trajectory(id=str(n), group="r", row=ROW) for n in range(len(rewards))]
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        trajectory.reward, trajectory.rewards = reward, {"a": reward, "b": float(trajectory.id)}
    return Group(id="r", row=ROW, trajectories=trajectories)


@pytest.mark.parametrize(
    ("rewards", "equal"),
    [
        ((0.1 + 0.2, 0.3, 0.3), True),
        ((sum([0.1] * 10), 1.0, 1.0), True),
        ((1e6 + 1e-5, 1e6, 1e6), True),
        ((0.3, 0.3 + 1e-6, 0.3), False),
        ((1e6, 1e6 + 1, 1e6), False),
    ],
)
def test_all_parts_of_a_run_agree_whether_rewards_are_equal(rewards: tuple[float, ...], equal: bool) -> None:
    one = group(*rewards)
    metrics = conversation_metrics([one])
    assert equal_rewards(rewards) is equal
    assert (centred(rewards) == [0.0] * len(rewards)) is equal
    assert has_reward_differences(one) is not equal
    assert metrics["groups/zero_std"] == float(equal)
    assert (metrics["reward/std"] == 0.0) is equal
    assert (metrics["rewards/a/std"] == 0.0) is equal
    assert (lowest_correlation(one.trajectories) is None) is equal


def test_a_reward_that_misses_the_bound_by_rounding_reaches_it() -> None:
    almost = sum([0.1] * 10)
    assert almost < 1.0
    assert reaches(almost, 1.0)
    assert not reaches(0.999999, 1.0)
    assert not reaches(0.5, math.inf)
    assert not reaches(-math.inf, 0.5)
    always_skips = Curriculum(low=0.0, high=1.0, keep=1e-12, seed=0)
    assert always_skips.skips(ROW, 0, {"r": almost})
    assert always_skips.skips(ROW, 0, {"r": 1e-17})
    assert not always_skips.skips(ROW, 0, {"r": 0.5})
    assert not Curriculum(low=-math.inf, high=1.0, keep=1e-12, seed=0).skips(ROW, 0, {"r": 0.5})
