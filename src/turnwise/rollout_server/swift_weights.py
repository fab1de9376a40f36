"""Receives the weights of ms-swift's trainer, which sends them by NCCL through vLLM's communicator.

The trainer announces each tensor, or each bucket of tensors, in a request, and then broadcasts it. The broadcasts are received in
a thread, in the order of the requests. The tensors wait in the memory of the CPU until the trainer says that it has sent all of
them; then they become the weights of the engine in one update.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from turnwise.engines.vllm.trainer_group import JoinGroup, SwiftTrainerGroup, TensorPlace, split_tensors
from turnwise.errors import Failed, boundary
from turnwise.rollout_server.weights import Leases, WeightUpdates
from turnwise.serve.http import RequestRefused

__all__ = [
    "BucketBody",
    "CommunicatorBody",
    "SwiftWeights",
    "TensorBody",
]

_DTYPE_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}


class CommunicatorBody(BaseModel):
    """The body of `POST /init_communicator/`."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    host: str
    """The address that ms-swift's own server would listen on. Not used: the group listens where the request arrived."""
    port: int = Field(ge=1, le=65535)
    """The port of the group."""
    world_size: int
    """The number of members: this process and the trainer."""


class TensorBody(BaseModel):
    """The body of `POST /update_named_param/`: one tensor."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str = Field(min_length=1)
    """The name in the state dict."""
    dtype: str
    """The type, such as `torch.bfloat16`."""
    shape: list[int]
    """The shape."""

    @property
    def type_name(self) -> str:
        """The type without the module."""
        return self.dtype.rpartition(".")[2]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * _DTYPE_BYTES[self.type_name]

    @model_validator(mode="after")
    def check(self) -> Self:
        """Refuse types and shapes that no weight has."""
        if self.type_name not in _DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPE_BYTES)}")
        if any(length < 0 for length in self.shape):
            raise ValueError("shape must not have negative numbers")
        return self


class FlattenedTensorBody(TensorBody):
    """A tensor in a bucket of bytes."""

    start_idx: int = Field(ge=0)
    """The first byte of the tensor."""
    end_idx: int
    """The byte after the last."""
    numel: int
    """Bytes of the tensor."""

    @model_validator(mode="after")
    def check_place(self) -> Self:
        """The place must have the size of the tensor."""
        if self.end_idx - self.start_idx != self.size:
            raise ValueError(f"end_idx - start_idx must be the {self.size} bytes of the tensor")
        return self


class BucketBody(BaseModel):
    """The body of `POST /update_flattened_params/`: tensors that are broadcast as one."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    metadatas: list[FlattenedTensorBody] = Field(min_length=1)
    """The tensors, in the order of their places."""


class SwiftWeights:
    """The weights of one trainer of ms-swift at a time. All methods are called in the event loop of the engine.

    `join` joins the trainer's group; `longest` is the most bytes of weights.
    """

    def __init__(self, updates: WeightUpdates, leases: Leases, *, join: JoinGroup, longest: int) -> None:
        self._updates = updates
        self._leases = leases
        self._join = join
        self._longest = longest
        self._receiver: _Receiver | None = None

    async def connect(self, host: str, body: CommunicatorBody, trainer: str) -> None:
        """Join the group of a trainer, in the background: the trainer joins after it has the answer.

        `host` is the address at which the group listens. Raises RequestRefused.
        """
        if body.world_size != 2:
            raise RequestRefused(
                400,
                f"world_size={body.world_size} must be 2: the trainer and this process (/get_world_size/ answers 1)",
            )
        self._leases.take(trainer)
        self._end_receiver()
        join, port = self._join, body.port
        self._receiver = _Receiver(lambda: join(host, port), trainer)

    async def announce(self, body: BucketBody | TensorBody) -> None:
        """Receive the broadcast that follows this request. Raises RequestRefused."""
        receiver = self._connected()
        broadcast = _broadcast_of(body)
        size = receiver.announced + broadcast.size
        if size > self._longest:
            raise RequestRefused(413, f"the weights may have {self._longest} bytes, and {size} were announced")
        receiver.announce(broadcast)

    async def load(self) -> dict[str, Any] | None:
        """Load all tensors that were announced since the last call, as the next version; None if there are none.

        Raises RequestRefused: the engine goes on with the old weights.
        """
        if self._receiver is None or not self._receiver.announced:
            return None
        tensors = await self._connected().take()
        return await self._updates.load(self._updates.version + 1, tensors)

    async def disconnect(self) -> None:
        """Leave the group, and let other trainers change the weights."""
        if self._receiver is not None:
            with contextlib.suppress(RequestRefused):  # another trainer has taken the lease
                self._leases.release(self._leases.take(self._receiver.trainer).id)
        self._end_receiver()

    def _connected(self) -> _Receiver:
        """The receiver; the trainer's lease is renewed. Raises RequestRefused."""
        if self._receiver is None:
            raise RequestRefused(409, "the trainer is not connected: send /init_communicator/ first")
        self._leases.take(self._receiver.trainer)
        return self._receiver

    def _end_receiver(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


@dataclass(frozen=True, slots=True)
class _Broadcast:
    """A tensor that the trainer has announced, which contains the weights."""

    places: Sequence[TensorPlace]
    count: int
    dtype: str
    size: int
    """Bytes."""


def _broadcast_of(body: BucketBody | TensorBody) -> _Broadcast:
    """The broadcast that follows a request."""
    if isinstance(body, TensorBody):
        weight = TensorPlace(name=body.name, dtype=body.type_name, shape=body.shape, start=0, end=body.size)
        return _Broadcast([weight], math.prod(body.shape), body.type_name, body.size)
    places = [
        TensorPlace(name=item.name, dtype=item.type_name, shape=item.shape, start=item.start_idx, end=item.end_idx)
        for item in body.metadatas
    ]
    return _Broadcast(places, places[-1].end, "uint8", places[-1].end)


class _Receiver:
    """A thread that receives the broadcasts of one trainer.

    A broadcast blocks until the trainer takes part. The thread is a daemon, so a trainer that has died cannot keep the process.
    """

    def __init__(self, join: Callable[[], SwiftTrainerGroup], trainer: str) -> None:
        self.trainer = trainer
        self.announced = 0
        """Bytes since the last `take`."""
        self._join = join
        self._jobs: queue.SimpleQueue[_Broadcast | Future[dict[str, Any]] | None] = queue.SimpleQueue()
        """Broadcasts in their order; a future receives all tensors since the last future; None ends the thread."""
        self._problem: str | None = None
        """Why a broadcast was not received. No broadcast is received after that."""
        threading.Thread(target=self._run, name="swift-weights", daemon=True).start()

    def announce(self, broadcast: _Broadcast) -> None:
        """Receive a broadcast after those that were announced before. Raises RequestRefused if one of those has failed."""
        self._refuse_after_problem()
        self.announced += broadcast.size
        self._jobs.put(broadcast)

    async def take(self) -> dict[str, Any]:
        """All tensors, once they have arrived. Raises RequestRefused if a broadcast has failed."""
        future: Future[dict[str, Any]] = Future()
        self._jobs.put(future)
        self.announced = 0
        tensors = await asyncio.wrap_future(future)
        self._refuse_after_problem()
        return tensors

    def close(self) -> None:
        """End the thread after the jobs that are left."""
        self._jobs.put(None)

    def _refuse_after_problem(self) -> None:
        if self._problem is not None:
            raise RequestRefused(
                422,
                f"the weights were not received: {self._problem}. The server goes on with its old weights; start the trainer "
                f"again",
            )

    def _run(self) -> None:
        group: SwiftTrainerGroup | None = None
        tensors: dict[str, Any] = {}
        try:
            with boundary("engine"):
                group = self._join()
        except Failed as failed:
            self._problem = failed.failure.message
        while (job := self._jobs.get()) is not None:
            if isinstance(job, Future):
                job.set_result(tensors)
                tensors = {}
            elif group is not None and self._problem is None:
                try:
                    with boundary("engine"):
                        tensors |= split_tensors(group.receive(job.count, job.dtype), job.places)
                except Failed as failed:
                    self._problem = failed.failure.message
