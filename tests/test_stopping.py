"""How a run is stopped: by Ctrl-C, by a scheduler's signals, and not by a reader that goes away."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.tiny import save_model, save_rows

USER = '''
import asyncio
import os
import subprocess
from pathlib import Path
from turnwise.environments.environment import environment
from turnwise.types import Opening, Reply

HERE = Path(__file__).parent

@environment
async def with_child(row):
    """Each conversation has a child process, which its clean-up ends."""
    child = subprocess.Popen(["sleep", "600"])
    with (HERE / "children").open("a") as file:
        file.write(f"{child.pid}\\n")
    try:
        turn = yield Opening(messages=row.messages)
        await asyncio.sleep(0.05)
        print("a word", flush=True)
        yield Reply(reward=float(len(turn.text)), done=True)
    finally:
        child.kill()
        child.wait()
'''


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(USER)
    options = {
        "model": {"path": str(save_model(tmp_path / "model"))},
        "data": {"train": str(save_rows(tmp_path / "train.jsonl"))},
        "environment": f"{tmp_path / 'user.py'}:with_child",
        "limits": {"turns": 1, "tokens_per_turn": 6},
        "train": {"steps": 400, "rows": 2, "group": 2, "lr": 0.01},
        "checkpoint": {"every": 400},
        "output": str(tmp_path / "run"),
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(options))
    return path


def start(recipe: Path, *overrides: str, stdout: Any = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "turnwise.cli", "train", str(recipe), *overrides]
    log = recipe.with_name("log.txt").open("w")
    with log:
        return subprocess.Popen(command, stdout=stdout or log, stderr=log, text=True)


def wait_for_steps(process: subprocess.Popen[str], recipe: Path, count: int) -> None:
    metrics, deadline = recipe.with_name("run") / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert process.poll() is None, recipe.with_name("log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=lambda one: str(one)
)
def test_a_signal_ends_a_run_with_a_checkpoint_and_without_children(
    recipe: Path, number: signal.Signals, status: int
) -> None:
    started = start(recipe, "seed=3")
    wait_for_steps(started, recipe, 2)
    started.send_signal(number)
    if number != signal.SIGINT:
        started.send_signal(number)  # terminals send it twice
    assert started.wait(timeout=240) == status
    log = recipe.with_name("log.txt").read_text()
    done = len((recipe.with_name("run") / "metrics.jsonl").read_text().splitlines())
    assert f"stopped after step {done}; the newest checkpoint is that of step {done}: " in log
    assert f"go on with: turnwise train {recipe} seed=3 resume=auto output=" in log
    assert "Traceback" not in log
    about = json.loads((recipe.with_name("run") / "checkpoints" / f"step-{done:06d}" / "checkpoint.json").read_text())
    assert about["step"] == done
    children = [int(line) for line in recipe.with_name("children").read_text().split()]
    assert children
    assert [pid for pid in children if alive(pid)] == []


def test_a_reader_that_goes_away_does_not_end_a_run(recipe: Path) -> None:
    started = start(recipe, "train.steps=3", stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.close()
    assert started.wait(timeout=240) == 0, recipe.with_name("log.txt").read_text()
    metrics = [json.loads(line) for line in (recipe.with_name("run") / "metrics.jsonl").read_text().splitlines()]
    assert [(one["step"], one["failed"]) for one in metrics] == [(1, 0), (2, 0), (3, 0)]
    assert "BrokenPipe" not in recipe.with_name("log.txt").read_text()


def test_a_second_ctrl_c_says_which_checkpoint_there_is(recipe: Path) -> None:
    slow = recipe.with_name("slow")  # from then on, closing takes long
    closing = f"if Path({str(slow)!r}).exists():\n            await asyncio.sleep(20)\n        child.kill()"
    recipe.with_name("user.py").write_text(USER.replace("child.kill()", closing))
    started = start(recipe, "checkpoint.every=1")
    wait_for_steps(started, recipe, 2)
    slow.touch()
    started.send_signal(signal.SIGINT)
    time.sleep(2)
    if started.poll() is None:
        started.send_signal(signal.SIGINT)
    # the latter where it came when all was said, and Python was shutting down
    assert started.wait(timeout=240) in (130, -signal.SIGINT)
    log = recipe.with_name("log.txt").read_text()
    link = recipe.with_name("run") / "checkpoint"
    step = int(link.resolve().parent.name.removeprefix("step-"))
    assert step >= 1
    assert f"the newest checkpoint is that of step {step}" in log
    assert "Traceback" not in log
    for line in recipe.with_name("children").read_text().split():
        if alive(int(line)):
            os.kill(int(line), signal.SIGKILL)
