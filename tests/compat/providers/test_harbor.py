"""Harbor's tasks through the loop, in real sandboxes and in backends of its package: the reference solution gives 1, and doing
nothing 0."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold, hold_all
from support.harbor_tasks import TASKS, graded, write_tasks
from support.own_environment import interpreter, python_3_12
from support.real_containers import busybox_folder, has_containers, real_tool
from turnwise import assembly
from turnwise.compat.providers import harbor_package
from turnwise.compat.providers.harbor import Harbor, read_rewards
from turnwise.compat.providers.harbor_containers import _WAIT
from turnwise.compat.providers.harbor_package import HarborMachine
from turnwise.compat.providers.harbor_sandboxes import HarborError
from turnwise.compat.providers.harbor_tasks import Unfit, plan_of, read_task
from turnwise.compat.providers.provider import RESTARTS
from turnwise.config.recipe import checked
from turnwise.environments.agents.containers import ContainerImage
from turnwise.errors import ConfigError
from turnwise.options.schema import Config
from turnwise.rollout.context import Limits
from turnwise.types import Row, Trajectory

LIMITS = Limits(turns=12, tokens_per_turn=2000)
LONG = Limits(turns=12, tokens_per_turn=200_000)


def recipe(folder: Path | str, **arguments: Any) -> Config:
    given = {"backend": "jail", **arguments}
    return checked({"model": "m", "environment": {"use": f"harbor:{folder}", "arguments": given}}, source="recipe")


def bash(command: str) -> str:
    return call("bash", json.dumps({"command": command}))


def edit(**arguments: Any) -> str:
    return call("str_replace_editor", json.dumps(arguments))


def played(config: Config, *turns: str, row: int = 0, limits: Limits = LIMITS) -> Trajectory:
    environments = assembly.environment_factory(config)
    return hold(Says(*turns), environments, row=assembly.rows(config)[row], limits=limits)


def answers(trajectory: Trajectory) -> list[str]:
    return [message["content"] for message in trajectory.messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if n > 2 else []) for n, name in enumerate(TASKS)]
)
def test_the_reference_solution_gives_1_and_doing_nothing_0(name: str, tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, name))
    solved = played(config, bash(TASKS[name]["solution/solve.sh"]), "Done.")
    assert solved.error is None, solved.error
    nothing = played(config, "Done.")
    assert nothing.error is None, nothing.error
    if name == "parts":
        assert solved.turns[-1].rewards == {"first": 1.0, "second": 1.0}
        assert nothing.turns[-1].rewards == {"first": 0.0, "second": 0.0}
    else:
        assert (solved.turns[-1].rewards, nothing.turns[-1].rewards) == ({"environment": 1.0}, {"environment": 0.0})
    assert solved.turns[-1].info["task"] == name
    assert "canary" not in solved.messages[0]["content"]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    command = ["git", "-C", str(folder), *who, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_data_set_of_a_registry_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tasks(tmp_path / "repository" / "tasks")
    git(tmp_path / "repository", "init", "--quiet")
    git(tmp_path / "repository", "add", ".")
    git(tmp_path / "repository", "commit", "--quiet", "--message=a")
    first = git(tmp_path / "repository", "rev-parse", "HEAD")
    names = list(TASKS)[:2]
    (tmp_path / "repository" / "tasks" / names[0] / "instruction.md").write_text("Changed.")
    git(tmp_path / "repository", "commit", "--quiet", "--all", "--message=b")
    url = (tmp_path / "repository").as_uri()
    tasks = [
        {"name": names[0], "git_url": url, "git_commit_id": first, "path": f"tasks/{names[0]}"},
        {"name": names[1], "git_url": url, "path": f"tasks/{names[1]}"},
    ]
    outside = [{"name": "a", "git_url": url, "path": "tasks/../../.."}]
    command = [{"name": "a", "git_url": "--upload-pack=touch x", "path": "a"}]
    sets = {
        "small@1.0": tasks,
        "outside@1.0": outside,
        "command@1": command,
        "gone@1": [{**tasks[1], "path": "tasks/gone"}],
    }
    listed = [{"name": n.split("@")[0], "version": n.split("@")[1], "tasks": its} for n, its in sets.items()]
    (registry := tmp_path / "registry.json").write_text(json.dumps(listed))
    config = recipe("small@1.0", registry=str(registry), backend="jail")
    rows = assembly.rows(config)
    assert [row.fields["task"] for row in rows] == sorted(names)
    source = Harbor("small@1.0", registry=str(registry), backend="jail")
    assert "Changed" not in source.task(next(row for row in rows if row.fields["task"] == names[0])).instruction
    away = (tmp_path / "repository").rename(tmp_path / "away")
    assert len(assembly.rows(config)) == 2  # from the cache
    away.rename(tmp_path / "repository")
    for name, message in (
        ("smal@1.0", r"has no data set smal@1\.0; did you mean 'small@1\.0'"),
        ("outside@1.0", "which is no path inside"),
        ("command@1", "which is no URL"),
        ("gone@1", "has no task in tasks/gone"),
    ):
        with pytest.raises(ConfigError, match=message):
            Harbor(name, registry=str(registry))
    with pytest.raises(ConfigError, match=r"the registry .*nowhere\.json cannot be read"):
        Harbor("small@2", registry=str(tmp_path / "nowhere.json"))
    with pytest.raises(ConfigError, match="registry has no effect"):
        Harbor(str(tmp_path / "repository"), registry=str(registry))
    assert not (tmp_path / "x").exists()
    assert not list((tmp_path / "cache").rglob(".fetching-*"))


def test_a_folder_has_a_row_for_each_task_and_another_the_held_out_ones(tmp_path: Path) -> None:
    write_tasks(tmp_path / "train", "mean", "nested/place", "column")
    write_tasks(tmp_path / "held", "half")
    config = recipe(tmp_path / "train", eval_tasks=str(tmp_path / "held"))
    assert [row["task"] for row in assembly.rows(config)] == ["column", "mean", "nested/place"]
    (row,) = assembly.rows(config, held_out=True)
    half = hold(Says(bash("echo 3 > primes"), "Done."), assembly.environment_factory(config), row=row, limits=LIMITS)
    assert (half.error, half.turns[-1].reward) == (None, 0.5)


def test_the_editor_views_creates_and_changes_files(tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, "mean"))
    trajectory = played(
        config,
        edit(command="view", path="/app"),
        edit(command="view", path="stats.py", view_range=[2, -1]),
        edit(command="str_replace", path="stats.py", old_str="(len(values) + 1)", new_str="len(values)"),
        edit(command="insert", path="stats.py", insert_line=0, insert_text="# means"),
        edit(command="create", path="/app/new/ä.txt", file_text="eins\n"),
        bash("cat stats.py new/ä.txt; pwd"),
        edit(command="str_replace", path="stats.py", old_str="e", new_str="x"),
        edit(command="view", path="nowhere.py"),
        edit(command="insert", path="stats.py", insert_line=9, insert_text="x"),
        edit(command="create", path="/etc/passwd", file_text="x"),
        "Done.",
    )
    assert trajectory.error is None, trajectory.error
    listed, viewed, _, _, _, shown, twice, missing, beyond, fixed = answers(trajectory)
    assert listed == "stats.py\n"
    assert viewed == "     2\t    return sum(values) / (len(values) + 1)"
    assert shown == "# means\ndef mean(values):\n    return sum(values) / len(values)\neins\n/app"
    assert "old_str occurs 8 times in stats.py" in twice
    assert "there is no file nowhere.py" in missing
    assert "insert_line from 0 to 3" in beyond
    assert "/etc/passwd cannot be written" in fixed
    assert trajectory.turns[-1].reward == 1.0


def test_each_conversation_has_files_of_its_own_and_the_tests_are_those_of_the_task(tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, "hello-world"), max_concurrent=2)
    environments = assembly.environment_factory(config)
    row = assembly.rows(config)[0]
    cheat = "mkdir /logs/verifier; cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 1}' > reward.json; touch /tests/x"
    engine = Says(bash(cheat), bash("(sleep 60; echo 1 > /logs/verifier/reward.txt) & ls /tests /solution"), "Done.")
    for trajectory in hold_all(engine, environments, row=row, size=3, limits=LIMITS):
        assert trajectory.error is None, trajectory.error
        assert answers(trajectory)[1].strip() == "/solution:\n\n/tests:\nx"
        assert trajectory.turns[-1].reward == 0.0


def test_files_with_two_names_keep_both(tmp_path: Path) -> None:
    """`git clone` of a folder makes such files."""
    config = recipe(write_tasks(tmp_path, "hello-world"))
    trajectory = played(
        config, bash("echo a > a; ln a b; mkdir c; ln a c/d"), bash("cat a b c/d; stat -c %h b"), "Done."
    )
    assert answers(trajectory)[1] == "a\na\na\n3"


def test_variables_of_the_sandbox_and_directories_that_are_there_are_known_to_a_dockerfile(tmp_path: Path) -> None:
    docker = (
        'FROM ubuntu\nWORKDIR /app/in\nENV PATH="/opt/x/bin:$PATH"\nCOPY Dockerfile /app/in\nCOPY Dockerfile /srv/new\n'
    )
    folder = write_tasks(tmp_path, "hello-world", dockerfile=docker, task_toml="[verifier]\nuser = 'root'\n")
    trajectory = played(recipe(folder), bash("ls -p /app/in /srv; echo $PATH"), "Done.")
    assert (trajectory.error, trajectory.turns[-1].reward) == (None, 0.0)
    assert answers(trajectory)[0].startswith("/app/in:\nDockerfile\n\n/srv:\nnew\n/opt/x/bin:/usr/local/sbin:")


def test_a_command_has_limits_and_no_network_and_sees_no_files_of_this_machine(tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, "hello-world"), bounds={"seconds": 3, "disk_mb": 8})
    trajectory = played(
        config,
        bash("sleep 60"),
        bash(
            "for n in 1 2 3; do head -c 4000000 /dev/zero > /tmp/$n; head -c 4000000 /dev/zero > /app/$n; done; sleep 1"
        ),
        bash("ls /work /home /root/.cache /proc; echo > /dev/tcp/1.1.1.1/80"),
        "Done.",
    )
    slow, large, outside = answers(trajectory)
    assert "[stopped: the program ran longer than 3 s]" in slow
    assert "more than 8 MB" in large or "No space left" in large
    assert "cannot access '/work'" in outside
    assert "cannot access '/proc'" in outside
    assert "[exit status 1" in outside
    assert trajectory.turns[-1].reward == 0.0


def test_a_limit_does_not_save_a_conversation_from_its_tests(tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, "hello-world"))
    trajectory = played(config, bash("echo 'Hello, world!' > hello.txt"), limits=Limits(turns=1, tokens_per_turn=2000))
    assert (trajectory.stop, trajectory.turns[-1].reward) == ("max_turns", 1.0)


def test_tests_that_a_limit_stops_give_0(tmp_path: Path) -> None:
    """As in Harbor, where they count 0: what the model did decides how long they take."""
    toml = "[verifier]\ntimeout_sec = 1.5\n"
    wait = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt; [ -e /app/slow ] && sleep 60\n"
    config = recipe(write_tasks(tmp_path, "hello-world", task_toml=toml, test=wait))
    slow, good = played(config, bash("touch slow"), "Done."), played(config, "Done.")
    assert (good.error, good.turns[-1].reward, slow.error, slow.turns[-1].reward) == (None, 1.0, None, 0.0)
    assert slow.turns[-1].info["tests"].startswith("[stopped: the program ran longer than 1.5 s]")
    config = recipe(tmp_path, weights={"first": 2.0, "second": 1.0})
    assert played(config, bash("touch slow"), "Done.").turns[-1].rewards == {"first": 0.0, "second": 0.0}


def test_a_command_may_be_longer_than_an_argument_of_a_program(tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, "hello-world"))
    text = "0123456789" * 15_000
    long = f"cat > long <<'END'\n{text}\nEND\nwc -c < long; read word; echo \"[$word]\"; false"
    trajectory = played(
        config,
        bash(long),
        bash('[ "$(head -c 10 long)" = 0123456789 ] && echo "Hello, world!" > hello.txt'),
        "Done.",
        limits=LONG,
    )
    assert answers(trajectory) == ["150001\n[]\n[exit status 1]", "[the program ended without printing anything]"]
    assert trajectory.turns[-1].reward == 1.0


def test_rewards_with_weights(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path, "parts")
    trajectory = played(recipe(folder, weights={"first": 0.25}), bash("echo A > a.txt"), "Done.")
    assert trajectory.turns[-1].rewards == {"first": 0.25}
    assert trajectory.turns[-1].info["rewards"] == {"first": 1.0, "second": 0.0}
    wrong = played(recipe(folder, weights={"third": 1}), "Done.")
    assert wrong.error is not None
    assert "gave no 'third', which has a weight; they gave ['first', 'second']" in wrong.error.message


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("#!/bin/bash\necho broken; exit 3\n", "the tests wrote neither reward.json nor reward.txt"),
        ("#!/bin/bash\n: > /logs/verifier/reward.txt\n", "wrote '' to reward.txt, which is no reward"),
        ("#!/bin/bash\necho null > /logs/verifier/reward.json\n", "the reward reward=None; it must be a finite number"),
        ("#!/bin/bash\necho yes > /logs/verifier/reward.txt\n", "wrote 'yes' to reward.txt, which is no reward"),
        ("#!/bin/bash\necho NaN > /logs/verifier/reward.txt\n", "the reward reward=nan; it must be a finite number"),
    ],
)
def test_tests_without_a_reward_give_0_and_the_reason_is_recorded(test: str, message: str, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path, "hello-world", test=test, task_toml="[verifier]\ntimeout_sec = 2\n")
    trajectory = played(recipe(folder), "Done.")
    assert trajectory.error is None, trajectory.error
    (turn,) = trajectory.turns
    assert turn.rewards == {"environment": 0.0}
    assert message in turn.info["no_reward"]
    assert turn.info["tests"].startswith("broken") == ("broken" in test)
    assert trajectory.metrics["harbor/no_reward"] == 1.0


def test_an_image_that_cannot_be_made_fails_its_conversations_with_the_line(tmp_path: Path) -> None:
    docker = "FROM ubuntu:24.04\nWORKDIR /app\nRUN echo no such thing >&2 && \\\n    exit 7\n"
    trajectory = played(recipe(write_tasks(tmp_path, "hello-world", dockerfile=docker)), "Done.")
    assert trajectory.error is not None
    assert "task hello-world: line 3 of its Dockerfile cannot be run" in trajectory.error.message
    assert "no such thing\n[exit status 7]" in trajectory.error.message


@pytest.mark.parametrize(
    ("dockerfile", "message"),
    [
        ("FROM nvidia/cuda:12\n", "line 1 of its Dockerfile, FROM 'nvidia/cuda:12': .*programs of this machine"),
        ("FROM ubuntu\nFROM debian\n", "one stage only"),
        (
            "FROM ubuntu\nRUN apt-get update && \\\n apt-get install -y curl\n",
            "line 2 .*'apt-get update' needs a network",
        ),
        ("FROM python:3.12\nRUN pip install --no-cache-dir numpy==2\n", "'pip install' needs a network"),
        ("FROM ubuntu\nRUN curl -LsSf https://x.org/a.sh | sh\n", "needs a network"),
        ("FROM ubuntu\nCOPY missing.txt /app/\n", "environment/missing.txt is not there"),
        ("FROM ubuntu\nCOPY ../tests /app/\n", "environment/../tests is not there"),
        ("FROM ubuntu\nCOPY --from=builder a b\n", "does not have --from=builder"),
        ("FROM ubuntu\nCOPY Dockerfile /etc/x\n", "/etc is this machine's"),
        ("FROM ubuntu\nWORKDIR /usr/src/app\n", "/usr is this machine's"),
        ("FROM ubuntu\nADD https://x.org/a /app/\n", "has no network"),
        ("FROM ubuntu\nUSER nobody\n", "USER 'nobody': the sandbox does not have this instruction"),
        ('FROM ubuntu\nENTRYPOINT ["x"]\n', "does not have this instruction"),
        ("RUN ls\n", "no FROM"),
    ],
)
def test_a_dockerfile_that_the_sandbox_cannot_follow_is_refused_with_its_line(
    dockerfile: str, message: str, tmp_path: Path
) -> None:
    task = read_task(write_tasks(tmp_path, "hello-world", dockerfile=dockerfile) / "hello-world", "t")
    with pytest.raises(Unfit, match=message):
        plan_of(task)


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("x =", "task.toml cannot be read"),
        ("[environment]\ngpus = 1\n", "it has GPUs or TPUs, which this provider does not support"),
        ("[[steps]]\nname = 'a'\n", "several steps"),
        ("[verifier]\nenvironment_mode = 'separate'\n", "another container for its tests"),
        ("[environment]\nnetwork_mode = 'allowlist'\n", "allowed hosts"),
        ("[environment]\nos = 'windows'\n", "a system other than Linux"),
        ("[environment]\nmemory_mb = 'much'\n", "memory_mb is 'much'; it must be a number"),
        ("[environment.env]\nA = '${NOBODY_SETS_THIS}'\n", "NOBODY_SETS_THIS, which is not set"),
        ("[agent]\nuser = 'agent'\n", "agent.user is agent, and the sandbox has one user"),
    ],
)
def test_a_task_with_more_than_this_provider_has_is_refused(toml: str, message: str, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path, "hello-world", task_toml=toml)
    with pytest.raises(Unfit, match=message):
        plan_of(read_task(folder / "hello-world", "t"))


def test_tests_that_need_a_network_are_refused(tmp_path: Path) -> None:
    test = "#!/bin/bash\n# pip install x\napt-get update\ncurl -LsSf https://astral.sh/uv/0.9/install.sh | sh\n"
    folder = write_tasks(tmp_path, "hello-world", test=test)
    with pytest.raises(
        ConfigError, match=r"hello-world: tests/test.sh has 'apt-get update', and the sandbox has no network"
    ):
        assembly.environment_factory(recipe(folder))
    local = graded("curl -s http://localhost:8000/ && true # apt is fine")
    plan_of(read_task(write_tasks(tmp_path, "hello-world", test=local) / "hello-world", "t"))


def test_tasks_that_cannot_be_run_are_left_out_if_asked_for(tmp_path: Path) -> None:
    write_tasks(tmp_path, "mean", "column")
    write_tasks(tmp_path, "hello-world", dockerfile="FROM my/own\n")
    with pytest.raises(
        ConfigError, match=r"1 task cannot be run in the sandbox of this machine; .*skip_unfit \(2 remain\)"
    ):
        assembly.environment_factory(recipe(tmp_path))
    assert [row["task"] for row in assembly.rows(recipe(tmp_path, skip_unfit=True))] == ["column", "mean"]
    (tmp_path / "mean" / "tests" / "test.sh").unlink()
    write_tasks(tmp_path, "column", dockerfile="FROM my/own\n")
    with pytest.raises(ConfigError, match="none remains"):
        assembly.environment_factory(recipe(tmp_path, skip_unfit=True))


def test_what_is_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        assembly.environment_factory(recipe(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"has no tasks: none of its folders has a task\.toml$"):
        assembly.environment_factory(recipe(tmp_path))
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "task.yaml").write_text("instruction: x\n")
    with pytest.raises(ConfigError, match="format of Terminal-Bench 1: convert it with `harbor task migrate`"):
        assembly.environment_factory(recipe(tmp_path))
    write_tasks(tmp_path, "mean")
    for arguments, message in (
        ({"max_concurrent": 0}, "max_concurrent is 0"),
        ({"weights": {"a": "x"}}, "numbers by the names of rewards"),
        ({"backend": "cloud"}, "backend is 'cloud'"),
        ({"network": False}, "network is False; .* a jail has none"),
        ({"keep_processes": True}, "keep_processes has no effect: in a jail no process outlives"),
        ({"bounds": {"second": 1}}, "did you mean 'seconds'"),
    ):
        with pytest.raises(ConfigError, match=message):
            assembly.environment_factory(recipe(tmp_path, **arguments))
    config = recipe(tmp_path)
    row = assembly.rows(config)[0]
    other = type(row)(id="9", messages=row.messages, fields={"task": "men"})
    trajectory = hold(Says("Done."), assembly.environment_factory(config), row=other, limits=LIMITS)
    assert trajectory.error is not None
    assert "there is no such task; did you mean 'mean'?" in trajectory.error.message
    with pytest.raises(ConfigError, match="has no held-out tasks: set environment"):
        assembly.rows(config, held_out=True)


def test_rewards_are_read_as_harbor_reads_them() -> None:
    assert read_rewards("reward.txt\n 0.5\n", "t") == {"reward": 0.5}
    assert read_rewards('reward.json\n{"a": 1, "b": 0.5}', "t") == {"a": 1.0, "b": 0.5}
    assert read_rewards("reward.json\n2", "t") == {"reward": 2.0}
    for wrong in (
        "reward.json\n{}",
        'reward.json\n{"a": "1"}',
        "reward.json\n[1]",
        "reward.json\n",
        "reward.json\n1e309",
        f"reward.json\n1{'0' * 400}",
        "reward.json\n" + "[" * 60_000,
        json.dumps({"\x1b[31m": 1}).join(["reward.json\n", ""]),
        json.dumps({"": 1}).join(["reward.json\n", ""]),
        json.dumps({str(n): 1 for n in range(101)}).join(["reward.json\n", ""]),
    ):
        with pytest.raises(HarborError, match="task t: its tests"):
            read_rewards(wrong, "t")


DOCKER = """#!{python} -IS
# stands in for docker: a container is a folder, and its commands see that folder instead of the machine's
import json, os, shutil, subprocess, sys
folder, (asked, *rest) = {folder!r}, sys.argv[1:]
with open(folder + "/calls.jsonl", "a") as calls:
    calls.write(json.dumps([asked, *rest]) + "\\n")
if asked == "build":
    if os.path.exists(rest[-1] + "/broken"):
        sys.exit("ERROR: failed to solve: process did not complete successfully: exit code: 7")
elif asked == "create":
    name = next(word for word in rest if word.startswith("--name=")).removeprefix("--name=")
    for place in ("app", "tests", "logs", "tmp", "solution"):
        os.makedirs(f"{{folder}}/{{name}}/{{place}}")
elif asked == "cp":
    sys.exit(subprocess.run(["tar", "-x", "-C", folder + "/" + rest[1].split(":")[0]]).returncode)
elif asked == "exec":
    words = rest[[n for n, word in enumerate(rest) if not word.startswith("-")][0] :]
    root, names = f"{{folder}}/{{words[0]}}", [word[6:] for word in rest if word.startswith("--env=")]
    binds = [word for place in os.listdir(root) for word in ("--bind", f"{{root}}/{{place}}", f"/{{place}}")]
    system = [word for place in ("usr", "bin", "lib", "lib64") for word in ("--ro-bind", f"/{{place}}", f"/{{place}}")]
    env = {{name: os.environ[name] for name in names if "=" not in name}}
    inside = ["bwrap", "--unshare-pid", *system, *binds, "--dev", "/dev", "--chdir", "/app", "--", *words[1:]]
    os.execvpe("bwrap", inside, {{**env, "PATH": "/usr/bin:/bin"}})
elif asked == "rm":
    shutil.rmtree(f"{{folder}}/{{rest[-1]}}")
elif asked == "inspect" and "WorkingDir" in rest[1]:
    print("/app")
elif asked == "inspect":
    print("\\n".join(name + " " + open(folder + "/label").read() for name in rest[2:]))
elif asked == "ps":
    print("\\n".join(name for name in os.listdir(folder) if name.startswith("turnwise-")))
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what a stand-in for docker was asked (`calls.jsonl`), and its containers."""
    place = tmp_path / "docker"
    place.mkdir()
    (place / "docker").write_text(DOCKER.format(python=sys.executable, folder=str(place)))
    (place / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
    return place


def docker_calls(folder: Path, name: str) -> list[list[str]]:
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    return [call for call in calls if call[0] == name]


@pytest.mark.slow
def test_with_docker_each_conversation_has_a_container_which_is_removed(docker: Path, tmp_path: Path) -> None:
    dockerfile = "FROM nvidia/cuda:12\nRUN apt-get update\n"  # not for the jail
    toml = "[environment]\nnetwork_mode = 'no-network'\nmemory_mb = 512\nenv = {KEY = 'secret', HOME = '/app'}\n"
    folder = write_tasks(tmp_path / "tasks", "hello-world", dockerfile=dockerfile, task_toml=toml)
    config = recipe(folder, backend=None, max_concurrent=1)
    environments = assembly.environment_factory(config)
    row = assembly.rows(config)[0]
    solve = bash("echo 'Hello, world!' > hello.txt; echo $KEY")
    for trajectory in hold_all(Says(solve, "Done."), environments, row=row, size=2, limits=LIMITS):
        assert (trajectory.error, trajectory.turns[-1].reward) == (None, 1.0)
        assert answers(trajectory) == ["secret"]
    assert hold(Says("Done."), environments, row=row, limits=LIMITS).turns[-1].reward == 0.0
    ((_, *built),) = docker_calls(docker, "build")
    assert built[-1] == str(folder / "hello-world" / "environment")
    created = docker_calls(docker, "create")
    assert len(created) == 3
    assert {"--network=none", "--memory=512m", "--cpus=1", "--pids-limit=128", "--entrypoint=/bin/sh"} < set(created[0])
    assert {"--env=KEY", "--workdir=/"} < set(docker_calls(docker, "exec")[0])
    assert "--env=HOME=/app" in docker_calls(docker, "exec")[0]
    assert not list(docker.glob("turnwise-*"))


def test_a_container_is_removed_if_its_conversation_is_cut(docker: Path, tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path / "tasks", "hello-world"), backend="docker")
    environments = assembly.environment_factory(config)
    limits = Limits(turns=12, tokens_per_turn=2000, seconds_per_turn=6)
    trajectory = hold(Says(bash("sleep 4712")), environments, row=assembly.rows(config)[0], limits=limits)
    assert trajectory.error is not None
    asyncio.run(environments.aclose())
    assert len(docker_calls(docker, "create")) == 1
    assert not list(docker.glob("turnwise-*"))


def test_an_image_that_docker_cannot_build_fails_with_its_message(
    docker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tasks(tmp_path / "tasks", "hello-world")
    (folder / "hello-world" / "environment" / "broken").touch()
    trajectory = played(recipe(folder, backend="docker"), "Done.")
    assert trajectory.error is not None
    assert "task hello-world: its image cannot be built: ERROR: failed to solve" in trajectory.error.message
    monkeypatch.setenv("PATH", str(docker))
    with pytest.raises(ConfigError, match="backend=podman: podman is not installed"):
        assembly.environment_factory(recipe(folder, backend="podman"))


def test_tests_run_as_their_user_and_what_is_around_them_as_root(docker: Path, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path / "tasks", "hello-world", task_toml="[agent]\nuser = 'ann'\n")
    played(recipe(folder, backend="docker"), bash("true"), "Done.")
    users = [[word for word in asked if word.startswith("--user=")] for asked in docker_calls(docker, "exec")]
    assert users == [["--user=ann"], ["--user=0"], ["--user=0"], [], ["--user=0"]]


@pytest.mark.slow
def test_tasks_share_the_threads_of_their_containers_and_an_image_that_fails_is_built_once(
    docker: Path, tmp_path: Path
) -> None:
    names = ["hello-world", "mean", "column"]
    folder = write_tasks(tmp_path / "tasks", *names)
    config = recipe(folder, backend="docker", max_concurrent=6)
    before = set(threading.enumerate())  # those of earlier tests may still be here
    environments = assembly.environment_factory(config)
    (folder / "mean" / "environment" / "broken").touch()
    for row in assembly.rows(config):
        errors = [one.error for one in hold_all(Says("Done."), environments, row=row, size=6, limits=LIMITS)]
        assert [error is not None for error in errors] == [row["task"] == "mean"] * 6
    assert len(docker_calls(docker, "build")) == 3
    threads = [one for one in set(threading.enumerate()) - before if one.name.startswith("turnwise-containers")]
    assert 0 < len(threads) <= 8
    asyncio.run(environments.aclose())
    assert not list(docker.glob("turnwise-*"))


@pytest.fixture
def podman(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real podman."""
    with real_tool("podman", tmp_path / "podman") as place:
        monkeypatch.setenv("PATH", f"{place}:{os.environ['PATH']}")
        yield place / "podman"


def of_busybox(folder: Path, test: str, *more: str) -> Path:
    """A task whose image is made here."""
    tasks = write_tasks(
        folder,
        "hello-world",
        test=f"#!/bin/sh\n{test}\n",
        task_toml="[environment]\nmemory_mb = 64\n[verifier]\ntimeout_sec = 5.0\n",
    )
    busybox_folder(tasks / "hello-world" / "environment", "WORKDIR /app", *more)
    return tasks


@pytest.mark.skipif(os.getuid() != 0, reason="only root may start processes of a user who has no others")
@pytest.mark.parametrize("shell", [("/bin/sh",), ("busybox", "sh"), ("bash",)], ids=" ".join)
def test_the_first_process_of_a_container_outlives_a_time_without_free_processes(shell: tuple[str, ...]) -> None:
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    user = 65_000 + os.getpid() % 400

    def children(process: subprocess.Popen[bytes]) -> list[str]:
        return Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()

    def wait_until(holds: Callable[[], bool]) -> None:
        latest = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < latest
            time.sleep(0.05)

    def may_have_two() -> None:
        resource.setrlimit(resource.RLIMIT_NPROC, (2, 2))

    with contextlib.ExitStack() as started:

        def start(*words: str, **options: Any) -> subprocess.Popen[bytes]:
            process = started.enter_context(subprocess.Popen(words, user=user, **options))
            started.callback(process.kill)
            return process

        started.callback(subprocess.run, ["pkill", "-KILL", "-u", str(user)], check=False)
        first = start(*shell, "-c", _WAIT, preexec_fn=may_have_two)
        wait_until(lambda: bool(children(first)))
        (sleep,) = children(first)
        another = start("sleep", "600")
        os.kill(int(sleep), signal.SIGKILL)
        wait_until(lambda: sleep not in children(first))
        time.sleep(0.2)  # it has tried to start another one
        assert first.poll() is None
        another.kill()
        another.wait()  # until then, it counts
        wait_until(lambda: bool(children(first)))


_GRADE = 'if [ "$(cat /app/hello.txt)" = "Hello, world!" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt'


@pytest.mark.slow
def test_in_a_real_container_the_model_works_and_the_tests_decide(podman: Path, tmp_path: Path) -> None:
    config = recipe(of_busybox(tmp_path / "tasks", _GRADE), backend="podman", network=False, bounds={"seconds": 3})
    environments = assembly.environment_factory(config)
    row = assembly.rows(config)[0]
    solved = hold(
        Says(
            edit(command="create", path="hello.txt", file_text="Hello, world!\n"),
            bash("pwd; cat hello.txt; id -u; ls /work; ip link show up 2>/dev/null | grep -c eth; sleep 60"),
            bash("head -c 200000000 /dev/zero | tail; echo $?"),
            bash(f"echo {'x' * 150_000} | wc -c; for n in $(seq 200); do sleep 2 & done"),
            "Done.",
        ),
        environments,
        row=row,
        limits=LONG,
    )
    assert (solved.error, solved.turns[-1].reward) == (None, 1.0)
    _, shown, large, many = answers(solved)
    assert shown.startswith("/app\nHello, world!\n0\nls: /work: No such file or directory\n0\n"), shown
    assert shown.endswith("[stopped: the program ran longer than 3 s]")
    assert "137" in large
    assert many.startswith("150001\n")
    assert "can't fork" in many
    for nothing in hold_all(Says("Done."), environments, row=row, size=3, limits=LIMITS):
        assert (nothing.error, nothing.turns[-1].reward) == (None, 0.0)
    assert not has_containers(podman)
    asyncio.run(environments.aclose())


@pytest.mark.slow
def test_in_a_real_container_a_model_cannot_avoid_or_change_its_reward(podman: Path, tmp_path: Path) -> None:
    late = f"sleep 1; {_GRADE}; sleep 1"
    config = recipe(of_busybox(tmp_path / "tasks", late), backend="podman", network=False)
    environments = assembly.environment_factory(config)
    row = assembly.rows(config)[0]
    writes = "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.1; done) > /dev/null 2>&1 &"
    for cheat in (
        writes,
        f"nohup setsid sh -c '{writes[:-1]}' &",
        "rm -rf /app",
        "kill -9 -1; kill -9 1",
        "cd /; rm -rf /tests /logs; echo > /tests",
    ):
        trajectory = hold(Says(bash(cheat), "Done."), environments, row=row, limits=LIMITS)
        assert (trajectory.error, trajectory.turns[-1].reward) == (None, 0.0), cheat
    kept = recipe(tmp_path / "tasks", backend="podman", network=False, keep_processes=True)
    trajectory = hold(Says(bash(writes), "Done."), assembly.environment_factory(kept), row=row, limits=LIMITS)
    assert (trajectory.error, trajectory.turns[-1].reward) == (None, 1.0)
    assert not has_containers(podman)


@pytest.mark.slow
@pytest.mark.parametrize("test", ["sleep 60", "head -c 200000000 /dev/zero | tail; kill -9 $$"])
def test_in_a_real_container_tests_that_a_limit_stops_give_0(test: str, podman: Path, tmp_path: Path) -> None:
    trajectory = played(recipe(of_busybox(tmp_path / "tasks", test), backend="podman", network=False), "Done.")
    assert (trajectory.error, trajectory.turns[-1].reward) == (None, 0.0)


@pytest.mark.slow
def test_a_real_container_is_removed_if_its_conversation_is_cut(podman: Path, tmp_path: Path) -> None:
    config = recipe(of_busybox(tmp_path / "tasks", _GRADE, "USER 1000"), backend="podman", network=False)
    environments = assembly.environment_factory(config)
    limits = Limits(turns=12, tokens_per_turn=2000, seconds_per_turn=6)
    trajectory = hold(Says(bash("sleep 4713")), environments, row=assembly.rows(config)[0], limits=limits)
    assert trajectory.error is not None
    assert trajectory.error.kind == "deadline"
    asyncio.run(environments.aclose())
    assert not has_containers(podman)


@pytest.mark.slow
def test_an_image_that_podman_cannot_build_fails_with_its_message(podman: Path, tmp_path: Path) -> None:
    config = recipe(of_busybox(tmp_path / "tasks", _GRADE, "RUN echo no such thing >&2; exit 7"), backend="podman")
    trajectory = played(config, "Done.")
    assert trajectory.error is not None
    assert "task hello-world: its image cannot be built" in trajectory.error.message
    assert "no such thing" in trajectory.error.message


def test_containers_of_a_killed_run_are_removed_by_the_next_one(docker: Path, tmp_path: Path) -> None:
    boot, space, *_ = ContainerImage(tool="docker", image="i").label.split(":")
    (docker / "turnwise-old").mkdir()
    (docker / "label").write_text(f"{boot}:{space}:4194305:1:a")
    assembly.environment_factory(recipe(write_tasks(tmp_path / "tasks", "hello-world"), backend="docker"))
    assert not (docker / "turnwise-old").exists()


def test_nothing_is_left_when_a_run_ends(tmp_path: Path) -> None:
    config = recipe(write_tasks(tmp_path, "hello-world"))
    environments = assembly.environment_factory(config)
    row = assembly.rows(config)[0]
    limits = Limits(turns=12, tokens_per_turn=2000, seconds_per_turn=4)
    trajectory = hold(Says(bash("sleep 4711")), environments, row=row, limits=limits)
    assert trajectory.error is not None
    asyncio.run(environments.aclose())
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not any(b"sleep\x004711" in command for command in running)


def test_a_command_may_compute_for_as_long_as_it_may_take(tmp_path: Path) -> None:
    tasks = str(write_tasks(tmp_path))
    assert Harbor(tasks).bounds.cpu_seconds == 60
    assert Harbor(tasks, bounds={"seconds": 90.5}).bounds.cpu_seconds == 91
    assert Harbor(tasks, bounds={"cpu_seconds": 5}).bounds.cpu_seconds == 5


# Backends of Harbor's package, with the real package in its own Python: environments of its interface, which are folders.


starts_pythons = pytest.mark.slow  # starts Pythons that import the package
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


def package_recipe(folder: Path, python: str, backend: str = FOLDER, **arguments: Any) -> Config:
    given = {"backend": backend, "python": python, **arguments}
    return checked({"model": "m", "environment": {"use": f"harbor:{folder}", "arguments": given}}, source="recipe")


def played_with_package(config: Config, *turns: str, size: int = 1) -> list[Trajectory]:
    environments = assembly.environment_factory(config)
    return hold_all(Says(*turns), environments, row=assembly.rows(config)[0], limits=LIMITS, size=size)


@starts_pythons
@pytest.mark.parametrize("name", ["half", "mean", "parts", "variables"])
def test_the_reference_solution_gives_1_and_doing_nothing_0_in_a_backend(
    name: str, python: str, folders: Path, tmp_path: Path
) -> None:
    config = package_recipe(write_tasks(tmp_path / "tasks", name), python)
    solution = f"export GREETING='Hello from us'; echo us > who; {TASKS[name]['solution/solve.sh']}"
    (solved,) = played_with_package(config, bash(solution), "Done.")
    assert solved.error is None, solved.error
    (nothing,) = played_with_package(config, "Done.")
    assert nothing.error is None, nothing.error
    parts = {"first", "second"} if name == "parts" else {"environment"}
    assert (solved.turns[-1].rewards, nothing.turns[-1].rewards) == (
        dict.fromkeys(parts, 1.0),
        dict.fromkeys(parts, 0.0),
    )
    assert list(folders.iterdir()) == []


@starts_pythons
def test_commands_files_and_limits_are_those_of_other_backends(python: str, folders: Path, tmp_path: Path) -> None:
    toml = "[environment]\nmemory_mb = 512\n[verifier]\ntimeout_sec = 30\n"
    config = package_recipe(write_tasks(tmp_path / "tasks", "half", task_toml=toml), python, bounds={"seconds": 3})
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


@starts_pythons
def test_environments_are_limited_in_number_and_removed_when_a_conversation_fails(
    python: str, folders: Path, tmp_path: Path
) -> None:
    config = package_recipe(write_tasks(tmp_path / "tasks", "half"), python, max_concurrent=2)
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


@starts_pythons
@pytest.mark.parametrize(
    ("fail", "message"), [("start", "quota of the folder service exceeded"), ("hang", "build_timeout_sec=2")]
)
def test_an_environment_that_does_not_start_keeps_the_packages_message(
    fail: str, message: str, python: str, folders: Path, tmp_path: Path
) -> None:
    folder = write_tasks(tmp_path / "tasks", "half", task_toml="[environment]\nbuild_timeout_sec = 2\n")
    (one,) = played_with_package(package_recipe(folder, python, backend_options={"fail": fail}), "Done.")
    assert one.error is not None
    assert f"task half: no environment of Harbor's {FOLDER} was started: " in one.error.message
    assert message in one.error.message
    assert list(folders.iterdir()) == []


@starts_pythons
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


@starts_pythons
def test_a_process_that_died_is_replaced_and_the_next_one_removes_what_it_left(
    python: str, folders: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = package_recipe(write_tasks(tmp_path / "tasks", "half"), python)
    environments, row = assembly.environment_factory(config), assembly.rows(config)[0]
    harbor = environments._shared[-1]
    assert isinstance(harbor, Harbor)
    for number in range(RESTARTS):
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


@starts_pythons
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
    config = package_recipe(write_tasks(tmp_path / "tasks", "half"), python, backend, **arguments)
    with pytest.raises(ConfigError, match=message):
        assembly.environment_factory(config)
