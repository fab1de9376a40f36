"""How a run is stopped: by Ctrl-C, by a scheduler's signals, and not by a reader that goes away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support.forked import Forked
from support.recipes import save_recipe
from support.tiny import save_model
from turnwise.commands.command import Stops
from turnwise.errors import RunError

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
    return save_recipe(
        tmp_path,
        save_model(tmp_path / "model"),
        environment=f"{tmp_path / 'user.py'}:with_child",
        limits={"turns": 1, "tokens_per_turn": 6},
        train={"steps": 400, "batch_size": 2, "group_size": 2, "lr": 0.01},
        checkpoint={"every": 400},
    )


def start(recipe: Path, *overrides: str, stdout: Any = None) -> Forked:
    with recipe.with_name("log.txt").open("w") as log:
        return Forked(["train", str(recipe), *overrides], stdout=stdout or log, stderr=log)


def start_fresh(recipe: Path, *overrides: str) -> subprocess.Popen[str]:
    """Where the end of the interpreter is the subject."""
    command = [sys.executable, "-m", "turnwise.cli", "train", str(recipe), *overrides]
    with recipe.with_name("log.txt").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True)


def wait_for_steps(process: Forked, recipe: Path, count: int) -> None:
    metrics, deadline = recipe.with_name("run") / "metrics.jsonl", time.monotonic() + 240
    while not metrics.exists() or metrics.read_text().count("\n") < count:
        assert process.poll() is None, recipe.with_name("log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)], ids=str
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
    assert f"resume with: turnwise train {recipe} seed=3 resume=auto output=" in log
    assert "Traceback" not in log
    about = json.loads((recipe.with_name("run") / "checkpoints" / f"step-{done:06d}" / "checkpoint.json").read_text())
    assert about["step"] == done
    children = [int(line) for line in recipe.with_name("children").read_text().split()]
    assert children
    assert [pid for pid in children if alive(pid)] == []


@pytest.mark.slow
def test_a_reader_that_goes_away_does_not_end_a_run(recipe: Path) -> None:
    started = start(recipe, "train.steps=3", stdout=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.close()
    assert started.wait(timeout=240) == 0, recipe.with_name("log.txt").read_text()
    metrics = [json.loads(line) for line in (recipe.with_name("run") / "metrics.jsonl").read_text().splitlines()]
    assert [(one["step"], one["failed"]) for one in metrics] == [(1, 0), (2, 0), (3, 0)]
    assert "BrokenPipe" not in recipe.with_name("log.txt").read_text()


def wait_for(path: Path, process: Forked | subprocess.Popen[str], recipe: Path) -> None:
    deadline = time.monotonic() + 240
    while not path.exists():
        assert process.poll() is None, recipe.with_name("log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.02)


SLOW_TO_CLOSE = """
import asyncio
import time
from pathlib import Path
from turnwise.types import Opening, Reply

HERE = Path(__file__).parent

class SlowToClose:
    async def begin(self, row):
        self.slow = (HERE / "slow").exists()  # asked once: a conversation is slow in both methods or in neither
        return Opening(messages=row.messages)

    async def step(self, turn):
        if self.slow:
            (HERE / "waits").touch()
            await asyncio.sleep(60)
        return Reply(reward=float(len(turn.text)), done=True)

    async def close(self):
        if self.slow:
            WAIT
            (HERE / "closed").touch()
"""


@pytest.mark.parametrize(
    ("wait", "every"),
    [
        pytest.param("await asyncio.sleep(20)", 1, id="waiting", marks=pytest.mark.slow),
        pytest.param("time.sleep(20)", 1, id="blocking", marks=pytest.mark.slow),
        pytest.param("await asyncio.to_thread(time.sleep, 20)", 400, id="in a thread", marks=pytest.mark.slow),
    ],
)
def test_a_second_ctrl_c_stops_at_once_and_says_which_checkpoint_there_is(recipe: Path, wait: str, every: int) -> None:
    waits, closed, slow = (recipe.with_name(name) for name in ("waits", "closed", "slow"))
    recipe.with_name("user.py").write_text(SLOW_TO_CLOSE.replace("WAIT", wait))
    started = start(
        recipe,
        f"environment={recipe.with_name('user.py')}:SlowToClose",
        "train.batch_size=1",
        f"checkpoint.every={every}",
    )
    wait_for_steps(started, recipe, 2)
    slow.touch()
    wait_for(waits, started, recipe)
    started.send_signal(signal.SIGINT)
    log, deadline = recipe.with_name("log.txt"), time.monotonic() + 240
    while "turnwise: stopping (SIGINT); Ctrl-C stops at once" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    run = recipe.with_name("run")
    time.sleep(0.5)
    assert started.poll() is None
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=240) == 130
    assert not closed.exists()
    text = log.read_text()
    done = len((run / "metrics.jsonl").read_text().splitlines())
    newest, none = f"the newest checkpoint is that of step {done}: {run}/checkpoint", "there is no checkpoint yet"
    # in a thread, the first signal may have cancelled `close`: then a checkpoint is written while the thread goes on
    possible = [newest] if every == 1 else [newest, none] if (run / "checkpoint").exists() else [none]
    assert any(f"turnwise: stopped after step {done}; {there}\n" in text for there in possible)
    assert f"resume with: turnwise train {recipe} " in text
    assert f" checkpoint.every={every} resume=auto output={run}\n" in text
    if (run / "checkpoint").exists():
        assert (run / "checkpoint").resolve().parent.name == f"step-{done:06d}"
    for word in ("Traceback", "Exception", "never retrieved", "never awaited"):
        assert word not in text


AT_EXIT = """
import atexit
import builtins
import threading
import time

def wait(here=HERE, sleep=time.sleep):
    (here / "exiting").touch()
    sleep(3)
    (here / "exited").touch()

class Last:
    def __del__(self, wait=wait):
        wait()
"""


@pytest.mark.parametrize(
    ("how", "presses", "status"),
    [
        pytest.param("threading.Thread(target=wait).start()", 2, 130, marks=pytest.mark.slow),
        pytest.param("atexit.register(wait)", 2, 130, marks=pytest.mark.slow),
        pytest.param("builtins.last = Last()", 1, 0, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_while_the_interpreter_exits_prints_no_traceback(
    recipe: Path, how: str, presses: int, status: int
) -> None:
    begin = f"if not (HERE / 'children').exists():\n        {how}\n    child = "
    recipe.with_name("user.py").write_text(
        USER.replace("child = ", begin).replace("@environment", f"{AT_EXIT}\n@environment")
    )
    if "Thread" in how:  # it starts with the first conversation, and must outlive the run
        recipe.with_name("user.py").write_text(
            recipe.with_name("user.py").read_text().replace("sleep(3)", "threading.main_thread().join(); sleep(3)")
        )
    started = start_fresh(recipe, "train.steps=1")
    exiting = recipe.with_name("exiting")
    wait_for(exiting, started, recipe)
    if "Thread" in how:
        wait_for(recipe.with_name("run") / "curve.png", started, recipe)
        time.sleep(0.5)
    log = recipe.with_name("log.txt")
    for press in range(presses):
        started.send_signal(signal.SIGINT)
        while press + 1 < presses and "turnwise: stopping (SIGINT)" not in log.read_text():
            time.sleep(0.02)
    assert started.wait(timeout=240) == status
    assert recipe.with_name("exited").exists() == (presses == 1)
    for word in ("Traceback", "Exception", "KeyboardInterrupt"):
        assert word not in log.read_text()


SLOW_TRAINING = """
import time
import torch

def slow(module, inputs):
    if torch.is_grad_enabled() and isinstance(module, torch.nn.Embedding) and (HERE / "slow").exists():
        (HERE / "training").touch()
        time.sleep(1)

torch.nn.modules.module.register_module_forward_pre_hook(slow)
"""


@pytest.mark.parametrize("staleness", [pytest.param(n, marks=pytest.mark.slow) for n in (0, 1)])
def test_a_signal_takes_effect_between_two_micro_batches(recipe: Path, staleness: int) -> None:
    recipe.with_name("user.py").write_text(USER.replace("@environment", f"{SLOW_TRAINING}\n@environment"))
    # 60 micro-batches of a second each
    small = ["train.group_size=30", "train.micro_batch_tokens=1", "train.share_prompts=never"]
    started = start(recipe, *small, f"train.max_staleness={staleness}")
    wait_for_steps(started, recipe, 1)
    recipe.with_name("slow").touch()
    wait_for(recipe.with_name("training"), started, recipe)
    done = len((recipe.with_name("run") / "metrics.jsonl").read_text().splitlines())
    started.send_signal(signal.SIGTERM)
    assert started.wait(timeout=240) == 143
    log = recipe.with_name("log.txt").read_text()
    assert f"stopped after step {done}; the newest checkpoint is that of step {done}: " in log
    assert len((recipe.with_name("run") / "metrics.jsonl").read_text().splitlines()) == done
    for word in ("Traceback", "Exception", "never retrieved", "never awaited"):
        assert word not in log


ABORTS = """
import atexit, os, sys
from turnwise.commands.command import Stops

class Aborts:
    def __del__(self):
        os._exit(6)

aborts = Aborts()
with Stops(until_exit=True) as stops:
    stops.finalize = sys.argv[1] == "yes"
    stops.exit_status = 1
atexit.register(print, "from atexit")
"""


@pytest.mark.parametrize(("finalize", "status"), [("yes", 6), ("no", 1)])
def test_what_aborts_while_the_interpreter_is_finalized_does_not_change_the_status_of_a_rank(
    finalize: str, status: int
) -> None:
    command = [sys.executable, "-c", ABORTS, finalize]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    if finalize == "no":
        assert done.stdout == "from atexit\n"


IN_COLLECTION = """
import gc, os, signal, time
from turnwise.commands.command import Stops

def interrupt(phase, info):
    gc.callbacks.remove(interrupt)
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass

gc.callbacks.append(interrupt)
with Stops() as stops:
    try:
        gc.collect()
        time.sleep(30)
    except KeyboardInterrupt:
        print("stopped by", stops.received.name)
"""


def test_ctrl_c_in_a_callback_of_the_garbage_collector_is_neither_lost_nor_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", IN_COLLECTION], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr, done.returncode) == ("stopped by SIGINT\n", "", 0)


# code of the recipe that ends the run from inside


async def stops_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(10)


async def cancels_all_tasks() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(10)


async def closes_a_descriptor() -> None:
    reader, writer = os.pipe()
    os.close(reader), os.close(writer)
    os.fstat(reader)


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (stops_the_loop, "code of the recipe has called loop.stop()"),
        (cancels_all_tasks, "code of the recipe has cancelled all tasks of the event loop"),
        (closes_a_descriptor, "code of the recipe has closed file descriptors that it has not opened"),
    ],
)
def test_a_run_that_is_ended_from_inside_says_by_what_and_how_it_goes_on(code: Any, cause: str) -> None:
    leave = os._exit
    with pytest.raises(RunError) as raised:
        Stops().run(code())
    assert cause in str(raised.value)
    assert "resume=auto continues" in str(raised.value)
    assert os._exit is leave


@pytest.mark.slow
def test_os_exit_in_a_conversation_fails_this_conversation_only(recipe: Path) -> None:
    ends = "if not (HERE / 'children').exists():\n        (HERE / 'children').touch()\n        os._exit(0)\n    child ="
    recipe.with_name("user.py").write_text(USER.replace("child =", ends, 1))
    assert start(recipe, "train.steps=1").wait(timeout=240) == 0, recipe.with_name("log.txt").read_text()
    lines = [json.loads(line) for line in (recipe.with_name("run") / "trajectories.jsonl").read_text().splitlines()]
    errors = [line["error"]["message"] for line in lines if line["error"] is not None]
    assert len(lines) == 4
    assert errors == ["the code tried to exit the process (status 0)"]


EXITS = """
import os, sys
from turnwise.commands.command import Stops

async def main():
    if os.fork() == 0:
        os._exit(7)  # a child may
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    os._exit(int(sys.argv[1]))

Stops().run(main())
"""


@pytest.mark.parametrize(("status", "expected"), [(0, 1), (5, 5)])
def test_a_run_that_code_of_its_recipe_exits_does_not_look_finished(status: int, expected: int) -> None:
    done = subprocess.run([sys.executable, "-c", EXITS, str(status)], capture_output=True, text=True, timeout=120)
    assert done.returncode == expected
    assert f"code of the recipe has called os._exit({status})" in done.stderr
