"""One process and all that come of it: its output read in bounds, its life ended in time.

Knows nothing of what is run. What limits of the kernel do not count (memory of all processes together, the number of files)
is looked at while it runs; what it says is bounded while it says it, so that nothing here grows with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from turnwise.environments.sandbox.bounds import Bounds, Ran

__all__ = ["run"]

_LOOK = 0.05  # seconds between two looks at what it uses
_CHUNK = 1 << 16
_LAST_WORDS = 0.5  # seconds for what was said before the end, where somebody who got away holds the pipe


async def run(
    command: Sequence[str],
    *,
    bounds: Bounds,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    first: Callable[[], int | None] | None = None,
    counted: Sequence[str] = (),
) -> Ran:
    """Run a command in bounds. When this returns or raises, cancelled or not, nothing of it is alive.

    `first` gives the process id of a jail's first process as soon as it is known: all others end with it. Without it only the
    process group is ended. `counted` are directories of the jail whose files are counted.
    """
    started = time.perf_counter()
    heard = _Heard(bounds)
    async with _pipe() as (reader, writer):  # our own: asyncio's would be waited for, whoever holds them
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writer,
                stderr=writer,
                env=dict(env),
                cwd=cwd,
                pass_fds=pass_fds,
                start_new_session=True,
            )
        finally:
            os.close(writer)
        look = asyncio.create_task(_look(process.pid, bounds, first, counted))
        listen = asyncio.create_task(heard.listen(reader))
        over = asyncio.create_task(process.wait())
        stopped: str | None = None
        try:
            async with asyncio.timeout(bounds.seconds):
                await asyncio.wait((look, listen, over), return_when=asyncio.FIRST_COMPLETED)
                if listen.done() and listen.result() is None:  # it closed its output and goes on
                    await asyncio.wait((look, over), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            stopped = f"it ran longer than {bounds.seconds:g} s"
        finally:
            await asyncio.shield(asyncio.ensure_future(_end(process, first)))
            await asyncio.wait((listen,), timeout=_LAST_WORDS)
            for task in (look, listen, over):
                task.cancel()
    for task in (look, listen):
        if stopped is None and task.done() and not task.cancelled():
            stopped = task.result()
    status = process.returncode if process.returncode is not None else 0
    return Ran(
        output=heard.text(),
        status=status if status >= 0 else 128 - status,
        stopped=stopped,
        seconds=time.perf_counter() - started,
    )


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A reader, and the descriptor to write to, which the user closes."""
    end, writer = os.pipe()
    reader = asyncio.StreamReader(limit=_CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
    )
    try:
        yield reader, writer
    finally:
        transport.close()


class _Heard:
    """The beginning and the end of a text of any length."""

    def __init__(self, bounds: Bounds) -> None:
        self._first, self._last = bytearray(), bytearray()
        self._room = (bounds.output_bytes + 1) // 2, bounds.output_bytes // 2
        self._most = bounds.flood_mb << 20
        self._count = 0

    async def listen(self, reader: asyncio.StreamReader) -> str | None:
        """Hear it out. Returns why it must be stopped, or None when everybody has closed the output."""
        while chunk := await reader.read(_CHUNK):
            self._count += len(chunk)
            free = self._room[0] - len(self._first)
            self._first += chunk[:free]
            self._last += chunk[free:]
            del self._last[: max(0, len(self._last) - self._room[1])]
            if self._count > self._most:
                return f"it printed more than {self._most >> 20} MB"
        return None

    def text(self) -> str:
        missing = self._count - len(self._first) - len(self._last)
        if not missing:
            return (self._first + self._last).decode("utf-8", errors="replace")
        # a character that was cut in two is left out on both sides
        first = self._first.decode("utf-8", errors="replace").removesuffix("\ufffd")
        last = self._last.decode("utf-8", errors="replace").lstrip("\ufffd")
        return f"{first}\n[... {missing} bytes of output left out ...]\n{last}"


async def _look(pid: int, bounds: Bounds, first: Callable[[], int | None] | None, counted: Sequence[str]) -> str:
    """Look now and then at what it uses. Returns the reason when that is too much."""
    while True:
        await asyncio.sleep(_LOOK)
        root = pid if first is None else first()
        if root is None:
            continue
        pids = _family(root)
        if len(pids) > bounds.processes + 3:  # a jail has up to three of its own
            return f"it had more than {bounds.processes} processes"
        resident = sum(map(_resident, pids))
        if resident > bounds.memory_mb << 20 and sum(map(_share, pids)) > bounds.memory_mb << 20:
            return f"its processes together used more than {bounds.memory_mb} MB of memory"
        if sum(_files(f"/proc/{root}/root{directory}") for directory in counted) > bounds.files:
            return f"it made more than {bounds.files} files"


def _family(root: int) -> list[int]:
    """A process and those that come of it."""
    found, waiting = list[int](), [root]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    waiting += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
    return found


def _resident(pid: int) -> int:
    """Bytes in memory that belong to no file; what processes share is counted for each."""
    return _kilobytes(Path(f"/proc/{pid}/status"), ("RssAnon:", "RssShmem:"))


def _share(pid: int) -> int:
    """The same with what is shared divided among those who share it: exact, and slower."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"), instead=lambda: _resident(pid))


def _kilobytes(path: Path, names: tuple[str, ...], instead: Callable[[], int] = lambda: 0) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:  # it is gone, or its numbers are not for us
        return instead()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))


def _files(directory: str) -> int:
    try:
        there = os.statvfs(directory)
    except OSError:
        return 0
    return there.f_files - there.f_ffree


async def _end(process: asyncio.subprocess.Process, first: Callable[[], int | None] | None) -> None:
    """Kill whatever is left, and see it gone."""
    handle = -1
    if first is not None and (root := first()) is not None:
        with contextlib.suppress(OSError):  # gone already
            handle = os.pidfd_open(root)
        if handle >= 0 and first() is None:  # and somebody else had got its number
            os.close(handle)
            handle = -1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if handle >= 0:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    await process.wait()
    if handle >= 0:
        # a first process is gone only when the kernel has ended all the others
        while not select.select([handle], [], [], 0)[0]:
            await asyncio.sleep(0.002)
        os.close(handle)
