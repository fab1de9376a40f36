"""An HTTP server that an engine talks to: JSON requests and streams of server-sent events, with time limits and retries.

Knows HTTP. Does not know engines, prompts or weights. Needs aiohttp (`pip install 'turnwise[http]'`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from turnwise.errors import ConfigError, EngineError

if TYPE_CHECKING:
    import aiohttp

_MAX_ANSWER = 256 << 20  # bytes of an answer, or of an event of a stream
_QUOTED = 500  # characters of a server's error that an error message quotes
_PAUSE = 0.5  # seconds before the first retry; each further pause is twice as long, up to _LONGEST_PAUSE
_LONGEST_PAUSE = 5.0
_UNAVAILABLE = (502, 503, 504)
"""The server, or a gateway in front of it, takes no requests now."""
_IDLE_CONNECTION = 2.0  # seconds after which an unused connection is not used again


class ServerLost(EngineError):
    """No connection to a server, a broken connection, or no answer in time. Another server may serve the request."""


class ServerRefused(EngineError):
    """A server refused a request (status 4xx). A repeated request would be refused again."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


class ServerFailed(EngineError):
    """A server failed at a request (status 5xx, or an error in a stream), and still answers other requests. `status` is below 500
    for an answer that has another form than it should."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.status = status

    @property
    def may_pass(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status >= 500


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Time limits of requests, in seconds."""

    connect: float = 10.0
    """To open a connection."""
    answer: float = 300.0
    """For the complete answer of a JSON request."""
    idle: float = 300.0
    """Without any event in any stream of the server, while a stream is open."""
    retries: int = 3
    """How often a JSON request is repeated that got no connection. A request that reached the server is not repeated."""
    failing: float = 30.0
    """For how long requests are repeated that a server answers with a failure of its own (status 5xx), while it is healthy."""


class Failures:
    """Failures of a server at one request, one after the other: whether and when the request is sent again.

    Example: the pauses of a server that fails for 6 seconds are 0.5, 1, 2 and 4 seconds.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = 0.0
        """When the server failed first, by `time.monotonic`."""
        self._pauses = retry_pauses()

    def pause(self, seconds: float) -> float | None:
        """Note a failure. The pause before the next attempt; None if the server has failed for `seconds`."""
        now = time.monotonic()
        self.first = now if self.count == 0 else self.first
        self.count += 1
        return next(self._pauses) if now - self.first < seconds else None

    @property
    def text(self) -> str:
        """The end of an error message."""
        return f" (sent {self.count} times in {time.monotonic() - self.first:.0f} s)" if self.count > 1 else ""


def retry_pauses() -> Iterator[float]:
    """The seconds before each retry: 0.5, 1, 2, 4, 5, 5 ..."""
    pause = _PAUSE
    while True:
        yield pause
        pause = min(2 * pause, _LONGEST_PAUSE)


class HttpServer:
    """A server at `url` (scheme, host and port), with an optional bearer `token`. One object serves one event loop at a time.

    `token_hint` says in errors what to do about a wrong token.

    Raises ConfigError if the URL is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        limits: HttpLimits | None = None,
        token_hint: str = "set the environment variable that engine.api_key_env names to the server's own token",
    ) -> None:
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is not a number
            valid = False
        if not valid:
            raise ConfigError(f"{url!r} is not the address of a server; it must have the form http://host:port")
        self.url = url.rstrip("/")
        self.limits = limits or HttpLimits()
        self._token_hint = token_hint
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._session: tuple[asyncio.AbstractEventLoop, aiohttp.ClientSession] | None = None
        self._progress = time.monotonic()
        """When the server last sent an event of a stream."""
        self._ahead = 0.0
        """Seconds by which the server's clock is ahead of this machine's."""

    def now(self) -> float:
        """The time by the server's clock, to the second, as its last answer had it; before that, or if its answers name no time,
        by that of this machine. Programs on several machines can compare such times, however their clocks differ."""
        return time.time() + self._ahead

    def _note_clock(self, date: str | None) -> None:
        with suppress(ValueError, TypeError):  # no time, or none that can be read
            self._ahead = parsedate_to_datetime(date or "").timestamp() - time.time()

    async def get(self, path: str, *, timeout: float | None = None) -> Any:
        """The JSON answer of a GET request; None if the answer is empty. Raises EngineError."""
        return await self._request("GET", path, None, {}, timeout)

    async def post(
        self, path: str, body: Any = None, *, query: Mapping[str, str] | None = None, timeout: float | None = None
    ) -> Any:
        """The JSON answer of a POST request; None if the answer is empty. Raises EngineError."""
        return await self._request("POST", path, body, query or {}, timeout)

    async def upload(self, path: str, file: Path, *, query: Mapping[str, str]) -> Any:
        """The JSON answer of a POST request whose body is a file. Raises EngineError."""
        return await self._request("POST", path, file, query, None)

    async def post_text(self, path: str, body: Any) -> str:
        """The answer of a POST request as text. Raises EngineError."""
        return await self._request("POST", path, body, {}, None, parse=False)

    async def healthy(self, path: str, *, timeout: float = 5.0) -> bool:
        """Whether a GET request to `path` has a status of 2xx. Raises ServerRefused if the token is wrong."""
        try:
            async with asyncio.timeout(timeout), self._opened("GET", path, None, {}) as response:
                if response.status in (401, 403):
                    raise self._refused(path, response.status, await response.text())
                return response.status < 300
        except (TimeoutError, ServerLost):
            return False

    async def events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """The events of a stream (`data: {...}` lines), until the server ends it with `data: [DONE]`.

        Closing the iterator closes the connection, which makes the server cancel the request.
        Raises ServerLost if the stream breaks off, ServerRefused or ServerFailed for an error of the server.
        """
        self._progress = time.monotonic()
        async with AsyncExitStack() as stack:
            opening = stack.enter_async_context(self._opened("POST", path, body, {}))
            response = await self._open_stream(path, opening)
            if response.status >= 300:
                self._check_status(path, response.status, await response.text())
            buffer = bytearray()
            while True:
                data = await self._next_bytes(response, path)
                if not data:
                    raise ServerLost(f"{self.url}{path} closed the connection before the answer was complete")
                buffer += data
                if b"\n" not in data:  # a long event is split once, at its end
                    lines = []
                else:
                    *lines, rest = buffer.split(b"\n")
                    buffer = bytearray(rest)
                if len(buffer) > _MAX_ANSWER:
                    raise ServerFailed(f"{self.url}{path} sent an event of more than {_MAX_ANSWER >> 20} MB", 200)
                for line in lines:
                    if not line.startswith(b"data:"):
                        continue
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        return
                    yield self._event(path, payload)

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            loop, session = self._session
            self._session = None
            if loop is asyncio.get_running_loop():
                await session.close()

    async def _next_bytes(self, response: aiohttp.ClientResponse, path: str) -> bytes:
        """The next bytes of a stream. Waits while other streams of the server make progress."""
        import aiohttp

        while True:
            try:
                async with asyncio.timeout(self.limits.idle):
                    data = await response.content.readany()
            except TimeoutError:
                self._refuse_silence(path)
                continue
            except (aiohttp.ClientError, OSError) as error:
                raise ServerLost(f"{self.url}{path} broke off: {_text(error)}") from error
            self._progress = time.monotonic()
            return data

    async def _open_stream(
        self, path: str, opening: Coroutine[Any, Any, aiohttp.ClientResponse]
    ) -> aiohttp.ClientResponse:
        """The response of a stream, once the server has begun it. Waits while other streams of the server make progress."""
        task = asyncio.ensure_future(opening)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=self.limits.idle)
                if not task.done():
                    self._refuse_silence(path)
            return task.result()
        finally:
            task.cancel()

    def _refuse_silence(self, path: str) -> None:
        """Raise ServerLost if the server has sent nothing in any stream for `limits.idle` seconds."""
        idle = time.monotonic() - self._progress
        if idle >= self.limits.idle:
            raise ServerLost(
                f"{self.url}{path} sent nothing for {idle:.0f} s: the server does not answer, or the time limit is too short"
            )

    def note_progress(self) -> None:
        """Do not count the time until now as time without progress: the server was paused."""
        self._progress = time.monotonic()

    def _event(self, path: str, payload: bytes | bytearray) -> dict[str, Any]:
        try:
            event = json.loads(payload)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise ServerFailed(f"{self.url}{path} must send JSON objects; it sent {bytes(payload[:_QUOTED])!r}", 200)
        if "error" in event:
            error = event["error"]
            status = error.get("code") if isinstance(error, dict) else None
            if isinstance(status, int) and 400 <= status < 500:
                raise ServerRefused(f"{self.url}{path} refused the request: {_error_text(error)}", status)
            raise ServerFailed(f"{self.url}{path} failed: {_error_text(error)}")
        return event

    async def _request(
        self,
        method: str,
        path: str,
        body: Any,
        query: Mapping[str, str],
        timeout: float | None,
        *,
        parse: bool = True,
    ) -> Any:
        limit = self.limits.answer if timeout is None else timeout
        pauses, attempt, failures = retry_pauses(), 0, Failures()
        while True:
            try:
                async with asyncio.timeout(limit), self._opened(method, path, body, query) as response:
                    content = await response.content.read(_MAX_ANSWER + 1)
                    while not response.content.at_eof() and len(content) <= _MAX_ANSWER:
                        content += await response.content.read(_MAX_ANSWER)
                    return self._answer(path, response.status, content, parse=parse)
            except TimeoutError:
                raise ServerLost(f"{self.url}{path} gave no answer within {limit:g} s") from None
            except _NotConnected:
                if attempt == self.limits.retries:
                    raise
                attempt += 1
                await asyncio.sleep(next(pauses))
            except ServerFailed as error:
                pause = failures.pause(self.limits.failing) if error.status in _UNAVAILABLE else None
                if pause is None:
                    raise
                await asyncio.sleep(pause)

    def _answer(self, path: str, status: int, content: bytes, *, parse: bool) -> Any:
        text = content[: _MAX_ANSWER + 1].decode("utf-8", errors="replace")
        self._check_status(path, status, text)
        if len(content) > _MAX_ANSWER:
            raise ServerFailed(f"{self.url}{path} returned more than {_MAX_ANSWER >> 20} MB", 200)
        if not parse:
            return text
        if not text.strip():
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise ServerFailed(f"{self.url}{path} must return JSON; it returned {text[:_QUOTED]!r}", 200) from None

    def _check_status(self, path: str, status: int, text: str) -> None:
        if status >= 500:
            raise ServerFailed(f"{self.url}{path} failed with status {status}: {_quoted(text)}", status)
        if status >= 300:
            raise self._refused(path, status, text)

    def _refused(self, path: str, status: int, text: str) -> ServerRefused:
        fix = ""
        if status in (401, 403):
            fix = f". The server accepts another token: {self._token_hint}"
        return ServerRefused(f"{self.url}{path} refused the request with status {status}: {_quoted(text)}{fix}", status)

    @asynccontextmanager
    async def _opened(
        self, method: str, path: str, body: Any, query: Mapping[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        try:
            with _content(body) as content:
                async with (await self._open_session()).request(
                    method, f"{self.url}{path}", params=dict(query), **content
                ) as response:
                    self._note_clock(response.headers.get("Date"))
                    yield response
        except aiohttp.ClientConnectorError as error:
            raise _NotConnected(f"there is no connection to {self.url}: {_text(error)}") from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise _NotConnected(f"no connection to {self.url} within {self.limits.connect:g} s") from error
            if isinstance(
                error.__cause__ or error, aiohttp.ClientConnectionResetError
            ):  # closed before the body was written
                raise _NotConnected(f"{self.url} has closed an unused connection: {_text(error)}") from error
            raise ServerLost(f"{self.url}{path} broke off: {_text(error)}") from error

    async def _open_session(self) -> aiohttp.ClientSession:
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("an engine on a server needs aiohttp: pip install 'turnwise[http]'") from None

        loop = asyncio.get_running_loop()
        if self._session is None or self._session[0] is not loop:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect)
            # no limit: the number of conversations is bounded elsewhere. Servers close unused connections (uvicorn after 5
            # seconds); a request on a connection that is being closed would look like a server that died
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_CONNECTION)
            session = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=self._headers)
            self._session = (loop, session)
        return self._session[1]


@contextmanager
def _content(body: Any) -> Iterator[dict[str, Any]]:
    """The arguments of a request with this body: a file that is sent as it is, or JSON."""
    if not isinstance(body, Path):
        yield {"json": body}
        return
    with body.open("rb") as file:
        yield {"data": file, "headers": {"Content-Type": "application/octet-stream"}}


class _NotConnected(ServerLost):
    """The request did not reach the server, so it can be repeated."""


def _error_text(error: Any) -> str:
    return _quoted(str(error.get("message", error)) if isinstance(error, dict) else str(error))


def _quoted(text: str) -> str:
    try:
        content = json.loads(text)
        if isinstance(content, dict) and "error" in content:
            error = content["error"]
            text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except (ValueError, RecursionError):
        pass
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]} [...]"


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
