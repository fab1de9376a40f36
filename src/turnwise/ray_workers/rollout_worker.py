"""A rollout worker: runs conversations for a trainer in another process, with its own engine and environments.

Knows the rollout loop and nothing of Ray.
"""

from __future__ import annotations

import pickle
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from turnwise.engines.engine import Engine
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.probe import ProbeAnswer, ProbePrompt
from turnwise.errors import EngineError, Failed, boundary
from turnwise.ray_workers.packed_weights import PackedWeights, unpack_tensors
from turnwise.ray_workers.sent_images import pickled, without_tensors
from turnwise.rollout.context import RolloutContext
from turnwise.rollout.rollout import rollout
from turnwise.rollout_server.adapters import LoadAdapter
from turnwise.types import Completion, Request, Sampling, Trajectory

__all__ = ["RolloutWorker", "WorkerInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """What a worker has loaded. It must be the same as in the trainer's process."""

    turnwise: str
    """The version of turnwise."""
    tokenizer: str
    """The fingerprint of the tokenizer and its chat template."""
    processor: str | None
    """The fingerprint of the image processor; None for a text model."""
    base: str | None
    """The fingerprint of the weights below an adapter; None if the recipe has no adapter."""


class RolloutWorker:
    """Runs conversations in the present event loop. `load_adapter` is given if the recipe has an adapter (model.lora)."""

    def __init__(self, context: RolloutContext, *, load_adapter: LoadAdapter | None, info: WorkerInfo) -> None:
        self.info = info
        self._context = context
        self._load_adapter = load_adapter

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self._context.engine

    async def run(self, empty: bytes, sampling: Sampling) -> bytes:
        """Run the conversation of an empty trajectory, which is pickled. Returns the pickled trajectory of the ended
        conversation.

        A failure is recorded in the trajectory; only cancellation is raised.
        """
        trajectory: Trajectory = pickle.loads(empty)
        await rollout(trajectory, replace(self._context, sampling=sampling))
        handle, trajectory.environment = trajectory.environment, None
        if handle is not None:  # reward functions of the trainer cannot read the object
            handle.release()
        without_tensors(trajectory)
        return _pickled(trajectory)

    async def generate(self, request: Request) -> Completion:
        """Answer a single request of the trainer, such as that of a judge. Raises EngineError."""
        try:
            return await self.engine.generate(request)
        finally:
            self.engine.release(request.conversation)

    async def load_weights(self, weights: PackedWeights, probe: ProbePrompt | None = None) -> list[ProbeAnswer]:
        """Sample with these weights from now on. Conversations that run go on with them. With `probe`, returns the answers of the
        engine's servers. Raises EngineError or ConfigError."""
        if weights.tensors is not None:
            await self.engine.load_weights(weights.version, unpack_tensors(weights.tensors))
        else:
            await self._load_packed_adapter(weights)
        if probe is None:
            return []
        assert isinstance(self.engine, RemoteEngine)  # an embedded engine is not probed
        return await self.engine.answer_probe(probe)

    async def _load_packed_adapter(self, weights: PackedWeights) -> None:
        """Raises EngineError or ConfigError."""
        if self._load_adapter is None:
            raise EngineError("the trainer has sent an adapter, and the worker's recipe has none (model.lora)")
        with tempfile.TemporaryDirectory(prefix="turnwise-adapter-") as name:
            for file, content in weights.adapter.items():
                (Path(name) / file).write_bytes(content)
            await self._load_adapter(weights.version, Path(name))


def _pickled(trajectory: Trajectory) -> bytes:
    """The trajectory as bytes. If an environment has put an object into it that cannot be pickled, the trajectory fails."""
    where = (
        "the conversation cannot be sent to the trainer: a message or `info` contains an object that cannot be pickled"
    )
    try:
        with boundary("environment", where=where):
            return pickled(trajectory)
    except Failed as failed:
        empty = Trajectory(id=trajectory.id, group=trajectory.group, row=trajectory.row, seed=trajectory.seed)
        empty.started, empty.seconds = trajectory.started, trajectory.seconds
        empty.fail(failed.failure)
        return pickled(empty)
