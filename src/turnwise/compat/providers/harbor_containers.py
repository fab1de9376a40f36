"""A container of docker or podman as the sandbox of one conversation: it waits, and each command is run in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from turnwise.environments.agents.containers import Container, ContainerError, ContainerImage
from turnwise.environments.sandbox.jail import scratch_file
from turnwise.environments.sandbox.machine import IN_DIRECTORY
from turnwise.environments.sandbox.process import Bounds, Ran, SandboxError, run

_WAIT = "while :; do command eval 'sleep 3600 & wait $!'; jobs; done >/dev/null 2>&1"
"""The first process of a container. It takes over orphans, and no process in the container can kill it. Where the model has as
many processes as may be, it cannot start another `sleep` when `end_processes` has ended all, until it has taken over the dead
ones (`jobs`): without `command`, a shell that cannot fork ends, and the container with it."""
_INSIDE = f"exec 2>&1; {IN_DIRECTORY}"  # the two streams reach the client in no order
_ANSWER_SECONDS = 20.0  # of the service, at the start of a run
_MORE_SECONDS = 5.0  # for the client, after the command in the container was killed
_OF_CLIENT = re.compile(r"HOME|PATH|TMPDIR|USER|(DOCKER|CONTAINER|CONTAINERS|REGISTRY|BUILDKIT|XDG|LD|SSL|SSH)_.*")


def find_tool(name: str) -> tuple[str | None, str]:
    """The path of docker or podman, or None and why it cannot be used."""
    if (path := shutil.which(name)) is None:
        return None, f"{name} is not installed"
    try:
        asked = subprocess.run([path, "version"], capture_output=True, text=True, timeout=_ANSWER_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{name} does not answer: {error}"
    return (path, "") if asked.returncode == 0 else (None, f"{name} does not answer: {asked.stderr.strip()[-300:]}")


async def build(tool: str, folder: str, tag: str, seconds: float) -> None:
    """Build the image of a folder with a Dockerfile. Raises SandboxError with the end of the output."""
    bounds = Bounds(seconds=seconds, processes=1 << 16, memory_mb=1 << 20, output_bytes=8000, flood_mb=1 << 12)
    ran = await run([tool, "build", "--tag", tag, folder], bounds=bounds, env=dict(os.environ))
    if ran.status or ran.stopped:
        raise SandboxError(ran.text_for_model()[-2000:])


@dataclass(slots=True)
class ContainerMachine:
    """Runs commands in a container that was started. All methods are called in one event loop."""

    container: Container
    bounds: Bounds
    cwd: str
    environment: Mapping[str, str]
    user: str | None
    """Who runs commands if nobody else is named; None: the user of the image."""
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
        limit = self.bounds.seconds if seconds is None else seconds
        inside = ["timeout", "-s", "KILL", f"{limit:g}", "/bin/sh", "-c", _INSIDE, "sh", cwd or self.cwd, *words]
        who = self.user if user is None else user
        variables = {**self.environment, **(environment or {})}
        options = [
            "--workdir=/",  # that of the image may be missing, or removed by the model
            *([f"--user={who}"] if who else []),
            # names only, so that no list of processes shows a value; but not of variables that the client itself reads
            *(
                f"--env={name}={value}" if _OF_CLIENT.fullmatch(name) else f"--env={name}"
                for name, value in variables.items()
            ),
        ]
        client = {name: value for name, value in variables.items() if not _OF_CLIENT.fullmatch(name)}
        command = [self.container.image.tool, "exec", "--interactive", *options, self.container.name, *inside]
        ran = await self._client(command, limit, given, output_bytes, client)
        if ran.status == 137 and ran.seconds >= limit and ran.stopped is None:
            return replace(ran, stopped=f"the program ran longer than {limit:g} s")
        return ran

    async def end_processes(self) -> None:
        # the shell that calls kill, and the first process of the container, are left out by the kernel
        words = [self.container.name, "/bin/sh", "-c", "kill -9 -1; true"]
        command = [self.container.image.tool, "exec", "--user=0", "--workdir=/", *words]
        ran = await self._client(command, self.bounds.seconds, b"", None, {})
        if ran.status or ran.stopped:
            raise SandboxError(f"the processes of a container cannot be ended: {ran.text_for_model()[-300:]}")

    async def put(self, archive: bytes) -> None:
        command = [self.container.image.tool, "cp", "-", f"{self.container.name}:/"]
        ran = await self._client(command, self.bounds.seconds, archive, None, {})
        if ran.status or ran.stopped:
            raise SandboxError(f"files could not be copied into the container: {ran.text_for_model()[-300:]}")

    async def close(self) -> None:
        await self.closing.aclose()

    async def _client(
        self,
        command: Sequence[str],
        seconds: float,
        given: bytes,
        output_bytes: int | None,
        variables: Mapping[str, str],
    ) -> Ran:
        """Run docker. Its own processes and memory are not those of the command."""
        bounds = replace(
            self.bounds,
            seconds=seconds + _MORE_SECONDS,
            processes=1 << 16,
            memory_mb=1 << 20,
            output_bytes=output_bytes or self.bounds.output_bytes,
        )
        file = scratch_file(given)
        try:
            async with self.turn:
                return await run(command, bounds=bounds, env={**os.environ, **variables}, stdin=file)
        finally:
            os.close(file)


@contextlib.asynccontextmanager
async def started(image: ContainerImage) -> AsyncIterator[Container]:
    """A container that waits, and is removed at the end. Raises ContainerError."""
    # the image's entrypoint is not run: its options replace it
    async with image.container(["-c", _WAIT], cwd=None, variables={}) as container:
        ran = await run(
            [image.tool, "start", container.name],
            bounds=Bounds(seconds=120, processes=1 << 16, memory_mb=1 << 20),
            env=dict(os.environ),
        )
        if ran.status or ran.stopped:
            raise ContainerError(f"the container of {image.image} does not start: {ran.text_for_model()[-500:]}")
        yield container


async def working_directory(container: Container) -> str:
    """The working directory of a container's image. Raises ContainerError."""
    image = container.image
    bounds = Bounds(seconds=_ANSWER_SECONDS, processes=1 << 16, memory_mb=1 << 20)
    command = [image.tool, "inspect", "--format", "{{.Config.WorkingDir}}", container.name]
    ran = await run(command, bounds=bounds, env=dict(os.environ))
    if ran.status or ran.stopped:
        raise ContainerError(f"the container of {image.image} cannot be inspected: {ran.text_for_model()[-500:]}")
    return ran.output.strip() or "/"


def container_options(bounds: Bounds, *, cpus: float, network: bool) -> list[str]:
    """Options of `docker create`: the limits of a container."""
    return [
        "--entrypoint=/bin/sh",
        f"--network={'bridge' if network else 'none'}",
        f"--memory={bounds.memory_mb}m",
        f"--memory-swap={bounds.memory_mb}m",
        f"--cpus={cpus:g}",
        f"--pids-limit={bounds.processes}",
        "--security-opt=no-new-privileges",
    ]
