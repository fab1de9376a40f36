"""Programs in containers: no container is left, however a conversation ends and however slow docker or podman is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_agent_clients import held

from support.conversations import Says
from support.real_containers import has_containers, real_tool
from turnwise.environments.agents import Program
from turnwise.environments.agents import containers as module
from turnwise.environments.agents.containers import Container, ContainerImage
from turnwise.errors import ConfigError
from turnwise.rollout.context import Limits

DOCKER = """#!{python} -IS
# stands in for docker: containers are processes of this machine, and a line for each call says what was asked. As with docker's
# daemon, what a call has begun goes on when the call is killed
import fcntl, json, os, subprocess, sys, time
folder, arguments = {folder!r}, sys.argv[1:]
command, name = arguments[0], arguments[-1]

def slow(what):
    end = time.monotonic() + 60
    while os.path.exists(f"{{folder}}/hold-{{what}}") and time.monotonic() < end:
        time.sleep(0.05)
    if os.path.exists(f"{{folder}}/slow-{{what}}"):
        time.sleep(float(open(f"{{folder}}/slow-{{what}}").read()))

def lock(name):
    held = open(f"{{folder}}/{{name}}.lock", "w")
    fcntl.flock(held, fcntl.LOCK_EX)
    return held

def known(name):
    if not os.path.exists(f"{{folder}}/{{name}}.container"):
        sys.exit(f"Error: No such container: {{name}}")
    return json.load(open(f"{{folder}}/{{name}}.container"))

def keep(name, container):
    with open(f"{{folder}}/{{name}}", "w") as file:
        json.dump(container, file)
    os.rename(f"{{folder}}/{{name}}", f"{{folder}}/{{name}}.container")

def in_daemon():
    code = subprocess.run([sys.executable, __file__, "daemon", *arguments], start_new_session=True).returncode
    sys.exit(code)

if command != "daemon":
    with open(f"{{folder}}/calls.jsonl", "a") as calls:
        calls.write(json.dumps(arguments) + "\\n")
if arguments[:2] == ["image", "inspect"]:
    if arguments[2] != "agents:1":
        sys.exit(f"Error: No such image: {{arguments[2]}}")
elif command in ("create", "start"):
    in_daemon()
elif arguments[:2] == ["daemon", "create"]:
    name, label = (
        next(one for one in arguments if one.startswith(f"--{{word}}=")).split("=", 1)[1] for word in ("name", "label")
    )
    given = [one.removeprefix("--env=") for one in arguments if one.startswith("--env=")]
    container = {{
        "words": arguments[arguments.index("agents:1") + 1 :],
        "env": {{name: os.environ[name] for name in given}},
        "label": label,
        "started": "0001-01-01T00:00:00Z",
    }}
    slow("create")
    keep(name, container)
elif arguments[:2] == ["daemon", "start"]:
    with lock(name):
        container = known(name)
        slow("start")
        try:
            inside = subprocess.Popen(container["words"], env=container["env"], start_new_session=True)
        except OSError as error:
            sys.exit(f"Error response from daemon: {{error}}")
        keep(name, container | {{"started": "2026-01-01T00:00:00Z", "pid": inside.pid}})
    sys.exit(inside.wait())
elif command == "ps":
    wanted = arguments[-1].removeprefix("--filter=label=")
    for entry in sorted(os.listdir(folder)):
        if entry.endswith(".container") and known(entry[:-10])["label"].startswith(wanted):
            print(entry[:-10])
elif command == "inspect":
    for name in arguments[3:]:
        container = known(name)
        print(container["started"] if "StartedAt" in arguments[2] else f"{{name}} {{container['label'].split('=', 1)[1]}}")
elif command == "rm":
    for name in arguments[3:]:
        with lock(name):
            container = known(name)
            os.remove(f"{{folder}}/{{name}}.container")
            if "pid" in container:
                try:
                    os.killpg(container["pid"], 9)
                except ProcessLookupError:
                    pass
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a stand-in for docker was asked (`calls.jsonl`), and a file `NAME.container` for each container."""
    (tmp_path / "docker").write_text(DOCKER.format(python=sys.executable, folder=str(tmp_path)))
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


def docker_calls(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def containers(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.glob("*.container"))


ASKING = (
    "import json, os, urllib.request\n"
    "body = json.dumps({'messages': [{'role': 'user', 'content': os.environ['WORD']}]}).encode()\n"
    "headers = {'Authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}\n"
    "request = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, headers)\n"
    "print(len(json.load(urllib.request.urlopen(request))['choices'][0]['message']['content']))\n"
)


def test_a_program_in_a_container_reaches_the_server_and_its_container_is_removed(docker: Path) -> None:
    command = [sys.executable, "-c", ASKING]
    make = Program(
        command=command, reward="json", image="agents:1", image_options=["--memory=1g"], cwd="/app", env={"WORD": "Hi"}
    )
    trajectory = held(Says("Yo."), make)
    assert (trajectory.error, trajectory.turns[0].reward) == (None, 3.0)
    inspected, listed, created, started, removed, listed_again = docker_calls(docker)
    assert inspected == ["image", "inspect", "agents:1"]
    assert created[-len(command) - 2 :] == ["--memory=1g", "agents:1", *command]
    assert {"--network=host", "--workdir=/app", "--env=WORD", "--env=OPENAI_API_KEY"} < set(created)
    assert not any("tw-" in word for word in created)  # no key where other users of the machine see it
    assert started[:-1] == ["start", "--attach"]
    assert removed == ["rm", "--force", "--volumes", started[-1]]
    assert f"--name={started[-1]}" in created
    assert listed[-1] == "--filter=label=turnwise.process"
    assert listed_again[-1].removeprefix("--filter=") in created[2]
    assert containers(docker) == []


def test_a_container_is_removed_if_its_conversation_is_ended(docker: Path) -> None:
    """Killing the program on this machine ends no container."""
    late = ASKING + f"import time; open({str(docker / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(600)\n"
    make = Program(command=[sys.executable, "-c", late], image="agents:1", env={"WORD": "Hi"})
    trajectory = held(Says("Yo."), make, limits=Limits(turns=8, tokens_per_turn=400, seconds_per_turn=6))
    assert trajectory.error is not None
    assert trajectory.error.kind == "deadline"
    pid = int((docker / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()
    assert containers(docker) == []


@pytest.mark.parametrize("slow", ["create", "start"])
def test_no_container_is_left_if_the_conversation_is_cut_while_docker_is_slow(docker: Path, slow: str) -> None:
    (docker / f"slow-{slow}").write_text("4")
    begun = docker / "begun"
    make = Program(command=[sys.executable, "-c", f"open({str(begun)!r}, 'w')"], image="agents:1")
    trajectory = held(Says("a"), make, limits=Limits(turns=8, tokens_per_turn=400, seconds_per_turn=0.5))
    assert trajectory.error is not None
    assert trajectory.error.kind == "deadline"
    assert containers(docker) == []
    assert any(call[0] == "rm" for call in docker_calls(docker))
    if slow == "create":
        assert not any(call[0] == "start" for call in docker_calls(docker))
        assert not begun.exists()


def test_a_program_that_cannot_be_started_is_no_reward(docker: Path) -> None:
    """The status of docker is 1 then, as that of a program which has failed its task."""
    make = Program(command=["/nowhere/agent"], image="agents:1", reward="exit_status")
    trajectory = held(Says("a"), make)
    assert trajectory.error is not None
    assert "'/nowhere/agent' was not started in its container: Error response from daemon" in trajectory.error.message


RUN = """
import asyncio, sys
from turnwise.environments.agents.containers import ContainerImage

async def run():
    image = ContainerImage.of("agents:1", [])
    async with image.container(["sleep", "600"], cwd=None, variables={}) as container:
        await asyncio.create_subprocess_exec(*container.start_command, start_new_session=True)
        print(container.name, flush=True)
        await asyncio.sleep(600)

asyncio.run(run())
"""


def _until(condition: Any) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


@pytest.mark.slow
def test_containers_of_a_killed_process_are_removed_by_the_next_one_and_those_of_a_running_one_stay(
    docker: Path,
) -> None:
    runs = [subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = [run.stdout.readline().strip() for run in runs if run.stdout is not None]
    try:
        pids = [f"{name}.container" for name in names]
        _until(lambda: all("pid" in json.loads((docker / pid).read_text()) for pid in pids))
        runs[0].kill()
        runs[0].wait()
        assert containers(docker) == sorted(names)
        ContainerImage.of("agents:1", [])
        assert containers(docker) == [names[1]]
        runs[1].send_signal(signal.SIGINT)  # Ctrl-C
        runs[1].wait(20)
        assert containers(docker) == []
    finally:
        for run in runs:
            run.kill()
            run.wait()
            assert run.stdout is not None
            run.stdout.close()


def test_a_process_that_proc_does_not_show_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hidepid, /proc shows a user only their own processes, and all may use one docker daemon."""
    here, ended = module._process(os.getpid()), subprocess.Popen(["true"])
    gone = module._process(ended.pid) or here
    ended.wait()
    boot, space, *_ = here.split(":")
    of_own, of_gone = f"{here}:a", f"{boot}:{space}:{ended.pid}:{gone.split(':')[3]}:a"
    assert (module._has_ended(of_own), module._has_ended(of_gone)) == (False, True)
    shown = module._process
    monkeypatch.setattr(module, "_process", lambda pid="self": shown() if pid == "self" else "")
    assert (module._has_ended(of_own), module._has_ended(of_gone)) == (False, True)


def test_a_container_whose_creation_outlives_the_process_is_removed_by_the_next_one(docker: Path) -> None:
    (docker / "hold-create").touch()
    with subprocess.Popen([sys.executable, "-c", RUN], stdout=subprocess.DEVNULL) as run:
        _until(lambda: (docker / "calls.jsonl").exists() and docker_calls(docker)[-1][0] == "create")
        run.kill()
    assert containers(docker) == []
    (docker / "hold-create").unlink()
    _until(lambda: containers(docker))
    ContainerImage.of("agents:1", [])
    assert containers(docker) == []


def test_close_removes_what_a_removal_has_left(docker: Path) -> None:
    image = ContainerImage.of("agents:1", [])
    other = ContainerImage.of("agents:1", [])
    for one in (image, other):
        Container(one).create(["true"], cwd=None, variables={})
    assert len(containers(docker)) == 2
    image.close()
    assert len(containers(docker)) == 1  # those of others stay
    other.close()
    assert containers(docker) == []


def test_without_docker_or_the_image_the_recipe_is_refused(docker: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"image=agents:2 cannot be used: .*No such image: agents:2.*before the run"):
        Program(command="agent", image="agents:2")
    with pytest.raises(ConfigError, match="image_options has no effect without image"):
        Program(command="ls", image_options=["--memory=1g"])
    for options in (["--name=mine"], ["--memory=1g", "--rm=false"], ["-d"], ["-itd"], ["--cidfile", "x"], ["agents:2"]):
        with pytest.raises(ConfigError, match=r"image_options has .*: they must be options of `docker run`"):
            Program(command="agent", image="agents:1", image_options=options)
    Program(command="agent", image="agents:1", image_options=["-v", "data:/d", "--name-prefix=x", "-edebug=1"])
    for name in ("HOME", "DOCKER_HOST", "CONTAINER_HOST"):
        with pytest.raises(ConfigError, match=f"env has {name}, which docker and podman read themselves"):
            Program(command="agent", image="agents:1", env={name: "x"})
    monkeypatch.setenv("PATH", str(docker / "nowhere"))
    with pytest.raises(ConfigError, match="needs docker or podman, and neither is installed"):
        Program(command="agent", image="agents:1")


# a real tool


@pytest.fixture(params=["docker", "podman"])
def tool(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real docker or podman, the only one there is."""
    with real_tool(request.param, tmp_path) as place:
        monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
        monkeypatch.setattr(module, "_TOOLS", (request.param,))
        yield place / request.param


@pytest.mark.slow
def test_a_real_container_asks_and_is_removed(tool: Path) -> None:
    ask = (
        'wget -q -O - --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" '
        '--post-data \'{"messages": [{"role": "user", "content": "Hi"}]}\' $OPENAI_BASE_URL/chat/completions >&2; exit 1'
    )
    options = ["--memory=64m", "--pids-limit=32"]
    make = Program(command=["sh", "-c", ask], image="turnwise-test", image_options=options, reward="exit_status")
    trajectory = held(Says("Yo."), make)
    assert trajectory.error is None, trajectory.error
    assert trajectory.turns[0].reward == 0.0
    assert '"content": "Yo."' in trajectory.turns[0].info["agent"]["stderr"].replace('":"', '": "')
    assert not has_containers(tool)
    make = Program(command=["sh", "-c", f"{ask.removesuffix('exit 1')} sleep 600"], image="turnwise-test")
    trajectory = held(Says("Yo."), make, limits=Limits(turns=8, tokens_per_turn=400, seconds_per_turn=10))
    assert trajectory.error is not None
    assert trajectory.error.kind == "deadline"
    assert not has_containers(tool)
    make = Program(command=["/nowhere/agent"], image="turnwise-test", reward="exit_status")
    trajectory = held(Says("Yo."), make)
    assert trajectory.error is not None
    assert "was not started in its container" in trajectory.error.message
    assert not has_containers(tool)


@pytest.mark.slow
def test_a_real_container_of_a_killed_process_is_removed_by_the_next_one(tool: Path) -> None:
    code = RUN.replace("agents:1", "turnwise-test").replace(
        "import asyncio, sys",
        f"import asyncio, sys\nfrom turnwise.environments.agents import containers\ncontainers._TOOLS = ({tool.name!r},)",
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("turnwise-")
        run.kill()
    assert has_containers(tool)
    ContainerImage.of("turnwise-test", [])
    assert not has_containers(tool)
