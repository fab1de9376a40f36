"""An adapter that sends the requests of all running conversations to an engine as one batch.

Used for deterministic runs, and for engines that accept complete batches only. A batch starts when every running conversation
has sent a request. Its order is the order of the conversations, so no result depends on timing. All conversations wait for the
slowest one. The rollout loop is the same as without the adapter.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from turnwise.engines.engine import Engine, longest_sequence
from turnwise.types import Completion, Request
from turnwise.user_code.deadlines import waiting_for_others

__all__ = ["Batched"]


class Batched:
    """Sends the requests of `conversations` to `engine` in batches. A batch does not wait for released conversations."""

    def __init__(self, engine: Engine, conversations: Iterable[str]) -> None:
        self._engine = engine
        self._order = {conversation: index for index, conversation in enumerate(conversations)}
        self._running = set(self._order)
        """Conversations that are not released."""
        self._waiting: dict[str, _Pending] = {}
        """Requests of the next batch, by conversation."""
        self._batch: asyncio.Task[None] | None = None
        """The last batch. The event loop keeps only weak references to tasks."""

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def context(self) -> int | None:
        return longest_sequence(self._engine)

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, request: Request) -> Completion:
        pending = _Pending(request)
        self._waiting[request.conversation] = pending
        self._start_if_complete()
        try:
            # time until the batch starts, and from this answer until the last one, does not count for deadlines
            with waiting_for_others():
                await pending.started.wait()
            await pending.finished.wait()
            with waiting_for_others():
                return await pending.completion
        finally:
            self._waiting.pop(request.conversation, None)
            pending.completion.cancel()  # has no effect on a completion that was returned

    def release(self, conversation: str) -> None:
        self._engine.release(conversation)
        self._running.discard(conversation)
        self._start_if_complete()

    async def load_weights(self, version: int, weights: Mapping[str, Any] | None = None) -> None:
        await self._engine.load_weights(version, weights)

    async def close(self) -> None:
        await self._engine.close()

    def _start_if_complete(self) -> None:
        if self._waiting and self._running <= self._waiting.keys():
            conversations = sorted(self._waiting, key=lambda conversation: self._order.get(conversation, -1))
            batch = [self._waiting[conversation] for conversation in conversations]
            self._waiting = {}
            self._batch = asyncio.get_running_loop().create_task(self._generate_batch(batch))

    async def _generate_batch(self, batch: list[_Pending]) -> None:
        results = await asyncio.gather(*(self._generate(pending) for pending in batch), return_exceptions=True)
        for pending, result in zip(batch, results, strict=True):
            if pending.completion.done():  # cancelled meanwhile
                continue
            if isinstance(result, BaseException):
                pending.completion.set_exception(result)
            else:
                pending.completion.set_result(result)

    async def _generate(self, pending: _Pending) -> Completion:
        pending.started.set()
        try:
            return await self._engine.generate(pending.request)
        finally:
            pending.finished.set()


class _Pending:
    """A request and its progress."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.started, self.finished = asyncio.Event(), asyncio.Event()
        """Set when the engine receives the request, and when it has answered it."""
        self.completion: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
