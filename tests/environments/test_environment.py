"""Environments: generators, classes, single turns, and those that run in threads."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, a_row, a_table, call, hold, hold_all, spoken
from turnwise.assembly import environment_factory
from turnwise.environments.environment import Environment, SingleTurn, ThreadedEnvironment, environment, user_message
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout import rollout as threaded_rollout
from turnwise.rollout.context import Limits
from turnwise.rollout.rollout import new_group, rollout
from turnwise.types import EnvironmentHandle, Failure, Opening, Reply, Row, Stop, Turn

# Environments: what a generator may yield, and that it is cleaned up on every path out.


@environment
async def sure(row: Row, question: str = "Are you sure?", *, times: int = 1) -> AsyncGenerator[Opening | Reply, Turn]:
    """A user who asks back."""
    turn = yield Opening(messages=row.messages)
    for n in range(times):
        turn = yield user_message(f"{question} {turn.text}?", reward=0.25 * (n + 1))
    yield Reply(reward=float("yes" in turn.text), done=True, info={"last": turn.text})


def test_say_is_a_reply_of_one_user_message() -> None:
    assert user_message("No.") == Reply(messages=({"role": "user", "content": "No."},))
    assert user_message("No.", reward=0.5, done=True) == Reply(
        messages=({"role": "user", "content": "No."},), reward=0.5, done=True
    )


def test_a_generator_is_an_environment_with_the_parameters_after_the_row() -> None:
    assert isinstance(sure(), Environment)
    assert isinstance(SingleTurn(), Environment)
    trajectory = hold(Says("4", "yes", "yes!"), lambda: sure("Really:", times=2))
    assert trajectory.stop == "done"
    assert [message["content"] for message in trajectory.messages] == [
        "Hi", "4", "Really: 4?", "yes", "Really: yes?", "yes!"
    ]  # fmt: skip
    assert [turn.reward for turn in trajectory.turns] == [0.25, 0.5, 1.0]
    assert [turn.info for turn in trajectory.turns] == [{}, {}, {"last": "yes!"}]


def test_each_conversation_has_a_generator_of_its_own() -> None:
    first, second = sure(), sure()
    rows = [a_row("A"), a_row("B")]

    async def both() -> list[Opening]:
        openings = [await first.begin(rows[0]), await second.begin(rows[1])]
        await first.close()
        await second.close()
        return openings

    assert [one.messages[0]["content"] for one in asyncio.run(both())] == ["A", "B"]


def test_returning_ends_the_conversation() -> None:
    @environment
    async def leaves(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)

    @environment
    async def leaves_later(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        turn = yield Opening(messages=row.messages)
        if turn.text == "a":
            yield user_message("b")
        return

    assert hold(Says("a"), leaves).stop == "done"
    trajectory = hold(Says("a", "c"), leaves_later)
    assert (trajectory.stop, trajectory.assistant_texts) == ("done", ["a", "c"])


def test_messages_of_a_last_reply_are_recorded_but_no_tokens() -> None:
    @environment
    async def thanks(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        yield Opening(messages=row.messages)
        yield user_message("Thanks.", done=True)

    trajectory = hold(Says("a"), thanks)
    assert trajectory.messages[-1] == {"role": "user", "content": "Thanks."}
    assert spoken(trajectory.segments[0])[-1] == (0, "a<|im_end|>")


def test_a_first_yield_that_is_no_opening_is_reported() -> None:
    @environment
    async def wrong(row: Row) -> AsyncGenerator[Any, Turn]:
        yield user_message("Hi")

    trajectory = hold(Says("a"), wrong)
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert trajectory.error.message == (
        "TypeError: the environment 'wrong' yielded Reply first; the first yield must be an Opening, for example: "
        "turn = yield Opening(messages=row.messages)"
    )
    assert trajectory.turns == []


def test_a_later_yield_that_is_no_reply_is_reported() -> None:
    @environment
    async def wrong(row: Row) -> AsyncGenerator[Any, Turn]:
        yield Opening(messages=row.messages)
        yield "Try again."

    trajectory = hold(Says("a"), wrong)
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert (
        "the environment 'wrong' yielded str; after the Opening every yield must be a Reply" in trajectory.error.message
    )
    assert trajectory.assistant_texts == ["a"]


def test_a_generator_that_never_yields_is_reported() -> None:
    @environment
    async def silent(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        for _ in ():
            yield Opening(messages=row.messages)

    trajectory = hold(Says("a"), silent)
    assert trajectory.error is not None
    assert trajectory.error.kind == "environment"
    assert "the environment 'silent' ended before its first yield" in trajectory.error.message


def test_only_generator_functions_can_be_made_environments() -> None:
    async def no_generator(row: Row) -> Reply:
        return Reply(done=True)

    with pytest.raises(TypeError, match="'no_generator' is not a generator function; it must contain yield"):
        environment(no_generator)  # type: ignore[arg-type]


# the clean-up


class House:
    """What an environment takes and gives back."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def visitor(self, *, at: str = "") -> Any:
        """An environment that breaks, hangs or just goes on `at` a place."""

        async def trouble(place: str) -> None:
            if at == f"error in {place}":
                raise RuntimeError(f"broken in {place}")
            if at == f"hang in {place}":
                await asyncio.sleep(60)

        @environment
        async def visits(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
            self.events.append("in")
            try:
                await trouble("begin")
                turn = yield Opening(messages=row.messages)
                while turn.text != "bye":
                    await trouble("step")
                    turn = yield user_message("And?")
                yield Reply(done=True)
                self.events.append("asked again after done")
            finally:
                await asyncio.sleep(0)  # the clean-up may await
                self.events.append("out")

        return visits


SLOW = Limits(turns=2, tokens_per_turn=400, seconds_per_turn=0.5, seconds=60)


@pytest.mark.parametrize(
    ("said", "at", "limits", "stop"),
    [
        (["hi", "bye"], "", Limits(), "done"),
        (["hi", "hi"], "", Limits(turns=2), "max_turns"),
        (["hi", "h" * 50], "", Limits(tokens_per_turn=20), "length"),
        (["hi", "hi"], "", Limits(tokens=4), "max_tokens"),
        (["hi", "hi"], "", Limits(context=50), "context"),
        (["hi", "hi"], "error in begin", Limits(), "error"),
        (["hi", "hi"], "error in step", Limits(), "error"),
        (["hi", "hi"], "hang in step", SLOW, "deadline"),
        (["hi", "hi"], "hang in begin", Limits(seconds=0.05), "deadline"),
        (["hi", RuntimeError("dead")], "", Limits(), "error"),
    ],
)
def test_finally_runs_once_on_every_path_out(said: list[Any], at: str, limits: Limits, stop: str) -> None:
    house = House()
    trajectory = hold(Says(*said), house.visitor(at=at), limits=limits)
    assert trajectory.stop == stop
    assert house.events == ["in", "out"]


def test_finally_runs_when_the_conversation_is_cancelled() -> None:
    house = House()
    engine = Says("hi", "hi", seconds=0.0)
    (trajectory,) = new_group(a_row(), size=1, seed=0).trajectories

    async def cancelled() -> None:
        task = asyncio.create_task(rollout(trajectory, a_table(engine, house.visitor(at="hang in step"))))
        await asyncio.sleep(0.02)
        assert house.events == ["in"]
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert task.cancelled()

    asyncio.run(cancelled())
    assert house.events == ["in", "out"]
    assert engine.released == [trajectory.id]


def test_a_finally_that_raises_is_logged_and_the_conversation_kept(caplog: pytest.LogCaptureFixture) -> None:
    @environment
    async def sore(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
        try:
            yield Opening(messages=row.messages)
            yield Reply(reward=1.0, done=True)
        finally:
            raise OSError("the disk is gone")

    trajectory = hold(Says("a"), sore)
    assert (trajectory.stop, trajectory.error, trajectory.turns[0].reward) == ("done", None, 1.0)
    assert caplog.messages == [f"the environment of {trajectory.id} could not be closed: OSError: the disk is gone"]


# Classes whose async methods block, run in threads of their own.


WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Blocks(SingleTurn):
    """Blocks in its async methods, and remembers where it was."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.wait = wait
        self.threads = [threading.current_thread()]

    async def begin(self, row: Row) -> Opening:
        WHO.set(str(id(self)))
        return await super().begin(row)

    async def step(self, turn: Turn) -> Reply:
        self.wait()
        self.threads.append(threading.current_thread())
        assert WHO.get() == str(id(self))
        return Reply(done=True, reward=1.0, info={"thread": threading.current_thread().name})

    async def close(self) -> None:
        self.threads.append(threading.current_thread())
        assert len(set(self.threads)) == 1
        assert self.threads[0] is not threading.main_thread()


def test_environments_in_threads_block_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    all_inside = threading.Barrier(20)  # each blocks until all do
    blocks = lambda: Blocks(lambda: all_inside.wait(120))  # noqa: E731
    trajectories = hold_all(Says("a"), lambda: ThreadedEnvironment(blocks), size=20)
    assert [one.stop for one in trajectories] == [Stop.DONE] * 20
    assert [one.turns[0].reward for one in trajectories] == [1.0] * 20
    assert caplog.messages == []
    assert WHO.get() == "nobody"


def test_a_deadline_holds_for_an_environment_in_a_thread_that_blocks_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threaded_rollout, "_CLOSING_SECONDS", 1.5)
    limits = Limits(seconds_per_turn=2.0)  # on a busy machine the good one, too, takes a part of a second
    released = threading.Event()
    waits = (lambda: released.wait(120), lambda: None)
    made = iter([ThreadedEnvironment(lambda wait=wait: Blocks(wait)) for wait in waits])
    bad, good = hold_all(Says("a"), lambda: next(made), size=2, limits=limits)
    assert (bad.stop, good.stop) == (Stop.DEADLINE, Stop.DONE)
    released.set()
    assert bad.seconds < 60
    assert caplog.messages == ["the environment of 1/0 could not be closed: no answer in 1.5 s"]


def test_an_environment_in_a_thread_has_the_last_word_after_a_limit() -> None:
    class Scores(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            return user_message("more")

        async def final_reply(self, turn: Turn) -> Reply:
            return Reply(reward=0.5, info={"said": turn.text, "thread": threading.current_thread().name}, done=True)

    trajectory = hold(Says("a", "b"), lambda: ThreadedEnvironment(Scores), limits=Limits(turns=2))
    assert trajectory.stop is Stop.MAX_TURNS
    assert [turn.reward for turn in trajectory.turns] == [0.0, 0.5]
    assert trajectory.turns[-1].info == {"said": "b", "thread": "environment"}


@pytest.mark.parametrize("around", [ThreadedEnvironment, lambda make: Tools([], then=make())], ids=["thread", "tools"])
def test_reward_functions_get_the_object_of_an_environment_in_a_thread_and_behind_tools(around: Any) -> None:
    class Provides(SingleTurn):
        def environment_handle(self) -> EnvironmentHandle | None:
            return EnvironmentHandle("the object", lambda: None)

    handle = hold(Says("a"), lambda: around(Provides)).environment
    assert handle is not None
    assert handle.instance == "the object"
    assert hold(Says("a"), lambda: around(SingleTurn)).environment is None


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no"), KeyboardInterrupt()])
def test_what_an_environment_in_a_thread_raises_ends_its_own_conversation_only(error: BaseException) -> None:
    class Raises(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            raise error

    if isinstance(error, KeyboardInterrupt):
        pytest.skip("ends its thread")
    made = iter([ThreadedEnvironment(Raises), ThreadedEnvironment(lambda: Blocks(lambda: None))])
    bad, good = hold_all(Says("a"), lambda: next(made), size=2)
    told = "the code tried to exit the process (status 3)" if isinstance(error, SystemExit) else "ValueError: no"
    assert bad.error == Failure("environment", told)
    assert good.stop is Stop.DONE


async def slow(n: int) -> str:
    """Take time."""
    time.sleep(0.4)
    return f"{n} in {threading.current_thread() is threading.main_thread()}"


def test_an_async_tool_in_a_thread_may_block(caplog: pytest.LogCaptureFixture) -> None:
    tool = Tool.from_schema(Tool.of(slow).schema, slow)
    from dataclasses import replace

    trajectory = hold(Says(call("slow", '{"n": 1}'), "bye"), lambda: Tools([replace(tool, thread=True)]))
    assert trajectory.turns[0].outcomes[0].content == "1 in False"
    assert caplog.messages == []


def sync(n: int) -> str:
    """Do it."""
    return ""


def test_a_thread_that_has_no_effect_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    with pytest.raises(ConfigError, match="thread=True of the tool 'sync' has no effect"):
        replace(Tool.of(sync), thread=True)


def recipe(tmp_path: Path, **more: Any) -> Config:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Hi"}\n')
    return Config.model_validate(
        {"model": {"path": "m"}, "data": {"train": str(tmp_path / "rows.jsonl")}, "output": str(tmp_path), **more}
    )


def test_a_recipe_asks_for_threads(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(
        "import threading, time\n"
        "from turnwise.environments.environment import SingleTurn, user_message\n"
        "from turnwise.types import Reply\n"
        "class User(SingleTurn):\n"
        "    async def step(self, turn):\n"
        "        time.sleep(0.3)\n"
        "        return Reply(done=True, info={'main': threading.current_thread() is threading.main_thread()})\n"
        "class Box:\n"
        "    async def look(self) -> str:\n"
        "        '''Look.'''\n"
        "        return str(threading.current_thread() is threading.main_thread())\n"
        "class Sync:\n"
        "    def look(self) -> str:\n"
        "        '''Look.'''\n"
        "        return ''\n"
    )
    user, box = f"{tmp_path / 'user.py'}:User", f"{tmp_path / 'user.py'}:Box"
    config = recipe(tmp_path, environment={"use": user, "thread": True}, tools=[{"use": box, "thread": True}])
    trajectory = hold(Says(call("look"), "bye"), environment_factory(config))
    assert trajectory.turns[0].outcomes[0].content == "False"
    assert trajectory.turns[1].info == {"main": False}
    plain = recipe(tmp_path, environment=user, tools=[box])
    trajectory = hold(Says(call("look"), "bye"), environment_factory(plain))
    assert (trajectory.turns[0].outcomes[0].content, trajectory.turns[1].info) == ("True", {"main": True})
    with pytest.raises(ConfigError, match="thread=True of Sync has no effect"):
        environment_factory(recipe(tmp_path, tools=[{"use": f"{tmp_path / 'user.py'}:Sync", "thread": True}]))


def test_a_reply_of_an_environment_in_a_thread_goes_on() -> None:
    class Asks(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            return user_message("And?")

    assert hold(Says("a", "b"), lambda: ThreadedEnvironment(Asks), limits=Limits(turns=2)).assistant_texts == ["a", "b"]
