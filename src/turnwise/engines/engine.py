"""The engine protocol, publishing of weights, and the adapter that batches requests.

Token ids go in, sampled token ids and log-probabilities come out. Batching, caching, routing and retries are behind one method.
A `WeightPublisher` gives the engine the weights that a learner has changed: its implementation knows how weights travel (shared
memory, disk, a collective operation), and the training loop knows only `publish`.

`Batched` sends the requests of all running conversations as one batch, for deterministic runs and for engines that accept
complete batches only. A batch starts when every running conversation has sent a request. Invariant: its order is the order of
the conversations, so no result depends on timing; all conversations wait for the slowest one. The rollout loop is the same as
without the adapter. An engine knows nothing of messages, tools, rewards or groups.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from turnwise.types import Completion, Request
from turnwise.user_code.calls import waiting_for_others


class TokenSampler(Protocol):
    """Continues token sequences. Many `generate` calls run at the same time, all in one event loop."""

    async def generate(self, request: Request) -> Completion:
        """Continue `request.token_ids`. A cancelled call frees its resources.

        Raises EngineError if the engine has stopped, or if it cannot serve the request.
        """
        ...

    def release(self, conversation: str) -> None:
        """Free the KV cache of a conversation that has ended. An unknown conversation is not an error."""
        ...


class Engine(TokenSampler, Protocol):
    """Samples the tokens of the conversations in this process, with weights that a learner may change."""

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with now."""
        ...

    async def start(self) -> None:
        """Wait until the engine can generate. Called before the first request.

        Raises EngineError if the engine cannot be started.
        """
        ...

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        """Sample with these weights from now on, and drop the KV cache of the previous weights.

        `weights` maps the names of the model's state dict to tensors; None means that the engine shares
        the trainer's parameters, which were updated in place.
        """
        ...

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        """How the weights of a learner reach this engine."""
        ...

    async def close(self) -> None:
        """Free all resources. A closed engine refuses to generate."""
        ...


@runtime_checkable
class HasContext(Protocol):
    """An engine whose sequences have a longest length. Conversations end there, with the stop reason `context`."""

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence, prompt and completion together, known after `start`; None if there is no limit."""
        ...


def longest_sequence(engine: Engine) -> int | None:
    """The most tokens of a sequence that a started engine takes; None if it has no limit of its own."""
    return engine.context if isinstance(engine, HasContext) else None


@runtime_checkable
class Constrains(Protocol):
    """An engine that may sample under grammars (`Request.constraint`)."""

    @property
    def constrains(self) -> bool:
        """Whether it does. All other engines would ignore a constraint."""
        ...


def can_constrain(engine: Engine) -> bool:
    """Whether an engine samples under grammars."""
    return isinstance(engine, Constrains) and engine.constrains


@runtime_checkable
class ContinuesForms(Protocol):
    """An engine that samples under grammars, and may do so behind a beginning of the turn (`Constraint.before`)."""

    @property
    def continues_forms(self) -> bool:
        """Whether it does."""
        ...


def can_continue_forms(engine: Engine) -> bool:
    """Whether an engine samples under a grammar behind a beginning of the turn, which it has not sampled."""
    return isinstance(engine, ContinuesForms) and engine.continues_forms


class Closes(Protocol):
    """What has resources to free at the end of a run."""

    async def close(self) -> None: ...


C = TypeVar("C", bound=Closes)


@asynccontextmanager
async def closing(engine: C) -> AsyncIterator[C]:
    """A context at whose end the engine, or the runner of conversations, is closed."""
    try:
        yield engine
    finally:
        await engine.close()


# Weights: how an engine gets those that a learner has changed

WriteAdapter = Callable[[Path], None]
"""Writes the files of an adapter into an existing directory."""


class WeightSource(Protocol):
    """The part of a learner that publishing needs (`training.learner.Learner`)."""

    @property
    def trains_adapter(self) -> bool:
        """Whether only an adapter is trained."""
        ...

    def trains(self, model: Any) -> bool:
        """Whether the parameters of `model` are those that the learner changes."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The present weights."""
        ...

    def copy_weights(self, model: Any) -> None:
        """Give another model in this process, with the same parameters, the present weights."""
        ...

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """`log_softmax(logits)` of the tokens after the first."""
        ...

    def largest_logit(self, token_ids: Sequence[int]) -> float:
        """The largest absolute logit behind each of the tokens."""
        ...

    def save(self, folder: Path) -> None:
        """Write the adapter into a directory."""
        ...


class WeightPublisher(Protocol):
    """Hands the learner's current weights to the engine."""

    @property
    def asleep(self) -> bool:
        """Whether the engine has given its memory to the trainer, and takes it back in `publish`: all training comes before, and
        whoever trains gives memory back."""
        ...

    async def begin(self, version: int) -> None:
        """Before the first conversation: when it returns, the engine is ready and has the learner's weights as `version`.

        Raises EngineError if the engine cannot be started, or cannot take the weights.
        """
        ...

    async def before_update(self) -> None:
        """Before the first pass of a step with the learner's models: the engine may free memory until `publish`. Without
        `train.max_staleness`, no request is running."""
        ...

    async def publish(self, version: int) -> None:
        """When it returns, the engine samples with the learner's current weights and reports them as `version`.

        Raises EngineError if the engine cannot take them.
        """
        ...


class SharedWeights:
    """For an engine that samples on the learner's own parameters: nothing is copied.

    The engine only learns that its weights have changed in place, and forgets its KV cache. `free_cache` frees what is of no use
    after an update: the KV cache, and copies of weights.
    """

    asleep = False

    def __init__(self, engine: Engine, free_cache: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._free_cache = free_cache

    async def begin(self, version: int) -> None:
        await self._engine.start()

    async def before_update(self) -> None:
        self._free_cache()

    async def publish(self, version: int) -> None:
        await self._engine.load_weights(version)


class CopiedWeights(SharedWeights):
    """For an embedded engine whose model is a copy, because the trained model is divided among several ranks.

    `copy` gives the engine's model the present weights.
    """

    def __init__(self, engine: Engine, copy: Callable[[], None], free_cache: Callable[[], None]) -> None:
        super().__init__(engine, free_cache)
        self._copy = copy

    async def publish(self, version: int) -> None:
        self._copy()
        await super().publish(version)


# Batches: the requests of all running conversations at once


class _Forwards:
    """What an adapter of an engine leaves to the engine: all but the requests."""

    _engine: Engine

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def context(self) -> int | None:
        return longest_sequence(self._engine)

    @property
    def constrains(self) -> bool:
        return can_constrain(self._engine)

    @property
    def continues_forms(self) -> bool:
        return can_continue_forms(self._engine)

    async def start(self) -> None:
        await self._engine.start()

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        await self._engine.load_weights(version, weights)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return self._engine.publisher(learner)

    async def close(self) -> None:
        await self._engine.close()


class Batched(_Forwards):
    """Sends the requests of `conversations` to `engine` in batches. A batch does not wait for released conversations."""

    def __init__(self, engine: Engine, conversations: Iterable[str]) -> None:
        self._engine = engine
        self._order = {conversation: (index, 0) for index, conversation in enumerate(conversations)}
        """The place of a conversation in a batch; an agent's place is behind the conversation that opened it."""
        self._running = set(self._order)
        """Conversations that are not released."""
        self._asked: dict[str, set[str]] = {}
        """By conversation: the agents of the episode whose turns its environment awaits. Their requests stand for its request."""
        self._waiting: dict[str, _Pending] = {}
        """Requests of the next batch, by conversation."""
        self._batch: asyncio.Task[None] | None = None
        """The last batch. The event loop keeps only weak references to tasks."""

    def beside(self, engine: Engine) -> BesideBatched:
        """Another engine for some of the conversations, such as that of a policy of agents: its requests are in the batches."""
        return BesideBatched(self, engine)

    async def generate(self, request: Request) -> Completion:
        return await self.generate_with(self._engine, request)

    async def generate_with(self, engine: TokenSampler, request: Request) -> Completion:
        """The completion of `engine`, sent when the batch starts."""
        pending = _Pending(engine, request)
        self._waiting[request.conversation] = pending
        self._start_if_complete()
        try:
            # time until the batch starts, and from this answer until the last one, does not count for deadlines
            with waiting_for_others():
                await pending.started.wait()
            await pending.finished.wait()
            with waiting_for_others():
                return await pending.completion
        finally:
            self._waiting.pop(request.conversation, None)
            pending.completion.cancel()  # has no effect on a completion that was returned

    def await_agent(self, agent: str, asker: str, number: int) -> None:
        """The environment of the conversation `asker` waits for the next turn of `agent`, number `number` of the episode: a batch
        waits for the agent's request instead of one of the conversation."""
        self._order.setdefault(agent, (self._order.get(asker, (-1, 0))[0], number))
        self._asked.setdefault(asker, set()).add(agent)

    def agent_answered(self, agent: str, asker: str) -> None:
        """The environment goes on: it has the turn, or waits no more."""
        self._asked.get(asker, set()).discard(agent)

    def release(self, conversation: str) -> None:
        self._engine.release(conversation)
        self.forget(conversation)

    def forget(self, conversation: str) -> None:
        """The conversation is over: no batch waits for it."""
        self._running.discard(conversation)
        for agents in self._asked.values():
            agents.discard(conversation)
        self._start_if_complete()

    def _is_ready(self, conversation: str) -> bool:
        """Whether the conversation has sent its request, or all the agents that its environment awaits have."""
        agents = self._asked.get(conversation)
        return conversation in self._waiting or (bool(agents) and all(map(self._is_ready, agents)))

    def _start_if_complete(self) -> None:
        if self._waiting and all(map(self._is_ready, self._running)):
            conversations = sorted(self._waiting, key=lambda conversation: self._order.get(conversation, (-1, 0)))
            batch = [self._waiting[conversation] for conversation in conversations]
            self._waiting = {}
            self._batch = asyncio.get_running_loop().create_task(self._generate_batch(batch))

    async def _generate_batch(self, batch: list[_Pending]) -> None:
        results = await asyncio.gather(*(self._generate(pending) for pending in batch), return_exceptions=True)
        for pending, result in zip(batch, results, strict=True):
            if pending.completion.done():  # cancelled meanwhile
                continue
            if isinstance(result, BaseException):
                pending.completion.set_exception(result)
            else:
                pending.completion.set_result(result)

    async def _generate(self, pending: _Pending) -> Completion:
        pending.started.set()
        try:
            return await pending.engine.generate(pending.request)
        finally:
            pending.finished.set()


class BesideBatched(_Forwards):
    """An engine whose requests are parts of the batches of another one."""

    def __init__(self, batched: Batched, engine: Engine) -> None:
        self._batched = batched
        self._engine = engine

    async def generate(self, request: Request) -> Completion:
        return await self._batched.generate_with(self._engine, request)

    def release(self, conversation: str) -> None:
        self._engine.release(conversation)
        self._batched.forget(conversation)


class _Pending:
    """A request and its progress."""

    def __init__(self, engine: TokenSampler, request: Request) -> None:
        self.engine = engine
        self.request = request
        self.started, self.finished = asyncio.Event(), asyncio.Event()
        """Set when the engine receives the request, and when it has answered it."""
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
