"""What Ray calls in the process that holds the resources of a training rank. The rank itself is a process of its own, which runs
the command of the user: it has a main thread for signals, an exit status, and a terminal.

Knows processes; knows nothing of training, and nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
import pty
import selectors
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.ray_workers.actor import enter_directory

__all__ = ["RAY_ADDRESS", "RankActor", "RankStart"]

RAY_ADDRESS = "TURNWISE_RAY_ADDRESS"
"""The environment variable of a rank with the address of its Ray cluster."""
_CHUNK = 1 << 16
_STOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """What the process of a rank runs."""

    words: Sequence[str]
    """The words of the command behind `turnwise`."""
    environment: Mapping[str, str]
    """Environment variables besides those of the actor."""
    terminals: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The output streams (1 and 2) that are terminals at the command, with their numbers of lines and columns."""


class RankActor:
    """The methods of the actor. They block, and run in threads of their own."""

    def __init__(self, rank: int, address: str, host: str) -> None:
        """`address` is that of the Ray cluster, and `host` that of this machine."""
        self._rank = rank
        self._address = address
        self._host = host
        self._store: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._outputs = selectors.DefaultSelector()

    def prepare(self, directory: str | None) -> tuple[str, int]:
        """Go to the directory of the command, unless it is that of the runtime environment. Returns the address of the store of
        the ranks, which is on rank 0; port 0 on the other ranks. Raises ConfigError."""
        if directory is not None:
            enter_directory(directory, f"trainer rank {self._rank}", "cluster.ranks.runtime_env.working_dir")
        if self._rank == 0:
            self._store = socket.create_server((self._host, 0))
        return self._host, 0 if self._store is None else self._store.getsockname()[1]

    def start(self, command: RankStart) -> str:
        """Start the process. Returns its place, for messages."""
        environment = {**os.environ, **command.environment, RAY_ADDRESS: self._address, "PYTHONUNBUFFERED": "1"}
        inherited: tuple[int, ...] = ()
        if self._store is not None:
            inherited = (self._store.fileno(),)
            environment["TURNWISE_STORE_FD"] = str(self._store.fileno())
        mine, its = zip(*(_stream(command.terminals.get(number)) for number in (1, 2)), strict=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "turnwise", *command.words],
            env=environment,
            pass_fds=inherited,
            stdin=subprocess.PIPE,  # closed when this process has gone
            stdout=its[0],
            stderr=its[1],
            start_new_session=True,
        )
        for number, descriptor in zip((1, 2), mine, strict=True):
            self._outputs.register(descriptor, selectors.EVENT_READ, number)
        for descriptor in its:
            os.close(descriptor)
        if self._store is not None:
            self._store.close()
        return f"{self._host}, process {self._process.pid}"

    def read(self) -> list[tuple[int, bytes]]:
        """The next output, with the number of its stream; empty if there will be no more. One call at a time."""
        while self._outputs.get_map():
            found: list[tuple[int, bytes]] = []
            for key, _ in self._outputs.select():
                data = b""
                with contextlib.suppress(OSError):  # EIO: the other side of a terminal is closed
                    data = os.read(key.fd, _CHUNK)
                if data:
                    found.append((key.data, data))
                else:
                    self._outputs.unregister(key.fd)
                    os.close(key.fd)
            if found:
                return found
        return []

    def wait(self) -> int:
        """The exit status of the process, after its end. Negative: the signal that has ended it."""
        return self._started.wait()

    def send_signal(self, number: int) -> None:
        """Send the process a signal, if it runs."""
        self._started.send_signal(number)

    def stop(self) -> None:
        """End the process at once."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the rank was not started"
        return self._process


def _stream(terminal: tuple[int, int] | None) -> tuple[int, int]:
    """A pipe, or a terminal of a size in lines and columns: the descriptor to read from, and the descriptor for the process."""
    if terminal is None:
        return os.pipe()
    mine, its = pty.openpty()
    termios.tcsetwinsize(its, terminal)
    attributes = termios.tcgetattr(its)
    attributes[1] &= ~termios.OPOST  # the terminal of the command adds carriage returns
    termios.tcsetattr(its, termios.TCSANOW, attributes)
    return mine, its
