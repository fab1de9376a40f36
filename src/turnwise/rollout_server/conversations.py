"""What a rollout server does: runs the conversations of all clients, takes new weights, and counts.

The queue of conversations is bounded. One trainer at a time may update the weights: it holds a lease. Counters are given in
the text format of Prometheus. All methods are called in the event loop of the engine. This module knows the rollout loop and
nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import stat
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turnwise.engines.engine import Engine
from turnwise.engines.remote.weights import checksum_of
from turnwise.errors import ConfigError, EngineError
from turnwise.rollout.context import RolloutContext
from turnwise.rollout.rollout import rollout, rollout_groups
from turnwise.rollout_server.wire import (
    ConversationBody,
    LoadAdapter,
    RolloutBody,
    empty_trajectory,
    finished_event,
    packed_config,
    unpack_adapter,
    with_images,
)
from turnwise.services.http_server import RequestRefused
from turnwise.types import Group, Sampling, Trajectory

# counters

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class ServerMetrics:
    """The metrics of one server. All methods may be called from any thread.

    Raises ConfigError if the library `prometheus_client` is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise ConfigError(
                "the rollout server needs the package `prometheus_client`: pip install 'turnwise[serve]'"
            ) from None
        registry = self._registry = CollectorRegistry()
        self.running = Gauge("turnwise_conversations_running", "Conversations that run now.", registry=registry)
        self.waiting = Gauge("turnwise_conversations_waiting", "Conversations in the queue.", registry=registry)
        self._finished = Counter(
            "turnwise_conversations_finished",
            "Finished conversations, by the reason why they ended.",
            ["stop"],
            registry=registry,
        )
        self.cancelled = Counter(
            "turnwise_conversations_cancelled",
            "Conversations that were cancelled because their client disconnected.",
            registry=registry,
        )
        self._turns = Counter("turnwise_turns", "Turns of the model in finished conversations.", registry=registry)
        self._tokens = Counter(
            "turnwise_sampled_tokens", "Sampled tokens in finished conversations.", registry=registry
        )
        self._seconds = Histogram(
            "turnwise_conversation_seconds",
            "The time of a finished conversation, without its time in the queue.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.version = Gauge("turnwise_weights_version", "The version of the engine's weights.", registry=registry)
        self.updates = Counter(
            "turnwise_weight_updates", "Updates of the weights, by result.", ["result"], registry=registry
        )
        self.update_seconds = Histogram(
            "turnwise_weight_update_seconds", "The time of a successful update of the weights.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.refused = Counter(
            "turnwise_requests_refused", "Refused requests, by HTTP status.", ["status"], registry=registry
        )

    def finished(self, trajectory: Trajectory) -> None:
        """Count a finished conversation."""
        self._finished.labels(stop=str(trajectory.stop)).inc()
        self._turns.inc(len(trajectory.turns))
        self._tokens.inc(trajectory.sampled_tokens)
        self._seconds.observe(trajectory.seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)


# the queue

Emit = Callable[[bytes], None]
"""Sends an event to the client."""

HEARTBEAT = b": heartbeat\n\n"
"""An event without content."""

_RETRY_SECONDS = 1
"""When a client may try again after the queue was full."""


class ConversationQueue:
    """The conversations that run and wait. At most `context.max_concurrent` run at the same time."""

    def __init__(self, context: RolloutContext, metrics: ServerMetrics, *, most_waiting: int) -> None:
        self.context = context
        self.admitted = 0
        """Conversations that run or wait."""
        self.running = 0
        self._metrics = metrics
        self._most_waiting = most_waiting
        self._slots = asyncio.Semaphore(context.max_concurrent)
        self._lockstep = asyncio.Lock()
        """A deterministic server runs the conversations of one request after those of another."""
        self._requests = itertools.count(1)

    @property
    def engine(self) -> Engine:
        """The engine that samples."""
        return self.context.engine

    async def run(self, body: RolloutBody, emit: Emit) -> None:
        """Run the conversations of a request. `emit` receives an event for each finished conversation.

        The first event is a heartbeat. It is sent when the request is admitted.

        If the call is cancelled, its conversations are cancelled and their environments closed.
        Raises RequestRefused before a conversation starts.
        """
        self._refuse_old_weights(body)
        try:
            conversations = with_images(body)
        except EngineError as error:
            raise RequestRefused(400, str(error)) from None
        await self.run_trajectories(
            conversations,
            body.sampling.to_sampling() if body.sampling is not None else None,
            on_admitted=lambda: emit(HEARTBEAT),
            on_finished=lambda trajectory, id: emit(finished_event(trajectory, id=id, known_images=body.images)),
        )

    async def run_trajectories(
        self,
        conversations: Sequence[ConversationBody],
        sampling: Sampling | None,
        *,
        tokens_per_turn: int | None = None,
        on_admitted: Callable[[], None] = lambda: None,
        on_finished: Callable[[Trajectory, str], None] = lambda trajectory, id: None,
    ) -> list[Trajectory]:
        """Run conversations; `on_finished` receives each finished trajectory and the client's id of it.

        `sampling` None samples as the recipe says; `tokens_per_turn` None bounds turns as the recipe says.

        Raises RequestRefused if the queue is full, or two conversations have the same id.
        """
        ids = [conversation.id for conversation in conversations]
        if len(set(ids)) < len(ids):
            raise RequestRefused(
                400, "two conversations of the request have the same id: ids must be unique in a request"
            )
        self._admit(len(ids))
        on_admitted()
        prefix = f"request{next(self._requests)}/"
        trajectories = [empty_trajectory(conversation, prefix=prefix) for conversation in conversations]
        context = self.context if sampling is None else replace(self.context, sampling=sampling)
        if tokens_per_turn is not None:
            context = replace(context, limits=context.limits.model_copy(update={"tokens_per_turn": tokens_per_turn}))
        progress = _Progress(self, [trajectory.id for trajectory in trajectories])

        def finish(trajectory: Trajectory) -> None:
            progress.end(trajectory.id)
            handle, trajectory.environment = trajectory.environment, None
            if handle is not None:  # reward functions of the client cannot read the object
                handle.release()
            self._metrics.finished(trajectory)
            on_finished(trajectory, trajectory.id.removeprefix(prefix))

        try:
            if context.lockstep:
                await self._run_lockstep(trajectories, context, progress, finish)
            else:
                async with asyncio.TaskGroup() as tasks:
                    for trajectory in trajectories:
                        tasks.create_task(self._run_one(trajectory, context, progress, finish))
        finally:
            self._metrics.cancelled.inc(progress.end_all())
        return trajectories

    async def _run_one(
        self,
        trajectory: Trajectory,
        context: RolloutContext,
        progress: _Progress,
        finish: Callable[[Trajectory], None],
    ) -> None:
        async with self._slots:
            progress.start(trajectory.id)
            await rollout(trajectory, context)
            finish(trajectory)

    async def _run_lockstep(
        self,
        trajectories: Sequence[Trajectory],
        context: RolloutContext,
        progress: _Progress,
        finish: Callable[[Trajectory], None],
    ) -> None:
        """The requests of all running conversations form one batch, so nothing else may run at the same time."""

        async def on_finished(trajectory: Trajectory) -> None:
            finish(trajectory)

        async with self._lockstep:
            for trajectory in trajectories:
                progress.start(trajectory.id)
            group = Group(id="request", row=trajectories[0].row, trajectories=list(trajectories))
            await rollout_groups([group], context, on_finished=on_finished)

    def _refuse_old_weights(self, body: RolloutBody) -> None:
        if body.least_version is not None and self.engine.version < body.least_version:
            raise RequestRefused(
                409,
                f"the weights of the server have version {self.engine.version}, and the request needs at least version "
                f"{body.least_version}: send the weights again (POST /weights). The server may have been restarted",
            )

    def _admit(self, count: int) -> None:
        """Take places in the queue. Raises RequestRefused if there are not enough."""
        most = self.context.max_concurrent + self._most_waiting
        if count > most:
            raise RequestRefused(
                413,
                f"the request has {count} conversations, and the server takes at most {most} at once (max_concurrent and "
                f"--queue): split the request",
            )
        if self.admitted + count > most:
            raise RequestRefused(
                503,
                f"the queue is full: {self.admitted} conversations run or wait, and at most {most} are taken (max_concurrent "
                f"and --queue). Try again after {_RETRY_SECONDS} s",
                retry_after=_RETRY_SECONDS,
            )
        self.admitted += count
        self.show()

    def show(self) -> None:
        """Update the gauges."""
        self._metrics.running.set(self.running)
        self._metrics.waiting.set(self.admitted - self.running)


class _Progress:
    """Counts the conversations of one request in `ConversationQueue.admitted` and `running`, each once."""

    def __init__(self, conversations: ConversationQueue, ids: Sequence[str]) -> None:
        self._conversations = conversations
        self._waiting = set(ids)
        self._running = set[str]()

    def start(self, id: str) -> None:
        self._waiting.discard(id)
        self._running.add(id)
        self._conversations.running += 1
        self._conversations.show()

    def end(self, id: str) -> None:
        if id in self._running:
            self._running.discard(id)
            self._conversations.running -= 1
            self._conversations.admitted -= 1
            self._conversations.show()

    def end_all(self) -> int:
        """End all conversations that have not ended, and return their number."""
        count = len(self._running) + len(self._waiting)
        self._conversations.running -= len(self._running)
        self._conversations.admitted -= count
        self._running, self._waiting = set(), set()
        self._conversations.show()
        return count


# weights and their lease

LEASE_SECONDS = 120.0
"""A lease ends when its trainer has not been received of for this time."""


@dataclass(slots=True)
class TrainerLease:
    """The right of one trainer to change the weights."""

    id: str
    owner: str
    """The trainer's name for itself."""
    used: float
    """When the trainer last used the lease, on the clock of `Leases`."""


class Leases:
    """At most one lease at a time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lease: TrainerLease | None = None

    def take(self, owner: str) -> TrainerLease:
        """A lease for `owner`; its earlier lease ends. Raises RequestRefused if another trainer has the lease."""
        now = self._clock()
        lease = self._lease
        if lease is not None and lease.owner != owner and now - lease.used < LEASE_SECONDS:
            raise RequestRefused(
                409,
                f"the trainer {lease.owner} uses this server, and the weights of two trainers cannot be served at once: stop "
                f"that trainer, or start another server. The server is free {LEASE_SECONDS:g} s after the trainer's last "
                f"request; the last request was {now - lease.used:.0f} s ago",
            )
        self._lease = TrainerLease(secrets.token_hex(16), owner, now)
        return self._lease

    def use(self, id: str | None) -> None:
        """Note that the trainer with this lease is alive. Raises RequestRefused if it is not the present lease."""
        if self._lease is None or id is None or not secrets.compare_digest(id.encode(), self._lease.id.encode()):
            raise RequestRefused(
                409, "the lease is missing, or another trainer has taken it: take a lease first (POST /lease)"
            )
        self._lease.used = self._clock()

    def renew(self, id: str | None) -> None:
        """As `use`, but an unknown lease is ignored: clients without a lease may run conversations."""
        if self._lease is not None and id == self._lease.id:
            self._lease.used = self._clock()

    def release(self, id: str | None) -> None:
        """End the lease. Raises RequestRefused if it is not the present lease."""
        self.use(id)
        self._lease = None

    @property
    def owner(self) -> str | None:
        """The trainer that has the lease; None if there is none, or the trainer is silent for too long."""
        if self._lease is None or self._clock() - self._lease.used >= LEASE_SECONDS:
            return None
        return self._lease.owner


class WeightUpdates:
    """Loads weights into the engine, one update after the other."""

    def __init__(self, engine: Engine, metrics: ServerMetrics, *, load_adapter: LoadAdapter | None = None) -> None:
        """`load_adapter` is given if the recipe has an adapter (model.lora)."""
        self._engine = engine
        self._load_adapter = load_adapter
        self._metrics = metrics
        self._lock = asyncio.Lock()
        metrics.version.set(engine.version)

    @property
    def version(self) -> int:
        """The version of the engine's weights."""
        return self._engine.version

    async def update(self, version: int, path: Path, checksum: str | None = None) -> dict[str, Any]:
        """Load the weights in a safetensors file, and sample with them as `version` from now on.

        After a failed update the engine samples with the old weights, under the old version. Raises RequestRefused.
        """
        return await self._counted(version, lambda: self._load_file(version, path, checksum))

    async def load(self, version: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The same with tensors in memory."""

        async def load() -> int:
            self._refuse_without_adapter()
            _refuse_not_finite(tensors)
            await self._engine.load_weights(version, tensors)
            return len(tensors)

        return await self._counted(version, load)

    async def _load_file(self, version: int, path: Path, checksum: str | None) -> int:
        """Load a file with all weights, or with an adapter. Returns the number of tensors."""
        tensors, config = await asyncio.to_thread(_read_tensors, path, checksum)
        if config is None:
            self._refuse_without_adapter()
            await self._engine.load_weights(version, tensors)
        elif self._load_adapter is None:
            raise RequestRefused(
                422,
                "the file contains a LoRA adapter, and the server's recipe has none: set the same options model.lora for "
                "`turnwise serve` and `turnwise train`",
            )
        else:
            with tempfile.TemporaryDirectory(prefix="turnwise-adapter-") as folder:
                await asyncio.to_thread(unpack_adapter, path, config, Path(folder))
                await self._load_adapter(version, Path(folder))
        return len(tensors)

    def _refuse_without_adapter(self) -> None:
        if self._load_adapter is not None:
            raise RequestRefused(
                422,
                "the server's recipe has a LoRA adapter (model.lora), and the weights are all weights of a model: send the "
                "adapter, or remove model.lora for `turnwise serve`",
            )

    async def _counted(self, version: int, load: Callable[[], Awaitable[int]]) -> dict[str, Any]:
        """Load weights after the updates before, and count the result. `load` returns the number of tensors."""
        started = time.perf_counter()
        try:
            async with self._lock:
                count = await load()
        except (RequestRefused, EngineError, ConfigError) as error:
            self._metrics.updates.labels(result="failed").inc()
            if isinstance(error, RequestRefused):
                raise
            raise RequestRefused(
                422,
                f"the weights of version {version} cannot be loaded: {error}. The server goes on with version "
                f"{self._engine.version}",
            ) from error
        seconds = time.perf_counter() - started
        self._metrics.updates.labels(result="loaded").inc()
        self._metrics.update_seconds.observe(seconds)
        self._metrics.version.set(self._engine.version)
        return {"version": self._engine.version, "tensors": count, "seconds": round(seconds, 4)}


def _read_tensors(path: Path, checksum: str | None) -> tuple[dict[str, Any], str | None]:
    """The tensors of a safetensors file, mapped into memory, and the configuration of the adapter if they are an adapter.

    Raises RequestRefused if the file cannot be read, or is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file  # torch

    try:
        _refuse_special_file(path)
        if checksum is not None and (found := checksum_of(path)) != checksum:
            raise RequestRefused(
                422,
                f"the weights are damaged: their CRC-32 is {found}, and the trainer's is {checksum}. Send them again",
            )
        tensors, config = load_file(path), packed_config(path)
    except (OSError, SafetensorError, ValueError) as error:
        raise RequestRefused(
            422,
            f"the weights cannot be read: {error}. They must be one complete safetensors file, which the server can open",
        ) from error
    _refuse_not_finite(tensors)
    return tensors, config


def _refuse_special_file(path: Path) -> None:
    """Raise RequestRefused for a pipe or a device, which would be read for ever. Raises OSError if there is nothing."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise RequestRefused(
            422, f"{path} is no regular file ({stat.filemode(mode)}): give the path of a safetensors file"
        )


def _refuse_not_finite(tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise RequestRefused(
                422, f"the weight {name} contains NaN or infinity: the server goes on with its old weights"
            )
