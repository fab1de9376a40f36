"""What all routes of the rollout server share: bearer token, bounded bodies, JSON errors, and the engine's event loop.

HTTP runs in a thread of its own, so that the server answers while the engine or the code of an environment blocks the event
loop of the conversations.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from turnwise.errors import ConfigError
from turnwise.rollout_server.refusals import RequestRefused

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = [
    "LONGEST_JSON",
    "EngineLoop",
    "Events",
    "Handler",
    "chunks",
    "guarded",
    "missing_library",
    "read_body",
]

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

Handler = Callable[["Request"], Awaitable["Response"]]

LONGEST_JSON = 64 << 20
"""Bytes of a JSON body, at most."""


def missing_library(library: str) -> ConfigError:
    """The error for a missing package of the extra `serve`."""
    return ConfigError(f"the rollout server needs the package `{library}`: pip install 'turnwise[serve]'")


def guarded(handler: Handler, *, token: str | None, on_refused: Callable[[int], None]) -> Handler:
    """`handler` with the check of the bearer token, and with refusals as JSON. No token: everybody may call it."""
    from starlette.responses import JSONResponse

    async def checked(request: Request) -> Response:
        try:
            _check_token(request, token)
            return await handler(request)
        except RequestRefused as refused:
            on_refused(refused.status)
            # the body may be unread, so the connection cannot be used again
            headers = {"Connection": "close"}
            if refused.retry_after is not None:
                headers["Retry-After"] = str(refused.retry_after)
            if refused.status == 401:
                headers["WWW-Authenticate"] = "Bearer"
            return JSONResponse({"error": str(refused)}, refused.status, headers=headers)

    return checked


def _check_token(request: Request, token: str | None) -> None:
    given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
    if given.startswith(b"Basic "):  # clients that send no bearer token, such as ms-swift's: http://any:TOKEN@host:port
        with contextlib.suppress(ValueError):
            given = b"Bearer " + base64.b64decode(given[6:], validate=True).partition(b":")[2]
    if token is not None and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise RequestRefused(
            401,
            "the header `Authorization: Bearer <token>` is missing or wrong: send the token that the server printed when it "
            "started, or that it was given in its environment variable",
        )


async def chunks(request: Request, *, longest: int) -> AsyncIterator[bytes]:
    """The body of a request. Raises RequestRefused if it has more than `longest` bytes, or the client disconnects."""
    from starlette.requests import ClientDisconnect

    given = request.headers.get("Content-Length", "0")
    if not given.isdigit() or int(given) > longest:
        raise RequestRefused(413, f"the body may have {longest} bytes, and Content-Length is {given}")
    length = 0
    try:
        async for chunk in request.stream():
            length += len(chunk)
            if length > longest:
                raise RequestRefused(413, f"the body may have {longest} bytes, and it has more")
            yield chunk
    except ClientDisconnect:
        raise RequestRefused(400, "the client disconnected before the body was complete") from None


async def read_body(request: Request, kind: type[B]) -> B:
    """The JSON body of a request. Raises RequestRefused if it is too long, not JSON, or not of that form."""
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":  # a web page in a local browser cannot send this type without permission
        raise RequestRefused(415, f"Content-Type must be application/json; it is {content_type or 'missing'}")
    body = bytearray()
    async for chunk in chunks(request, longest=LONGEST_JSON):
        body += chunk
    try:
        value = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise RequestRefused(400, "the body is not JSON") from None
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
