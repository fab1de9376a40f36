"""A long step shows that it is alive: a line now and then in a log, the live display on a terminal."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from support.recipes import save_recipe
from support.tiny import save_model
from turnwise.config.recipe import load
from turnwise.terminal.report import Activity, Heartbeat
from turnwise.terminal.train_report import TrainReport
from turnwise.train import assemble, train

SLOW = """
import asyncio
import time
from pathlib import Path
from turnwise.environments.environment import environment
from turnwise.types import Opening, Reply

HERE = Path(__file__).parent

@environment
async def slow(row):
    turn = yield Opening(messages=row.messages)
    while (HERE / "wait").exists():
        await asyncio.sleep(0.05)
    yield Reply(reward=float(len(turn.text)), done=True)
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "user.py").write_text(SLOW)
    (tmp_path / "wait").touch()
    return save_recipe(
        tmp_path,
        save_model(tmp_path / "model"),
        environment=f"{tmp_path / 'user.py'}:slow",
        limits={"turns": 1, "tokens_per_turn": 6},
        train={"steps": 1, "batch_size": 2, "group_size": 3, "lr": 0.01},
    )


def test_a_part_counts_its_own_pieces_only() -> None:
    activity = Activity()
    conversation = activity.part(2, "conversations", 8)
    conversation()
    assert activity.text().startswith("step 2: conversations 1 of 8, 0 s")
    micro_batch = activity.part(1, "training, micro-batches", 3)
    conversation()  # with train.max_staleness they go on
    micro_batch()
    assert activity.text().startswith("step 1: training, micro-batches 1 of 3, 0 s")


def test_a_short_step_prints_no_sign_of_life() -> None:
    written = io.StringIO()
    activity = Activity()
    activity.step(1)
    with Heartbeat(activity, Console(file=written), seconds=0.5):
        for step in range(2, 10):
            time.sleep(0.1)
            activity.step(step)
    assert written.getvalue() == ""


def test_a_long_step_prints_a_line_in_each_interval_where_there_is_no_terminal(recipe: Path) -> None:
    written = io.StringIO()
    console = Console(file=written, width=200)

    async def go() -> None:
        going = asyncio.create_task(train(run, TrainReport(console, run.activity)))
        while written.getvalue().count("step 1: conversations ") < 3 and not going.done():
            await asyncio.sleep(0.05)
        recipe.with_name("wait").unlink()
        await going

    config, _ = load(str(recipe), [])
    run = assemble(config)
    with Heartbeat(run.activity, console, seconds=0.2):
        asyncio.run(go())
    lines = [line for line in written.getvalue().splitlines() if line.startswith("step 1: conversations ")]
    assert len(lines) >= 3
    assert all(re.fullmatch(r"step 1: conversations \d of 6,( [\d,]+ tokens/s,)? \d+ s", line) for line in lines)


@pytest.mark.slow
def test_a_long_step_shows_its_parts_on_a_terminal(recipe: Path) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 150, 0, 0))
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "turnwise", "train", str(recipe)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    shown, deadline = "", time.monotonic() + 240
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                shown += os.read(ours, 65536).decode(errors="replace")
            except OSError:  # the process has ended
                break
        seconds = set(re.findall(r"step 1: conversations \d of 6,(?: [\d,]+ tokens/s,)? (\d+) s", shown))
        if len(seconds) >= 2 and recipe.with_name("wait").exists():  # it counts
            recipe.with_name("wait").unlink()
    os.close(ours)
    assert process.wait(timeout=240) == 0, shown
    assert not recipe.with_name("wait").exists()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is shown again


@pytest.mark.parametrize(
    "closed", [pytest.param("stdout", marks=pytest.mark.slow), pytest.param("stderr", marks=pytest.mark.slow), "both"]
)
def test_a_run_goes_on_when_its_output_is_closed(recipe: Path, closed: str) -> None:
    recipe.with_name("wait").unlink()
    command = f"{sys.executable} -m turnwise train {recipe} train.steps=3"
    command = {
        "stdout": f"set -o pipefail; {command} | head -1",
        "stderr": f"{command} 2>&-",
        "both": f"{command} >&- 2>&-",
    }[closed]
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (recipe.with_name("run") / "metrics.jsonl").read_text().count("\n") == 3
    assert "Error" not in ended.stderr
    assert "Traceback" not in ended.stderr
    if closed == "stdout":
        assert ended.stdout.startswith("training ")
