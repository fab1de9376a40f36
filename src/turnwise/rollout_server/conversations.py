"""Runs the conversations of all clients of a rollout server, with a bounded queue.

Knows the rollout loop and nothing of HTTP. All methods are called in the event loop of the engine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from turnwise.engines.engine import Engine
from turnwise.errors import EngineError
from turnwise.rollout.rollout import RolloutContext, rollout, rollout_groups
from turnwise.rollout_server.metrics import ServerMetrics
from turnwise.rollout_server.wire import ConversationBody, RolloutBody, empty_trajectory, finished_event, with_images
from turnwise.serve.http import RequestRefused
from turnwise.types import Group, Sampling, Trajectory

__all__ = ["HEARTBEAT", "ConversationQueue", "Emit"]

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
            context = replace(context, limits=replace(context.limits, tokens_per_turn=tokens_per_turn))
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
