"""The trainer's side of the rollout workers: a `ConversationRunner` that also passes single requests on (`TokenSampler`).

A conversation or a request whose worker is lost runs again from its beginning, with the same seed, on another worker. The pool
starts the workers, gives them weights, notices lost workers and starts them again; it does not know conversations. Which
worker runs a conversation is a pure function of the numbers of conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.chat.media import MediaProcessor
from turnwise.chat.media_parts import has_media
from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.engine import TokenSampler, WeightPublisher, WeightSource, WriteAdapter
from turnwise.engines.remote.publisher import ProbeOptions, RemoteWeights
from turnwise.engines.remote.servers import Probe, ProbeAnswer, ProbePrompt, check_answer
from turnwise.errors import ConfigError, EngineError, Failed, boundary
from turnwise.options.engines import ClusterSection
from turnwise.ray_workers import ray_api
from turnwise.ray_workers.ray_api import MakeWorker, WorkerLost, answer
from turnwise.ray_workers.rollout_worker import (
    SentWeights,
    WorkerInfo,
    adapter_files,
    add_tensors,
    parts_of,
    unpickled,
    with_files,
)
from turnwise.rollout.context import ConversationContext, Runner
from turnwise.rollout_server.wire import take_over
from turnwise.types import Completion, Failure, Request, Sampling, Trajectory

# the choice of a worker

_SLACK, _FACTOR = 4, 1.5
"""A worker is overloaded if it runs more conversations than `_FACTOR` times those of the least busy worker, and `_SLACK` more."""


def choose_worker(running: Sequence[int | None], *, most: int, own: int | None) -> int | None:
    """The index of the worker that runs the next conversation of a group; None if there is no place.

    `running` are the conversations that each worker runs; None for a worker that is not ready. A worker runs at most `most`.
    `own` is the worker that has run the last conversation of the group: its engine has the prefix that the conversations of a
    group share. It is chosen again, unless it is overloaded, full or not ready. Else the least busy worker is chosen.

    Example: `choose_worker([3, 1, None], most=10, own=0)` is 0, and `choose_worker([9, 1, None], most=10, own=0)` is 1.
    """
    places = {index: count for index, count in enumerate(running) if count is not None and count < most}
    if not places:
        return None
    least = min(places, key=lambda index: (places[index], index))
    if own is not None and own in places and places[own] <= _FACTOR * places[least] + _SLACK:
        return own
    return least


# the pool

_FIRST_STARTS = 3
"""How often a worker is started at the beginning of a run."""
_MAX_STARTS = 5
"""Successful starts of a worker without a finished conversation in between."""
_NOTICE = 10.0
"""Seconds of silence while a run waits for its workers."""
_FIRST_PAUSE, _LONGEST_PAUSE = 2.0, 60.0
"""Seconds after a failed start: the pause is doubled after each further failure."""
_SIGNS = 4
"""How often a worker is asked for a sign of life in the time after which it is lost."""
_STOP_SECONDS = 15.0
"""The time that workers have to close their engines and environments."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Worker:
    """A worker as the trainer sees it. After a loss, it has another actor."""

    number: int
    actor: Any = None
    """The handle of the actor; None before the first start."""
    ready: bool = False
    """Whether it has the present weights and takes conversations."""
    running: int = 0
    """Conversations."""
    starts: int = 0
    """Successful starts since the last finished conversation."""
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    problem: str | None = None
    """Why it is not started again; None if it runs or will be started."""

    @property
    def name(self) -> str:
        return f"rollout worker {self.number}"


class WorkerPool:
    """The workers. `make` gives the function that makes the worker with a number in its process. `check` raises ConfigError if a
    worker has loaded something else than the trainer."""

    def __init__(
        self, cluster: ClusterSection, make: Callable[[int], MakeWorker], check: Callable[[WorkerInfo], None]
    ) -> None:
        self.cluster, self.needs = cluster, cluster.workers
        self.workers = [Worker(number) for number in range(self.needs.count)]
        self.losses = 0
        """How many workers were lost."""
        self._make = make
        self._check = check
        self._weights: SentWeights | None = None
        """The present weights, by their references in the object store, which keep them there; None before the first weights."""
        self._groups: dict[str, tuple[Worker, int]] = {}
        """For each group with running conversations: the worker of the last one, and their number."""
        self._waiting: deque[asyncio.Future[None]] = deque()
        """Conversations that wait for a place."""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers and wait until they are ready. Raises EngineError or ConfigError."""
        if self._tasks:
            return
        notices = asyncio.create_task(self._tell_what_is_missing())
        try:
            async with asyncio.TaskGroup() as starts:
                for worker in self.workers:
                    starts.create_task(self._start_first(worker))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            notices.cancel()
        self._tasks = [asyncio.create_task(self._keep(worker)) for worker in self.workers]

    @contextlib.asynccontextmanager
    async def place(self, group: str) -> AsyncIterator[Worker]:
        """A place for a conversation of a group on a ready worker. Raises EngineError if no worker becomes ready."""
        worker = await self._place(group)
        worker.running += 1
        self._groups[group] = (worker, self._groups.get(group, (worker, 0))[1] + 1)
        try:
            yield worker
        finally:
            worker.running -= 1
            last, count = self._groups[group]
            if count == 1:
                del self._groups[group]
            else:
                self._groups[group] = (last, count - 1)
            self._wake(1)

    def lose(self, worker: Worker, actor: Any, reason: str) -> None:
        """Note that an actor of a worker is lost, and start another one. Several conversations report the same loss."""
        if not worker.ready or worker.actor is not actor:
            return
        worker.ready = False
        self.losses += 1
        worker.lost.set()
        _log.warning("%s is lost (%s); its conversations run again on another worker", worker.name, reason)
        ray_api.kill(actor)

    async def publish(
        self,
        weights: SentWeights,
        probe: ProbePrompt | None = None,
        check: Callable[[ProbeAnswer], object] | None = None,
    ) -> None:
        """Give all workers other weights, by their references in the object store.

        With `probe`, `check` is called with the answer of each server of the workers. If a worker refuses the weights, or `check`
        raises EngineError, all workers get the previous weights again, and EngineError is raised. A worker that is lost meanwhile
        gets them when it is started again.
        """
        previous, self._weights = self._weights, weights
        try:
            answers = await self._load_all(weights, probe)
            if check is not None:
                for answered in answers:
                    check(answered)
        except (EngineError, ConfigError):
            self._weights = previous
            if previous is not None:
                await self._load_all(previous)
            raise

    async def close(self) -> None:
        """Let the workers close their engines and environments, and end them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ready = [worker for worker in self.workers if worker.ready]
        for worker in ready:
            worker.ready = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STOP_SECONDS):
                stopping = [answer(worker.actor.stop.remote()) for worker in ready]
                for result in await asyncio.gather(*stopping, return_exceptions=True):
                    if isinstance(result, EngineError):
                        _log.info("a rollout worker did not stop: %s", result)
        for worker in self.workers:
            if worker.actor is not None:
                ray_api.kill(worker.actor)

    async def _load_all(self, weights: SentWeights, probe: ProbePrompt | None = None) -> list[ProbeAnswer]:
        """The answers to a probe. Raises EngineError if a worker refuses the weights."""
        ready = [worker for worker in self.workers if worker.ready]
        loads = (self._load(worker, weights, probe) for worker in ready)
        answers: list[ProbeAnswer] = []
        for result in await asyncio.gather(*loads, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
            answers += result
        return answers

    async def _load(self, worker: Worker, weights: SentWeights, probe: ProbePrompt | None) -> list[ProbeAnswer]:
        actor = worker.actor
        try:
            return await answer(actor.load_weights.remote(weights, probe))
        except WorkerLost as error:
            self.lose(worker, actor, str(error))
            return []

    async def _place(self, group: str) -> Worker:
        """A ready worker with a free place."""
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        while True:
            own = self._groups.get(group)
            chosen = choose_worker(
                [worker.running if worker.ready else None for worker in self.workers],
                most=self.needs.max_concurrent,
                own=None if own is None else own[0].number,
            )
            if chosen is not None:
                return self.workers[chosen]
            if any(worker.ready for worker in self.workers):
                deadline = None  # all workers are full: a conversation will end
            elif all(worker.problem is not None for worker in self.workers):
                raise EngineError(f"no rollout worker is left: {self.workers[0].problem}")
            else:
                deadline = deadline or loop.time() + self.needs.start_timeout
            waiting = loop.create_future()
            self._waiting.append(waiting)
            try:
                async with asyncio.timeout_at(deadline):
                    await waiting
            except TimeoutError:
                raise EngineError(
                    f"no rollout worker was ready for cluster.workers.start_timeout={self.needs.start_timeout:g} s; each "
                    f"needs {ray_api.needs_text(self.needs)}, and the cluster has free: {ray_api.free_resources()}"
                ) from None
            finally:
                if not waiting.done():
                    waiting.cancel()

    def _wake(self, count: int) -> None:
        """Let `count` waiting conversations look for a place."""
        while count and self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.done():
                waiting.set_result(None)
                count -= 1

    async def _tell_what_is_missing(self) -> None:
        """Say from time to time which workers a run waits for."""
        pause = _NOTICE
        while True:
            await asyncio.sleep(pause)
            missing = [str(worker.number) for worker in self.workers if not worker.ready]
            _log.warning(
                "waiting for %d of %d rollout workers (%s), at most cluster.workers.start_timeout=%g s: each needs %s, and the "
                "cluster has free: %s",
                len(missing),
                len(self.workers),
                ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else ""),
                self.needs.start_timeout,
                ray_api.needs_text(self.needs),
                ray_api.free_resources(),
            )
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def _start_first(self, worker: Worker) -> None:
        """Start a worker at the beginning of a run. Its machine may be lost meanwhile: then it is started on another one."""
        for attempt in range(_FIRST_STARTS):
            try:
                return await self._start(worker)
            except WorkerLost as error:
                if attempt == _FIRST_STARTS - 1:
                    raise
                _log.warning("%s was lost at its start and is started again: %s", worker.name, error)
                await asyncio.sleep(_FIRST_PAUSE)

    async def _keep(self, worker: Worker) -> None:
        """Watch a worker, and start it again after each loss."""
        while True:
            await self._watch(worker)
            pause = _FIRST_PAUSE
            while not worker.ready:
                if worker.starts >= _MAX_STARTS:
                    worker.problem = f"{worker.name} was started {_MAX_STARTS} times without finishing a conversation"
                    _log.warning("%s", worker.problem)
                    self._wake(len(self._waiting))
                    return
                try:
                    await self._start(worker)
                except (EngineError, ConfigError) as error:
                    _log.warning("%s was not started, and is tried again in %g s: %s", worker.name, pause, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)

    async def _watch(self, worker: Worker) -> None:
        """Ask a ready worker for signs of life until it is lost."""
        actor, seconds = worker.actor, self.cluster.heartbeat
        while worker.ready:
            try:
                async with asyncio.timeout(seconds):
                    await answer(actor.ping.remote())
            except TimeoutError:
                self.lose(worker, actor, f"no sign of life for cluster.heartbeat={seconds:g} s")
            except EngineError as error:
                self.lose(worker, actor, str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds / _SIGNS):
                    await worker.lost.wait()

    async def _start(self, worker: Worker) -> None:
        """Start an actor, and give it the present weights. Raises EngineError or ConfigError."""
        worker.lost.clear()
        started = False
        actor = worker.actor = ray_api.create_actor(worker.name, self._make(worker.number), self.needs)
        try:
            async with asyncio.timeout(self.needs.start_timeout):
                self._check(await answer(actor.start.remote()))
                weights = None
                while weights is not self._weights:  # other weights may be published meanwhile
                    weights = self._weights
                    await answer(actor.load_weights.remote(weights))
            started = True
        except TimeoutError:
            raise EngineError(
                f"{worker.name} was not ready after cluster.workers.start_timeout={self.needs.start_timeout:g} s. It needs "
                f"{ray_api.needs_text(self.needs)}; the cluster has free: {ray_api.free_resources()}"
            ) from None
        finally:
            if not started:
                ray_api.kill(actor)
        worker.starts += 1
        worker.ready = True
        self._wake(self.needs.max_concurrent)


# conversations and requests

_GPU_SECONDS = 60.0
"""How long Ray may take to reserve the GPU of this process."""
_ATTEMPTS = 3
"""How often a conversation is started whose worker is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Which cluster is used, and how."""

    address: str | None
    """None: RAY_ADDRESS, or a cluster on this machine, or a new one."""
    cluster: ClusterSection
    info: WorkerInfo
    """What a worker must have loaded."""
    probe: ProbeOptions | None = None
    """How the workers' servers are probed after an update; None: not at all."""
    gpu: str | None = None
    """The GPU on which this process trains, by its name in CUDA_VISIBLE_DEVICES: Ray gives it to no worker. None: there is none,
    or it belongs to Ray already."""
    takes_gpu: bool = False
    """Whether the engine of a worker would sample on a GPU that the worker sees."""


class RayRollouts:
    """All rollout workers of a run. `make(n)` returns the function that builds worker n; it is called in the worker's process.
    One object serves one event loop."""

    def __init__(self, options: RayOptions, make: Callable[[int], MakeWorker]) -> None:
        self.version = -1
        """The version of the weights that the workers have; -1 before the first weights were sent."""
        self.restarted = 0
        """How many conversations were started again because their worker was lost."""
        self.pool = WorkerPool(options.cluster, make, self._check)
        self._options = options
        self._connected = False
        """Whether this object has made the connection with Ray."""
        self._gpu: Any = None
        """What holds the GPU of this process."""
        self._suspects = asyncio.Lock()
        """Held by a conversation whose workers were lost more than once: if it is the reason, it takes no other such
        conversation with it."""

    async def start(self) -> None:
        """Connect with Ray and start the workers. Raises EngineError or ConfigError."""
        self._connected = ray_api.connect(self._options.address, self._options.cluster.workers) or self._connected
        if self._options.gpu is not None and self._gpu is None:
            self._gpu = await asyncio.to_thread(ray_api.hold_gpu, self._options.gpu, _GPU_SECONDS)
        self._tell_unused_gpus()
        await self.pool.start()

    def _tell_unused_gpus(self) -> None:
        """Log that workers sample on CPUs although GPUs are free."""
        if not self._options.takes_gpu or self._options.cluster.workers.num_gpus > 0:
            return
        if free := ray_api.free_gpus():
            _log.warning(
                "cluster.workers.num_gpus=0: rollout workers sample on CPUs, and the cluster has %d free GPUs. Set "
                "cluster.workers.num_gpus=1, or model.device=cpu",
                free,
            )

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

    async def update(
        self, version: int, weights: Mapping[str, Any] | WriteAdapter | None, probe: Probe | None = None
    ) -> None:
        """Send weights to all workers: all weights, or an adapter (a function that writes its files into a directory).

        With `probe`, the log-probabilities of the workers' servers are compared with those of the trainer. Conversations that run
        go on with the new weights. Raises EngineError; the workers then go on with the previous weights.
        """
        if weights is None:
            raise EngineError("rollout workers have their own copies of the weights: give the weights")
        if callable(weights):  # an adapter is small, and its trainer may belong to this thread
            stored = SentWeights(version=version, adapter=ray_api.put(adapter_files(weights)))
        else:
            # conversations go on meanwhile; the trainer does not change its weights before this method returns
            parts = await asyncio.to_thread(_stored, weights)
            stored = SentWeights(version=version, parts=parts)
        if probe is None:
            await self.pool.publish(stored)
        else:
            await self.pool.publish(stored, probe.question, lambda given: check_answer(given, probe, version))
        self.version = version

    async def close(self) -> None:
        """End the workers, and the connection with Ray if this object has made it."""
        await self.pool.close()
        if self._gpu is not None:
            ray_api.kill(self._gpu)
            self._gpu = None
        if self._connected:
            self._connected = False
            ray_api.disconnect()

    @property
    def sampler(self) -> TokenSampler:
        """A worker answers a single request."""
        return self

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return RemoteWeights(self, learner, self._options.probe)

    def metrics(self) -> Mapping[str, int]:
        """The workers that were lost since the last call, and the conversations that were started again for this reason."""
        lost = {"workers/lost": self.pool.losses, "workers/restarted_conversations": self.restarted}
        self.pool.losses = self.restarted = 0
        return lost

    def context(self, shared: ConversationContext, renderer: Renderer, thinking: Thinking) -> ConversationContext:
        def make_runner(context: ConversationContext) -> Runner:
            async def run(trajectory: Trajectory) -> Trajectory:
                await self.run(trajectory, context.sampling, vision=renderer.vision)
                return trajectory

            return run

        return replace(shared, make_runner=make_runner)

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

        sent = time.time()
        filled = await self._on_worker(
            trajectory.group,
            lambda actor: actor.run.remote(empty, sampling),
            name="the conversation",
            restarted=restarted,
        )
        done = unpickled(filled)
        for each in (done, *done.agents):
            if any(segment.media for segment in each.segments):
                await asyncio.to_thread(add_tensors, each, vision)
        take_over(trajectory, done, sent=sent)

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
                f"a rollout worker has turnwise {info.turnwise}, and the trainer {expected.turnwise}: install the same source "
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


def _stored(weights: Mapping[str, Any]) -> list[Any]:
    """The references of the parts of all weights. No name keeps a part while the next one is made."""
    return list(map(ray_api.put, parts_of(weights)))


def _packed(trajectory: Trajectory) -> bytes:
    """An empty trajectory as bytes, with the files of its row's images. Raises DataError."""
    return pickle.dumps(replace(trajectory, row=with_files(trajectory.row)))
