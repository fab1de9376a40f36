"""Sandboxes of Harbor's own backends (Daytona, Modal, E2B, ...), through the package `harbor` in another process.

The package needs Python 3.12 and many libraries, so the Python of `environment.arguments.python` runs it (`harbor_worker.py`).
One such process serves all conversations. It removes its environments when it is told to, and when this process ends. If it dies,
what it was asked and the conversations of its environments fail; the next conversation has a new process, which is also asked to
remove what the old one has left. Not every backend can remove what another process has started."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import io
import itertools
import json
import logging
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
from turnwise.compat.providers.provider import Restarts
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


_log = logging.getLogger(__name__)


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
        what = f"task {task.name}: no environment of Harbor's {self._backend.name} was started"
        given = {
            "name": name,
            "backend": self._backend.name,
            "options": dict(self._backend.options),
            "folder": str(task.folder.resolve()),
            "task": task.folder.resolve().name,
            "memory_mb": bounds.memory_mb,
            "network": task.network and self._network,
        }
        async with contextlib.AsyncExitStack() as closing:
            await self._places.take(closing)
            process = await asyncio.to_thread(self._worker.process)
            closing.push_async_callback(self._removed, process, given)
            within = task.build_seconds + _MORE_SECONDS
            try:
                await process.ask("start", seconds=task.build_seconds, within=within, **given)
            except ProcessEnded as error:  # not a failure of the task, which is not tried again soon
                raise ProcessEnded(f"{what}: {error}") from error
            except SandboxError as error:
                with contextlib.suppress(SandboxError):  # what follows is then not told
                    await self._removed(process, given)
                raise HarborError(f"{what}: {error}") from error
            return HarborMachine(process, name, bounds, task.user, asyncio.Lock(), closing.pop_all())

    async def _removed(self, process: _Process, given: Mapping[str, Any]) -> None:
        """Remove an environment, also one that a dead process has left."""
        try:
            await asyncio.shield(process.ask("stop", name=given["name"], within=_STOP_SECONDS))
        except ProcessEnded:
            try:
                other = await asyncio.to_thread(self._worker.process)
                await asyncio.shield(other.ask("remove", within=_STOP_SECONDS, **given))
            except SandboxError as error:
                _log.warning(
                    "The environment %s of Harbor's %s may be left: %s", given["name"], given["backend"], error
                )


@dataclass(slots=True)
class HarborMachine:
    """Runs commands in an environment of Harbor that was started."""

    process: _Process
    """The one that has started it."""
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
            ran = await self.process.ask(
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
        await self.process.ask("upload", name=self.name, source=source, target=target, within=within)


def _unpack(archive: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(folder, filter="data")


class ProcessEnded(SandboxError):
    """The process with the package has died."""


class _Worker:
    """The process with the package: it is started when it is first needed, and replaced if it has died."""

    def __init__(self, python: str) -> None:
        self._python = python
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._restarts = Restarts("have died")

    def process(self) -> _Process:
        """The present process. Raises ProcessEnded, with what the last one has said, if too many have died."""
        with self._lock:
            if self._process is not None and (why := self._process.ended()):
                if (refused := self._restarts.refused(why)) is not None:
                    raise ProcessEnded(refused)
                self._process = None
            if self._process is None:
                self._process = _Process(self._python)
            return self._process

    def close(self) -> None:
        """End the process, which first removes its environments. Another one can be started."""
        with self._lock:
            process, self._process, self._restarts = self._process, None, Restarts("have died")
        if process is not None:
            process.close()


class _Process:
    """A process with the package. Its answers are read in a thread."""

    def __init__(self, python: str) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, concurrent.futures.Future[Any]] = {}
        self._ended = ""
        log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  closed by the reader
        self.running = subprocess.Popen(
            [python, "-P", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=_surroundings(),
            start_new_session=True,  # an interrupt of the terminal must not end it before it has removed what it has started
        )
        assert self.running.stdout is not None
        arguments = (self.running.stdout, log)
        self._reader = threading.Thread(target=self._read, args=arguments, name="turnwise-harbor", daemon=True)
        self._reader.start()
        self._finalizer = weakref.finalize(self, _end, self.running)

    async def ask(self, do: str, *, within: float, **given: Any) -> Any:
        """The answer to a request. Raises SandboxError with the package's message, or if there is no answer `within` seconds, and
        ProcessEnded."""
        asked = await asyncio.to_thread(self.send, {"do": do, **given})
        try:
            async with asyncio.timeout(within):
                return await asyncio.wrap_future(asked)
        except TimeoutError:
            raise SandboxError(f"the package harbor gave no answer in {within:g} s ({do})") from None

    def send(self, request: Mapping[str, Any]) -> concurrent.futures.Future[Any]:
        """Send a request. Raises ProcessEnded."""
        with self._lock:
            if self._ended:
                raise ProcessEnded(self._ended)
            assert self.running.stdin is not None
            number = next(self._numbers)
            answer = self._waiting[number] = concurrent.futures.Future[Any]()
            with contextlib.suppress(OSError):  # it has died: the reader says so
                self.running.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
                self.running.stdin.flush()
            return answer

    def ended(self) -> str:
        """Why the process has ended; empty while it runs."""
        if self.running.poll() is not None:
            self._reader.join(_MORE_SECONDS)
        return self._ended

    def close(self) -> None:
        """End the process, which first removes its environments."""
        self._finalizer.detach()
        _end(self.running)

    def _read(self, answers: IO[bytes], log: IO[str]) -> None:
        for line in answers:
            if not line.endswith(b"\n"):  # it died while it wrote
                break
            told = json.loads(line)
            answer = self._waiting.pop(told["id"], None)
            if answer is None or not answer.set_running_or_notify_cancel():
                continue
            if "error" in told:
                answer.set_exception(SandboxError(told["error"]))
            else:
                answer.set_result(told["value"])
        status = self.running.wait()
        log.seek(0)
        said = log.read()[-600:].strip() or "it said nothing"
        log.close()
        answers.close()
        with self._lock:
            self._ended = f"the process with the package harbor has ended with the status {status}: {said}"
            waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            if answer.set_running_or_notify_cancel():
                answer.set_exception(ProcessEnded(self._ended))


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
