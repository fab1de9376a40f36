"""The engine protocol: token ids in, sampled token ids and log-probabilities out.

An engine knows nothing of messages, tools, rewards or groups. Batching, caching, routing and retries are behind one method.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from turnwise.types import Completion, Request

__all__ = ["Engine"]


class Engine(Protocol):
    """Continues token sequences. Many `generate` calls run at the same time, all in one event loop."""

    @property
    def version(self) -> int:
        """The version of the weights that the engine samples with now."""
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
