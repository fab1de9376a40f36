"""The sandboxes of Harbor's tasks: jails of this machine, or containers, a new one for each conversation."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import posixpath
import time
import weakref
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Protocol

from turnwise.compat.providers.harbor_containers import (
    ContainerMachine,
    build,
    container_options,
    started,
    working_directory,
)
from turnwise.compat.providers.harbor_tasks import CopyStep, HarborTask, ImagePlan, usual_environment
from turnwise.environments.agents.containers import ContainerImage
from turnwise.environments.sandbox.jail import Layout, find_jail
from turnwise.environments.sandbox.machine import JailMachine, Machine, reopened, tar_of
from turnwise.environments.sandbox.process import Bounds, SandboxError
from turnwise.errors import TurnwiseError
from turnwise.user_code.calls import in_lockstep, waiting_for_others

_AGAIN_SECONDS = 600.0
"""How long an image that could not be made is not tried again."""


class HarborError(TurnwiseError):
    """A task could not be prepared or tested, so its conversation has no reward."""


class Sandboxes(Protocol):
    """Makes a sandbox for each conversation."""

    async def machine(self, task: HarborTask) -> Machine:
        """A new sandbox with the files of a task. Raises HarborError if its image cannot be made."""
        ...

    async def aclose(self) -> None:
        """Remove what is left."""
        ...


def bounds_of(task: HarborTask, bounds: Bounds) -> Bounds:
    """The bounds of a task's commands: those of the recipe, or less if the task asks for less."""
    given = {"memory_mb": task.memory_mb, "disk_mb": task.storage_mb}
    least = {name: min(value, getattr(bounds, name)) for name, value in given.items() if value is not None}
    return replace(bounds, **least)  # type: ignore[arg-type]


class TaskPlaces:
    """A semaphore, and a lock for each task. Both belong to one event loop, and a source may be used in several."""

    def __init__(self, concurrent: int) -> None:
        self.concurrent = concurrent
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )
        self._building: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = (
            weakref.WeakKeyDictionary()
        )
        self._failed: dict[str, tuple[float, str]] = {}
        """When and why an image could not be made, by task."""

    @property
    def slots(self) -> asyncio.Semaphore:
        """The places of this event loop."""
        return self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrent))

    async def take(self, closing: contextlib.AsyncExitStack) -> None:
        """Wait for one of the places, which is free again when `closing` ends. Raises HarborError."""
        slots = self.slots
        if in_lockstep() and slots.locked():
            raise HarborError(
                f"all {self.concurrent} containers are in use, and with deterministic: true no conversation waits for another: "
                f"set environment.arguments.max_concurrent to the conversations of a step"
            )
        with waiting_for_others():
            await slots.acquire()
        closing.callback(slots.release)

    @contextlib.asynccontextmanager
    async def building(self, task: HarborTask) -> AsyncIterator[None]:
        """Inside, the image of a task is made, once at a time. What failed is not tried again soon: all conversations of a group
        would wait for the same failure, one after the other. Raises HarborError."""
        key = str(task.folder)
        locks = self._building.setdefault(asyncio.get_running_loop(), {})
        with waiting_for_others():
            async with locks.setdefault(key, asyncio.Lock()):
                failed, message = self._failed.get(key, (-math.inf, ""))
                if time.monotonic() < failed + _AGAIN_SECONDS:
                    raise HarborError(message)
                try:
                    yield
                except HarborError as error:
                    self._failed[key] = time.monotonic(), str(error)
                    raise


class JailSandboxes:
    """Jails. The image of a task is an archive in memory. Raises ConfigError if this machine has none."""

    def __init__(self, plans: Mapping[str, ImagePlan], bounds: Bounds, concurrent: int) -> None:
        self._jail, self._plans, self._bounds = find_jail(), plans, bounds
        self._places, self._images = TaskPlaces(concurrent), dict[str, int]()
        """The descriptors of the archives by task."""

    async def machine(self, task: HarborTask) -> Machine:
        key = str(task.folder)
        async with self._places.building(task):
            if key not in self._images:
                self._images[key] = await self._built(task)
        return self._new(task, reopened(self._images[key]))

    async def aclose(self) -> None:
        while self._images:
            os.close(self._images.popitem()[1])

    def _new(self, task: HarborTask, files: int | None) -> JailMachine:
        plan = self._plans[str(task.folder)]
        layout = Layout(writable=plan.writable, environment={**usual_environment(), **plan.environment})
        return JailMachine(
            self._jail, layout, bounds_of(task, self._bounds), cwd=plan.workdir, slots=self._places.slots, files=files
        )

    async def _built(self, task: HarborTask) -> int:
        """The descriptor of the archive of a task's image. Raises HarborError."""
        machine, left = self._new(task, None), task.build_seconds
        try:
            for step in self._plans[str(task.folder)].steps:
                where = f"task {task.name}: line {step.line} of its Dockerfile"
                if isinstance(step, CopyStep):
                    await machine.put(await asyncio.to_thread(tar_of, step.files, mode=step.mode))
                    continue
                # without the time in which a command waits for a free place
                ran = await machine.run(step.words, cwd=step.cwd, seconds=max(left, 0.1), environment=step.environment)
                left -= ran.seconds
                if left < 0:
                    raise HarborError(
                        f"task {task.name}: its image was not made within build_timeout_sec={task.build_seconds:g}"
                    )
                if ran.status or ran.stopped or ran.notes:
                    raise HarborError(f"{where} cannot be run in the sandbox: {ran.text_for_model()[-1500:]}")
            return machine.archive()
        except (SandboxError, OSError, ValueError) as error:
            raise HarborError(f"task {task.name}: its image cannot be made: {error}") from error
        finally:
            await machine.close()


class ContainerSandboxes:
    """Containers of docker or podman (`tool`). The image of a task is built once. Without `network`, none has one."""

    def __init__(self, tool: str, bounds: Bounds, concurrent: int, *, network: bool) -> None:
        self._bounds, self._network = bounds, network
        self._containers = ContainerImage(tool=tool, image="")
        """What the images of all tasks share."""
        self._containers.remove_left_over()
        self._places, self._images = TaskPlaces(concurrent), dict[str, ContainerImage]()
        self._directories: dict[str, str] = {}
        """The working directories of images, by their names."""

    async def machine(self, task: HarborTask) -> Machine:
        key = str(task.folder)
        async with self._places.building(task):
            if key not in self._images:
                self._images[key] = await self._image(task)
        return await self._started(task, self._images[key])

    async def aclose(self) -> None:
        self._images.clear()
        await asyncio.to_thread(self._containers.close)

    async def _image(self, task: HarborTask) -> ContainerImage:
        """The image of a task's containers. Raises HarborError if it cannot be built."""
        image = task.image
        if image is None:
            folder = task.folder / "environment"
            image = f"turnwise-harbor:{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]}"
            try:
                await build(self._containers.tool, str(folder), image, task.build_seconds)
            except SandboxError as error:
                raise HarborError(f"task {task.name}: its image cannot be built: {error}") from error
        network = task.network and self._network
        options = container_options(bounds_of(task, self._bounds), cpus=task.cpus or 1.0, network=network)
        return self._containers.other(image, options)

    async def _started(self, task: HarborTask, image: ContainerImage) -> ContainerMachine:
        """A container of a task, when one is free."""
        async with contextlib.AsyncExitStack() as closing:
            await self._places.take(closing)
            container = await closing.enter_async_context(started(image))
            bounds, lock = bounds_of(task, self._bounds), asyncio.Lock()
            if image.image not in self._directories:  # known once there is a container: `create` may have got the image
                self._directories[image.image] = await working_directory(container)
            cwd = posixpath.join(self._directories[image.image], task.workdir or "")
            return ContainerMachine(container, bounds, cwd, task.environment, task.user, lock, closing.pop_all())
