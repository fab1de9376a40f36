"""What all routes of the rollout server share: bearer token, bounded bodies, JSON errors, and the engine's event loop.

HTTP runs in a thread of its own, so that the server answers while the engine or the code of an environment blocks the event
loop of the conversations.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from turnwise.serve.http import RequestRefused, json_body, refuse_wrong_token

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = [
    "LONGEST_JSON",
    "EngineLoop",
    "Events",
    "Handler",
    "guarded",
    "read_body",
]

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

Handler = Callable[["Request"], Awaitable["Response"]]

LONGEST_JSON = 64 << 20
"""Bytes of a JSON body without images, at most."""
_TOKEN_HINT = "send the token that the server printed when it started, or that it was given in its environment variable"


def guarded(handler: Handler, *, token: str | None, on_refused: Callable[[int], None]) -> Handler:
    """`handler` with the check of the bearer token, and with refusals as JSON. No token: everybody may call it."""
    from starlette.responses import JSONResponse

    async def checked(request: Request) -> Response:
        try:
            refuse_wrong_token(request, token, hint=_TOKEN_HINT)
            return await handler(request)
        except RequestRefused as refused:
            on_refused(refused.status)
            return JSONResponse({"error": str(refused)}, refused.status, headers=refused.headers)

    return checked


async def read_body(request: Request, kind: type[B], *, longest: int = LONGEST_JSON) -> B:
    """The JSON body of a request. Raises RequestRefused if it has more than `longest` bytes, is not JSON, or not of that form."""
    value = await json_body(request, longest=longest)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestRefused(
            400, f"the body is not a {kind.__name__} (see /openapi.json): {_problems(error)}"
        ) from None


def _problems(error: ValidationError) -> str:
    """The first problems: the place, the rule and the value of each."""
    texts = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'the body'}: {problem['msg']}; got {problem['input']!r:.80}"
        for problem in error.errors(include_url=False, include_context=False)[:3]
    ]
    more = error.error_count() - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


class EngineLoop:
    """The event loop of the engine and the conversations, called from the event loop of HTTP."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop. If this call is cancelled, the coroutine is cancelled.

        Raises RequestRefused if the server is stopping.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise RequestRefused(503, "the server is stopping", retry_after=5)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


class Events:
    """Server-sent events that the engine's loop sends to the response of a request, with a heartbeat.

    The heartbeat is sent from the engine's loop, so it stops if that loop is blocked.
    """

    def __init__(self, *, heartbeat: bytes, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._heartbeat = heartbeat
        self._seconds = seconds

    def send(self, event: bytes) -> None:
        """Send an event. To be called in the engine's loop. Nothing is sent when the server has stopped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def run(self, work: Callable[[Callable[[bytes], None]], Coroutine[Any, Any, None]]) -> None:
        """Run `work(send)` in the engine's loop, with a heartbeat."""
        task = asyncio.create_task(self._beat())
        try:
            await work(self.send)
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self.send(self._heartbeat)

    async def first(self, task: asyncio.Future[None]) -> bytes | None:
        """The first event; None if there is none. Raises what `task` raised before it sent an event."""
        task.add_done_callback(lambda _: self._queue.put_nowait(None))
        event = await self._queue.get()
        if event is None:
            task.result()
        return event

    async def rest(self) -> AsyncIterator[bytes]:
        """The other events, until the task has ended."""
        while (event := await self._queue.get()) is not None:
            yield event
