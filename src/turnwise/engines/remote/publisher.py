"""Publishes a learner's weights to an engine on servers: as a file with all weights, or as an adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.weights import Probe

_PROMPT, _SAMPLED = 8, 16
"""Tokens of a probe."""

__all__ = ["ProbeOptions", "RemoteWeights", "WeightSource"]


class WeightSource(Protocol):
    """The part of a learner that publishing needs (`training.learner.Learner`)."""

    @property
    def trains_adapter(self) -> bool:
        """Whether only an adapter is trained."""
        ...

    def weights(self) -> Mapping[str, Any]:
        """The present weights."""
        ...

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """`log_softmax(logits)` of the tokens after the first."""
        ...

    def save(self, folder: Path) -> None:
        """Write the adapter into a directory."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeOptions:
    """How often, and how exactly, a server's log-probabilities are compared with the learner's after an update."""

    first: int = 3
    """The first updates of a run are all checked."""
    every: int = 10
    """After them, each update with this number; 0: no more."""
    tolerance: float = 1e-4
    """The largest difference that is rounding: 1e-4 in float32."""

    def due(self, update: int) -> bool:
        """Whether an update is checked. Updates are counted from 0, which is the one before the first step."""
        return update < self.first or (self.every > 0 and update % self.every == 0)


class RemoteWeights:
    """A `WeightPublisher` for `RemoteEngine`. With `sleep`, the servers free their memory while the model is trained."""

    def __init__(
        self, engine: RemoteEngine, learner: WeightSource, probe: ProbeOptions, *, sleep: bool = False
    ) -> None:
        self._engine = engine
        self._learner = learner
        self._probe = probe
        self._sleep = sleep
        self._asleep = False
        self._updates = 0

    async def begin(self, version: int) -> None:
        await self._engine.start()
        await self.publish(version)

    async def before_update(self) -> None:
        if self._sleep:
            await self._engine.sleep()
            self._asleep = True

    async def publish(self, version: int) -> None:
        if self._asleep:
            await self._engine.wake()
            self._asleep = False
        probe = self._make_probe() if self._probe.due(self._updates) else None
        learner = self._learner
        weights: Mapping[str, Any] | Callable[[Path], None] = (
            learner.save if learner.trains_adapter else learner.weights()
        )
        await self._engine.update(version, weights, probe)
        self._updates += 1

    def _make_probe(self) -> Probe:
        """A fixed prompt. The end of the vocabulary is left out: it has placeholders of images."""
        info = self._engine.info
        assert info is not None
        prompt = [(7919 * index + 11) % (info.vocab_size * 3 // 4) for index in range(_PROMPT)]
        return Probe(
            prompt=prompt,
            tokens=_SAMPLED,
            logprobs=self._learner.token_logprobs,
            tolerance=self._probe.tolerance,
        )
