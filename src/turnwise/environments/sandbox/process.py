"""Runs one process with its descendants within bounds: limits their output, and ends them in time.

This module does not know which program it runs. It polls the values that kernel limits do not cover (memory of all processes
together, number of files) while the program runs. It shortens the output while reading, so that memory use here is bounded.
`Bounds` and `Ran` only hold values; the kernel limits among the bounds are set in `jail.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import select
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from turnwise.errors import ConfigError, TurnwiseError, nearest

# limits and results


class SandboxError(TurnwiseError):
    """The sandbox or its server failed for a call. The program did not run, or its result is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The limits of one call. A program above a limit is stopped or gets an error; the answer names the limit of a stop."""

    seconds: float = 10.0
    """Wall-clock seconds from the start of the sandbox to its end."""
    cpu_seconds: int = 10
    """CPU seconds of each process."""
    memory_mb: int = 1024
    """MiB. Limits the address space of each process, and the resident memory of all processes together."""
    processes: int = 32
    """Maximum number of processes and threads at the same time."""
    disk_mb: int = 64
    """MiB. Limits all files in the working directory together, and the size of each file."""
    files: int = 1000
    """Maximum number of files and directories in the working directory."""
    open_files: int = 64
    """Maximum number of file descriptors of each process."""
    output_bytes: int = 16_000
    """Maximum bytes kept of standard output and standard error together: the beginning and the end of a longer output."""
    flood_mb: int = 64
    """MiB of output, kept or dropped, above which the program is stopped."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"the sandbox's bound {field.name} is {value!r}; it must be a number above 0")
            if field.type == "int" and not isinstance(value, int):
                raise ConfigError(f"the sandbox's bound {field.name} is {value!r}; it must be an integer")

    @classmethod
    def of(cls, given: Bounds | Mapping[str, float] | None) -> Bounds:
        """Return Bounds unchanged, or create Bounds from a mapping of a recipe. None gives the defaults.

        Raises ConfigError if a name is unknown or a value is not a number above 0.
        """
        if isinstance(given, Bounds):
            return given
        names = [field.name for field in fields(cls)]
        unknown = [name for name in given or {} if name not in names]
        if unknown:
            raise ConfigError(
                f"the sandbox has no bound {unknown[0]!r}{nearest(unknown[0], names)}; its bounds are: {', '.join(names)}"
            )
        return cls(**dict(given or {}))  # type: ignore[arg-type]  # __post_init__ checks the types


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """The result of a program that ended or was stopped."""

    output: str
    """Standard output and standard error in order of arrival, at most `Bounds.output_bytes`, with a note in place of dropped
    output."""
    status: int
    """Exit status; 128 + n if signal n ended the program."""
    stopped: str | None = None
    """Why the sandbox stopped the program, for example `the program ran longer than 10 s`; None if it ended by itself."""
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """Further notes for the model."""

    def text_for_model(self) -> str:
        """The text of the result for the model.

        Example: a program that prints 4 and then raises ends in `...ValueError: no\\n[exit status 1]`.
        """
        parts = [self.output.rstrip("\n")] if self.output.strip() else []
        if self.stopped is not None:
            parts.append(f"[stopped: {self.stopped}]")
        elif self.status:
            parts.append(f"[exit status {self.status}{_by_signal(self.status)}]")
        elif not parts:
            parts.append("[the program ended without printing anything]")
        return "\n".join([*parts, *(f"[{note}]" for note in self.notes)])


def _by_signal(status: int) -> str:
    if status <= 128 or status - 128 not in set(signal.Signals):
        return ""
    name = signal.Signals(status - 128).name
    if name == "SIGXCPU":
        return ", SIGXCPU: the limit of processor time was reached"
    if name == "SIGXFSZ":
        return ", SIGXFSZ: the program wrote a file that is too large"
    return f", {name}"


# the process

_LOOK = 0.05  # seconds between two checks of the resource use
_CHUNK = 1 << 16
_LAST_WORDS = 0.5  # seconds to read remaining output if an escaped process keeps the pipe open


async def run(
    command: Sequence[str],
    *,
    bounds: Bounds,
    env: Mapping[str, str],
    cwd: str | None = None,
    pass_fds: Sequence[int] = (),
    first: Callable[[], int | None] | None = None,
    counted: Callable[[], Sequence[str]] = tuple,
    stdin: int = asyncio.subprocess.DEVNULL,
) -> Ran:
    """Run a command within `bounds`. When this function returns, raises or is cancelled, its processes have been killed.

    `first` returns the process id of a jail's first process as soon as the id is known; all processes of the jail end with
    this process. Without `first`, only the process group is killed. `counted` returns the directories of the jail whose files are
    counted: none before the jail is set up, because until then its first process has the directories of this machine.
    """
    started = time.perf_counter()
    collected = _CollectedOutput(bounds)
    # not asyncio's pipe: its wait() also waits until all holders close the pipe
    async with _pipe() as (reader, writer):
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=stdin,
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
        listen = asyncio.create_task(collected.listen(reader))
        over = asyncio.create_task(process.wait())
        stopped: str | None = None
        try:
            async with asyncio.timeout(bounds.seconds):
                await asyncio.wait((look, listen, over), return_when=asyncio.FIRST_COMPLETED)
                if listen.done() and listen.result() is None:  # the program closed its output and continues
                    await asyncio.wait((look, over), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            stopped = f"the program ran longer than {bounds.seconds:g} s"
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
        output=collected.text(),
        status=status if status >= 0 else 128 - status,
        stopped=stopped,
        seconds=time.perf_counter() - started,
    )


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
    """A reader, and the descriptor of the write end. The caller closes the descriptor."""
    end, writer = os.pipe()
    reader = asyncio.StreamReader(limit=_CHUNK)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", buffering=0)
    )
    try:
        yield reader, writer
    finally:
        transport.close()


class _CollectedOutput:
    """Keeps the beginning and the end of an output of any length."""

    def __init__(self, bounds: Bounds) -> None:
        self._first, self._last = bytearray(), bytearray()
        self._room = (bounds.output_bytes + 1) // 2, bounds.output_bytes // 2
        self._most = bounds.flood_mb << 20
        self._count = 0

    async def listen(self, reader: asyncio.StreamReader) -> str | None:
        """Read the output. Returns the reason to stop the program, or None when all writers have closed the output."""
        while chunk := await reader.read(_CHUNK):
            self._count += len(chunk)
            free = self._room[0] - len(self._first)
            self._first += chunk[:free]
            self._last += chunk[free:]
            del self._last[: max(0, len(self._last) - self._room[1])]
            if self._count > self._most:
                return f"the program printed more than {self._most >> 20} MB"
        return None

    def text(self) -> str:
        missing = self._count - len(self._first) - len(self._last)
        if not missing:
            return (self._first + self._last).decode("utf-8", errors="replace")
        # drop a character that the cut has split
        first = self._first.decode("utf-8", errors="replace").removesuffix("\ufffd")
        last = self._last.decode("utf-8", errors="replace").lstrip("\ufffd")
        return f"{first}\n[... {missing} bytes of output left out ...]\n{last}"


async def _look(
    pid: int, bounds: Bounds, first: Callable[[], int | None] | None, counted: Callable[[], Sequence[str]]
) -> str:
    """Check the resource use every `_LOOK` seconds. Returns the reason to stop the program when a limit is exceeded."""
    while True:
        await asyncio.sleep(_LOOK)
        root = pid if first is None else first()
        if root is None:
            continue
        pids = _family(root)
        if len(pids) > bounds.processes + 3:  # the jail itself has up to three processes
            return f"the program had more than {bounds.processes} processes"
        resident = sum(map(_resident, pids))
        if resident > bounds.memory_mb << 20 and sum(map(_share, pids)) > bounds.memory_mb << 20:
            return f"the processes of the program together used more than {bounds.memory_mb} MB of memory"
        used = {place: _used(f"/proc/{root}/root{place}") for place in counted()}
        if sum(files for files, _ in used.values()) > bounds.files:
            return f"the program created more than {bounds.files} files"
        # of several directories, each may have less; the kernel limits /dev/shm
        if sum(size for place, (_, size) in used.items() if place != "/dev/shm") > bounds.disk_mb << 20:
            return f"the program wrote more than {bounds.disk_mb} MB of files"


def _family(root: int) -> list[int]:
    """The process ids of a process and its descendants."""
    pids, waiting = list[int](), [root]
    while waiting:
        pid = waiting.pop()
        pids.append(pid)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                with contextlib.suppress(OSError):
                    waiting += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="ascii").split())
    return pids


def _resident(pid: int) -> int:
    """Resident bytes of a process without file mappings. Memory shared by processes counts in full for each process."""
    return _kilobytes(Path(f"/proc/{pid}/status"), ("RssAnon:", "RssShmem:"))


def _share(pid: int) -> int:
    """Same as _resident(), but shared memory is divided among the processes that share it: exact, but slower."""
    return _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), ("Pss_Anon:", "Pss_Shmem:"), instead=lambda: _resident(pid))


def _kilobytes(path: Path, names: tuple[str, ...], instead: Callable[[], int] = lambda: 0) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:  # the process has ended, or access is denied
        return instead()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(names))


def _used(directory: str) -> tuple[int, int]:
    """The number of files of a file system, and the bytes that they take."""
    try:
        there = os.statvfs(directory)
    except OSError:
        return 0, 0
    return there.f_files - there.f_ffree, (there.f_blocks - there.f_bfree) * there.f_frsize


async def _end(process: asyncio.subprocess.Process, first: Callable[[], int | None] | None) -> None:
    """Kill all remaining processes, and wait for their end."""
    handle = -1
    if first is not None and (root := first()) is not None:
        with contextlib.suppress(OSError):  # already ended
            handle = os.pidfd_open(root)
        if handle >= 0 and first() is None:  # ended before pidfd_open: the id may have been reused
            os.close(handle)
            handle = -1
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if handle >= 0:
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    await process.wait()
    if handle >= 0:
        # the first process of a jail ends only after the kernel has ended all other processes of the jail
        while not select.select([handle], [], [], 0)[0]:
            await asyncio.sleep(0.002)
        os.close(handle)
