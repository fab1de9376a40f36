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
from turnwise.user_code.deadlines import waiting_for_others

__all__ = ["Batched"]


class Batched:
    """Hands the requests of `conversations` on to `engine` in batches. A released conversation is no longer waited for."""

    def __init__(self, engine: Engine, conversations: Iterable[str]) -> None:
        self._engine = engine
        self._order = {name: place for place, name in enumerate(conversations)}
        self._live = set(self._order)
        self._waiting: dict[str, _Asked] = {}
        self._batch: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, request: Request) -> Completion:
        asked = _Asked(request)
        self._waiting[request.conversation] = asked
        self._start_if_complete()
        try:
            # a deadline of this conversation counts neither until all have asked, nor until all are answered
            with waiting_for_others():
                await asked.started.wait()
            await asked.finished.wait()
            with waiting_for_others():
                return await asked.answer
        finally:
            self._waiting.pop(request.conversation, None)
            asked.answer.cancel()  # where nobody waits for it any more

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

    async def _answer(self, batch: list[_Asked]) -> None:
        answers = await asyncio.gather(*(self._ask(asked) for asked in batch), return_exceptions=True)
        for asked, answer in zip(batch, answers, strict=True):
            if asked.answer.done():  # cancelled meanwhile
                continue
            if isinstance(answer, BaseException):
                asked.answer.set_exception(answer)
            else:
                asked.answer.set_result(answer)

    async def _ask(self, asked: _Asked) -> Completion:
        asked.started.set()
        try:
            return await self._engine.generate(asked.request)
        finally:
            asked.finished.set()


class _Asked:
    """A request, and how far it is."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started, self.finished = asyncio.Event(), asyncio.Event()
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
