"""What an engine asks of a server and what it gets back, and several servers with one model.

`ServerApi` is what differs between kinds of servers; vLLM and SGLang have an implementation each. All turns of a conversation
go to the same server, whose prefix cache holds the conversation. If a server died, was restarted, or aborted a request, the
next part of the completion is sampled after the prompt and all tokens that are known; the session sees the joined completion
only.

Invariant: a server's answer is not trusted. A bad one fails its conversation, and not the run. Whether servers have the
trainer's weights is tested with tokens of which both compute log-probabilities; if the servers belong to another process than
the trainer, the question and the answers are sent between them. Knows servers and processes. Does not know messages, routes or
how weights travel.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from turnwise.engines.remote.experts import joined
from turnwise.engines.remote.http import HttpServer, ServerLost
from turnwise.engines.remote.server_process import PortTaken, ServerProcess
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.errors import EngineError
from turnwise.models.grammar import PROBE
from turnwise.models.model_config import rounding_of_logprobs
from turnwise.types import Completion, LogprobKind, Request, Routes, Sampling

# Servers: which of them serves a conversation, and what happens when one of them is lost

_RECHECK = 5.0  # seconds between two checks of a server that was lost and that turnwise did not start
_MAX_RESTARTS = 5
"""Restarts of a process without a finished request in between."""

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Replica:
    """One server."""

    server: HttpServer
    health_path: str
    process: ServerProcess | None = None
    """None for a server that turnwise did not start."""
    elsewhere: Callable[[], tuple[HttpServer, ServerProcess]] | None = None
    """Makes the same server on another port; None for a server that turnwise did not start."""
    ready: bool = False
    """Whether it serves the engine's present weights. False before the start and after a loss."""
    running: int = 0
    """Requests that it is serving."""
    served: float = 0.0
    """When it last finished a request, by `time.monotonic`."""
    asleep: Literal["all", "cache"] | None = None
    """What of its memory on the device the server has freed: all, or all but that of the weights."""
    claimed: bool = False
    """Whether this engine may own the server's weights: it has asked for them, and was not refused."""
    failed_starts: int = 0
    """Starts since the last finished request."""
    checked: float = 0.0
    """When a lost server was last asked whether it is back, by `time.monotonic`."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the server is started or restored."""

    @property
    def name(self) -> str:
        """For messages: the address of the server."""
        return self.server.url if self.process is None else f"{self.process.command.name} ({self.server.url})"


class Replicas:
    """The servers of an engine.

    `prepare` is called with a replica that has been started or found again, and gives it the engine's present weights.
    `patience` is the time in seconds to wait for a server that turnwise did not start.
    """

    def __init__(
        self, replicas: Sequence[Replica], *, prepare: Callable[[Replica], Awaitable[None]], patience: float
    ) -> None:
        self.all = list(replicas)
        self._prepare = prepare
        self._patience = patience
        self._of: dict[str, Replica] = {}
        """The replica of each conversation."""
        self._started = False
        """Whether all servers have been ready once."""
        self._restoring: set[asyncio.Future[None]] = set()
        """Restorations in the background."""

    async def start(self) -> None:
        """Start all processes, and wait until all servers are ready. Does nothing later. Raises EngineError."""
        if self._started:
            return
        for replica in self.all:  # all processes start at the same time
            if replica.process is not None and not replica.process.running:
                replica.process.start()
        results = await asyncio.gather(*(self.restore(replica) for replica in self.all), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        self._started = True

    async def all_ready(self) -> None:
        """Restore all servers that are lost. Raises EngineError if one of them does not become ready."""
        await self.start()
        for replica in self.all:
            await self.restore(replica)

    async def of(self, conversation: str) -> Replica:
        """The ready replica of a conversation: its own, or else the one with the fewest requests.

        Waits for a restart if no replica is ready. Raises EngineError if none becomes ready.
        """
        await self.start()
        own = self._of.get(conversation)
        if own is not None and own.ready:
            return own
        replica = self._least_busy() or await self._any_restored()
        self._of[conversation] = replica
        return replica

    def release(self, conversation: str) -> None:
        """Forget a conversation that has ended."""
        self._of.pop(conversation, None)

    def lose(self, replica: Replica) -> None:
        """Use a replica no more until it is restored. A process that turnwise started is ended.

        Nothing happens while the replica is restored: several requests report the same loss, one after the other.
        """
        if replica.lock.locked():
            return
        replica.asleep = None
        if replica.ready:
            replica.ready = False
            _log.warning("%s is lost; its requests go on at another server or after a restart", replica.name)
        if replica.process is not None:
            replica.process.kill()

    async def restore(self, replica: Replica) -> None:
        """Make a replica ready: start its process if it does not run, wait for it, and give it the present weights.

        Raises EngineError if it does not become ready.
        """
        async with replica.lock:
            if replica.ready:
                return
            if replica.process is not None:
                await self._start_process(replica, replica.process)
            else:
                await self._wait_for(replica)
            await self._prepare(replica)
            replica.ready = True

    async def stop_restoring(self) -> None:
        """Restore no server in the background any more."""
        restoring = list(self._restoring)
        for task in restoring:
            task.cancel()
        await asyncio.gather(*restoring, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections, and end the processes that turnwise started."""
        for replica in self.all:
            replica.ready = False
        await self.stop_restoring()
        await asyncio.gather(*(replica.server.close() for replica in self.all))
        await asyncio.gather(*(replica.process.stop() for replica in self.all if replica.process is not None))

    def _least_busy(self) -> Replica | None:
        """A ready replica with the fewest requests; None if none is ready.

        Conversations that are between two turns count as well, by the number that each replica has been given.
        """
        ready = [replica for replica in self.all if replica.ready]
        if not ready:
            return None
        given = {id(replica): 0 for replica in ready}
        for replica in self._of.values():
            if id(replica) in given:
                given[id(replica)] += 1
        self._recheck_lost()
        return min(ready, key=lambda replica: (given[id(replica)], replica.running))

    def _recheck_lost(self) -> None:
        """Restore lost replicas in the background while others serve."""
        for replica in self.all:
            if not replica.ready and not replica.lock.locked() and time.monotonic() - replica.checked > _RECHECK:
                replica.checked = time.monotonic()
                self._in_background(asyncio.ensure_future(self.restore(replica)))

    def _in_background(self, task: asyncio.Future[None]) -> None:
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)
        task.add_done_callback(_log_failure)

    async def _any_restored(self) -> Replica:
        """The first replica that becomes ready. Raises the EngineError of the first replica if none does."""
        tasks = [asyncio.ensure_future(self.restore(replica)) for replica in self.all]
        try:
            pending = set(tasks)
            while pending:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                if (replica := next((replica for replica in self.all if replica.ready), None)) is not None:
                    return replica
        finally:
            for task in tasks:
                if len(self.all) > 1 and not task.done():
                    self._in_background(task)  # it goes on restoring its replica
                elif not task.done():
                    task.cancel()
        for task in tasks:
            if (error := task.exception()) is not None:
                raise EngineError(str(error)) from error
        raise EngineError(f"{self.all[0].name} was lost directly after its start")

    async def _start_process(self, replica: Replica, process: ServerProcess) -> None:
        if not process.running:
            replica.failed_starts += 1
            if replica.failed_starts > _MAX_RESTARTS:
                raise EngineError(
                    f"{replica.name} has died {_MAX_RESTARTS} times without finishing a request; it is not started "
                    f"again{process.log_tail()}"
                )
            if process.starts:
                _log.warning("%s is restarted", replica.name)
            process.kill()  # what is left of the last start
            await asyncio.to_thread(process.wait_for_end)  # its port and its memory are free then
            process.start()
        try:
            await process.wait_until(lambda: replica.server.healthy(replica.health_path))
        except PortTaken as error:
            if replica.elsewhere is None:
                raise
            _log.warning("%s. It is started on another port", error)
            await replica.server.close()
            replica.server, replica.process = replica.elsewhere()
            await self._start_process(replica, replica.process)

    async def _wait_for(self, replica: Replica) -> None:
        deadline = time.monotonic() + self._patience
        while not await replica.server.healthy(replica.health_path):
            if time.monotonic() > deadline:
                raise ServerLost(
                    f"there is no server at {replica.server.url} (GET {replica.health_path} was tried for "
                    f"{self._patience:g} s): start it, or correct engine.url"
                )
            await asyncio.sleep(0.5)


def _log_failure(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("%s", error)


# Parts: what a server has sampled before it died, was restarted, or aborted the request


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Tokens that a server has sampled for a request, one after the other, and possibly why it has stopped."""

    token_ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Literal["stop", "length", "aborted"] | None = None
    """None: more parts follow. `aborted`: the server has stopped before the completion was complete."""
    versions: Sequence[int] | None = None
    """The version of the weights of each token; None if the server did not report it."""
    all_versions: Sequence[int] | None = None
    """The same of all tokens of the request so far, for servers that report it at the end of a request."""
    cached_tokens: int | None = None
    """Tokens of the prompt that were in the server's prefix cache; None if the server did not report it."""
    routes: Routes | None = None
    """The experts of the tokens of prompt and completion, from `first_unknown` of the request on; with the last part, from a
    server that records them."""


@dataclass(slots=True)
class JoinedCompletion:
    """The completion of a request, from parts.

    Example: a server dies after the tokens 5 and 6; the next one receives the prompt, 5 and 6, and samples 7 and the stop
    token 2. The completion is 5, 6, 7, 2.
    """

    request: Request
    max_tokens: int
    """The most tokens of the completion."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    """Of the prompt of the first part. Later parts find the prompt in the cache because of the first part."""
    finish: Literal["stop", "length"] | None = None
    requests: int = 0
    """How many requests were sent for it."""
    start: int = 0
    """The number of tokens that were known when the last request was sent."""
    routes: Routes | None = None
    """The experts of the first tokens of prompt and completion, as far as they are known. Tokens of a server that was lost have
    those with which the next server has computed them."""

    def __post_init__(self) -> None:
        self.routes = self.request.routes

    @property
    def room(self) -> int:
        """How many tokens may still be sampled."""
        return self.max_tokens - len(self.token_ids)

    def next_request(self) -> Request:
        """The request for the next part: the prompt, and all tokens that are known.

        The seed of a later part differs: with the same seed, its tokens would be drawn with the random numbers of the first.
        """
        known = self.start = len(self.token_ids)
        self.requests += 1
        return replace(
            self.request,
            token_ids=[*self.request.token_ids, *self.token_ids],
            sampling=replace(self.request.sampling, max_tokens=self.room),
            seed=(self.request.seed + known * 0x9E3779B1) & 0x7FFFFFFF,
            routes=self.routes,
        )

    def add(self, part: Part, version: int) -> None:
        """Append a part. `version` is that of its tokens if the server has not reported it.

        Raises EngineError if the number of reported versions is not that of the tokens, or if the experts are of another model.
        """
        self.token_ids.extend(part.token_ids)
        self.logprobs.extend(part.logprobs)
        self.versions.extend([version] * len(part.token_ids) if part.versions is None else part.versions)
        if part.all_versions is not None:
            if len(part.all_versions) != len(self.token_ids) - self.start:
                raise EngineError(
                    f"a server reported the weight versions of {len(part.all_versions)} tokens, and has sent "
                    f"{len(self.token_ids) - self.start}. The numbers must be equal. "
                    f"Use a version of the server with which turnwise is tested (docs/engines.md)"
                )
            self.versions[self.start :] = part.all_versions
        if self.cached_tokens is None:
            self.cached_tokens = part.cached_tokens
        if part.routes is not None:
            self.routes = joined(self.routes, part.routes, self._computed)
        if part.finish in ("stop", "length"):
            self.finish = part.finish

    def truncate(self, length: int) -> None:
        """Forget all tokens after the first `length`."""
        del self.token_ids[length:], self.logprobs[length:], self.versions[length:]
        if self.routes is not None:
            self.routes = self.routes.first(self._computed)
        self.finish = None

    @property
    def _computed(self) -> int:
        """Tokens of prompt and completion that have been an input of the model: all but the last."""
        return len(self.request.token_ids) + len(self.token_ids) - 1

    def drop_versions_above(self, version: int) -> None:
        """Forget the tokens that were sampled with weights that were rejected, and all tokens after them."""
        first = next((index for index, own in enumerate(self.versions) if own > version), None)
        if first is not None:
            self.truncate(first)

    def close_if_complete(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Set `finish` if the known tokens are complete: the limit is reached, or the tokens contain a stop.

        A stop text can begin in one part and end in the next, where the server does not find it. The tokens after the token
        that completes the stop text are removed.
        """
        end = _stop_position(self.token_ids, self.request.sampling, decode) if self.requests > 1 else None
        if end is not None:
            self.truncate(end)
            self.finish = "stop"
        elif self.finish is None and self.room <= 0:
            self.finish = "length"

    def completion(self, kind: LogprobKind) -> Completion:
        """The finished completion."""
        assert self.finish is not None
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            finish_reason=self.finish,
            logprob_kind=kind,
            prompt_tokens=len(self.request.token_ids),
            cached_tokens=self.cached_tokens,
            routes=self.routes,
        )


def _stop_position(token_ids: Sequence[int], sampling: Sampling, decode: Callable[[Sequence[int]], str]) -> int | None:
    """The number of tokens up to and with the first stop; None if there is no stop in the tokens."""
    ends = [index + 1 for index, token in enumerate(token_ids) if token in sampling.stop_token_ids]
    end = ends[0] if ends else None
    if sampling.stop:
        text = decode(token_ids)
        if any(stop in text for stop in sampling.stop):
            low, high = 1, len(token_ids)  # the smallest prefix whose text contains a stop text
            while low < high:
                middle = (low + high) // 2
                if any(stop in decode(token_ids[:middle]) for stop in sampling.stop):
                    high = middle
                else:
                    low = middle + 1
            end = low if end is None else min(end, low)
    return end


# Interface: what an engine asks of a server


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server serves."""

    vocab_size: int
    context: int
    """The most tokens of a sequence, prompt and completion together."""
    logprob_kind: LogprobKind


WakePart = Literal["weights", "cache"]


class ServerApi(Protocol):
    """The requests of one kind of server, such as vLLM. All methods raise EngineError; ServerLost if the server is gone.

    `engines/sglang/api.py` is the shorter of the two over HTTP. What is above the protocol in this file serves all of them.
    """

    @property
    def name(self) -> str:
        """The name in messages, such as `vLLM`."""
        ...

    async def identify(self, server: HttpServer) -> None:
        """Refuse a server of another kind, and a wrong token. Asked before `claim`, also of a server that is paused."""
        ...

    async def info(self, server: HttpServer) -> ServerInfo:
        """What the server serves. Asked once, when the server is ready. Refuses a server that cannot be used."""
        ...

    async def check_grammar(self, server: HttpServer) -> None:
        """Refuse a server that does not read llguidance's grammars, or whose log-probabilities come before their masks. Asked
        after `info`, if turns may have grammars."""
        ...

    def sample(self, server: HttpServer, request: Request, version: int) -> AsyncGenerator[Part]:
        """Sample a completion. The last part has `finish`. Closing the iterator cancels the request at the server.

        `version` is the version of the weights when the request is sent: prefixes that were cached with other weights must not
        be used.
        """
        ...

    async def claim(self, server: HttpServer) -> None:
        """Before the first weight update: become the only trainer of this server. Raises EngineError if there is another."""
        ...

    async def pause(self, server: HttpServer, *, abort: bool = False) -> None:
        """Stop sampling. Requests wait, and go on after `resume`; with `abort`, they end with `aborted`."""
        ...

    async def load(self, server: HttpServer, update: WeightUpdate) -> None:
        """Replace the weights of a paused server, drop its prefix cache, and label the weights with the update's version.

        If it raises, the server has the previous weights, or it raises ServerLost.
        """
        ...

    async def label(self, server: HttpServer, version: int) -> None:
        """Label the weights that the server has with a version."""
        ...

    async def resume(self, server: HttpServer) -> None:
        """Go on sampling."""
        ...

    async def sleep(self, server: HttpServer) -> None:
        """Free the memory of the device until `wake`. The weights stay with the server."""
        ...

    async def wake(self, server: HttpServer, part: WakePart) -> None:
        """Take memory of the device again: first that of the weights, after which the server can load others, then all the rest,
        after which it can sample. At no time is memory in use that is not needed yet."""
        ...

    async def release(self, server: HttpServer) -> None:
        """After the last request: give up what `claim` took."""
        ...

    def close(self) -> None:
        """After all servers: free what is left in this process."""
        ...


# Owner: the process that updates the weights of servers, as the servers know it


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that updates the weights of servers."""

    name: str = field(default_factory=lambda: secrets.token_hex(4))
    """The name in the claim of a server, without `#`. A process that replaces a killed process has the same name, so the server
    accepts it at once. Two processes that run at the same time must have different names."""
    process: str = field(default_factory=lambda: secrets.token_hex(4))
    """Different in each process. A killed process may have used other weights under the same version, so versions and cached
    prefixes are labelled with this text."""


# Probe: a test whether servers have the trainer's weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbePrompt:
    """What a server is asked."""

    prompt: Sequence[int]
    """Token ids that the server continues."""
    tokens: int
    """How many tokens it samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(ProbePrompt):
    """The same with what the trainer needs to check the answers."""

    logprobs: Callable[[Sequence[int]], Sequence[float]]
    """The trainer's own `log_softmax(logits)` of each token after the first."""
    tolerance: float
    """The largest difference that is rounding."""
    averaged: bool = False
    """Whether the mean of the differences is compared instead of the largest: a quantized server."""
    largest_logit: Callable[[Sequence[int]], float] | None = None
    """The trainer's largest absolute logit behind these tokens, where rounding depends on it: the server computes in bfloat16."""

    @property
    def question(self) -> ProbePrompt:
        """Only what a server is asked, which can be sent to other processes."""
        return ProbePrompt(prompt=self.prompt, tokens=self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """What a server has sampled. The lists have equal lengths."""

    server: str
    """The name of the server, for messages."""
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]


def check_answer(answer: ProbeAnswer, probe: Probe, version: int) -> float:
    """The largest difference of log-probabilities between a server and the trainer, or the mean (`Probe.averaged`). Raises
    EngineError if it is not rounding, or if the server has sampled with another version of the weights."""
    ids = [*probe.prompt, *answer.token_ids]
    own = probe.logprobs(ids)[len(probe.prompt) - 1 :]
    if not answer.token_ids or set(answer.versions) != {version}:
        raise EngineError(f"{answer.server} sampled with the weights {set(answer.versions)}, and not {version}")
    differences = [abs(mine - other) for mine, other in zip(own, answer.logprobs, strict=True)]
    deviation = statistics.fmean(differences) if probe.averaged else max(differences)
    tolerance = probe.tolerance
    if deviation > tolerance and probe.largest_logit is not None:
        tolerance = max(tolerance, rounding_of_logprobs(probe.largest_logit(ids)))
    if not deviation <= tolerance:
        raise EngineError(
            f"{answer.server} has other weights than the trainer: the log-probabilities of the same tokens differ by "
            f"{deviation:.3g}{' in the mean' if probe.averaged else ''}, and at most {tolerance:.3g} is rounding. The server "
            f"must serve the model of model.path, in the same precision (docs/engines.md)"
        )
    return deviation


# Checks of what a server has sampled

_ROUNDING = 1e-3
"""How far above 0 rounding may lift a log-probability."""
_IMPOSSIBLE = -9000.0
"""Servers report -9999 instead of NaN and minus infinity, which JSON cannot express."""


def check_grammar_probe(server: str, token_ids: Sequence[int], logprobs: Sequence[float], fix: str) -> None:
    """Raise EngineError if a server has sampled other tokens than `PROBE_GRAMMAR` allows, or not with the probability 1."""
    if tuple(token_ids) != PROBE:
        raise EngineError(f"{server} sampled {list(token_ids)} under a grammar that allows {list(PROBE)} only: {fix}")
    if min(logprobs) < -1e-6:
        raise EngineError(
            f"{server} reports log-probabilities ({min(logprobs):.4g} instead of 0) without the mask of a grammar: {fix}"
        )


def check_part(server: str, part: Part, *, vocab_size: int, room: int) -> None:
    """Raise EngineError if a part of a completion cannot be what a model has sampled.

    `room` is the number of tokens that may still be sampled. The message has the server, the value and the rule.
    """
    ids, logprobs = part.token_ids, part.logprobs
    if len(logprobs) != len(ids):
        raise EngineError(
            f"{server} returned {len(ids)} token ids and {len(logprobs)} log-probabilities; there must be one for each token"
        )
    if len(ids) > room:
        raise EngineError(f"{server} returned {len(ids)} tokens where {room} were allowed")
    bad_ids = [value for value in ids if not _is_int(value) or not 0 <= value < vocab_size]
    if bad_ids:
        raise EngineError(
            f"{server} returned the token id {bad_ids[0]!r}; the model has the ids 0 to {vocab_size - 1}. The server must serve "
            f"the model of model.path"
        )
    bad_logprobs = [value for value in logprobs if not _is_logprob(value)]
    if bad_logprobs:
        raise EngineError(
            f"{server} returned {bad_logprobs[0]!r} as the log-probability of a sampled token; it must be a finite number of at "
            f"most 0 (-9999 stands for NaN or minus infinity). The weights of the model may not be finite"
        )
    if part.versions is not None and len(part.versions) != len(ids):
        raise EngineError(
            f"{server} returned {len(ids)} tokens and the weight versions of {len(part.versions)} tokens. "
            f"The numbers must be equal. Use a version of the server with which turnwise is tested (docs/engines.md)"
        )


@contextmanager
def expected_form(server: str, kind: str) -> Iterator[None]:
    """Raise EngineError if the code inside cannot read an answer of `server`, because a field is missing or has another type.

    `kind` is the expected kind of server, such as `vLLM`.
    """
    try:
        yield
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise EngineError(
            f"an answer of {server} does not have the form of {kind}'s answers ({type(error).__name__}: {error}). The server "
            f"must be {kind}, in a version that turnwise was tested with (docs/engines.md): check engine.name and engine.url"
        ) from error


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_logprob(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and _IMPOSSIBLE < value <= _ROUNDING
