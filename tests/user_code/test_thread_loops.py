"""Objects of users' classes beside the event loop: sync objects in threads, and `async` code that blocks in loops of its own."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, call, hold, hold_all
from support.swift import made
from turnwise import assembly
from turnwise.compat.gym import GymEnvironments, ToolEnvironments
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.compat.trl import TrlEnvironments
from turnwise.compat.verl import Conversations
from turnwise.environments.environment import ThreadedEnvironment, environment, user_message
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import ConfigError, Failed
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Opening, Reply, Row, Stop, Turn
from turnwise.user_code import calls
from turnwise.user_code.thread_loops import OwnLoop
from turnwise.user_code.threads import ThreadedObject, columns_for

# `async` code of users' classes that blocks: in a loop of the conversation's own, and the warning that names the
# option.


VERL = """
import contextvars
import time
from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool

WHO = contextvars.ContextVar("who", default="nobody")
SEEN = []
TOGETHER = None
HANGS = None


class Meets(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        WHO.set(instance_id)
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        SEEN.append(WHO.get() == instance_id)
        TOGETHER.wait()
        return True, "Thanks.", 0.5, {}


class Blocks(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        time.sleep(0.3)
        return True, "Thanks.", 0.5, {}


class Hangs(BaseInteraction):
    async def generate_response(self, instance_id, messages, **kwargs):
        HANGS.wait()
        return True, "Thanks.", 0.5, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        SEEN.append("finalized")


class Sync(BaseInteraction):
    def generate_response(self, instance_id, messages, **kwargs):
        return True, "Thanks.", 0.5, {}


class Looks(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        TOGETHER.wait()
        return "seen", 0.25, {}
"""

SCHEMA = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}

MESSAGE = "docs/environments.md, Errors"


@pytest.fixture
def verl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `verl_blocks` of a user of verl."""
    import importlib
    import sys

    from turnwise.compat.verl import verl_names

    (tmp_path / "verl_blocks.py").write_text(VERL)
    monkeypatch.syspath_prepend(str(tmp_path))
    with verl_names():
        module = importlib.import_module("verl_blocks")
    module.TOGETHER = threading.Barrier(8, timeout=20)  # opens when all eight are inside; breaks otherwise
    yield module
    del sys.modules["verl_blocks"]


def interaction(folder: Path, kind: str) -> str:
    """The interaction file of a class."""
    path = folder / "interaction.yaml"
    path.write_text(f"interaction:\n- class_name: verl_blocks.{kind}\n  config: {{}}\n")
    return str(path)


def ends_of(name: str) -> Callable[[], bool]:
    """Whether no thread of this name runs any more, asked until it is so or ten seconds are over."""

    def gone() -> bool:
        until = time.monotonic() + 10
        while time.monotonic() < until and any(thread.name == name for thread in threading.enumerate()):
            time.sleep(0.01)
        return not any(thread.name == name for thread in threading.enumerate())

    return gone


# verl


def test_eight_interactions_that_block_wait_together_in_threads_of_their_conversations(
    verl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conversations = Conversations(interactions=interaction(tmp_path, "Meets"), thread=True)
    eight = hold_all(Says("a"), conversations, size=8)
    assert [(one.error, one.turns[0].reward) for one in eight] == [(None, 0.5)] * 8
    assert verl.SEEN == [True] * 8  # a variable that `start_interaction` has set is seen by the next method
    assert caplog.messages == []
    assert ends_of("verl")()


def test_eight_tools_of_verl_that_block_wait_together(verl: Any, tmp_path: Path) -> None:
    import json

    path = tmp_path / "tools.yaml"
    path.write_text(
        f"tools:\n- class_name: verl_blocks.Looks\n  config: {{type: native}}\n  tool_schema: {json.dumps(SCHEMA)}\n"
    )
    eight = hold_all(Says(call("look", "{}"), "bye"), Conversations(tools=str(path), thread=True), size=8)
    assert [one.turns[0].outcomes[0].content for one in eight] == ["seen"] * 8


def test_a_method_that_hangs_ends_its_conversation_at_the_limit_and_is_released_in_another_thread(
    verl: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # what cleans up after the limit is not interrupted, though the watching thread sees it, as on a busy machine
    monkeypatch.setattr(calls, "_INTERVAL", 0.0)
    verl.HANGS = threading.Event()
    conversations = Conversations(interactions=interaction(tmp_path, "Hangs"), thread=True)
    trajectory = hold(Says("a"), conversations, limits=Limits(turns=2, seconds=0.5))
    assert trajectory.stop is Stop.DEADLINE
    assert verl.SEEN == ["finalized"]  # although `generate_response` has not returned
    verl.HANGS.set()
    assert ends_of("verl")()


def test_a_thread_without_async_methods_of_the_user_is_refused(verl: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"environment\.arguments\.thread has no effect: what the files name has no `async`"
    ):
        Conversations(interactions=interaction(tmp_path, "Sync"), thread=True)


def recipe(tmp_path: Path, **more: Any) -> Config:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": str(tmp_path / "rows.jsonl")}, "output": str(tmp_path), **more}
    )


def test_the_warning_names_the_option_of_verls_conversations_and_the_option_ends_it(
    verl: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {"interactions": interaction(tmp_path, "Blocks")}
    use = {"use": "turnwise.compat.verl:Conversations", "arguments": arguments}
    hold(Says("a"), assembly.environment_factory(recipe(tmp_path, environment=use)))
    (message,) = [message for message in caplog.messages if MESSAGE in message]
    assert "verl_blocks.py:" in message
    assert (
        "write `def` instead of `async def`, set environment.arguments.thread: true, or write `await asyncio.to_thread("
        in message
    )
    caplog.clear()
    threaded = {**use, "arguments": {**arguments, "thread": True}}
    hold(Says("a"), assembly.environment_factory(recipe(tmp_path, environment=threaded)))
    assert caplog.messages == []
    with pytest.raises(ConfigError, match=r"`def` instead of `async def` or set environment\.arguments\.thread: true"):
        assembly.environment_factory(recipe(tmp_path, environment={**use, "thread": True}))


# gym and TRL


def meeting() -> tuple[type[Any], type[Any], type[Any]]:
    """Classes whose `async` methods block until eight of them do."""
    together = threading.Barrier(8, timeout=20)

    class Game:
        async def reset(self, *, seed: int, options: Any) -> tuple[str, dict[str, Any]]:
            return "Go.", {}

        async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            together.wait()
            return "End.", 1.0, True, False, {}

    class Steps:
        async def reset(self) -> str:
            return "Go."

        async def step(self, action: str) -> tuple[str, bool]:
            together.wait()
            return "End.", True

    class Trl:
        def reset(self, **kwargs: Any) -> None:
            pass

        async def look(self) -> str:
            """Look."""
            together.wait()
            return "seen"

    return Game, Steps, Trl


def test_eight_games_whose_async_steps_block_wait_together(caplog: pytest.LogCaptureFixture) -> None:
    game, steps, trl = meeting()
    for source in (GymEnvironments(game, thread=True), ToolEnvironments(steps, thread=True)):
        eight = hold_all(Says("a"), source, size=8)
        assert [(one.error, one.stop) for one in eight] == [(None, Stop.DONE)] * 8
    eight = hold_all(Says(call("look", "{}"), "bye"), TrlEnvironments(trl, thread=True), size=8)
    assert [one.turns[0].outcomes[0].content for one in eight] == ["seen"] * 8
    assert caplog.messages == []
    assert ends_of("trl")()


def test_games_without_async_methods_refuse_a_thread() -> None:
    class Game:
        def reset(self, **kwargs: Any) -> tuple[str, dict[str, Any]]:
            return "Go.", {}

        def step(self, action: str) -> tuple[str, bool]:
            """Step.

            Args:
                action: What to do.
            """
            return "", True

    for source in (GymEnvironments, ToolEnvironments, TrlEnvironments):
        with pytest.raises(ConfigError, match="thread has no effect: Game has no `async` method"):
            source(Game, thread=True)


# ms-swift


def test_eight_async_schedulers_that_block_wait_together_with_environment_thread() -> None:
    together = threading.Barrier(8, timeout=20)

    class Blocks(MultiTurnScheduler):
        async def step(self, infer_request: Any, response_choice: Any, current_turn: int) -> dict[str, Any]:  # type: ignore[override]
            together.wait()
            infer_request.messages.append({"role": "user", "content": "More."})
            return {"infer_request": infer_request}

    class Runs(MultiTurnScheduler):
        async def run(self, infer_request: Any, request_config: Any, **kwargs: Any) -> Any:
            together.wait()
            return await super().run(infer_request, request_config, **kwargs)

        check_finished = lambda self, request, choice, turn: turn == 2  # noqa: E731
        step = Blocks.step

    for kind in (Blocks, Runs):
        with made(kind, max_turns=2) as make:
            eight = hold_all(Says("a", "b"), lambda make=make: ThreadedEnvironment(make), size=8)
        assert [(one.error, one.stop, len(one.turns)) for one in eight] == [(None, Stop.DONE, 2)] * 8


def test_a_scheduler_that_conversations_share_is_refused_in_threads(tmp_path: Path) -> None:
    arguments = {"name": "math_tip_trick", "max_turns": 2, "shared": True}
    use = {"use": "turnwise.compat.swift:scheduler", "arguments": arguments, "thread": True}
    with pytest.raises(ConfigError, match=r"share one object \(environment.arguments.shared\)"):
        assembly.environment_factory(recipe(tmp_path, environment=use))


# other warnings, and tools of a recipe


BLOCKING = """
import time
from turnwise import SingleTurn, Tool
from turnwise.types import Reply

class User(SingleTurn):
    async def step(self, turn):
        if not turn.calls:
            time.sleep(0.3)
        return Reply(done=True)

async def look() -> str:
    '''Look.'''
    time.sleep(0.3)
    return "seen"

async def reward(trajectory) -> float:
    time.sleep(0.3)
    return 1.0
"""


def test_each_warning_names_only_what_its_class_accepts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    user = tmp_path / "user.py"
    user.write_text(BLOCKING)
    config = recipe(tmp_path, environment=f"{user}:User", tools=[f"{user}:look"])
    hold(Says(call("look", "{}"), "bye"), assembly.environment_factory(config))
    of_tool, of_environment = [message for message in caplog.messages if MESSAGE in message]
    assert "in a thread: write `def` instead of `async def`, set tools.0.thread: true, or write" in of_tool
    assert "in a thread: set environment.thread: true, or write" in of_environment
    caplog.clear()
    threaded = recipe(
        tmp_path,
        environment={"use": f"{user}:User", "thread": True},
        tools=[{"use": f"{user}:look", "thread": True}],
    )
    trajectory = hold(Says(call("look", "{}"), "bye"), assembly.environment_factory(threaded))
    assert trajectory.turns[0].outcomes[0].content == "seen"
    assert caplog.messages == []


# the loop itself


def test_an_own_loop_keeps_variables_and_its_loop_from_call_to_call_and_ends_with_its_last_call() -> None:
    who: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")
    loops: list[asyncio.AbstractEventLoop] = []

    async def sets() -> None:
        loops.append(asyncio.get_running_loop())
        who.set("me")

    async def reads() -> str:
        loops.append(asyncio.get_running_loop())
        return who.get()

    async def main() -> tuple[str, str]:
        loop = OwnLoop("own")
        await loop.run(sets, kind="environment")
        there = await loop.run(reads, kind="environment")
        loop.end()
        late = await loop.run(reads, kind="environment")
        return there, late

    assert asyncio.run(main()) == ("me", "me")
    first, second, third = loops
    assert first is second
    assert third is not first
    assert ends_of("own")()


def test_an_own_loop_cancels_what_waits_and_goes_on_in_the_same_thread() -> None:
    seen: list[str] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def waits() -> None:
        loops.append(asyncio.get_running_loop())
        try:
            await asyncio.sleep(3600)
        finally:
            seen.append("cleaned")

    async def says() -> str:
        loops.append(asyncio.get_running_loop())
        return "on"

    async def main() -> str:
        loop = OwnLoop("own")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await loop.run(waits, kind="environment")
        seen.append("ended")
        said = await loop.run(says, kind="environment")
        loop.end()
        return said

    assert asyncio.run(main()) == "on"
    assert seen == ["cleaned", "ended"]
    assert loops[0] is loops[1]
    assert ends_of("own")()


# Objects of other people's classes: made, asked and closed beside the event loop, on every path out.


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
def blocks(row: Row, wait: Callable[[], object] = lambda: None) -> Generator[Opening | Reply, Turn, None]:
    """A sync interaction."""
    try:
        turn = yield Opening(messages=row.messages)
        wait()
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
    all_inside = threading.Barrier(8)  # each waits until all do
    trajectories = hold_all(Says("a", "b"), lambda: blocks(wait=lambda: all_inside.wait(120)), size=8)
    assert [one.stop for one in trajectories] == ["done"] * 8


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
