"""Publishing weights: how an engine gets the weights that a learner has changed.

An implementation knows how weights travel (shared memory, disk, a collective operation). The training loop knows only
`publish`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from turnwise.engines.engine import Engine

__all__ = ["CopiedWeights", "FreesCache", "SharedWeights", "WeightPublisher"]


class WeightPublisher(Protocol):
    """Hands the learner's current weights to the engine."""

    async def begin(self, version: int) -> None:
        """Before the first conversation: when it returns, the engine is ready and has the learner's weights as `version`.

        Raises EngineError if the engine cannot be started, or cannot take the weights.
        """
        ...

    async def before_update(self) -> None:
        """Before the learner's weights change: the engine may free memory until `publish`. No request is running."""
        ...

    async def publish(self, version: int) -> None:
        """When it returns, the engine samples with the learner's current weights and reports them as `version`.

        Raises EngineError if the engine cannot take them.
        """
        ...


@runtime_checkable
class FreesCache(Protocol):
    """An engine that can free what is of no use after an update: its KV cache, and copies of weights."""

    def free_cache(self) -> None: ...


class SharedWeights:
    """For an engine that samples on the learner's own parameters: nothing is copied.

    The engine only learns that its weights have changed in place, and forgets its KV cache.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def begin(self, version: int) -> None:
        await self._engine.start()

    async def before_update(self) -> None:
        if isinstance(self._engine, FreesCache):
            self._engine.free_cache()

    async def publish(self, version: int) -> None:
        await self._engine.load_weights(version)


class CopiedWeights(SharedWeights):
    """For an embedded engine whose model is a copy, because the trained model is divided among several ranks.

    `copy` gives the engine's model the present weights.
    """

    def __init__(self, engine: Engine, copy: Callable[[], None]) -> None:
        super().__init__(engine)
        self._copy = copy

    async def publish(self, version: int) -> None:
        self._copy()
        await super().publish(version)
