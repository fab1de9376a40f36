"""The ranks of a training with several processes: starts them on this machine, and runs those that follow rank 0.

Imports torch only in a rank.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from turnwise.config.local_ranks import local_ranks
from turnwise.errors import ConfigError

if TYPE_CHECKING:
    from turnwise.config.schema import Config

__all__ = ["run_as_rank"]

_GRACE = 60.0
"""Seconds that the other ranks have to end after a rank has ended."""
_POLL = 0.2
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)


def run_as_rank(config: Config, console: Console) -> int | None:
    """What this process does if the recipe has several ranks. Returns its exit status, or None if the process runs the command
    itself: in a run of one process, and on rank 0.

    Raises ConfigError if the ranks cannot be started.
    """
    cluster = config.cluster
    if not cluster.distributed:
        return None
    rank = os.environ.get("RANK")
    if cluster.launcher == "local" and "TURNWISE_STORE_PORT" not in os.environ:
        if rank is not None:
            raise ConfigError(
                "cluster.launcher=local starts the ranks itself, and this process was started by torchrun (RANK is set): set "
                "cluster=torchrun, or start the command without torchrun"
            )
        return _Launcher(local_ranks(cluster), cluster.restarts, console).run()
    return _follow(config) if rank not in (None, "0") else None


def _follow(config: Config) -> int:
    """Run the commands of rank 0 until its end. Signals are for rank 0, which ends the other ranks."""
    for number in (signal.SIGINT, *_FORWARDED):
        signal.signal(number, signal.SIG_IGN)
    from turnwise import build
    from turnwise.training.sharded.following import follow_rank_0  # torch

    return follow_rank_0(build.rank_options(config))


class _Launcher:
    """Starts all ranks with the words of this command, and waits for them. Starts them again after a rank was lost."""

    def __init__(self, ranks: int, restarts: int, console: Console) -> None:
        self._ranks = ranks
        self._restarts = restarts
        self._console = console
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stopped = False

    def run(self) -> int:
        """Run until rank 0 has ended. Returns its exit status."""
        for number in _FORWARDED:
            signal.signal(number, self._forward)
        # Ctrl-C in a terminal goes to rank 0 as well, which decides
        signal.signal(signal.SIGINT, lambda number, frame: setattr(self, "_stopped", True))
        words, status = sys.argv[1:], 1
        for attempt in range(self._restarts + 1):
            status, lost = self._run_once(words)
            if lost is None or self._stopped:
                return status
            self._console.print(f"turnwise: {lost}", highlight=False, markup=False)
            if attempt < self._restarts:
                left = self._restarts - attempt - 1
                self._console.print(
                    f"turnwise: starting all ranks again from the newest checkpoint (cluster.restarts; {left} left)",
                    highlight=False,
                )
                words = [
                    *(word for word in sys.argv[1:] if not word.startswith(("resume=", "replace="))),
                    "resume=auto",
                ]
        return abs(status) or 1

    def _run_once(self, words: Sequence[str]) -> tuple[int, str | None]:
        """Run all ranks to their end. Returns the exit status of rank 0, and a text about a rank that was lost."""
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self._processes = [self._start(rank, words, listening) for rank in range(self._ranks)]
        lost = None
        while self._processes[0].poll() is None and lost is None:
            time.sleep(_POLL)
            # a rank that ends before rank 0 was lost, unless rank 0 has ended it
            lost = next((rank for rank, process in enumerate(self._processes) if process.poll()), None)
        if lost is None and self._processes[0].returncode < 0:
            lost = 0
        self._end()
        status = self._processes[0].returncode
        if lost is None or (lost == 0 and status > 0):  # rank 0 reports its own errors
            return status, None
        of_lost = self._processes[lost]
        return status, f"trainer rank {lost} (process {of_lost.pid}) {_ending(of_lost.returncode)}"

    def _start(self, rank: int, words: Sequence[str], listening: socket.socket) -> subprocess.Popen[bytes]:
        threads = max((os.cpu_count() or 1) // self._ranks, 1)
        environment = {
            "OMP_NUM_THREADS": str(threads),  # unless the caller sets it
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._ranks),
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

    def _end(self) -> None:
        """Wait for the end of all ranks; after a time, end them."""
        deadline = time.monotonic() + _GRACE
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _forward(self, number: int, frame: object) -> None:
        self._stopped = True
        if self._processes and self._processes[0].poll() is None:
            self._processes[0].send_signal(number)


def _ending(status: int) -> str:
    if status < 0:
        return f"was ended by the signal {signal.Signals(-status).name}"
    return f"ended with exit status {status}"
