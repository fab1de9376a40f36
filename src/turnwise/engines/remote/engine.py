"""An engine whose tokens are sampled by servers: requests, lost servers and weight updates.

What differs between vLLM, SGLang and others is behind `ServerApi`. This module knows neither routes nor formats.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from turnwise.engines.engine import WeightPublisher, WeightSource, WriteAdapter
from turnwise.engines.remote.http import Failures, HttpServer, ServerFailed, ServerLost
from turnwise.engines.remote.publisher import ProbeOptions, RemoteWeights
from turnwise.engines.remote.servers import (
    JoinedCompletion,
    Probe,
    ProbeAnswer,
    ProbePrompt,
    Replica,
    Replicas,
    ServerApi,
    ServerInfo,
    check_answer,
    check_part,
)
from turnwise.engines.remote.weights import CannotShare, SharedCopies, WeightStore, WeightUpdate
from turnwise.errors import EngineError
from turnwise.types import Completion, Request, Sampling
from turnwise.user_code.calls import waiting_for_others

_MAX_LOSSES = 3
"""How often a request may lose its server without a new token in between. A prompt that kills each server must not go on."""
_MAX_FAILURES = 3
"""How often a request is sent to a server that fails at it and serves other requests meanwhile."""
_MAX_ABORTS = 50
"""How often a server may abort a request without a new token in between."""

_RELEASING = 10.0  # seconds to release a server at the end
T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ServedWeights:
    """The weights of one policy at the servers of an engine."""

    policy: str
    """Its name; empty: the recipe's model."""
    version: int
    update: WeightUpdate | None = None
    """The weights that the servers have; None: those that they were started with."""
    deviation: float | None = None
    """The largest difference of log-probabilities between servers and trainer in the last probe."""


class RemoteEngine:
    """An `Engine` on one or several servers of one kind.

    `files` keeps the weights for the servers; None for an engine whose weights never change. `decode` turns token ids into
    text, for stop texts. `version` is the version of the weights that the servers have after their start. `context` is the number
    of tokens that a conversation of the recipe may have, None if it is not known: fewer at the servers are reported.
    """

    def __init__(
        self,
        api: ServerApi,
        replicas: Sequence[Replica],
        *,
        decode: Callable[[Sequence[int]], str],
        files: WeightStore | None = None,
        version: int = 0,
        patience: float = 60.0,
        context: int | None = None,
        probe: ProbeOptions | None = None,
        sleeps: bool = False,
        constrains: bool = False,
    ) -> None:
        self._weights = [ServedWeights("", version)]
        """Of all policies at the servers, first of the recipe's model."""
        self.probe = probe
        """How the servers are probed after an update; None: not at all."""
        self.sleeps = sleeps
        """Whether the servers free their memory while the model is trained."""
        self.constrains = constrains
        """Whether the servers sample under grammars."""
        self.info: ServerInfo | None = None
        """What the servers serve; None before the start."""
        self._api = api
        self._replicas = Replicas(replicas, prepare=self._prepare, patience=patience)
        self._decode = decode
        self._files = files
        self._open = asyncio.Event()
        """Set while requests may be sent: not during a weight update."""
        self._open.set()
        self._update = asyncio.Lock()
        self._closed = False
        self._context = context

    @property
    def _main(self) -> ServedWeights:
        """The weights of the recipe's model."""
        return self._weights[0]

    @property
    def version(self) -> int:
        """The version of the weights that the servers sample with."""
        return self._main.version

    @property
    def deviation(self) -> float | None:
        """The largest difference of log-probabilities between servers and trainer in the last probe."""
        return self._main.deviation

    @property
    def servers(self) -> Sequence[str]:
        """The addresses of the servers."""
        return [replica.server.url for replica in self._replicas.all]

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence that the servers take; None before the start."""
        return None if self.info is None else self.info.context

    async def start(self) -> None:
        """Start the servers and wait until they are ready. `generate` does so if it was not called. Raises EngineError."""
        await self._replicas.start()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`. A request whose server is lost goes on at another server, after the tokens that are known; one
        with a grammar begins again."""
        return await self._generate(request, self._main)

    def with_policy(self, name: str, version: int) -> ServedPolicy:
        """An engine for a further policy: an adapter of its own at the same servers. `version` is the number of its weights.
        Before its first update it samples as the weights that the servers were started with."""
        weights = ServedWeights(name, version)
        self._weights.append(weights)
        return ServedPolicy(self, weights)

    async def _generate(self, request: Request, weights: ServedWeights) -> Completion:
        """`generate`, by one of the policies."""
        request = replace(request, policy=weights.policy) if weights.policy else request
        joined: JoinedCompletion | None = None
        whole = request.constraint is not None  # a server begins a grammar with the first token that it samples
        losses = aborts = 0
        failures = Failures()
        while True:
            replica = await self._ready_replica(request.conversation)
            joined = joined or JoinedCompletion(request, self._max_tokens(request))
            if whole:
                joined.truncate(0)
            known = len(joined.token_ids)
            try:
                await self._sample(replica, joined, weights)
            except (ServerLost, ServerFailed) as error:
                progress = not whole and len(joined.token_ids) > known
                if isinstance(error, ServerFailed) and await replica.server.healthy(replica.health_path):
                    failures = Failures() if progress else failures
                    await self._wait_after(failures, replica, error)
                    self._replicas.release(request.conversation)  # another server may be better
                else:
                    losses = 1 if progress else losses + 1
                    if losses >= _MAX_LOSSES:
                        raise EngineError(
                            f"the request lost its server {losses} times without a new token: {error}"
                        ) from error
                    self._replicas.lose(replica)
            if joined.versions and max(joined.versions) > weights.version:
                with waiting_for_others():
                    await self._open.wait()  # an update is not decided yet
                joined.drop_versions_above(weights.version)
            joined.close_if_complete(self._decode)
            if joined.finish is not None:
                replica.failed_starts, replica.served = 0, time.monotonic()
                assert self.info is not None
                return joined.completion(self.info.logprob_kind)
            aborts = 0 if not whole and len(joined.token_ids) > known else aborts + 1
            if aborts > _MAX_ABORTS:
                raise EngineError(f"{replica.name} aborted a request {aborts} times without sampling a token")
            if aborts:
                await asyncio.sleep(0.1)

    async def _wait_after(self, failures: Failures, replica: Replica, error: ServerFailed) -> None:
        """Wait until a request may be sent again at which a healthy server has failed. The pause does not count for the time
        limits of the conversation.

        Raises EngineError if the server has failed for too long, or fails at this request and serves others.
        """
        if not error.may_pass:
            raise error
        pause = failures.pause(replica.server.limits.failing)
        if pause is None or (failures.count >= _MAX_FAILURES and replica.served > failures.first):
            raise EngineError(f"{error}{failures.text}") from error
        if failures.count == 1:
            _log.warning("%s; requests are sent again for %g s", error, replica.server.limits.failing)
        with waiting_for_others():
            await asyncio.sleep(pause)

    async def _repeated(self, replica: Replica, call: Callable[[], Awaitable[T]]) -> T:
        """The result of a call of a server, which is repeated if the server fails and stays healthy. Raises EngineError."""
        failures = Failures()
        while True:
            try:
                return await call()
            except ServerFailed as error:
                if not (error.may_pass and await replica.server.healthy(replica.health_path)):
                    raise
                pause = failures.pause(replica.server.limits.failing)
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    async def _ready_replica(self, conversation: str) -> Replica:
        """The server of a conversation, after an update that is going on.

        Updates and restarts of servers take minutes with large models. They do not count for the time limits of the
        conversation.
        """
        with waiting_for_others():
            await self._open.wait()
            if self._closed:
                raise EngineError("the engine is closed: it takes no more requests")
            return await self._replicas.of(conversation)

    def release(self, conversation: str) -> None:
        self._replicas.release(conversation)

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        """See `Engine.load_weights`. `weights` must be the complete state dict; None only sets the version."""
        await self.update(version, weights)

    async def update(
        self, version: int, weights: Mapping[str, Any] | WriteAdapter | None, probe: Probe | None = None
    ) -> None:
        """Give the servers other weights: a state dict, an adapter on the weights that the servers were started with (a function
        that writes its files into a directory), or None for the same weights with another version.

        With `probe`, the log-probabilities of the servers are compared with those of the trainer. If a server cannot load the
        weights, or has other log-probabilities, all servers get the previous weights again, the version stays, and EngineError
        is raised. Requests that are running go on; those that have sampled with rejected weights repeat these tokens.
        """
        await self._update_of(self._main, version, weights, probe)

    async def _update_of(
        self,
        of: ServedWeights,
        version: int,
        weights: Mapping[str, Any] | WriteAdapter | None,
        probe: Probe | None,
    ) -> None:
        """`update`, for one of the policies."""
        await self._replicas.start()  # which decides how the weights are kept
        update = None
        if callable(weights):  # an adapter is small, and its trainer may belong to this thread
            update = self._write(version, weights)
        elif weights is not None:
            # requests go on meanwhile; the trainer does not change its weights before this method returns
            update = await asyncio.to_thread(self._write, version, weights)
        if update is not None:
            update = replace(update, policy=of.policy)
        try:
            async with self._updating():
                if update is None:
                    await asyncio.gather(
                        *(self._give(replica, None) for replica in self._replicas.all if replica.asleep)
                    )
                    if of is self._main:  # which the servers label
                        await self._on_all(lambda server: self._api.label(server, version))
                    await self._compare(of, probe, version)
                    if of.update is not None:
                        of.update = replace(of.update, version=version)
                else:
                    await self._replace(of, update, probe)
                of.version = version
        finally:
            if update is not None:
                update.live.clear()  # the trainer goes on, and changes them
                if update is not of.update and self._files is not None:
                    self._files.discard(update)  # it was not taken over

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        return RemoteWeights(self, learner, self.probe, sleeper=self if self.sleeps else None)

    async def answer_probe(self, probe: ProbePrompt) -> list[ProbeAnswer]:
        """What each server samples behind the prompt of a probe with the present weights, for a trainer in another process, which
        checks the answers. Raises EngineError."""
        async with self._updating():
            return await self._answers(self._main, probe, self.version)

    async def sleep(self) -> None:
        """Free the memory of the servers' devices until the next `update`. No request may be running."""

        async def sleep(replica: Replica) -> None:
            if not replica.ready:
                self._replicas.lose(replica)  # until the update
                return
            try:
                await self._repeated(replica, partial(self._api.sleep, replica.server))
                replica.asleep = "all"
            except ServerLost:
                self._replicas.lose(replica)

        self._open.clear()
        await self._replicas.stop_restoring()  # a server that is started in the meantime would take all its memory
        await asyncio.gather(*map(sleep, self._replicas.all))

    async def close(self) -> None:
        self._closed = True
        self._open.set()
        await self._replicas.stop_restoring()
        for replica in self._replicas.all:
            if replica.claimed and replica.process is None:  # also if it did not become ready
                await self._release(replica)
        self._api.close()
        await self._replicas.close()
        if self._files is not None:
            self._files.close()

    async def _release(self, replica: Replica) -> None:
        """Give up the right to change a server's weights, for the next trainer."""
        try:
            async with asyncio.timeout(_RELEASING):
                await self._api.release(replica.server)
        except (EngineError, TimeoutError) as error:
            reason = str(error) or f"no answer within {_RELEASING:g} s"
            _log.warning("%s was not released: %s", replica.name, reason)

    # one request

    async def _sample(self, replica: Replica, joined: JoinedCompletion, weights: ServedWeights) -> None:
        """Send a request for the rest of a completion, and add its parts.

        A server reports the versions of tokens at the end of a request. If the server is lost before, and the weights changed
        meanwhile, only the tokens from before the change are kept: the versions of the others are not known.
        """
        assert self.info is not None
        first, version = len(joined.token_ids), weights.version
        certain = first
        replica.running += 1
        complete = False
        try:
            async with aclosing(self._api.sample(replica.server, joined.next_request(), version)) as parts:
                async for part in parts:
                    check_part(replica.name, part, vocab_size=self.info.vocab_size, room=joined.room)
                    joined.add(part, version)
                    if weights.version == version and self._open.is_set():
                        certain = len(joined.token_ids)
                    if part.finish is not None:
                        complete = True
                        return
            raise ServerLost(f"{replica.name} ended its answer without a finish reason")
        finally:
            replica.running -= 1
            if not complete:
                joined.truncate(certain)

    def _max_tokens(self, request: Request) -> int:
        """The most tokens of the completion. Raises EngineError if the request can never be served."""
        assert self.info is not None
        info, length, sampling = self.info, len(request.token_ids), request.sampling
        if request.constraint is not None and request.constraint.before:
            raise EngineError(
                f"the turn begins with {request.constraint.before[:80]!r}, which was not sampled, and has a form: a server "
                f"begins a grammar with the first token that it samples. Leave one of the two out, or use engine.name=local"
            )
        if not length:
            raise EngineError(
                "the prompt is empty: it must have at least one token, such as the token that begins a text"
            )
        if min(request.token_ids) < 0 or max(request.token_ids) >= info.vocab_size:
            raise EngineError(
                f"the prompt contains token ids from {min(request.token_ids)} to {max(request.token_ids)}; the model has 0 to "
                f"{info.vocab_size - 1}. The tokenizer must be the model's own"
            )
        if sampling.max_tokens < 1 or sampling.temperature < 0:
            raise EngineError(
                f"max_tokens is {sampling.max_tokens} and temperature {sampling.temperature}: max_tokens must be at least 1, "
                "and temperature must not be negative (0 is greedy)"
            )
        if length >= info.context:
            raise EngineError(
                f"the prompt has {length} tokens and the context {info.context}: no token can be sampled after it. "
                "Shorten the conversation (limits.context), or raise the context of the server"
            )
        return min(sampling.max_tokens, info.context - length)

    # weights

    @asynccontextmanager
    async def _updating(self) -> AsyncIterator[None]:
        """A context in which no request is sent, and in which all servers are ready."""
        async with self._update:
            await self._replicas.all_ready()
            self._open.clear()
            try:
                yield
            finally:
                self._open.set()

    def _write(self, version: int, weights: Mapping[str, Any] | WriteAdapter) -> WeightUpdate:
        if self._files is None:
            raise EngineError(f"this {self._api.name} engine was created without weight updates")
        if callable(weights):
            return self._files.write_adapter(version, weights)
        return self._files.write(version, weights)

    async def _replace(self, of: ServedWeights, update: WeightUpdate, probe: Probe | None) -> None:
        """Give all servers other weights of a policy. If one of them fails, all get the previous weights again."""
        assert self._files is not None
        changed: list[Replica] = []

        async def change(replica: Replica) -> None:
            changed.append(replica)
            try:
                await self._load(replica, update)
            except ServerLost:
                self._replicas.lose(replica)
                await self._replicas.restore(replica)
                await self._load(replica, update)

        try:
            if update.tensors is None:
                # all of them, also if one fails: only then can they be given back
                results = await asyncio.gather(*map(change, self._replicas.all), return_exceptions=True)
                for result in results:
                    if isinstance(result, BaseException):
                        raise result
            else:  # each server has a group of its own with this process, and broadcasts in two groups must not overlap
                for replica in self._replicas.all:
                    await change(replica)
            await self._compare(of, probe, update.version)
        except BaseException as error:
            if of.update is None or of.update.tensors is None:
                await asyncio.gather(*(self._give_back(replica, of) for replica in changed))
            else:  # broadcasts, as above
                for replica in changed:
                    await self._give_back(replica, of)
            if isinstance(error, EngineError):
                name = f" of the policy {of.policy!r}" if of.policy else ""
                raise EngineError(
                    f"the weights of version {update.version}{name} were not taken over; the engine goes on with version "
                    f"{of.version}: {error}"
                ) from error
            raise
        previous, of.update = of.update, update
        if previous is not None and previous.path is not None:  # a broadcast has no files
            self._files.discard(previous)

    async def _load(self, replica: Replica, update: WeightUpdate) -> None:
        load = partial(self._give, replica, update)
        # a broadcast is not repeated: the server's workers may still wait for the first one
        await (self._repeated(replica, load) if update.tensors is None else load())
        replica.server.note_progress()

    async def _give(self, replica: Replica, update: WeightUpdate | None, *, abort: bool = False) -> None:
        """Load weights into a server; None: those that it has. A server that sleeps takes the memory of its cache after that."""
        server = replica.server
        if replica.asleep == "all":
            await self._api.wake(server, "weights")
            replica.asleep = "cache"
        await self._api.pause(server, abort=abort)
        if update is not None:
            await self._api.load(server, update)
        if replica.asleep == "cache":
            await self._api.wake(server, "cache")
            replica.asleep = None
        await self._api.resume(server)

    async def _compare(self, of: ServedWeights, probe: Probe | None, version: int) -> None:
        """Raise EngineError if a server's log-probabilities of a policy are not those of the trainer."""
        if probe is not None:
            for answer in await self._answers(of, probe, version):
                of.deviation = check_answer(answer, probe, version)

    async def _answers(self, of: ServedWeights, probe: ProbePrompt, version: int) -> list[ProbeAnswer]:
        """What each server samples of a policy behind the prompt of a probe. Raises EngineError."""
        assert self.info is not None
        count = min(probe.tokens, self.info.context - len(probe.prompt))
        request = Request(
            conversation="probe",
            token_ids=probe.prompt,
            sampling=Sampling(max_tokens=count),
            seed=version,
            policy=of.policy,
        )

        async def ask(replica: Replica) -> ProbeAnswer:
            joined = await self._repeated(replica, partial(self._sample_probe, replica, request, version))
            return ProbeAnswer(
                server=replica.name,
                token_ids=list(joined.token_ids),
                logprobs=list(joined.logprobs),
                versions=list(joined.versions),
            )

        return await asyncio.gather(*map(ask, self._replicas.all))

    async def _sample_probe(self, replica: Replica, request: Request, version: int) -> JoinedCompletion:
        """What a server samples for one request, without a second one."""
        assert self.info is not None
        joined = JoinedCompletion(request, request.sampling.max_tokens)
        joined.next_request()
        async with aclosing(self._api.sample(replica.server, request, version)) as parts:
            async for part in parts:
                check_part(replica.name, part, vocab_size=self.info.vocab_size, room=joined.room)
                joined.add(part, version)
        return joined

    async def _give_back(self, replica: Replica, of: ServedWeights) -> None:
        """The present weights of a policy for a server whose update has failed or was rejected. Running requests start again."""
        try:
            if of.update is None and replica.process is not None:
                raise ServerLost("a restart gives back the weights from before the first update")
            await self._give(replica, of.update, abort=True)
        except EngineError:
            self._replicas.lose(replica)

    async def _prepare(self, replica: Replica) -> None:
        """Give a server that was started or found again the present weights, and ask it what it serves."""
        await self._repeated(replica, partial(self._prepare_once, replica))

    async def _prepare_once(self, replica: Replica) -> None:
        if self._files is not None:
            await self._api.identify(replica.server)
            await self._claim(replica)
            if replica.process is None:  # a trainer that was killed during an update has left it paused
                await self._api.resume(replica.server)
        info = await self._api.info(replica.server)
        if self.constrains:
            await self._api.check_grammar(replica.server)
        if self.info is not None and info != self.info:
            raise EngineError(
                f"{replica.name} serves another model than the other servers, or with other options: {info} instead of "
                f"{self.info}. All servers of engine.url must be equal"
            )
        if self.info is None and self._context is not None and info.context < self._context:
            _log.warning(
                "%s takes %d tokens, and conversations of this recipe may have %d (limits.context, or what the model allows): "
                "conversations end at %d tokens (stop: context). Start the server with a longer context to avoid this",
                replica.name,
                info.context,
                self._context,
                info.context,
            )
        self.info = info
        if self._files is not None:
            if self._main.update is None:
                await self._api.label(replica.server, self.version)
            for weights in self._weights:
                if weights.update is not None:
                    await self._load(replica, weights.update)

    async def _claim(self, replica: Replica) -> None:
        """Become the owner of a server's weights."""
        replica.claimed = True  # at once: a request without an answer may have reached the server
        try:
            await self._api.claim(replica.server)
        except ServerLost:
            raise
        except CannotShare as problem:
            if isinstance(self._files, SharedCopies):
                if self._files.instead is None or self._main.update is not None:
                    raise  # the present weights are no file
                _log.warning("%s. Weights are sent as files", problem)
                self._files = self._files.instead
        except EngineError:
            replica.claimed = False
            raise

    async def _on_all(self, call: Callable[[HttpServer], Awaitable[None]]) -> None:
        await asyncio.gather(
            *(self._repeated(replica, partial(call, replica.server)) for replica in self._replicas.all)
        )


class ServedPolicy:
    """An `Engine` for a further policy at the servers of a `RemoteEngine` (`RemoteEngine.with_policy`)."""

    def __init__(self, engine: RemoteEngine, weights: ServedWeights) -> None:
        self._engine, self._weights = engine, weights
        self.constrains = engine.constrains
        """Whether the servers sample under grammars."""

    @property
    def version(self) -> int:
        """The version of the weights that the servers sample with."""
        return self._weights.version

    @property
    def context(self) -> int | None:
        """The most tokens of a sequence that the servers take; None before the start."""
        return self._engine.context

    async def start(self) -> None:
        """See `RemoteEngine.start`."""
        await self._engine.start()

    async def generate(self, request: Request) -> Completion:
        """See `RemoteEngine.generate`."""
        return await self._engine._generate(request, self._weights)

    def release(self, conversation: str) -> None:
        self._engine.release(conversation)

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        """See `RemoteEngine.load_weights`."""
        await self.update(version, weights)

    async def update(
        self, version: int, weights: Mapping[str, Any] | WriteAdapter | None, probe: Probe | None = None
    ) -> None:
        """See `RemoteEngine.update`. Nothing of the other policies changes."""
        await self._engine._update_of(self._weights, version, weights, probe)

    def publisher(self, learner: WeightSource) -> WeightPublisher:
        """The publisher of the recipe's model, which comes first, lets the servers sleep and wakes them."""
        return RemoteWeights(self, learner, self._engine.probe)

    async def close(self) -> None:
        """The servers are those of the other engine, which ends them."""
