"""Runs commands in containers, with docker or podman, for agents that have their own image.

Containers share the network of this machine unless told otherwise, so that they reach the server for agents on 127.0.0.1.
A container is created before its command is started. So it has a name that can be removed, however slowly it starts and whatever
cuts the conversation: a removal waits for the creation. Both run in threads, in which neither the end of an event loop nor
Ctrl-C cuts them. What is left of a process that was killed has its label, and the next one removes it.

Knows nothing of conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import shutil
import subprocess
import threading
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from turnwise.errors import ConfigError, TurnwiseError

_TOOLS = ("docker", "podman")
_SECONDS = 30.0
"""The longest time for a call of docker or podman."""
_CREATE_SECONDS = 120.0
"""The longest time for the creation of a container, which may copy the image."""
_TRIES = 4
_THREADS = 8
"""Containers that are created or removed at the same time."""
_LABEL = "turnwise.process"
_OURS = ("--name", "--rm", "--detach", "--cidfile")
_DETACHED = re.compile(r"-[itPq]*d[ditPq]*(=.*)?")
_OF_CLIENT = re.compile(r"HOME|PATH|TMPDIR|USER|(DOCKER|CONTAINER|CONTAINERS|REGISTRY|BUILDKIT|XDG|LD|SSL|SSH)_.*")
"""Variables of the client, which would use another daemon or configuration than for the removal."""
_NEVER = "0001-01-01"
"""The beginning of the time at which a container was started that never was."""
_log = logging.getLogger(__name__)


class ContainerError(TurnwiseError):
    """A container cannot be created or started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImage:
    """An image, and its containers."""

    tool: str
    """The path of docker or podman."""
    image: str
    options: Sequence[str] = ()
    """Further options of `docker run`."""
    label: str = field(default_factory=lambda: f"{_process()}:{uuid.uuid4().hex}")
    """The value of the containers' label, which names this process and this object."""
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_THREADS, "turnwise-containers"))

    def other(self, image: str, options: Sequence[str]) -> ContainerImage:
        """Another image, whose containers have the same label and the same threads: `close` of one of them is for both."""
        return replace(self, image=image, options=options)

    @classmethod
    def of(cls, image: str, options: Sequence[str], *, variables: Collection[str] = ()) -> ContainerImage:
        """With the first of docker and podman that has the image. `variables` are those that the recipe gives its containers.

        Raises ConfigError if an option or a variable is not for the container, if neither is installed, if it does not answer, or
        if the image is not on this machine.
        """
        if not isinstance(image, str) or not image or image.startswith("-"):
            raise ConfigError(f"image={image!r:.80} must be the name of a container image")
        if isinstance(options, str) or not all(isinstance(option, str) for option in options):
            raise ConfigError(f"image_options={options!r:.80} must be a list of options of `docker run`")
        wrong = [option for option in options if option.split("=")[0] in _OURS or _DETACHED.fullmatch(option)]
        if wrong or (options and not options[0].startswith("-")):
            raise ConfigError(
                f"image_options has {(wrong or options)[0]!r:.80}: they must be options of `docker run`, and those that decide "
                f"about the name, the removal and the end of a container are turnwise's ({', '.join(_OURS)}, -d)"
            )
        if read := [name for name in variables if _OF_CLIENT.fullmatch(name)]:
            raise ConfigError(
                f"env has {read[0]}, which docker and podman read themselves: values reach a container through their "
                f"environment. Set it in the image, or with image_options: [--env={read[0]}=...]"
            )
        if not (tools := [path for path in map(shutil.which, _TOOLS) if path is not None]):
            raise ConfigError(
                f"image={image} needs docker or podman, and neither is installed: install one of them, or remove `image` to run "
                f"the command on this machine"
            )
        answers = {tool: _call([tool, "image", "inspect", image]) for tool in tools}
        if (tool := next((tool for tool, answer in answers.items() if answer.status == 0), None)) is None:
            said = "; ".join(f"{tool} says {answer.error[-400:]!r}" for tool, answer in answers.items())
            raise ConfigError(
                f"image={image} cannot be used: {said}. Start the service, and get the image before the run ({tools[0]} pull, or "
                f"build)"
            )
        made = cls(tool=tool, image=image, options=tuple(options))
        made.remove_left_over()
        return made

    @contextlib.asynccontextmanager
    async def container(
        self, words: Sequence[str], *, cwd: str | None, variables: Mapping[str, str]
    ) -> AsyncIterator[Container]:
        """A container for the command `words`, with these environment variables, which is removed at the end. `cwd` is a
        directory of the image.

        If the caller is cancelled again while the container is removed, the removal goes on. Raises ContainerError.
        """
        container = Container(self)
        creating = self._threads.submit(container.create, words, cwd=cwd, variables=variables)
        try:
            await asyncio.wrap_future(creating)
            yield container
        finally:
            with contextlib.suppress(RuntimeError):  # `close` was called, and removes all
                await asyncio.shield(asyncio.wrap_future(self._threads.submit(container.remove)))

    def close(self) -> None:
        """Remove all containers that are left. Blocks until they are removed."""
        self._threads.shutdown(wait=True)
        if ids := self._labelled(f"{_LABEL}={self.label}"):
            _remove(self.tool, ids)

    def remove_left_over(self) -> None:
        """Remove the containers of processes of this machine that have ended without removing them, such as after `kill -9`."""
        if not (ids := self._labelled(_LABEL)):
            return
        # the status is not 0 if a container was removed meanwhile: the output has the others
        answer = _call([self.tool, "inspect", "--format", f'{{{{.Id}}}} {{{{index .Config.Labels "{_LABEL}"}}}}', *ids])
        labelled = [line.partition(" ") for line in answer.out.splitlines()]
        if left := [container for container, _, label in labelled if _has_ended(label)]:
            _log.warning("%d containers were left over by runs that were killed, and are removed", len(left))
            _remove(self.tool, left)

    def _labelled(self, label: str) -> list[str]:
        """The ids of the containers with a label."""
        answer = _call([self.tool, "ps", "--all", "--quiet", "--no-trunc", f"--filter=label={label}"])
        if answer.status != 0:
            _log.warning(
                "%s lists no containers, so none that is left over is removed: %.300s", self.tool, answer.error
            )
            return []
        return answer.out.split()


@dataclass(slots=True)
class Container:
    """One container. `create` and `remove` block, and may be called from any thread."""

    image: ContainerImage
    name: str = field(default_factory=lambda: f"turnwise-{uuid.uuid4().hex}")
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while the container is created or removed: one does not cross the other."""
    _removed: bool = False

    @property
    def start_command(self) -> list[str]:
        """The command line that runs the container's command until it ends, with its output."""
        return [self.image.tool, "start", "--attach", self.name]

    def create(self, words: Sequence[str], *, cwd: str | None, variables: Mapping[str, str]) -> None:
        """Create the container, unless it was removed before. Raises ContainerError."""
        of, shared = self.image, ("--network", "--net")
        network = [] if any(option.split("=")[0] in shared for option in of.options) else ["--network=host"]
        command = [
            *(of.tool, "create", f"--name={self.name}", f"--label={_LABEL}={of.label}", *network),
            "--stop-timeout=1",  # podman stops a container before it removes it
            *([] if cwd is None else [f"--workdir={cwd}"]),
            # names only: no list of processes shows a key
            *(f"--env={name}" for name in variables),
            *(*of.options, of.image, *words),
        ]
        with self._lock:
            if self._removed:
                return
            created = _call(command, variables, seconds=_CREATE_SECONDS)
        if created.status != 0:
            raise ContainerError(
                f"no container of the image {of.image} was created: {of.tool} says {created.error[-1500:]!r}"
            )

    def was_started(self) -> bool:
        """Whether the command has begun to run. docker answers with the status 1 if it cannot be started."""
        answer = _call([self.image.tool, "inspect", "--format", "{{.State.StartedAt}}", self.name])
        return answer.status == 0 and not answer.out.startswith(_NEVER)

    def remove(self) -> None:
        """Remove the container with what runs in it. Failures are logged."""
        with self._lock:
            self._removed = True
            _remove(self.image.tool, [self.name], then="It is tried again at the end of the run")


def _remove(tool: str, containers: Sequence[str], *, then: str = "The next run removes it") -> None:
    """Remove containers with what runs in them. It is tried again if it fails, as it may while a container ends. Failures are
    logged, with what is done about them `then`."""
    for name in containers:
        command, tries = [tool, "rm", "--force", "--volumes", name], 1
        while (answer := _call(command)).status != 0 and "no such container" not in answer.error.lower():
            if answer.status is None or tries == _TRIES:  # without an answer, it would block for as long again
                _log.warning("the container %s is not removed yet: %.300s. %s", name, answer.error, then)
                break
            time.sleep(0.5 * tries)
            tries += 1


class _Answer(NamedTuple):
    """What a call of docker or podman gave."""

    status: int | None
    """The exit status; None if it did not end in time."""
    out: str
    error: str
    """What it printed, or why there is no answer."""


def _call(command: Sequence[str], variables: Mapping[str, str] | None = None, *, seconds: float = _SECONDS) -> _Answer:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env={**os.environ, **(variables or {})},
            start_new_session=True,  # Ctrl-C is for the run
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return _Answer(None, "", f"no answer: {error}")
    return _Answer(done.returncode, done.stdout.strip(), f"{done.stderr}{done.stdout}".strip())


# the process of a label


def _process(pid: int | str = "self") -> str:
    """What names a process of this machine: its boot, the namespace of its processes, its number and when it began.

    Empty if there is no such process, or no /proc.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot, open(f"/proc/{pid}/stat") as stat:
            number, _, rest = stat.read().partition(" ")
            began = rest.rpartition(")")[2].split()[19]
            return ":".join((boot.read().strip(), _space(), number, began))
    except OSError:
        return ""


def _space() -> str:
    return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))


def _has_ended(label: str) -> bool:
    """Whether the process of a label has ended. That of another machine, or another container, is not known here."""
    boot, space, number, *_ = [*label.split(":"), "", "", ""]
    own = _process().split(":")
    if [boot, space] != own[:2] or not number.isdecimal():
        return False
    if now := _process(number):
        return not label.startswith(f"{now}:")
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # it is another user's, and /proc may be mounted so that only that user sees it
        pass
    return False
