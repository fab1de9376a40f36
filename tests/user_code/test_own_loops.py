"""`async` code of users' classes that blocks: in a loop of the conversation's own, and the warning that names the option."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from support.swift import made
from turnwise import assembly
from turnwise.compat.gym import GymEnvironments, ToolEnvironments
from turnwise.compat.swift.schedulers import MultiTurnScheduler
from turnwise.compat.trl import TrlEnvironments
from turnwise.compat.verl import Conversations
from turnwise.environments.environment import ThreadedEnvironment
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Stop
from turnwise.user_code.thread_loops import OwnLoop

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
    verl: Any, tmp_path: Path
) -> None:
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
