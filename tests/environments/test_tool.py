"""How long and how often a tool is tried, and that none of them can end anything but its own call."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from typing import Any

import pytest

from support.conversations import Says, a_row, a_table, call, hold
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Reply, ToolCall, ToolOutcome, Turn


def ask(tool: Tool) -> ToolOutcome:
    return asyncio.run(tool.run(ToolCall(id="call_0", name=tool.name, arguments={}, text="")))


class Flaky:
    """Raises what it is given, one after the other, and then answers."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.tried = 0

    async def fetch(self) -> str:
        """Fetch."""
        self.tried += 1
        if self.errors:
            raise self.errors.pop(0)
        return "fetched"


# attempts


def test_an_exception_is_tried_again_as_often_as_the_budget_says() -> None:
    flaky = Flaky(ConnectionError("reset"), KeyError("x"))
    outcome = ask(Tool.of(flaky.fetch, retries=2))
    assert (outcome.content, outcome.error, outcome.attempts, flaky.tried) == ("fetched", None, 3, 3)
    assert outcome.seconds >= 0.3  # 0.1 s before the second attempt, 0.2 s before the third

    flaky = Flaky(*(ConnectionError(f"reset {n}") for n in range(3)))
    outcome = ask(Tool.of(flaky.fetch, retries=1))
    assert (outcome.content, outcome.error) == ("Error: ConnectionError: reset 1", "raised")
    assert (outcome.attempts, flaky.tried) == (2, 2)

    flaky = Flaky(ConnectionError("reset"))
    outcome = ask(Tool.of(flaky.fetch))
    assert (outcome.error, outcome.attempts, flaky.tried) == ("raised", 1, 1)


def test_a_value_error_is_the_tool_talking_and_is_reported_at_once() -> None:
    class NotFound(ValueError):
        pass

    for error, told in ((ValueError("no such city"), "no such city"), (NotFound("none"), "NotFound: none")):
        flaky = Flaky(error)
        outcome = ask(Tool.of(flaky.fetch, retries=5))
        assert (outcome.content, outcome.error) == (f"Error: {told}", "raised")
        assert (outcome.attempts, flaky.tried) == (1, 1)


def test_wrong_arguments_are_not_tried_again() -> None:
    async def add(a: int) -> int:
        """Add."""
        return a

    outcome = ask(Tool.of(add, retries=5))
    assert (outcome.error, outcome.attempts) == ("arguments", 1)


@pytest.mark.parametrize(("retry_timeouts", "attempts"), [(False, 1), (True, 3)])
def test_a_timeout_is_tried_again_where_it_is_said(retry_timeouts: bool, attempts: int) -> None:
    tried: list[float] = []

    async def hangs() -> None:
        """Hang."""
        tried.append(time.perf_counter())
        await asyncio.sleep(5)

    outcome = ask(Tool.of(hangs, timeout=0.03, retries=2, retry_timeouts=retry_timeouts))
    assert (outcome.error, outcome.attempts, len(tried)) == ("timeout", attempts, attempts)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"timeout": 0}, "has timeout=0; it must be a number of seconds above 0"),
        ({"timeout": float("inf")}, "has timeout=inf"),
        ({"retries": -1}, "has retries=-1; it must be 0 or more"),
        (
            {"retry_timeouts": True},
            "retry_timeouts of the tool 'fetch' has no effect without retries: set retries, or remove it",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Tool.of(Flaky().fetch, **options)


# what a tool may do to us


def test_a_tool_cleans_up_when_its_time_is_over() -> None:
    cleaned: list[str] = []

    async def hangs() -> None:
        """Hang."""
        try:
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("up")

    assert ask(Tool.of(hangs, timeout=0.02)).error == "timeout"
    assert cleaned == ["up"]


def test_a_tool_that_does_not_let_itself_be_cancelled_is_left_behind() -> None:
    over = False

    async def stubborn() -> None:
        """Stay."""
        while not over:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.05)

    async def main() -> ToolOutcome:
        nonlocal over
        outcome = await Tool.of(stubborn, timeout=0.02).run(ToolCall(id="c", name="stubborn", arguments={}, text=""))
        over = True
        await asyncio.sleep(0.1)
        return outcome

    outcome = asyncio.run(main())
    assert outcome.error == "timeout"
    assert outcome.seconds < 30


@pytest.mark.parametrize("in_thread", [False, True])
def test_a_tool_that_cancels_itself_ends_nobody_else(in_thread: bool) -> None:
    async def on_the_loop() -> str:
        """Cancel."""
        raise asyncio.CancelledError

    def aside() -> str:
        """Cancel."""
        raise asyncio.CancelledError

    tool = aside if in_thread else on_the_loop
    trajectory = hold(Says(call(tool.__name__), "bye"), lambda: Tools([tool]))
    assert (trajectory.stop, trajectory.error) == ("done", None)
    assert trajectory.turns[0].outcomes[0].error == "raised"
    assert "CancelledError" in trajectory.turns[0].outcomes[0].content


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit(3), "Error: the code tried to exit the process (status 3)"),
        (KeyboardInterrupt(), "Error: KeyboardInterrupt"),
    ],
)
def test_a_sync_tool_that_wants_out_ends_its_own_call(error: BaseException, told: str) -> None:
    def leave() -> str:
        """Leave."""
        raise error

    outcome = ask(Tool.of(leave))
    assert outcome.error == "raised"
    assert outcome.content.rstrip(": ") == told


def test_a_result_that_cannot_be_reported_is_an_error_of_the_tool() -> None:
    class Sour:
        def __str__(self) -> str:
            raise RuntimeError("I will not be written")

    def give() -> Any:
        """Give."""
        return {"a": Sour(), ("x", 1): 2}

    outcome = ask(Tool.of(give))
    assert outcome.error == "raised"
    assert outcome.content.startswith(("Error: TypeError: keys must be", "Error: RuntimeError: I will not"))


def test_eight_conversations_with_a_slow_sync_tool_take_as_long_as_one() -> None:
    gate = threading.Barrier(8, timeout=60)  # opens when all eight wait at once

    def slow() -> str:
        """Think."""
        gate.wait()
        return str(os.getpid())

    group = new_group(a_row(), size=8, seed=0)
    table = a_table(Says(call("slow"), "done"), lambda: Tools([slow]))
    asyncio.run(rollout_groups([group], table))
    assert [one.turns[0].outcomes[0].content for one in group.trajectories] == [str(os.getpid())] * 8
    assert [one.stop for one in group.trajectories] == ["done"] * 8


# several calls of one turn


def answered(tools: Tools, *calls: ToolCall) -> Reply:
    turn = Turn(index=0, message={"role": "assistant", "content": ""}, text="", calls=calls)
    return asyncio.run(tools.step(turn))


def calls_of(name: str, count: int) -> list[ToolCall]:
    return [ToolCall(id=f"call_{n}", name=name, arguments={}, text="") for n in range(count)]


def test_calls_beyond_the_bound_are_answered_and_not_made() -> None:
    made: list[int] = []

    async def note() -> str:
        """Note."""
        made.append(1)
        return "noted"

    reply = answered(Tools([note], max_parallel_calls=2), *calls_of("note", 4))
    assert len(made) == 2
    assert [outcome.id for outcome in reply.outcomes] == ["call_0", "call_1", "call_2", "call_3"]
    assert [outcome.error for outcome in reply.outcomes] == [None, None, "parallel", "parallel"]
    assert [message["tool_call_id"] for message in reply.messages] == ["call_0", "call_1", "call_2", "call_3"]
    assert reply.messages[3]["content"] == (
        "Error: at most 2 tool calls can be made in one turn, and this turn has 4. This call was not run; make it in your "
        "next turn"
    )
    assert len(answered(Tools([note], max_parallel_calls=4), *calls_of("note", 4)).outcomes) == 4
    assert len(made) == 6


def test_calls_that_cannot_be_run_take_no_place() -> None:
    async def note() -> str:
        """Note."""
        return "noted"

    bad = ToolCall(id="call_x", name="", arguments={}, text="", error="cannot be read")
    strange = ToolCall(id="call_y", name="nothing", arguments={}, text="")
    reply = answered(Tools([note], max_parallel_calls=1), bad, strange, *calls_of("note", 2))
    assert [outcome.error for outcome in reply.outcomes] == ["malformed", "unknown_tool", None, "parallel"]


def test_the_bound_of_a_layer_in_front_of_a_layer_is_the_stricter_one() -> None:
    async def note() -> str:
        """Note."""
        return "noted"

    async def look() -> str:
        """Look."""
        return "seen"

    tools = Tools([look], then=Tools([note], max_parallel_calls=1), max_parallel_calls=3)
    reply = answered(tools, *calls_of("note", 1), *calls_of("look", 1))
    assert [outcome.error for outcome in reply.outcomes] == [None, "parallel"]
    with pytest.raises(ConfigError, match="max_parallel_calls=0 is not allowed;"):
        Tools([note], max_parallel_calls=0)


def test_an_exception_keeps_its_traceback_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def helper() -> None:
        raise LookupError("no such page")

    async def page(n: int) -> str:
        """Read a page."""
        helper()
        return ""

    async def talks(n: int) -> str:
        """Read a page."""
        raise ValueError("give another number")

    tool = Tool.of(page)
    outcomes = [asyncio.run(tool.run(ToolCall(id="1", name="page", arguments={"n": n}, text=""))) for n in range(3)]
    assert [one.content for one in outcomes] == ["Error: LookupError: no such page"] * 3
    for one in outcomes:
        assert "in page" in one.traceback
        assert one.traceback.splitlines()[-1].strip() == 'raise LookupError("no such page")'
    asyncio.run(Tool.of(talks).run(ToolCall(id="1", name="talks", arguments={"n": 1}, text="")))
    (message,) = caplog.messages
    assert message.startswith("the tool page raised LookupError: no such page\n  File ")
