"""The engine protocol: token ids in, sampled token ids and log-probabilities out.

An engine knows nothing of messages, tools, rewards or groups. Batching, caching, routing and retries are behind one method.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, runtime_checkable

from turnwise.types import Completion, Request

__all__ = ["Engine", "HasContext", "closing", "longest_sequence"]


class Engine(Protocol):
    """Continues token sequences. Many `generate` calls run at the same time, all in one event loop."""

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with now."""
        ...

    async def start(self) -> None:
        """Wait until the engine can generate. Called before the first request.

        Raises EngineError if the engine cannot be started.
        """
        ...

    async def generate(self, request: Request) -> Completion:
        """Continue `request.token_ids`. A cancelled call frees its resources.

        Raises EngineError if the engine has stopped, or if it cannot serve the request.
        """
        ...

    def release(self, conversation: str) -> None:
        """Free the KV cache of a conversation that has ended. An unknown conversation is not an error."""
        ...

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        """Sample with these weights from now on, and drop the KV cache of the previous weights.

        `weights` maps the names of the model's state dict to tensors; None means that the engine shares
        the trainer's parameters, which were updated in place.
        """
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


@asynccontextmanager
async def closing(engine: Engine) -> AsyncIterator[Engine]:
    """A context at whose end the engine is closed."""
    try:
        yield engine
    finally:
        await engine.close()
