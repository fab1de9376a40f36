"""Backends of Harbor's package, with the real package in its own Python: environments of its interface, which are folders."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from support.harbor_tasks import TASKS, write_tasks
from support.own_environment import interpreter, python_3_12
from turnwise import assembly
from turnwise.compat.providers import harbor_package
from turnwise.compat.providers.harbor import Harbor
from turnwise.compat.providers.harbor_package import HarborMachine
from turnwise.config.recipe import checked
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Row, Trajectory

pytestmark = pytest.mark.slow  # starts Pythons that import the package
LIMITS = Limits(turns=12, tokens_per_turn=2000)
FOLDER = "harbor_environment:Folder"


@pytest.fixture(scope="module")
def python() -> str:
    return interpreter("harbor", "harbor>=0.26,<0.27", "harbor", base=python_3_12())


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where environments are while they are there."""
    (place := tmp_path / "environments").mkdir()
    monkeypatch.setenv("HARBOR_FOLDERS", str(place))
    monkeypatch.chdir(Path(__file__).parents[2] / "support" / "peers")
    return place


def recipe(folder: Path, python: str, backend: str = FOLDER, **arguments: Any) -> Config:
    given = {"backend": backend, "python": python, **arguments}
    return checked({"model": "m", "environment": {"use": f"harbor:{folder}", "arguments": given}}, source="recipe")


def bash(command: str) -> str:
    return call("bash", json.dumps({"command": command}))


def played(config: Config, *turns: str, size: int = 1) -> list[Trajectory]:
    environments = assembly.environment_factory(config)
    return hold_all(Says(*turns), environments, row=assembly.rows(config)[0], limits=LIMITS, size=size)


def answers(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


@pytest.mark.parametrize("name", ["half", "mean", "parts", "variables"])
def test_the_reference_solution_gives_1_and_doing_nothing_0(
    name: str, python: str, folders: Path, tmp_path: Path
) -> None:
    config = recipe(write_tasks(tmp_path / "tasks", name), python)
    solution = f"export GREETING='Hello from us'; echo us > who; {TASKS[name]['solution/solve.sh']}"
    (solved,) = played(config, bash(solution), "Done.")
    assert solved.error is None, solved.error
    (nothing,) = played(config, "Done.")
    assert nothing.error is None, nothing.error
    parts = {"first", "second"} if name == "parts" else {"environment"}
    assert (solved.turns[-1].rewards, nothing.turns[-1].rewards) == (
        dict.fromkeys(parts, 1.0),
        dict.fromkeys(parts, 0.0),
    )
    assert list(folders.iterdir()) == []


def test_commands_files_and_limits_are_those_of_other_backends(python: str, folders: Path, tmp_path: Path) -> None:
    toml = "[environment]\nmemory_mb = 512\n[verifier]\ntimeout_sec = 30\n"
    config = recipe(write_tasks(tmp_path / "tasks", "half", task_toml=toml), python, bounds={"seconds": 3})
    long = f"echo '{'x' * 120_000}' > long; wc -c < long; cat /memory"
    edit = call("str_replace_editor", json.dumps({"command": "create", "path": "b/primes", "file_text": "2\n"}))
    flood = "head -c 100000 /dev/zero | tr '\\0' x; echo end >&2; exit 3"
    turns = [
        bash(long),
        edit,
        bash("mv b/primes . ; pwd; ls; sleep 60 & sleep 60"),
        bash(flood),
        bash("read x; echo [$x]"),
        "Done.",
    ]
    environments, row = assembly.environment_factory(config), assembly.rows(config)[0]
    one = hold(Says(*turns), environments, row=row, limits=Limits(turns=12, tokens_per_turn=200_000))
    assert one.error is None, one.error
    counted, written, stopped, flooded, read = answers(one)
    assert counted == "120001\n512"
    assert written == "The file was written: b/primes"
    assert stopped == "/app\nDockerfile\nb\nlong\nprimes\n[stopped: the program ran longer than 3 s]"
    assert "bytes of output left out" in flooded
    assert flooded.endswith("end\n[exit status 3]")
    assert read == "[]"
    assert one.turns[-1].reward == 0.5
    assert list(folders.iterdir()) == []


def test_environments_are_limited_in_number_and_removed_when_a_conversation_fails(
    python: str, folders: Path, tmp_path: Path
) -> None:
    config = recipe(write_tasks(tmp_path / "tasks", "half"), python, max_concurrent=2)
    environments, row = assembly.environment_factory(config), assembly.rows(config)[0]
    ones = hold_all(
        Says(bash("ls -d /app; sleep 0.5"), bash("sleep 30")),
        environments,
        row=row,
        limits=Limits(turns=12, tokens_per_turn=2000, seconds_per_turn=8),
        size=3,
    )
    assert [one.error.kind if one.error else None for one in ones] == ["deadline"] * 3
    assert list(folders.iterdir()) == []


@pytest.mark.parametrize(
    ("fail", "message"), [("start", "quota of the folder service exceeded"), ("hang", "build_timeout_sec=2")]
)
def test_an_environment_that_does_not_start_keeps_the_packages_message(
    fail: str, message: str, python: str, folders: Path, tmp_path: Path
) -> None:
    folder = write_tasks(tmp_path / "tasks", "half", task_toml="[environment]\nbuild_timeout_sec = 2\n")
    (one,) = played(recipe(folder, python, backend_options={"fail": fail}), "Done.")
    assert one.error is not None
    assert f"task half: no environment of Harbor's {FOLDER} was started: " in one.error.message
    assert message in one.error.message
    assert list(folders.iterdir()) == []


def test_what_is_left_is_removed_when_the_process_ends(python: str, folders: Path, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks", "half") / "half"
    process = harbor_package._Process(python)
    started = {
        "backend": FOLDER,
        "options": {},
        "folder": str(folder),
        "task": "half",
        "memory_mb": 64,
        "network": True,
    }
    process.send({"do": "start", "name": "left", "seconds": 60, **started}).result(120)
    assert [one.name for one in folders.iterdir()] == ["left"]
    assert process.running.stdin is not None
    process.running.stdin.close()  # as when this process is killed
    assert process.running.wait(60) == 0
    assert list(folders.iterdir()) == []


async def killed_in_a_command(harbor: Harbor, row: Row, folders: Path) -> str:
    """What a conversation gets whose process is killed while a command runs."""
    machine = await harbor.sandboxes.machine(harbor.task(row))
    assert isinstance(machine, HarborMachine)
    running = asyncio.ensure_future(machine.run(["sh", "-c", "touch started; sleep 60"]))
    while not list(folders.glob("*/app/started")):
        await asyncio.sleep(0.02)
    machine.process.running.kill()
    with pytest.raises(harbor_package.ProcessEnded) as ended:
        await running
    with pytest.raises(harbor_package.ProcessEnded, match="has ended with the status -9"):  # nothing of it is there
        await machine.run(["pwd"])
    await machine.close()
    return str(ended.value)


def test_a_process_that_died_is_replaced_and_the_next_one_removes_what_it_left(
    python: str, folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = recipe(write_tasks(tmp_path / "tasks", "half"), python)
    environments, row = assembly.environment_factory(config), assembly.rows(config)[0]
    harbor = environments._shared[-1]
    assert isinstance(harbor, Harbor)
    for number in range(harbor_package._RESTARTS):
        assert "has ended with the status -9: " in asyncio.run(killed_in_a_command(harbor, row, folders))
        assert f"Another one is started, number {number + 1} of at most 3." in caplog.text
        assert list(folders.iterdir()) == []  # before the new process ends
    one = hold(Says(bash("pwd"), "Done."), environments, row=row, limits=LIMITS)
    assert one.error is None, one.error
    assert answers(one) == ["/app"]
    asyncio.run(killed_in_a_command(harbor, row, folders))
    assert "may be left: the process with the package harbor has ended" in caplog.text
    assert len(list(folders.iterdir())) == 1
    for _ in range(2):  # not only once, as of a task whose image cannot be made
        refused = hold(Says("Done."), environments, row=row, limits=LIMITS)
        assert refused.error is not None
        assert "(the last of 4 that have died: no other is started)" in refused.error.message
    asyncio.run(environments.aclose())


@pytest.mark.parametrize(
    ("backend", "arguments", "message"),
    [
        ("daytonna", {}, "backend is 'daytonna'; did you mean 'daytona'\\?; it must be docker, podman, jail"),
        ("e2b", {}, "backend=e2b: E2B requires E2B_API_KEY to be set"),
        ("runloop", {}, "backend=runloop: .*"),
        ("nowhere.at:All", {}, "backend=nowhere.at:All: ValueError: Failed to import module 'nowhere.at'"),
        (FOLDER, {"backend_options": {"fail": "preflight"}}, "Folder requires FOLDER_API_KEY to be set"),
        (FOLDER, {"keep_processes": True}, "backends of Harbor's package keep them always"),
        (FOLDER, {"bounds": {"processes": 3}}, "bounds.processes has no effect with a backend of Harbor's package"),
        ("harbor:docker", {"backend_options": {"x": 1}}, "Unknown option 'x'"),
        ("jail", {}, "python has no effect without a backend of Harbor's package"),
    ],
)
def test_backends_that_cannot_be_used_are_refused_before_the_run(
    backend: str, arguments: dict[str, Any], message: str, python: str, folders: Path, tmp_path: Path
) -> None:
    config = recipe(write_tasks(tmp_path / "tasks", "half"), python, backend, **arguments)
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(config)
