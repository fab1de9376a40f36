"""The processes of a training with several ranks: starts them, starts them again after a loss, and ends them.

The ranks run on this machine or on a Ray cluster. A process that is not rank 0 follows rank 0. This module knows processes and
nothing of the training. It imports torch only in a rank, and Ray only in a command that starts ranks on a Ray cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from turnwise.errors import NOT_AGAIN, ConfigError, StartAgain

if TYPE_CHECKING:
    from turnwise.commands.command import Context
    from turnwise.options.schema import Config


# processes on this machine

_PAUSE = 0.05


class LocalRanks:
    """Processes that run the command of this process, with the environment variables of torchrun. See `RankProcesses`."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, words: Sequence[str]) -> None:
        self._processes = []
        with socket.create_server(("127.0.0.1", 0)) as listening:
            for rank in range(self._count):
                self._processes.append(self._start(rank, words, listening))

    def poll(self, seconds: float) -> list[int | None]:
        deadline = time.monotonic() + seconds
        before = [process.returncode for process in self._processes]
        while (statuses := [process.poll() for process in self._processes]) == before and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        return statuses

    def place(self, rank: int) -> str:
        return f"process {self._processes[rank].pid}"

    def reason(self, rank: int) -> str | None:
        return None

    def send_signal(self, number: int) -> None:
        self._processes[0].send_signal(number)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def close(self) -> None:
        """Nothing is held."""

    def _start(self, rank: int, words: Sequence[str], listening: socket.socket) -> subprocess.Popen[bytes]:
        threads = max((os.cpu_count() or 1) // self._count, 1)
        environment = {
            "OMP_NUM_THREADS": str(threads),  # unless the caller sets it
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._count),
            "LOCAL_WORLD_SIZE": str(self._count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listening.getsockname()[1]),
            "TURNWISE_STORE_PORT": str(listening.getsockname()[1]),
        }
        inherited: tuple[int, ...] = ()
        if rank == 0:
            environment["TURNWISE_STORE_FD"] = str(listening.fileno())
            inherited = (listening.fileno(),)
        return subprocess.Popen(
            [sys.executable, "-m", "turnwise", *words],
            env=environment,
            pass_fds=inherited,
            stdin=None if rank == 0 else subprocess.DEVNULL,
        )


# ranks, wherever they run

_FIRST_SECONDS = 10.0
"""Seconds in which the first rank of a machine has read the recipe, too, and torchrun has seen its end."""
_GRACE = 60.0
"""Seconds that the other ranks have to end after a rank was lost: rank 0 may need them to notice it."""
_SHORT_GRACE = 10.0
"""The same after the end of rank 0."""
_POLL = 0.2
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


class RankProcesses(Protocol):
    """The processes of all ranks, on this machine or on others. After `end`, they can be started again."""

    def start(self, words: Sequence[str]) -> None:
        """Start all ranks with the words of a command. `end` is called, too, if it raises. Raises TurnwiseError."""
        ...

    def poll(self, seconds: float) -> Sequence[int | None]:
        """Wait for a change, at most `seconds`. Returns the exit status of each rank; None for a rank that runs."""
        ...

    def place(self, rank: int) -> str:
        """Where a rank runs, for messages."""
        ...

    def reason(self, rank: int) -> str | None:
        """Why a rank was lost; None if its process has ended by itself."""
        ...

    def send_signal(self, number: int) -> None:
        """Send rank 0 a signal."""
        ...

    def end(self) -> None:
        """End all processes at once."""
        ...

    def close(self) -> None:
        """Called after the last `end`."""
        ...


def run_as_rank(
    config: Config, context: Context, check: Callable[[Config], None], *, conversations: bool
) -> int | None:
    """What this process does if the recipe has several ranks. Returns its exit status, or None if the process runs the command
    itself: in a run of one process, and on rank 0. `check` refuses a recipe before ranks are started.
    `conversations`: the command runs conversations.

    Raises ConfigError if the ranks cannot be started.
    """
    cluster = config.cluster
    if not cluster.distributed:
        return None
    from turnwise.options.engines import local_ranks  # pydantic, which `--help` of a command does not need

    rank = os.environ.get("RANK")
    if cluster.launcher != "torchrun" and "TURNWISE_STORE_PORT" not in os.environ:
        if rank is not None:
            raise ConfigError(
                f"cluster.launcher={cluster.launcher} starts the ranks itself, and this process was started by torchrun (RANK is "
                f"set): set cluster=torchrun, or start the command without torchrun"
            )
        check(config)
        ranks, terminal = LocalRanks(local_ranks(cluster)), True
        if cluster.launcher == "ray":
            from turnwise.assembly.learners import ray_ranks

            ranks, terminal = ray_ranks(config, workers=conversations), False
        return _Launcher(ranks, cluster.restarts, context.console, shares_terminal=terminal).run()
    context.stops.finalize = False
    if cluster.launcher == "ray":
        threading.Thread(target=_end_with_parent, daemon=True).start()
    return _follow(config) if rank not in (None, "0") else None


@contextlib.contextmanager
def read_by_all_ranks() -> Iterator[None]:
    """Inside, the recipe is read. Torchrun starts a process for each rank: the first one of each machine tells what is wrong with
    the recipe. The others wait until torchrun ends them, and tell it if that does not happen: then it is their own."""
    try:
        yield
    except ConfigError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            former = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # without a word
            time.sleep(_FIRST_SECONDS)
            signal.signal(signal.SIGTERM, former)
        raise


def _end_with_parent() -> None:
    """End this process, and those that it has started, after the process that has started it."""
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # the rank was started in a session of its own


def _follow(config: Config) -> int:
    """Run the commands of rank 0 until its end. Signals are for rank 0, which ends the other ranks."""
    for number in (signal.SIGINT, *_FORWARDED):
        signal.signal(number, signal.SIG_IGN)
    from turnwise import assembly
    from turnwise.training.sharded.commands import follow_rank_0  # torch

    return follow_rank_0(config.cluster, device=assembly.rank_device(config))


class _Launcher:
    """Starts all ranks with the words of this command, and waits for them. Starts them again after a rank was lost.

    `shares_terminal`: a terminal sends Ctrl-C to the ranks, too, and not only to this process.
    """

    def __init__(self, ranks: RankProcesses, restarts: int, console: Console, *, shares_terminal: bool) -> None:
        self._ranks = ranks
        self._restarts = restarts
        self._console = console
        self._forwarded = _FORWARDED if shares_terminal else (*_FORWARDED, signal.SIGINT)
        self._stopped = False
        self._signals: list[int] = []
        """Signals for rank 0 that were not sent yet."""

    def run(self) -> int:
        """Run until rank 0 has ended. Returns its exit status."""
        try:
            return self._run()
        finally:
            self._ranks.close()

    def _run(self) -> int:
        words, status = sys.argv[1:], 1
        for attempt in range(self._restarts + 1):
            status, lost = self._run_once(words)
            if lost is None or self._stopped:
                return status
            self._say(lost)
            if attempt < self._restarts:
                left = self._restarts - attempt - 1
                self._say(f"starting all ranks again from the newest checkpoint (cluster.restarts; {left} left)")
                words = [
                    *(word for word in sys.argv[1:] if not word.startswith(("resume=", "replace="))),
                    "resume=auto",
                ]
        return max(status, 1)  # a lost rank is an error of the run, whichever rank it was

    def _run_once(self, words: Sequence[str]) -> tuple[int, str | None]:
        """Run all ranks to their end. Returns the exit status of rank 0, and a text about a rank that was lost."""
        ranks = self._ranks
        try:
            ranks.start(words)  # a signal raises KeyboardInterrupt here
            with self._handling_signals():
                statuses, lost = ranks.poll(_POLL), None
                while statuses[0] is None and lost is None:
                    while self._signals:
                        ranks.send_signal(self._signals.pop(0))
                    statuses = ranks.poll(_POLL)
                    # a rank that ends before rank 0 was lost, unless rank 0 has ended it
                    lost = next((rank for rank, status in enumerate(statuses) if status), None)
                if lost is None and _is_lost(statuses[0] or 0):
                    lost = 0
                deadline = time.monotonic() + (_GRACE if statuses[0] is None else _SHORT_GRACE)
                while None in statuses and time.monotonic() < deadline:
                    statuses = ranks.poll(_POLL)
        finally:
            ranks.end()
        status = -signal.SIGKILL if statuses[0] is None else statuses[0]  # `end` has killed it
        if NOT_AGAIN in statuses[1:]:  # which has said why, and so has rank 0
            return 1, None
        if lost is None or (lost == 0 and not _is_lost(status)):  # rank 0 reports its own errors
            return status, None
        reason = ranks.reason(lost) or _ending(statuses[lost] or 0)
        # for whoever has started the command, that the ranks can start again is an error
        return 1 if status == StartAgain.exit_status else status, f"trainer rank {lost} ({ranks.place(lost)}) {reason}"

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        """A context in which rank 0 decides what signals do. A signal that this process ignores (`nohup`) stays ignored."""
        former = {number: signal.getsignal(number) for number in (signal.SIGINT, *_FORWARDED)}
        for number, handler in former.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, self._note_signal)
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note_signal(self, number: int, frame: object) -> None:
        self._stopped = True
        if number in self._forwarded:
            self._signals.append(number)

    def _say(self, text: str) -> None:
        self._console.print(f"turnwise: {text}", highlight=False, markup=False, soft_wrap=True)


def _is_lost(status: int) -> bool:
    """Whether rank 0 has not ended with an error that a further start would have again."""
    return status < 0 or status == StartAgain.exit_status


def _ending(status: int) -> str:
    if status == StartAgain.exit_status:
        return "ended for the reason above"
    if status < 0:
        return f"was ended by the signal {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
