"""What Ray calls in the process of a rollout worker. Knows no conversations: it builds a `RolloutWorker` and passes calls on."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable

from turnwise.engines.remote.probe import ProbeAnswer, ProbePrompt
from turnwise.errors import ConfigError, EngineError
from turnwise.ray_workers.packed_weights import PackedWeights
from turnwise.ray_workers.rollout_worker import RolloutWorker, WorkerInfo
from turnwise.types import Completion, Request, Sampling

__all__ = ["MakeWorker", "WorkerActor", "enter_directory"]

MakeWorker = Callable[[], contextlib.AbstractAsyncContextManager[RolloutWorker]]
"""Makes the worker in its process. At the end of the context, its engine and environments are closed."""


class WorkerActor:
    """The methods of the actor. They run in one event loop, which the conversations use, too."""

    def __init__(self, make: MakeWorker, directory: str | None) -> None:
        """`directory` is the directory to which the recipe's paths are relative; None: that of the runtime environment."""
        self._make = make
        self._directory = directory
        self._worker: RolloutWorker | None = None
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._life: asyncio.Task[None] | None = None

    async def start(self) -> WorkerInfo:
        """Build the worker. Raises TurnwiseError."""
        if self._directory is not None:
            enter_directory(self._directory, "a rollout worker", "cluster.workers.runtime_env.working_dir")
        ready = asyncio.create_task(self._ready.wait())
        self._life = asyncio.create_task(self._live())
        await asyncio.wait([ready, self._life], return_when=asyncio.FIRST_COMPLETED)
        if self._worker is None:
            ready.cancel()
            await self._life  # raises the reason
        return self._started.info

    async def _live(self) -> None:
        """Keep the worker until `stop`. One task opens and closes its resources."""
        async with self._make() as self._worker:
            self._ready.set()
            await self._stopping.wait()

    async def run(self, empty: bytes, sampling: Sampling) -> bytes:
        """See `RolloutWorker.run`."""
        return await self._started.run(empty, sampling)

    async def generate(self, request: Request) -> Completion:
        """See `RolloutWorker.generate`."""
        return await self._started.generate(request)

    async def load_weights(self, weights: PackedWeights, probe: ProbePrompt | None = None) -> list[ProbeAnswer]:
        """See `RolloutWorker.load_weights`."""
        return await self._started.load_weights(weights, probe)

    async def ping(self) -> None:
        """Answers if the event loop of the conversations is not blocked."""

    async def stop(self) -> None:
        """Close the engine and the environments. All conversations have ended or were cancelled."""
        self._stopping.set()
        if self._life is not None:
            await self._life

    @property
    def _started(self) -> RolloutWorker:
        if self._worker is None:
            raise EngineError("the rollout worker was not started")
        return self._worker


def enter_directory(directory: str, process: str, option: str) -> None:
    """Make the directory of the command the present one of this process. Raises ConfigError if the machine does not have it;
    `option` is that with which Ray copies it."""
    try:
        os.chdir(directory)
    except OSError as error:
        raise ConfigError(
            f"the machine of {process} has no directory {directory} ({error.strerror}), in which the command was started: "
            f"share it among the machines, or set {option}"
        ) from None
