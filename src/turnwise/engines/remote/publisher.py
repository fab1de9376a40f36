"""Publishes a learner's weights to an engine on servers, in this process or in rollout workers: all weights, or an adapter.

After an update it may compare the log-probabilities of the servers with the learner's (`ProbeOptions`), and the servers may free
their memory while the model is trained. Knows what it needs of learner and engine as protocols. Does not know files, routes or
kinds of servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from turnwise.engines.engine import WeightSource, WriteAdapter
from turnwise.engines.remote.servers import Probe

_PROMPT, _SAMPLED = 8, 16
"""Tokens of a probe."""


class UpdatedEngine(Protocol):
    """The part of an engine that publishing needs."""

    async def start(self) -> None:
        """Wait until the servers are ready. Raises EngineError or ConfigError."""
        ...

    async def update(
        self, version: int, weights: Mapping[str, Any] | WriteAdapter | None, probe: Probe | None = None
    ) -> None:
        """See `RemoteEngine.update`."""
        ...


class Sleeper(Protocol):
    """An engine whose servers can free their memory."""

    async def sleep(self) -> None:
        """Free the memory of the servers' devices until the next update. No request may be running."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """How often, and how exactly, a server's log-probabilities are compared with the learner's after an update."""

    vocab_size: int
    """The number of token ids of the model."""

    first: int = 3
    """The first updates of a run are all checked."""
    every: int = 10
    """After them, each update with this number; 0: no more."""
    tolerance: float = 1e-4
    """The largest difference that is rounding: 1e-4 in float32."""
    averaged: bool = False
    """Whether that is the mean over the tokens: servers that compute with 8 bits."""
    bfloat16: bool = False
    """Whether the servers or the trainer compute in bfloat16. With large logits, more than `tolerance` is rounding then."""

    def due(self, update: int) -> bool:
        """Whether an update is checked. Updates are counted from 0, which is the one before the first step."""
        return update < self.first or (self.every > 0 and update % self.every == 0)


class RemoteWeights:
    """A `WeightPublisher` for an engine on servers. Without `probe`, log-probabilities are not compared. The servers of `sleeper`
    free their memory while the model is trained; None: they keep it."""

    def __init__(
        self,
        engine: UpdatedEngine,
        learner: WeightSource,
        probe: ProbeOptions | None,
        *,
        sleeper: Sleeper | None = None,
    ) -> None:
        self._engine = engine
        self._learner = learner
        self._probe = probe
        self._sleeper = sleeper
        self.asleep = False
        """See `WeightPublisher.asleep`."""
        self._updates = 0

    async def begin(self, version: int) -> None:
        await self._engine.start()
        await self.publish(version)

    async def before_update(self) -> None:
        if self._sleeper is not None:
            await self._sleeper.sleep()
            self.asleep = True

    async def publish(self, version: int) -> None:
        self.asleep = False
        options = self._probe
        probe = self._make_probe(options) if options is not None and options.due(self._updates) else None
        learner = self._learner
        weights: Mapping[str, Any] | WriteAdapter = learner.save if learner.trains_adapter else learner.weights()
        await self._engine.update(version, weights, probe)
        self._updates += 1

    def _make_probe(self, options: ProbeOptions) -> Probe:
        """A fixed prompt. The end of the vocabulary is left out: it has placeholders of images."""
        prompt = [(7919 * index + 11) % (options.vocab_size * 3 // 4) for index in range(_PROMPT)]
        return Probe(
            prompt=prompt,
            tokens=_SAMPLED,
            logprobs=self._learner.token_logprobs,
            tolerance=options.tolerance,
            averaged=options.averaged,
            largest_logit=self._learner.largest_logit if options.bfloat16 else None,
        )
