"""What an engine is: token ids in, token ids and log-probabilities out.

An engine knows nothing of messages, tools, rewards or groups. Batching, caching, routing and retries are its own affair
and hide behind one method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from turnwise.types import Completion, Request

__all__ = ["Engine"]


class Engine(Protocol):
    """Continues token sequences. Many `generate` calls are awaited at once, from one event loop."""

    @property
    def version(self) -> int:
        """The version of the weights that it samples with now."""
        ...

    async def generate(self, request: Request) -> Completion:
        """Continue `request.token_ids`. Cancelling the call frees whatever it holds.

        Raises EngineError if the engine is dead, or the request cannot be served.
        """
        ...

    def release(self, conversation: str) -> None:
        """The conversation is over: what is kept for it may go. An unknown one is no error."""
        ...

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        """Sample with these weights from now on, and forget what was computed with the former ones.

        `weights` maps the names of the model's state dict to tensors; None says that the engine shares the trainer's
        own parameters, which have changed in place.
        """
        ...

    async def close(self) -> None:
        """Give back everything. A closed engine refuses to generate."""
        ...
