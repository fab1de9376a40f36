"""The processes of ranks on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

__all__ = ["LocalRanks"]

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
