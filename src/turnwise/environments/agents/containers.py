"""Runs a command in a container, with docker or podman, for agents that have their own image.

Containers share the network of this machine unless told otherwise, so that they reach the server for agents on 127.0.0.1. A
container is removed when its conversation ends, however that is. Knows nothing of conversations.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import subprocess
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from turnwise.errors import ConfigError

_TOOLS = ("docker", "podman")
_START_SECONDS = 60.0  # for a question to the daemon
_REMOVE_SECONDS = 20.0
_TRIES = 4
_OURS = ("--name", "--rm", "--detach", "--cidfile")
_DETACHED = re.compile(r"-[itPq]*d[ditPq]*(=.*)?")
_OF_CLIENT = re.compile(r"HOME|PATH|TMPDIR|USER|(DOCKER|CONTAINER|CONTAINERS|REGISTRY|BUILDKIT|XDG|LD|SSL|SSH)_.*")
"""Variables of the client, which would use another daemon or configuration than for the removal."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerImage:
    """An image, and how its containers are started."""

    tool: str
    """The path of docker or podman."""
    image: str
    options: Sequence[str] = ()
    """Further options of `docker run`."""

    @classmethod
    def of(cls, image: str, options: Sequence[str], *, variables: Collection[str] = ()) -> ContainerImage:
        """With the first of docker and podman that is installed. `variables` are those that the recipe gives its containers.

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
        if (tool := next(filter(None, map(shutil.which, _TOOLS)), None)) is None:
            raise ConfigError(
                f"image={image} needs docker or podman, and neither is installed: install one of them, or remove `image` to run "
                f"the command on this machine"
            )
        try:
            asked = [tool, "image", "inspect", image]
            answer = subprocess.run(asked, capture_output=True, text=True, timeout=_START_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ConfigError(f"image={image}: {tool} does not answer: {error}") from None
        if answer.returncode != 0:
            raise ConfigError(
                f"image={image} cannot be used: {tool} says {answer.stderr.strip()[-400:]!r}. Start its service, and get the "
                f"image before the run ({tool} pull, or build)"
            )
        return cls(tool=tool, image=image, options=tuple(options))

    def container(self) -> Container:
        """A container that does not run yet."""
        return Container(self)


@dataclass(frozen=True, slots=True)
class Container:
    """One container."""

    image: ContainerImage
    name: str = field(default_factory=lambda: f"turnwise-{uuid.uuid4().hex}")

    def command(self, words: Sequence[str], *, cwd: str | None, variables: Collection[str]) -> list[str]:
        """The command line that runs `words` in the container.

        `cwd` is a directory of the image. `variables` are names: their values come from the environment of this command, so that
        no list of processes shows a key.
        """
        of, shared = self.image, ("--network", "--net")
        network = [] if any(option.split("=")[0] in shared for option in of.options) else ["--network=host"]
        return [
            *(of.tool, "run", "--rm", "--init", f"--name={self.name}", "--label=turnwise", *network),
            *([] if cwd is None else [f"--workdir={cwd}"]),
            *(f"--env={name}" for name in variables),
            *(*of.options, of.image, *words),
        ]

    async def remove(self, *, ended: bool) -> None:
        """Remove the container with what runs in it. `ended`: the command has ended by itself, so it may be gone already.

        Otherwise its start may still be under way, and it is looked for several times. Failures are logged.
        """
        for attempt in range(1 if ended else _TRIES):
            await asyncio.sleep(0.5 * attempt)
            process = await asyncio.create_subprocess_exec(
                *(self.image.tool, "rm", "--force", "--volumes", self.name),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            try:
                said, _ = await asyncio.wait_for(process.communicate(), _REMOVE_SECONDS)
            except TimeoutError:
                process.kill()
                said = b"no answer"
            text = said.decode("utf-8", errors="replace").strip()
            if process.returncode == 0 and self.name in text:
                return
            if "no such container" not in text.lower() and text:
                _log.warning(
                    "the container %s could not be removed: %.300s. Remove it with: %s rm --force %s",
                    *(self.name, text, self.image.tool, self.name),
                )
                return
