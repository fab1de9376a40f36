"""OpenEnv through the loop: classes in the process and on their real server, with the rewards of the library's own clients."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from support.ports import free_port
from support.real_containers import busybox_folder, has_containers, real_tool
from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Trajectory

pytest.importorskip("openenv.core.env_server", reason="needs an environment of its own with 'turnwise[openenv]'")
pytestmark = pytest.mark.filterwarnings("ignore")

LIMITS = Limits(turns=8, tokens_per_turn=400)
GAMES = '''
from typing import Any, Literal
from openenv.core.env_server import Action, Environment, Observation, State
from pydantic import field_validator

OPEN = []

class Guess(Action):
    number: int

class Hint(Observation):
    text: str = ""

class Guessing(Environment):
    """The number is the seed, or 7."""
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, points: float = 1.0):
        super().__init__()
        self.points, self._state = points, State(step_count=0)
        OPEN.append(self)

    def reset(self, seed=None, episode_id=None, secret=None, **kwargs):
        self.secret = secret if secret is not None else 7 if seed is None else seed % 10
        return Hint(text="A number below 10?")

    def step(self, action: Guess, timeout_s=None, **kwargs):
        self._state.step_count += 1
        right = action.number == self.secret
        text = "Yes." if right else "Higher." if action.number < self.secret else "Lower."
        return Hint(text=text, done=right, reward=self.points if right else -0.25)

    @property
    def state(self):
        return self._state

    def close(self):
        OPEN.remove(self)

class Move(Action):
    """Move somewhere."""
    direction: Literal["left", "right"]
    steps: int = 1

class Place(Observation):
    at: int = 0
    seen: list[str] = []

class Walk(Environment[Move, Place, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.at = 0
        return Place()

    def step(self, action, timeout_s=None, **kwargs):
        self.at += action.steps * (1 if action.direction == "right" else -1)
        return Place(at=self.at, seen=["a"], done=self.at >= 3, reward=1.0 if self.at >= 3 else None)

    @property
    def state(self):
        return State()

class Weighing(Action):
    grams: float

    @field_validator("grams")
    @classmethod
    def light(cls, grams):
        if grams > 9:
            raise ValueError("at most 9")
        return grams

class Scales(Guessing):
    def step(self, action: Weighing, timeout_s=None, **kwargs):
        return Hint(text="Right.", done=True, reward=1.0)

class Untyped(Guessing):
    def step(self, action, timeout_s=None, **kwargs):
        return super().step(action)
'''


@pytest.fixture
def games(tmp_path: Path) -> Path:
    path = tmp_path / "games.py"
    path.write_text(GAMES, encoding="utf-8")
    return path


def recipe(name: str, **arguments: Any) -> Config:
    return checked({"model": "m", "environment": {"use": f"openenv:{name}", "arguments": arguments}}, source="recipe")


def played(config: Config, turns: list[str], *, row: int = 0, size: int = 1) -> list[Trajectory]:
    rows = assembly.rows(config, limit=row + 1)
    environments = assembly.environment_factory(config)
    return hold_all(Says(*turns, *["?"] * 8), environments, row=rows[row], limits=LIMITS, size=size)


def test_a_text_is_the_action_with_one_field_and_the_reward_is_that_of_the_environment(games: Path) -> None:
    (one,) = played(recipe(f"{games}:Guessing", arguments={"points": 2.0}), ["5", "many", "3"], row=3)
    assert one.error is None, one.error
    assert [turn.rewards for turn in one.turns] == [{"environment": -0.25}, {}, {"environment": 2.0}]
    assert [message["content"] for message in one.messages if message["role"] == "user"] == [
        "A number below 10?", "Lower.", "Error: 'many' is no integer", "Yes.",
    ]  # fmt: skip
    assert one.stop == "done"
    assert one.tools == ()


def test_an_action_with_several_fields_is_a_tool(games: Path) -> None:
    turns = [
        "I walk.",
        call("act", '{"direction": "up"}'),
        call("act", '{"direction": "right", "steps": 2}'),
        call("act", '{"direction": "right"}') + call("act", '{"direction": "left"}'),
    ]
    (one,) = played(recipe(f"{games}:Walk"), turns)
    assert one.error is None, one.error
    (tool,) = one.tools
    assert tool["function"]["description"] == "Move somewhere."
    assert set(tool["function"]["parameters"]["properties"]) == {"direction", "steps"}
    assert [[outcome.error for outcome in turn.outcomes] for turn in one.turns] == [
        [], ["arguments"], [None], [None, "raised"],
    ]  # fmt: skip
    assert json.loads(str(one.turns[2].outcomes[0].content)) == {"at": 2, "seen": ["a"]}
    assert [turn.rewards for turn in one.turns] == [{}, {}, {}, {"environment": 1.0}]


def test_what_only_the_class_of_the_actions_refuses_is_told_to_the_model(games: Path) -> None:
    (one,) = played(recipe(f"{games}:Scales"), ["12", "nan", "inf", "2"])
    assert one.error is None, one.error
    assert [message["content"] for message in one.messages if message["role"] == "user"][1:] == [
        "Error: grams: Value error, at most 9", *["Error: numbers must be finite"] * 2, "Right.",
    ]  # fmt: skip
    (one,) = played(
        recipe(f"{games}:Scales", action_as="tool"), [call("act", '{"grams": 12}'), call("act", '{"grams": 2}')]
    )
    assert [[outcome.error for outcome in turn.outcomes] for turn in one.turns] == [["arguments"], [None]]
    assert one.turns[1].reward == 1.0


def test_conversations_have_objects_of_their_own_which_are_closed(games: Path) -> None:
    config = recipe(f"{games}:Guessing", reset_columns=["secret"])
    row = assembly.rows(config, limit=1)[0]
    row.fields["secret"] = 4
    environments = assembly.environment_factory(config)
    together = hold_all(Says("1", "2", "4"), environments, row=row, limits=LIMITS, size=4)
    assert [sum(turn.reward for turn in one.turns) for one in together] == [0.5] * 4
    source = environments._shared[-1]
    module = __import__("sys").modules[source._factory.make().__class__.__module__]  # type: ignore[union-attr]
    assert len(module.OPEN) == 1  # the one that was made here


@pytest.fixture
def server(games: Path) -> Iterator[str]:
    """The library's own server of an environment."""
    import uvicorn
    from openenv.core.env_server import create_fastapi_app

    space: dict[str, Any] = {"__name__": "games"}
    exec(GAMES, space)
    application = create_fastapi_app(space["Guessing"], space["Guess"], space["Hint"], max_concurrent_envs=8)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(timeout=20)


def test_a_server_gives_the_rewards_that_its_own_client_gets(server: str) -> None:
    from openenv.core import GenericEnvClient

    with GenericEnvClient(base_url=server).sync() as client:
        result, expected = client.reset(seed=6), 0.0
        for guess in (1, 9, 6):
            result = client.step({"number": guess})
            expected += result.reward
    config = recipe(server)
    together = played(config, ["1", "9", "6"], row=6, size=4)
    for one in together:
        assert one.error is None, one.error
        assert sum(turn.reward for turn in one.turns) == expected == 0.5
        assert one.messages[-1]["content"] == "Yes."


SERVER = """
import os, sys, uvicorn
from openenv.core.env_server import create_fastapi_app
exec(open(sys.argv[1]).read())

class Mortal(Guessing):
    def step(self, action: Guess, timeout_s=None, **kwargs):
        if action.number == 99:
            print("No number is so large.", flush=True)
            os._exit(3)
        return super().step(action)

uvicorn.run(create_fastapi_app(Mortal, Guess, Hint, max_concurrent_envs=8), host="127.0.0.1", port=int(sys.argv[2]))
"""
IMAGE = "turnwise-openenv"


def openenv_image(place: Path, tmp_path: Path, games: Path, port: int, *, outlives: bool = False) -> dict[str, Any]:
    """Build the image of a server with this machine's Python. `outlives`: the container does not end with its server. Returns the
    arguments of the recipe."""
    (tmp_path / "server.py").write_text(SERVER, encoding="utf-8")
    root = "/host"
    # this machine's Python with the library, in a container whose image has a shell only
    command = ["chroot", root, sys.executable, str(tmp_path / "server.py"), str(games), str(port)]
    if outlives:
        command = ["sh", "-c", f"{shlex.join(command)}; sleep 600"]
    folder = busybox_folder(tmp_path / "image", f"CMD {json.dumps(command)}")
    built = subprocess.run(
        [place / "podman", "build", f"--tag={IMAGE}", folder], capture_output=True, text=True, timeout=60
    )
    assert built.returncode == 0, built.stderr
    options = ["--network=host", f"--volume=/:{root}:ro", "--env=TMPDIR=/dev/shm"]
    return {"image_options": options, "port": port}


def test_a_server_that_is_lost_is_replaced(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("turnwise.compat.providers.provider.RESTARTS", 2)
    with real_tool("podman", tmp_path / "podman") as place:
        monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        config = recipe(f"docker://{IMAGE}", **openenv_image(place, tmp_path, games, free_port(), outlives=True))
        rows, environments = assembly.rows(config, limit=7), assembly.environment_factory(config)

        def ended(*turns: str) -> str:
            (one,) = hold_all(Says(*turns), environments, row=rows[6], limits=LIMITS, size=1)
            assert one.error is not None
            assert one.error.kind == "environment"
            return one.error.message

        lost = f"the server of openenv:docker://{IMAGE} "
        # the server ends in an episode, its container does not
        assert ended("1", "99").startswith(f"{lost}accepts no connection; it printed: ")
        for one in hold_all(Says("1", "9", "6"), environments, row=rows[6], limits=LIMITS, size=3):
            assert one.error is None, one.error
            assert sum(turn.reward for turn in one.turns) == 0.5
        # the container is removed between episodes
        listed = [place / "podman", "ps", "--quiet", "--filter=label=turnwise.process"]
        (container,) = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split()
        subprocess.run([place / "podman", "rm", "--force", container], check=True, capture_output=True)
        assert ended("99").startswith(f"{lost}accepts no connection")
        assert ended("1").endswith("(the last of 3 that were lost: no other is started)")
        warnings = [record.getMessage() for record in caplog.records if "Another one" in record.getMessage()]
        assert ["No number is so large." in warning for warning in warnings] == [True, False]
        assert all(warning.startswith(lost) for warning in warnings)
        assert warnings[1].endswith("Another one is started, number 2 of at most 2.")
        asyncio.run(environments.aclose())
        assert not has_containers(place / "podman")


def test_an_image_is_a_server_for_the_run_in_a_container_that_is_removed(
    games: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with real_tool("podman", tmp_path / "podman") as place:
        monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        name, arguments = f"docker://{IMAGE}", openenv_image(place, tmp_path, games, free_port())
        config = recipe(name, **arguments)
        rows = assembly.rows(config, limit=7)
        assert not has_containers(place / "podman")
        environments = assembly.environment_factory(config)
        assert has_containers(place / "podman")
        for one in hold_all(Says("1", "9", "6"), environments, row=rows[6], limits=LIMITS, size=3):
            assert one.error is None, one.error
            assert sum(turn.reward for turn in one.turns) == 0.5
        asyncio.run(environments.aclose())
        assert not has_containers(place / "podman")
        options = [*arguments["image_options"], f"--env=PYTHONHOME={tmp_path}"]
        broken = recipe(name, **{**arguments, "image_options": options}, seconds_to_start=3)
        with pytest.raises(
            ConfigError,
            match=r"(?s)the server in it (ended|did not answer within seconds_to_start=3.*); it printed: .*(encodings|init)",
        ):
            assembly.environment_factory(broken)
        assert not has_containers(place / "podman")
        with pytest.raises(ConfigError, match="image=no-such-image cannot be used"):
            assembly.environment_factory(recipe("docker://no-such-image"))


def test_what_is_wrong_is_refused(games: Path) -> None:
    for name, arguments, message in (
        ("http://127.0.0.1:1", {"port": 8000}, "port has no effect without an image"),
        (f"{games}:Untyped", {}, "name the class of the environment's actions"),
        (f"{games}:Walk", {"action_as": "text"}, "has direction, steps: use `tool`"),
        (f"{games}:Nothing", {}, "Nothing"),
        ("http://127.0.0.1:1", {}, "does not give the schema of its actions"),
        ("http://127.0.0.1:1", {"arguments": {"a": 1}}, "arguments has no effect with a server"),
    ):
        with pytest.raises(ConfigError, match=message):
            assembly.environment_factory(recipe(name, **arguments))
    (one,) = played(recipe(f"{games}:Guessing", show=["hint"]), ["1"])
    assert one.error is not None
    assert "show has 'hint', and the observation has" in one.error.message
    assert (
        hold(
            Says("7"), assembly.environment_factory(recipe(f"{games}:Untyped", action=f"{games}:Guess")), limits=LIMITS
        ).error
        is None
    )
