"""Tools of a conversation: how they are called, what they keep, and what becomes of their errors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from support.conversations import Says, a_row, a_table, call, hold, hold_all
from turnwise.environments.environment import Environment, SingleTurn
from turnwise.environments.tools.toolbox import Tool, Toolbox, ToolResponse, Tools
from turnwise.environments.users import checked_answer
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Opening, Reply, Row, ToolCall, ToolOutcome, ToolSchema, Turn

# Classes whose methods are tools: one instance for each conversation, closed once on every path out.


LOG: list[str] = []


@pytest.fixture(autouse=True)
def _forget() -> None:
    LOG.clear()


class Bank:
    """An account."""

    currency = "EUR"

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance
        LOG.append("made")

    def deposit(self, amount: int) -> str:
        """Put money in.

        Args:
            amount: How much.
        """
        before = self.balance
        time.sleep(0.005)  # a moment in which another call could come between
        self.balance = before + amount
        return f"{self.balance} {self.currency}"

    async def show(self) -> int:
        """Say what is there."""
        await asyncio.sleep(0)
        return self.balance

    @staticmethod
    def rate() -> float:
        """Say what interest there is."""
        return 0.5

    @property
    def secret(self) -> str:
        return "1234"

    def _audit(self) -> None: ...

    def close(self) -> None:
        LOG.append(f"closed at {self.balance}")


def test_the_public_methods_of_a_class_are_tools() -> None:
    box = Toolbox.of(Bank)
    assert [tool.name for tool in box.tools] == ["deposit", "show", "rate"]
    assert box.tools[0].schema == {
        "type": "function",
        "function": {
            "name": "deposit",
            "description": "Put money in.",
            "parameters": {
                "type": "object",
                "properties": {"amount": {"type": "integer", "description": "How much."}},
                "required": ["amount"],
            },
        },
    }
    assert box.closes


def test_each_conversation_has_an_instance_of_its_own_which_keeps_its_state() -> None:
    engine = Says(
        call("deposit", '{"amount": 5}'), call("deposit", '{"amount": 2}') + call("rate"), call("show"), "#### 7"
    )
    row = a_row(answer=7)
    trajectories = hold_all(engine, lambda: Tools([Bank], then=checked_answer()), row=row, size=3)
    for trajectory in trajectories:
        assert [[one.content for one in turn.outcomes] for turn in trajectory.turns] == [
            ["5 EUR"], ["7 EUR", "0.5"], ["7"], []
        ]  # fmt: skip
        assert (trajectory.stop, trajectory.error) == ("done", None)
    assert LOG == ["made"] * 3 + ["closed at 7"] * 3


def test_a_class_may_be_given_arguments() -> None:
    box = Toolbox.of(Bank, arguments={"balance": 100}, timeout=2.0, retries=1)
    assert (box.tools[0].timeout, box.tools[0].retries) == (2.0, 1)
    trajectory = hold(Says(call("show"), "x"), lambda: Tools([box]))
    assert trajectory.turns[0].outcomes[0].content == "100"
    assert LOG == ["made", "closed at 100"]


class Basket:
    def __init__(self, items: list[str], prices: dict[str, list[float]]) -> None:
        self.items, self.prices = items, prices

    def put(self, item: str) -> str:
        """Put something in."""
        self.items.append(item)
        self.prices["all"].append(1.0)
        return f"{self.items} {self.prices}"


def test_what_an_instance_does_to_its_arguments_is_not_seen_by_another() -> None:
    box = Toolbox.of(Basket, arguments={"items": [], "prices": {"all": []}})
    for _ in range(2):
        trajectory = hold(Says(call("put", '{"item": "pear"}'), "Done."), lambda: Tools([box]))
        assert trajectory.turns[0].outcomes[0].content == "['pear'] {'all': [1.0]}"


def test_calls_of_one_instance_are_run_in_their_order_and_of_two_together() -> None:
    engine = Says("".join(call("deposit", f'{{"amount": {n}}}') for n in range(1, 6)) + call("show"), "x")
    trajectory = hold(engine, lambda: Tools([Bank]), limits=Limits(turns=2, tokens_per_turn=1000))
    said = [one.content for one in trajectory.turns[0].outcomes]
    assert said == ["1 EUR", "3 EUR", "6 EUR", "10 EUR", "15 EUR", "15"]

    both = threading.Barrier(2, timeout=10)  # passed only where both are under way at once

    class One:
        def first(self) -> str:
            """Wait."""
            both.wait()
            return "1"

    class Two:
        def second(self) -> str:
            """Wait."""
            both.wait()
            return "2"

    trajectory = hold(Says(call("first") + call("second"), "x"), lambda: Tools([One, Two]))
    assert [one.content for one in trajectory.turns[0].outcomes] == ["1", "2"]


# closing


def closing(kind: type, engine: Any, then: Callable[[], Environment] = SingleTurn, **table: Any) -> Any:
    return hold(engine, lambda: Tools([kind], then=then()), **table)


class Breaks(SingleTurn):
    async def step(self, turn: Turn) -> Reply:
        raise RuntimeError("no")


class BreaksAtOnce(SingleTurn):
    async def begin(self, row: Row) -> Opening:
        raise RuntimeError("no")


def test_close_is_called_once_on_every_path_out() -> None:
    assert closing(Bank, Says("x")).stop == "done"
    assert LOG == ["made", "closed at 0"]
    assert closing(Bank, Says("x"), Breaks).error.kind == "environment"
    assert LOG == ["made", "closed at 0"] * 2
    assert closing(Bank, Says(RuntimeError("no engine"))).error.kind == "engine"
    assert LOG == ["made", "closed at 0"] * 3
    limits = Limits(turns=1, tokens_per_turn=400)
    assert closing(Bank, Says(call("deposit", '{"amount": 1}')), limits=limits).stop == "max_turns"
    assert LOG == ["made", "closed at 0"] * 3 + ["made", "closed at 1"]
    slow = Limits(turns=2, tokens_per_turn=400, seconds_per_turn=1.0)
    assert closing(Bank, Says("x", seconds=100.0), limits=slow).stop == "deadline"
    assert LOG[-2:] == ["made", "closed at 0"]
    assert len(LOG) == 10


def test_an_instance_is_not_made_for_a_conversation_that_does_not_begin() -> None:
    trajectory = closing(Bank, Says("x"), BreaksAtOnce)
    assert trajectory.error.kind == "environment"
    assert LOG == []


def test_close_may_be_async() -> None:
    class Shop:
        def buy(self) -> str:
            """Buy."""
            return "bought"

        async def close(self) -> None:
            await asyncio.sleep(0)
            LOG.append("closed")

    assert Toolbox.of(Shop).closes
    assert closing(Shop, Says(call("buy"), "x")).turns[0].outcomes[0].content == "bought"
    assert LOG == ["closed"]


def test_a_class_that_cannot_be_made_breaks_its_own_conversation_only() -> None:
    class Rare:
        made = 0

        def __init__(self) -> None:
            type(self).made += 1
            if self.made == 2:
                raise OSError("no port is free")

        def look(self) -> str:
            """Look."""
            return "seen"

        def close(self) -> None:
            LOG.append("closed")

    trajectories = hold_all(Says(call("look"), "x"), lambda: Tools([Rare]), size=3)
    errors = [one.error for one in trajectories]
    assert sorted(one is None for one in errors) == [False, True, True]
    (error,) = [one for one in errors if one is not None]
    assert (error.kind, error.message) == ("environment", "OSError: no port is free")
    assert LOG == ["closed", "closed"]


def test_all_are_closed_though_one_cannot_be(caplog: pytest.LogCaptureFixture) -> None:
    class Bad:
        def look(self) -> str:
            """Look."""
            return "seen"

        def close(self) -> None:
            raise OSError("stuck")

    class Behind(SingleTurn):
        async def close(self) -> None:
            LOG.append("behind closed")

    trajectory = hold(Says("x"), lambda: Tools([Bad, Bank], then=Behind()))
    assert (trajectory.stop, trajectory.error) == ("done", None)
    assert LOG == ["made", "closed at 0", "behind closed"]
    assert "could not be closed: OSError: stuck" in caplog.text


def test_an_instance_that_is_made_after_its_conversation_is_over_is_closed_all_the_same() -> None:
    class Late:
        def __init__(self) -> None:
            time.sleep(1.0)
            LOG.append("made")

        def look(self) -> str:
            """Look."""
            return "seen"

        def close(self) -> None:
            LOG.append("closed")

    async def main() -> None:
        tools = Tools([Late])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await tools.begin(a_row())
        await tools.close()
        assert LOG == []
        until = time.monotonic() + 20
        while len(LOG) < 2 and time.monotonic() < until:
            await asyncio.sleep(0.05)
        assert LOG == ["made", "closed"]

    asyncio.run(main())


# what is refused


def test_classes_that_cannot_be_tools_are_refused() -> None:
    class Empty:
        def _hidden(self) -> None: ...

        def close(self) -> None: ...

    class Untyped:
        def look(self, x) -> None:  # type: ignore[no-untyped-def]
            """Look."""

    class Needs:
        def __init__(self, url: str) -> None: ...

        def look(self) -> None:
            """Look."""

    with pytest.raises(
        ConfigError,
        match="the class Empty has no public methods; each public method becomes a tool, so add at least one",
    ):
        Tools([Empty])
    with pytest.raises(ConfigError, match=r"a tool is a function, a class or an object with public methods, .* not <"):
        Tools([Empty()])
    with pytest.raises(ConfigError, match="a tool is made from a function, not from 3"):
        Tool.of(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the parameter 'x' of the tool 'look' has no type: add an annotation"):
        Tools([Untyped])
    with pytest.raises(
        ConfigError, match=r"Needs cannot be created with the arguments \{\}: missing a required argument: 'url'"
    ):
        Tools([Needs])
    with pytest.raises(
        ConfigError, match=r"Bank cannot be created with the arguments \{'x': 1\}: got an unexpected keyword"
    ):
        Toolbox.of(Bank, arguments={"x": 1})
    with pytest.raises(ConfigError, match="two tools have the name 'deposit'"):
        Tools([Bank, Bank])


def test_a_subclass_may_replace_and_hide_methods_of_its_base() -> None:
    class Quiet(Bank):
        rate = None  # type: ignore[assignment]

        def deposit(self, amount: int, note: str = "") -> str:
            """Put money in, with a note."""
            return note

    assert [(tool.name, tool.description) for tool in Toolbox.of(Quiet).tools] == [
        ("deposit", "Put money in, with a note."),
        ("show", "Say what is there."),
    ]


# in front of others


class Game:
    """Offers a tool itself, and answers words and calls."""

    def __init__(self) -> None:
        self.closed = 0

    async def begin(self, row: Row) -> Opening:
        schema: ToolSchema = {"type": "function", "function": {"name": "move", "description": "", "parameters": {}}}
        return Opening(messages=[*row.messages, {"role": "user", "content": "Your move."}], tools=[schema])

    async def step(self, turn: Turn) -> Reply:
        messages = [{"role": "tool", "tool_call_id": one.id, "name": "move", "content": "moved"} for one in turn.calls]
        if not turn.calls:
            messages = [{"role": "user", "content": "Go on."}]
        return Reply(
            messages=messages, reward=len(turn.calls), done=turn.text == "bye", info={"moves": len(turn.calls)}
        )

    async def close(self) -> None:
        self.closed += 1


class Commented:
    """An interaction in front of a game: says a word of its own behind each reply."""

    def __init__(self, then: Environment) -> None:
        self._then = then

    async def begin(self, row: Row) -> Opening:
        return await self._then.begin(row)

    async def step(self, turn: Turn) -> Reply:
        reply = await self._then.step(turn)
        messages: Sequence[dict[str, Any]] = [*reply.messages, {"role": "user", "content": "Hm."}]
        return Reply(messages=messages, reward=reply.reward, done=reply.done, outcomes=reply.outcomes, info=reply.info)

    async def close(self) -> None:
        await self._then.close()


async def look() -> ToolResponse:
    """Look."""
    return ToolResponse(text="a wall")


@pytest.mark.parametrize("order", ["tools, interaction, game", "interaction, tools, game", "tools, tools, game"])
def test_tools_an_interaction_and_a_game_stand_in_any_order(order: str) -> None:
    games: list[Game] = []

    def make() -> Environment:
        games.append(game := Game())
        match order:
            case "tools, interaction, game":
                return Tools([look, Bank], then=Commented(game))
            case "interaction, tools, game":
                return Commented(Tools([look, Bank], then=game))
            case _:
                return Tools([Bank], then=Tools([look], then=game))

    trajectory = hold(Says(call("look"), call("move"), "well", call("show"), "bye"), make)
    assert (trajectory.stop, trajectory.error, trajectory.template_mismatch) == ("done", None, None)
    assert sorted(tool["function"]["name"] for tool in trajectory.tools) == ["deposit", "look", "move", "rate", "show"]
    said = [message["content"] for message in trajectory.messages if message["role"] in ("tool", "user")]
    assert [text for text in said if text != "Hm."] == ["Hi", "Your move.", "a wall", "moved", "Go on.", "0", "Go on."]
    assert [turn.reward for turn in trajectory.turns] == [0.0, 1.0, 0.0, 0.0, 0.0]
    assert (games[0].closed, LOG) == (1, ["made", "closed at 0"])


def test_a_turn_that_calls_tools_of_two_layers_is_answered_by_both_in_the_order_of_the_calls() -> None:
    trajectory = hold(
        Says(call("move") + call("look") + call("lok") + call("move"), "bye"), lambda: Tools([look], then=Game())
    )
    told = [(one["tool_call_id"], one["content"]) for one in trajectory.messages if one["role"] == "tool"]
    assert told == [
        ("call_0", "moved"),
        ("call_1", "a wall"),
        ("call_2", "Error: there is no tool 'lok'; did you mean 'look'? (the tools are: look, move)"),
        ("call_3", "moved"),
    ]
    assert trajectory.turns[0].reward == 2.0
    assert trajectory.turns[0].info == {"moves": 2}


def test_a_layer_whose_other_side_breaks_leaves_no_call_behind() -> None:
    class Broken(Game):
        async def step(self, turn: Turn) -> Reply:
            await asyncio.sleep(0.01)
            raise RuntimeError("no")

    async def linger() -> str:
        """Linger."""
        try:
            await asyncio.sleep(5)
        finally:
            LOG.append("given up")
        return ""

    trajectory = hold(Says(call("move") + call("linger"), "x"), lambda: Tools([linger], then=Broken()))
    assert trajectory.error is not None
    assert (trajectory.error.kind, trajectory.error.message) == ("environment", "RuntimeError: no")
    assert LOG == ["given up"]


def test_a_name_that_the_environment_behind_offers_too_is_refused() -> None:
    async def move() -> str:
        """Move."""
        return "no"

    trajectory = hold(Says("x"), lambda: Tools([move], then=Game()))
    assert trajectory.error is not None
    assert (trajectory.error.kind, trajectory.error.message) == (
        "environment",
        "two tools have the name 'move'; their names must differ: rename one",
    )


# How long and how often a tool is tried, and that none of them can end anything but its own call.


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


def test_a_conversation_makes_no_more_calls_than_its_bound() -> None:
    """Over its turns, those that cannot be run too; a call that was for the next turn takes no place."""
    made: list[int] = []

    async def note() -> str:
        """Note."""
        made.append(1)
        return "noted"

    def errors(tools: Tools, *calls: ToolCall) -> list[str | None]:
        return [outcome.error for outcome in answered(tools, *calls).outcomes]

    tools = Tools([note], max_parallel_calls=2, max_calls=3)
    strange = ToolCall(id="call_y", name="nothing", arguments={}, text="")
    assert errors(tools, *calls_of("note", 3)) == [None, None, "parallel"]
    assert errors(tools, strange, *calls_of("note", 2)) == ["unknown_tool", "max_calls", "max_calls"]
    assert errors(tools, *calls_of("note", 1)) == ["max_calls"]
    assert len(made) == 2
    assert errors(Tools([note], max_calls=3), *calls_of("note", 1)) == [None]  # another conversation
    with pytest.raises(ConfigError, match="max_calls=0 is not allowed;"):
        Tools([note], max_calls=0)
    inner = Tools([], then=Tools([note], max_calls=1), max_calls=3)
    assert errors(inner, *calls_of("note", 2)) == [None, "max_calls"]


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
