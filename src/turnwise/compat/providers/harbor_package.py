"""Sandboxes of Harbor's own backends (Daytona, Modal, E2B, ...), through the package `harbor` in another process.

The package needs Python 3.12 and many libraries, so the Python of `environment.arguments.python` runs it (`harbor_worker.py`).
One such process serves all conversations. It removes its environments when it is told to, and when this process ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import itertools
import json
import os
import shlex
import subprocess
import tarfile
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from turnwise.compat.providers.harbor_sandboxes import HarborError, TaskPlaces, bounds_of
from turnwise.compat.providers.harbor_tasks import HarborTask
from turnwise.environments.sandbox.process import Bounds, Ran, SandboxError
from turnwise.errors import ConfigError, nearest

_PROGRAM = Path(__file__).with_name("harbor_worker.py")
_CHECK_SECONDS = 120.0
_MORE_SECONDS = 30.0  # for the backend, after the command was killed
_STOP_SECONDS = 150.0
_OWN = ("docker", "podman", "jail")
"""The backends without the package."""
_BOUNDS = ("seconds", "memory_mb", "output_bytes")
"""Those that have an effect: a backend has no others."""
_RECORDED = """\
mkdir -p /tmp 2> /dev/null; out=$(mktemp) || exit 125; exec 2> /dev/null
({command}) < {given} > "$out" 2>&1; status=$?; size=$(($(wc -c < "$out")))
if [ "$size" -gt {most} ]; then
  head -c {half} "$out"; printf '\\n[... %s bytes of output left out ...]\\n' "$((size - 2 * {half}))"; tail -c {half} "$out"
else cat "$out"; fi; rm -f "$out"; exit $status"""
"""What is left running in the background does not hold the output open, and a flood of it stays in the sandbox."""


def is_of_package(backend: str | None) -> bool:
    """Whether a backend is not one of turnwise's own."""
    return backend not in (None, *_OWN)


@dataclass(frozen=True, slots=True)
class PackageBackend:
    """A backend of the package."""

    name: str
    """One of Harbor's, `harbor:docker` or `harbor:podman`, or `module:Class`."""
    python: str
    options: Mapping[str, Any]


class HarborSandboxes:
    """Environments of a backend. Raises ConfigError, with the package's own message, if it cannot be used."""

    def __init__(self, backend: PackageBackend, bounds: Bounds, concurrent: int, *, network: bool) -> None:
        _check(backend)
        self._backend, self._bounds, self._network = backend, bounds, network
        self._places, self._started = TaskPlaces(concurrent), set[str]()
        """The tasks of which an environment has been started."""
        self._worker = _Worker(backend.python)

    async def machine(self, task: HarborTask) -> HarborMachine:
        """A new environment of a task. Raises HarborError."""
        if str(task.folder) in self._started:
            return await self._new(task)
        async with self._places.building(task):  # the first one makes the image
            machine = await self._new(task)
            self._started.add(str(task.folder))
            return machine

    async def aclose(self) -> None:
        await asyncio.to_thread(self._worker.close)

    async def _new(self, task: HarborTask) -> HarborMachine:
        bounds, name = bounds_of(task, self._bounds), f"turnwise-{uuid.uuid4().hex[:12]}"
        async with contextlib.AsyncExitStack() as closing:
            await self._places.take(closing)
            closing.push_async_callback(self._removed, name)
            try:
                await self._worker.ask(
                    "start",
                    name=name,
                    seconds=task.build_seconds,
                    within=task.build_seconds + _MORE_SECONDS,
                    backend=self._backend.name,
                    options=dict(self._backend.options),
                    folder=str(task.folder.resolve()),
                    task=task.folder.resolve().name,
                    memory_mb=bounds.memory_mb,
                    network=task.network and self._network,
                )
            except SandboxError as error:
                with contextlib.suppress(SandboxError):  # what follows is then not told
                    await self._removed(name)
                raise HarborError(
                    f"task {task.name}: no environment of Harbor's {self._backend.name} was started: {error}"
                ) from error
            return HarborMachine(self._worker, name, bounds, task.user, asyncio.Lock(), closing.pop_all())

    async def _removed(self, name: str) -> None:
        await asyncio.shield(self._worker.ask("stop", name=name, within=_STOP_SECONDS))


@dataclass(slots=True)
class HarborMachine:
    """Runs commands in an environment of Harbor that was started."""

    worker: _Worker
    name: str
    bounds: Bounds
    user: str | None
    turn: asyncio.Lock
    closing: contextlib.AsyncExitStack

    async def run(
        self,
        words: Sequence[str],
        *,
        cwd: str | None = None,
        seconds: float | None = None,
        output_bytes: int | None = None,
        given: bytes = b"",
        environment: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Ran:
        limit, most = self.bounds.seconds if seconds is None else seconds, output_bytes or self.bounds.output_bytes
        who = (self.user if user is None else user) or None
        async with self.turn:
            place = "/dev/null"
            if given:
                place = f"/tmp/turnwise-{uuid.uuid4().hex[:12]}"
                await self._put_file(given, place)
            command = _RECORDED.format(
                command=shlex.join(["timeout", "-s", "KILL", f"{limit:g}", *words]),
                given=place,
                most=most,
                half=most // 2,
            )
            started = time.monotonic()
            ran = await self.worker.ask(
                "execute",
                name=self.name,
                command=command,
                cwd=cwd,
                env=dict(environment or {}),
                user=who,
                seconds=limit + _MORE_SECONDS / 2,
                within=limit + 2 * _MORE_SECONDS,
            )
        took = time.monotonic() - started
        late = ran["status"] == 137 and took >= limit
        stopped = f"the program ran longer than {limit:g} s" if late else None
        return Ran(output=str(ran["output"]), status=int(ran["status"]), stopped=stopped, seconds=took)

    async def put(self, archive: bytes) -> None:
        with tempfile.TemporaryDirectory(prefix="turnwise-harbor-") as folder:
            await asyncio.to_thread(_unpack, archive, folder)
            async with self.turn:
                for place in sorted(os.listdir(folder)):
                    await self._upload(os.path.join(folder, place), f"/{place}")

    async def end_processes(self) -> None:
        """Nothing: what a backend runs commands with may be among the processes."""

    async def close(self) -> None:
        await self.closing.aclose()

    async def _put_file(self, content: bytes, place: str) -> None:
        with tempfile.NamedTemporaryFile(prefix="turnwise-harbor-") as file:
            file.write(content)
            file.flush()
            await self._upload(file.name, place)

    async def _upload(self, source: str, target: str) -> None:
        within = self.bounds.seconds + _MORE_SECONDS
        await self.worker.ask("upload", name=self.name, source=source, target=target, within=within)


def _unpack(archive: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


class _Worker:
    """The process with the package. It is started when it is first asked; its answers are read in a thread."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None

    async def ask(self, do: str, *, within: float, **given: Any) -> Any:
        """The answer to a request. Raises SandboxError with the package's message, or if there is no answer `within` seconds."""
        asked = await asyncio.to_thread(self._send, {"do": do, **given})
        try:
            async with asyncio.timeout(within):
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            raise SandboxError(f"the package harbor gave no answer in {within:g} s ({do})") from None

    def _send(self, request: Mapping[str, Any]) -> concurrent.futures.Future[Any]:
        with self._lock:
            if self._process is None:
                self._start()
            process, number = self._process, next(self._numbers)
            assert process is not None
            assert process.stdin is not None
            answer = self._waiting[number] = concurrent.futures.Future[Any]()
            try:
                process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                process.stdin.flush()
            except OSError:  # the reader says why, unless it has ended already: one of both answers
                if self._waiting.pop(number, None) is not None:
                    answer.set_exception(SandboxError("the process with the package harbor has ended"))
            return answer

    def _start(self) -> None:
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by the reader
        self._process = process = subprocess.Popen(
            [self._python, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_surroundings(),
            start_new_session=True,  # an interrupt of the terminal must not end it before it has removed what it has started
        )
        assert process.stdout is not None
        reading = threading.Thread(target=self._read, args=(process.stdout, log), name="turnwise-harbor", daemon=True)
        reading.start()
        self._finalizer = weakref.finalize(self, _end, process)

    def _read(self, answers: IO[bytes], log: IO[str]) -> None:
        for line in answers:
            told = json.loads(line)
            answer = self._waiting.pop(told["id"], None)
            if answer is None or not answer.set_running_or_notify_cancel():
                continue
            if "error" in told:
                answer.set_exception(SandboxError(told["error"]))
            else:
                answer.set_result(told["value"])
        log.seek(0)
        said = log.read()[-600:].strip()
        log.close()
        answers.close()
        while self._waiting:
            _, answer = self._waiting.popitem()
            if answer.set_running_or_notify_cancel():
                answer.set_exception(SandboxError(f"the process with the package harbor has ended: {said}"))

    def close(self) -> None:
        """End the process, which first removes its environments. It can be started again."""
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            self._finalizer.detach()
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        process.stdin.close()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _surroundings() -> dict[str, str]:
    """The environment variables of the other Python, which must not import our packages."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}


def _check(given: PackageBackend) -> None:
    """Raises ConfigError if a backend cannot be used."""
    backend, python = given.name, given.python
    request = json.dumps({"id": 0, "do": "check", "backend": backend, "options": dict(given.options)})
    try:
        asked = subprocess.run(
            [python, "-P", str(_PROGRAM), "check"],
            input=request + "\n",
            capture_output=True,
            text=True,
            timeout=_CHECK_SECONDS,
            env=_surroundings(),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"environment.arguments.python: {python!r} does not run: {error}") from None
    told = json.loads(asked.stdout) if asked.stdout else {"error": asked.stderr.strip()[-600:]}
    error = told.get("error", "")
    if not error:
        return
    if "No module named 'harbor'" in error or "tomllib" in error:
        raise ConfigError(
            f"environment.arguments.backend is {backend!r:.80}{nearest(backend, _OWN)}; {', '.join(_OWN)} are turnwise's, and "
            f"others are of the package harbor, which {python} does not have: `python3.12 -m venv DIR && DIR/bin/pip install "
            f"harbor` (with its extra, such as 'harbor[daytona]'), and set environment.arguments.python to DIR/bin/python"
        )
    if error.startswith("LookupError: "):
        names = [*_OWN, *json.loads(error.partition(" ")[2])]
        raise ConfigError(
            f"environment.arguments.backend is {backend!r:.80}{nearest(backend, names)}; it must be {', '.join(_OWN)}, "
            f"module:Class, or one of Harbor's: {', '.join(names[len(_OWN) :])}"
        )
    raise ConfigError(f"environment.arguments.backend={backend}: {error}")


def refuse_bounds(given: Mapping[str, float]) -> None:
    """Raises ConfigError for a bound without effect in a backend of the package."""
    if without := [name for name in given if name not in _BOUNDS]:
        raise ConfigError(
            f"environment.arguments.bounds.{without[0]} has no effect with a backend of Harbor's package: remove it (those that "
            f"have are {', '.join(_BOUNDS)})"
        )
