"""Environments of the tests of faults: they end the process of their rollout worker, block it, or take their time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from turnwise.environments.environment import environment, user_message
from turnwise.types import Opening, Reply, Row, Turn

_together: list[asyncio.Event] = []


def _first(folder: str, name: str) -> bool:
    """Whether this is the first call with this name, in all processes."""
    try:
        (Path(folder) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


@environment
async def kills_its_worker_once(row: Row, folder: str) -> AsyncGenerator[Opening | Reply, Turn]:
    """In the second turn of row 1, the process of the worker is killed. Once."""
    yield Opening(messages=row.messages)
    if row.id == "1" and _first(folder, "killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    turn = yield user_message("And?")
    yield Reply(reward=len(turn.text), done=True)


@environment
async def kills_its_worker(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Row 1 kills the process of its worker each time."""
    turn = yield Opening(messages=row.messages)
    if row.id == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    yield Reply(reward=len(turn.text), done=True)


@environment
async def blocks_once(row: Row, folder: str) -> AsyncGenerator[Opening | Reply, Turn]:
    """The first conversation blocks the process of its worker for a long time."""
    turn = yield Opening(messages=row.messages)
    if _first(folder, "blocked"):
        time.sleep(600)
    yield Reply(reward=len(turn.text), done=True)


@environment
async def kills_one_of_its_servers_once(row: Row, folder: str) -> AsyncGenerator[Opening | Reply, Turn]:
    """In the second turn of the first conversation, one of the servers that this process has started is killed. Once. The
    conversation then notes whether that server answers."""
    yield Opening(messages=row.messages)
    port = None
    if _first(folder, "killed"):
        group = _started_servers()[0]
        words = (Path("/proc") / str(group) / "cmdline").read_text(encoding="utf-8").replace("=", "\0").split("\0")
        port = int(words[words.index("--port") + 1])
        os.killpg(group, signal.SIGKILL)
        while _answers(port):  # a killed process still has its memory to give back
            await asyncio.sleep(0.01)
    turn = yield user_message("And?")
    info = {} if port is None else {"answers": _answers(port)}
    yield Reply(reward=len(turn.text), done=True, info=info)


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _started_servers() -> list[int]:
    """The process groups of the servers that this process has started: those of its children under `guard.py`."""
    servers: list[int] = []
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            parent = int((process / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            if parent == os.getpid() and "guard.py" in (process / "cmdline").read_text(encoding="utf-8"):
                servers.append(int(process.name))
    assert servers, "no server to kill"
    return servers


@environment
async def slow(row: Row, folder: str) -> AsyncGenerator[Opening | Reply, Turn]:
    """Takes 0.3 seconds for a turn, and leaves the number of its process and its node in a file."""
    node = os.environ.get("RAY_RAYLET_PID", "")
    (Path(folder) / f"{os.getpid()}").write_text(node, encoding="utf-8")
    turn = yield Opening(messages=row.messages)
    await asyncio.sleep(0.3)
    turn = yield user_message("And?")
    await asyncio.sleep(0.3)
    yield Reply(reward=len(turn.text), done=True)


@environment
async def waits_for_a_loss(row: Row, folder: str) -> AsyncGenerator[Opening | Reply, Turn]:
    """Leaves the number of its process in a file, and takes its second turn when there is a file `lost`."""
    (Path(folder) / f"{os.getpid()}").touch()
    turn = yield Opening(messages=row.messages)
    while not (Path(folder) / "lost").exists():
        await asyncio.sleep(0.05)
    turn = yield user_message("And?")
    yield Reply(reward=len(turn.text), done=True)


@environment
async def one_after_the_other(row: Row, turns: int) -> AsyncGenerator[Opening | Reply, Turn]:
    """Many turns, so that weights change in their middle. Likes long turns."""
    turn = yield Opening(messages=row.messages)
    for _ in range(turns - 1):
        turn = yield user_message("And?", reward=len(turn.text) / 100)
    yield Reply(reward=len(turn.text) / 100, done=True)


@environment
async def all_together(row: Row, count: int) -> AsyncGenerator[Opening | Reply, Turn]:
    """Waits until `count` conversations run in this process."""
    everyone = asyncio.Event()
    _together.append(everyone)
    if len(_together) == count:
        for event in _together:
            event.set()
    await everyone.wait()
    turn = yield Opening(messages=row.messages)
    yield Reply(reward=len(turn.text), done=True)
