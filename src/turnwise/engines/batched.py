"""An engine that answers all live conversations together: an adapter, so that lock-step is not a second loop.

For engines that can only answer whole batches, and for deterministic runs: a batch is formed when every conversation that
is still going on has asked, and is ordered by conversation, so it depends on no timing. Everybody waits for the slowest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from turnwise.engines.engine import Engine
from turnwise.types import Completion, Request

__all__ = ["Batched"]


class Batched:
    """Hands the requests of `conversations` on to `engine` in batches. A released conversation is no longer waited for."""

    def __init__(self, engine: Engine, conversations: Iterable[str]) -> None:
        self._engine = engine
        self._order = {name: place for place, name in enumerate(conversations)}
        self._live = set(self._order)
        self._waiting: dict[str, tuple[Request, asyncio.Future[Completion]]] = {}
        self._batch: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request) -> Completion:
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._waiting[request.conversation] = (request, future)
        self._start_if_complete()
        try:
            return await future
        finally:
            self._waiting.pop(request.conversation, None)

    def release(self, conversation: str) -> None:
        self._engine.release(conversation)
        self._live.discard(conversation)
        self._start_if_complete()

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        await self._engine.load_weights(version, weights)

    async def close(self) -> None:
        await self._engine.close()

    def _start_if_complete(self) -> None:
        if self._waiting and self._live <= self._waiting.keys():
            batch = [self._waiting[name] for name in sorted(self._waiting, key=lambda name: self._order.get(name, -1))]
            self._waiting = {}
            self._batch = asyncio.get_running_loop().create_task(self._answer(batch))

    async def _answer(self, batch: list[tuple[Request, asyncio.Future[Completion]]]) -> None:
        answers = await asyncio.gather(
            *(self._engine.generate(request) for request, _ in batch), return_exceptions=True
        )
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():  # cancelled meanwhile
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)
