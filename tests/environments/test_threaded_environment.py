"""Classes whose async methods block, run in threads of their own."""

from __future__ import annotations

import contextvars
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from turnwise.assembly import environment_factory
from turnwise.environments.environment import SingleTurn, ThreadedEnvironment, user_message
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout import rollout
from turnwise.rollout.context import Limits
from turnwise.types import Failure, Opening, Reply, Row, Stop, Turn

WHO: contextvars.ContextVar[str] = contextvars.ContextVar("who", default="nobody")


class Blocks(SingleTurn):
    """Blocks in its async methods, and remembers where it was."""

    def __init__(self, seconds: float = 0.5) -> None:
        self.seconds = seconds
        self.threads = [threading.current_thread()]

    async def begin(self, row: Row) -> Opening:
        WHO.set(str(id(self)))
        return await super().begin(row)

    async def step(self, turn: Turn) -> Reply:
        time.sleep(self.seconds)
        self.threads.append(threading.current_thread())
        assert WHO.get() == str(id(self))
        return Reply(done=True, reward=1.0, info={"thread": threading.current_thread().name})

    async def close(self) -> None:
        self.threads.append(threading.current_thread())
        assert len(set(self.threads)) == 1
        assert self.threads[0] is not threading.main_thread()


def test_environments_in_threads_block_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    started = time.monotonic()
    trajectories = hold_all(Says("a"), lambda: ThreadedEnvironment(Blocks), size=20)
    assert [one.stop for one in trajectories] == [Stop.DONE] * 20
    assert [one.turns[0].reward for one in trajectories] == [1.0] * 20
    assert time.monotonic() - started < 8  # one after the other they take 10 s
    assert caplog.messages == []
    assert WHO.get() == "nobody"


def test_a_deadline_holds_for_an_environment_in_a_thread_that_blocks_for_ever(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollout, "_CLOSING_SECONDS", 0.2)
    limits = Limits(seconds_per_turn=0.3)
    made = iter([ThreadedEnvironment(lambda: Blocks(20.0)), ThreadedEnvironment(lambda: Blocks(0.01))])
    bad, good = hold_all(Says("a"), lambda: next(made), size=2, limits=limits)
    assert (bad.stop, good.stop) == (Stop.DEADLINE, Stop.DONE)
    assert bad.seconds < 10
    assert caplog.messages == ["the environment of 1/0 could not be closed: no answer in 0.2 s"]


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("no"), KeyboardInterrupt()])
def test_what_an_environment_in_a_thread_raises_ends_its_own_conversation_only(error: BaseException) -> None:
    class Raises(SingleTurn):
        async def step(self, turn: Turn) -> Reply:
            raise error

    if isinstance(error, KeyboardInterrupt):
        pytest.skip("ends its thread")
    made = iter([ThreadedEnvironment(Raises), ThreadedEnvironment(lambda: Blocks(0.0))])
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
