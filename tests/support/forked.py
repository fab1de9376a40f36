"""The command line in processes that have imported everything already: they are forked from one that does nothing else.

A process that imports torch and transformers needs seconds for that, and tests that kill, stop and resume runs start many. Where
the start itself is tested, use `subprocess`. Nothing is computed in the process that is forked, so it has one thread. If its
command starts ranks on this machine, they are forked from it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any


class Forked:
    """`turnwise WORDS` in a process of its own, used as a `subprocess.Popen`.

    Args:
        words: What follows `turnwise`, such as `["train", "recipe.yaml"]`.
        stdout: The file that takes what the process prints; PIPE: the attribute `stdout` has its text.
        stderr: The same for its messages; None: `stdout`.
        env: Its variables; None: those of this process.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdout: IO[Any] | int = subprocess.PIPE,
        stderr: IO[Any] | int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.stdout: IO[str] | None = None
        if piped := stdout == subprocess.PIPE:
            reading, stdout = os.pipe()
            self.stdout = os.fdopen(reading, encoding="utf-8")
        self._ended, status = os.pipe()
        out = stdout if isinstance(stdout, int) else stdout.fileno()
        error = out if stderr is None else stderr if isinstance(stderr, int) else stderr.fileno()
        asked = {"words": list(map(str, words)), "folder": os.getcwd(), "env": dict(os.environ if env is None else env)}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.connect(_server())
            text = json.dumps(asked).encode()
            socket.send_fds(server, [len(text).to_bytes(8, "big")], [out, error, status])
            server.sendall(text)
            for file in [status, *([out] if piped else [])]:
                os.close(file)
            self.pid = int.from_bytes(_read(server, 8), "big")
        self.returncode: int | None = None

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *error: object) -> None:
        if self.stdout is not None:
            self.stdout.close()
        self.wait()

    def communicate(self, timeout: float = 300.0) -> tuple[str, None]:
        """What the process prints until it has ended."""
        assert self.stdout is not None
        with self.stdout:
            printed = self.stdout.read()
        self.wait(timeout)
        return printed, None

    def poll(self) -> int | None:
        """The exit status; None while the process runs. -N if signal N ended it."""
        return self._status(0)

    def wait(self, timeout: float = 300.0) -> int:
        """The exit status. Raises subprocess.TimeoutExpired."""
        if (status := self._status(timeout)) is None:
            raise subprocess.TimeoutExpired("turnwise", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(int.from_bytes(os.read(self._ended, 8), "big"))
            os.close(self._ended)
        return self.returncode


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        assert part, "the process that is forked has ended"
        found += part
    return found


@cache
def _server() -> str:
    """The address of this process's server, which is started by the first call."""
    address = f"\0turnwise-forked-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(address)
        listening.listen()
        process = subprocess.Popen([sys.executable, __file__, str(listening.fileno())], pass_fds=[listening.fileno()])
    atexit.register(process.kill)
    return address


def _serve(number: int) -> None:
    """Fork a process for each request, and one that waits for its end and writes its status to the request's pipe."""
    import gc

    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM  # noqa: F401

    import turnwise.cli
    import turnwise.commands.train
    import turnwise.train  # noqa: F401

    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # those that wait for a process are waited for by nobody
    with socket.socket(fileno=number) as listening:
        while True:
            connection, _ = listening.accept()
            length, files, _, _ = socket.recv_fds(connection, 8, 3)
            asked = json.loads(_read(connection, int.from_bytes(length, "big")))
            if os.fork() == 0:
                listening.close()
                _watch(connection, files, asked)
            for file in files:
                os.close(file)
            connection.close()


def _watch(connection: socket.socket, files: Sequence[int], asked: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    out, error, status = files
    if (pid := os.fork()) == 0:
        connection.close()
        os.close(status)
        os.dup2(out, 1)
        os.dup2(error, 2)
        for file in {out, error} - {1, 2}:
            os.close(file)
        _run(asked)
    connection.sendall(pid.to_bytes(8, "big"))
    connection.close()
    os.close(out)
    os.close(error)
    _, ended = os.waitpid(pid, 0)
    os.write(status, ended.to_bytes(8, "big"))
    os._exit(0)


def _run(asked: dict[str, Any]) -> None:
    """What `python -m turnwise.cli` does."""
    from turnwise.cli import program
    from turnwise.commands import ranks

    ranks.subprocess = SimpleNamespace(Popen=_ForkedRank, DEVNULL=subprocess.DEVNULL)  # type: ignore[assignment]
    os.chdir(asked["folder"])
    sys.path[0] = asked["folder"]
    os.environ.clear()
    os.environ.update(asked["env"])
    sys.argv = ["turnwise", *asked["words"]]
    raise SystemExit(program())


class _ForkedRank:
    """What `subprocess.Popen([python, "-m", "turnwise", *words])` starts, forked from the process that starts the ranks."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int], stdin: int | None
    ) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        if (pid := os.fork()) == 0:
            try:
                self._become(command[3:], env, pass_fds, stdin)
            finally:
                os._exit(1)
        self.pid = pid

    def _become(self, words: Sequence[str], env: Mapping[str, str], pass_fds: Sequence[int], stdin: int | None) -> None:
        """Runs the command without a return to those who have called: they would end the other ranks."""
        from turnwise.cli import program

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):  # `subprocess` keeps only what is ignored
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        sys.unraisablehook = sys.__unraisablehook__
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in pass_fds:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        if stdin == subprocess.DEVNULL:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["turnwise", *words]
        try:
            status = program()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(status)

    def poll(self) -> int | None:
        return self._status(os.WNOHANG)

    def wait(self) -> int | None:
        return self._status(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _status(self, how: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:1] = ["", str(tests.parent / "src"), str(tests)]  # the first becomes a run's working directory
    _serve(int(sys.argv[1]))
