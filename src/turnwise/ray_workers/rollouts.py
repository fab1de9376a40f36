"""The trainer's side of the rollout workers: a `Runner` of conversations, and an `Engine` that passes single requests on.

A conversation whose worker is lost runs again from its beginning, with the same seed, on another worker. A request as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import has_media
from turnwise.engines.remote.engine import WriteAdapter
from turnwise.engines.remote.probe import Probe, check_answer
from turnwise.errors import ConfigError, EngineError, Failed, boundary
from turnwise.ray_workers import ray_api
from turnwise.ray_workers.actor import MakeWorker
from turnwise.ray_workers.packed_weights import pack
from turnwise.ray_workers.pool import PoolOptions, WorkerPool
from turnwise.ray_workers.ray_api import WorkerLost, answer
from turnwise.ray_workers.rollout_worker import WorkerInfo
from turnwise.ray_workers.sent_images import add_tensors, unpickled, with_files
from turnwise.rollout.context import RolloutContext, Runner
from turnwise.rollout_server.wire import take_over
from turnwise.types import Completion, Failure, Request, Sampling, Trajectory

__all__ = ["Losses", "RayOptions", "RayRollouts"]

_ATTEMPTS = 3
"""How often a conversation is started whose worker is lost."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Which cluster is used, and how."""

    address: str | None
    """None: RAY_ADDRESS, or a cluster on this machine, or a new one."""
    pool: PoolOptions
    info: WorkerInfo
    """What a worker must have loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Losses:
    """What a training step has lost, and what was done about it."""

    workers: int
    """Workers that were lost."""
    restarted_conversations: int
    """Conversations that were started again because their worker was lost."""


class RayRollouts:
    """All rollout workers of a run. `make` gives the function that makes the worker with a number in its process. One object
    serves one event loop."""

    def __init__(self, options: RayOptions, make: Callable[[int], MakeWorker]) -> None:
        self.version = -1
        """The version of the weights that the workers have; -1 before the first weights were sent."""
        self.restarted = 0
        """How many conversations were started again because their worker was lost."""
        self.pool = WorkerPool(options.pool, make, self._check)
        self._options = options
        self._connected = False
        """Whether this object has made the connection with Ray."""
        self._suspects = asyncio.Lock()
        """Held by a conversation whose workers were lost more than once: if it is the reason, it takes no other such
        conversation with it."""

    async def start(self) -> None:
        """Connect with Ray and start the workers. Raises EngineError or ConfigError."""
        self._connected = ray_api.connect(self._options.address) or self._connected
        await self.pool.start()

    async def generate(self, request: Request) -> Completion:
        """Let the engine of a worker answer a single request, such as that of a judge. Raises EngineError."""
        return await self._on_worker(
            request.conversation,
            lambda actor: actor.generate.remote(request),
            name=f"the request {request.conversation}",
            restarted=lambda: None,
        )

    def release(self, conversation: str) -> None:
        """Nothing: a worker frees a conversation by itself, and a single request when it is answered."""

    async def load_weights(self, version: int, weights: Mapping[str, Any] | WriteAdapter | None = None) -> None:
        """See `update`."""
        await self.update(version, weights)

    async def update(
        self, version: int, weights: Mapping[str, Any] | WriteAdapter | None, probe: Probe | None = None
    ) -> None:
        """Send weights to all workers: all weights, or an adapter (a function that writes its files into a directory).

        With `probe`, the log-probabilities of the workers' servers are compared with those of the trainer. Conversations that run
        go on with the new weights. Raises EngineError; the workers then go on with the previous weights.
        """
        if weights is None:
            raise EngineError("rollout workers have their own copies of the weights: give the weights")
        # serialized here and not in a thread: the trainer changes its weights in place
        stored = ray_api.put(pack(version, weights))
        if probe is None:
            await self.pool.publish(stored)
        else:
            await self.pool.publish(stored, probe.question, lambda given: check_answer(given, probe, version))
        self.version = version

    async def close(self) -> None:
        """End the workers, and the connection with Ray if this object has made it."""
        await self.pool.close()
        if self._connected:
            self._connected = False
            ray_api.disconnect()

    def take_losses(self) -> Losses:
        """What was lost since the last call."""
        losses = Losses(workers=self.pool.losses, restarted_conversations=self.restarted)
        self.pool.losses = self.restarted = 0
        return losses

    def make_runner(self, context: RolloutContext) -> Runner:
        """The runner of conversations on the workers, with the sampling of `context`."""

        async def run(trajectory: Trajectory) -> Trajectory:
            await self.run(trajectory, context.sampling, vision=context.renderer.vision)
            return trajectory

        return run

    async def run(self, trajectory: Trajectory, sampling: Sampling, *, vision: MediaProcessor | None = None) -> None:
        """Let a worker fill a trajectory. If that fails, the trajectory fails with kind `engine`.

        `vision` is the image processor of the trainer's model.
        """
        images = has_media(trajectory.row.messages)
        try:
            with boundary("data", where=f"row {trajectory.row.id} cannot be sent to a rollout worker"):
                empty = await asyncio.to_thread(_packed, trajectory) if images else pickle.dumps(trajectory)
            await self._run(trajectory, empty, sampling, vision)
        except Failed as failed:
            trajectory.fail(failed.failure)
        except (EngineError, ConfigError) as error:
            trajectory.fail(Failure("engine", str(error)))

    async def _run(
        self, trajectory: Trajectory, empty: bytes, sampling: Sampling, vision: MediaProcessor | None
    ) -> None:
        """Start the conversation until a worker has finished it. Raises EngineError."""

        def restarted() -> None:
            self.restarted += 1

        filled = await self._on_worker(
            trajectory.group,
            lambda actor: actor.run.remote(empty, sampling),
            name="the conversation",
            restarted=restarted,
        )
        done = unpickled(filled)
        if any(segment.media for segment in done.segments):
            await asyncio.to_thread(add_tensors, done, vision)
        take_over(trajectory, done)

    async def _on_worker(
        self, group: str, call: Callable[[Any], Any], *, name: str, restarted: Callable[[], None]
    ) -> Any:
        """The answer of a worker's actor to `call`, which is sent again if the worker is lost. Raises EngineError."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._suspects if attempt == _ATTEMPTS else contextlib.nullcontext():
                    return await self._call_once(group, call)
            except WorkerLost as error:
                _log.info("%s (%s) lost its rollout worker; attempt %d of %d", name, group, attempt, _ATTEMPTS)
                if attempt == _ATTEMPTS:
                    raise EngineError(
                        f"{name} lost its rollout worker {_ATTEMPTS} times: {error}. The environment may end the process, or "
                        f"use too much memory"
                    ) from error
                restarted()
        raise AssertionError("unreachable")

    async def _call_once(self, group: str, call: Callable[[Any], Any]) -> Any:
        """Raises WorkerLost or EngineError."""
        async with self.pool.place(group) as worker:
            actor = worker.actor
            try:
                done = await answer(call(actor))
            except WorkerLost as error:
                self.pool.lose(worker, actor, str(error))
                raise
            worker.starts = 0
            return done

    def _check(self, info: WorkerInfo) -> None:
        """Raise ConfigError if a worker has loaded something else than the trainer."""
        expected = self._options.info
        if info.turnwise != expected.turnwise:
            raise ConfigError(
                f"a rollout worker has turnwise {info.turnwise}, and the trainer {expected.turnwise}: install the same version "
                f"on all machines of the Ray cluster"
            )
        if info.tokenizer != expected.tokenizer:
            raise ConfigError(
                "a rollout worker has another tokenizer or chat template in model.path than the trainer: give all machines the "
                "same model"
            )
        if info.processor != expected.processor:
            raise ConfigError(
                "a rollout worker has another image processor in model.path than the trainer: give all machines the same model"
            )
        if info.base != expected.base:
            raise ConfigError(
                "a rollout worker has other weights in model.path than the trainer, and only the adapter (model.lora) is sent: "
                "give all machines the same model"
            )


def _packed(trajectory: Trajectory) -> bytes:
    """An empty trajectory as bytes, with the files of its row's images. Raises DataError."""
    return pickle.dumps(replace(trajectory, row=with_files(trajectory.row)))
