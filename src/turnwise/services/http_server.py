"""What the HTTP servers of turnwise share: sockets, bearer tokens, bounded bodies, and refusals with a status and a text.

These servers are the rollout server, the server that agents talk to, the retrieval service and the viewer. Knows no routes.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import hmac
import ipaddress
import json
import re
import resource
import socket
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from turnwise.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from starlette.requests import Request

BACKLOG = 2048
"""Connections that wait to be accepted."""
IDLE_SECONDS = 60
"""An idle connection is closed after this time."""
HEADER_SECONDS = 20.0
"""The time in which the first line and the headers of a request must arrive, on a new connection from its start."""
BODY_SECONDS = 60.0
"""The longest time without any byte of a body that is not complete."""
_MOST_CONNECTIONS = 4096
_OTHER_FILES = 256
"""Files that this process opens besides the connections of a server."""
_LOCAL_HOST = re.compile(r"(?:127\.0\.0\.1|localhost)(?::[0-9]{1,5})?", re.IGNORECASE)


class RequestRefused(Exception):
    """A request is refused: with an HTTP status and a text that has the value, the rule and the fix."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds after which the client may try again; None if another attempt will fail in the same way."""

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the answer. The connection is closed, because the body of the request may be unread."""
        headers = {"Connection": "close"}
        if self.retry_after is not None:
            headers["Retry-After"] = str(self.retry_after)
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers


def missing_library(library: str, *, server: str, extra: str) -> ConfigError:
    """The error for a missing package. `server` is such as `the viewer`, `extra` is the extra of turnwise that installs it."""
    return ConfigError(f"{server} needs the package `{library}`: pip install 'turnwise[{extra}]'")


# sockets


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server at this address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def listen(port: int, *, server: str, host: str = "127.0.0.1") -> socket.socket:
    """A listening socket; port 0 selects a free port.

    Raises ConfigError, with the name of the `server`, if the address cannot be used or the port is in use.
    """
    if not 0 <= port <= 65535:  # getaddrinfo takes the remainder
        raise ConfigError(
            f"{server} cannot listen on port {port}: a port is a number from 0 to 65535; give another --port"
        )
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{server} cannot use --host {host} --port {port}: {error}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _find_dead_peers(listening)
    try:
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(f"{server} cannot listen on port {port} of {host}: {error}; give another --port") from None
    return listening


def _find_dead_peers(listening: socket.socket) -> None:
    """Let the system close connections whose other end has gone without a word, after two minutes. Connections inherit it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
            listening.setsockopt(socket.IPPROTO_TCP, option, value)


def most_connections() -> int:
    """How many connections a server keeps: as many as this process may open files, less those that it needs itself."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return max(16, min(files - _OTHER_FILES, _MOST_CONNECTIONS))


@functools.cache
def _bounded_protocol() -> Any:
    """uvicorn's HTTP/1.1 with what it does not have: a time limit for headers, and a bound on connections.

    A connection is closed whose headers do not arrive in time, however slowly they come. If there are too many connections, the
    oldest one without a request is closed for a new one.
    """
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Bounded(H11Protocol):
        _headers_due: asyncio.TimerHandle | None = None
        """Closes the connection; None while no headers are expected."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._opened = self.loop.time()
            super().connection_made(transport)
            self._headers_due = self.loop.call_later(HEADER_SECONDS, self._close, b"408 Request Timeout")
            if len(self.connections) > most_connections():
                waiting = [other for other in self.connections if isinstance(other, Bounded) and not other._in_request]
                oldest = min(waiting, key=lambda other: other._opened)
                oldest._close(b"503 Service Unavailable")

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._in_request:
                self._expect_no_headers()
            elif self._headers_due is None and self.timeout_keep_alive_task is None:  # else it is closed anyway
                self._headers_due = self.loop.call_later(HEADER_SECONDS, self._close, b"408 Request Timeout")

        def connection_lost(self, exc: Exception | None) -> None:
            self._expect_no_headers()
            super().connection_lost(exc)

        @property
        def _in_request(self) -> bool:
            """Whether a request has arrived that is not answered yet."""
            return self.cycle is not None and not self.cycle.response_complete

        def _expect_no_headers(self) -> None:
            if self._headers_due is not None:
                self._headers_due.cancel()
                self._headers_due = None

        def _close(self, status: bytes) -> None:
            self._expect_no_headers()
            if self._in_request or self.transport.is_closing():
                return
            if self.cycle is None:  # an idle connection is closed without a word
                self.transport.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            self.transport.close()
            self.connections.discard(self)

    return Bounded


def uvicorn_server(
    application: Any,
    *,
    server: str,
    extra: str,
    seconds_to_finish: int = 2,
    certificate: tuple[str, str] | None = None,
) -> uvicorn.Server:
    """A server of an ASGI application that logs nothing. Requests have `seconds_to_finish` when it stops. With a `certificate`,
    the files of a certificate and of its key in PEM form, it speaks TLS.

    Raises ConfigError if uvicorn is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise missing_library("uvicorn", server=server, extra=extra) from None
    return uvicorn.Server(
        uvicorn.Config(
            application,
            backlog=BACKLOG,
            http=_bounded_protocol(),
            ws="none",
            lifespan="auto",  # the viewer watches its runs as long as its server runs
            log_config=None,
            access_log=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=seconds_to_finish,
            ssl_certfile=None if certificate is None else certificate[0],
            ssl_keyfile=None if certificate is None else certificate[1],
        )
    )


# tokens


def refuse_without_token(host: str, *, variable: str) -> None:
    """Raise ConfigError if other machines can reach a server that has no token. `variable` is the environment variable for it."""
    if not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and no token is set: set the environment variable {variable}, "
            f"or use --host 127.0.0.1"
        )


def refuse_foreign_host(request: Request, *, server: str) -> None:
    """Raise RequestRefused unless the request names this machine by its local name or address, as `127.0.0.1:8000`.

    This keeps out web pages that resolve their own name to 127.0.0.1 (DNS rebinding). The port may be another one, because of
    tunnels.
    """
    hosts = request.headers.getlist("host")
    if len(hosts) != 1 or not _LOCAL_HOST.fullmatch(hosts[0]):
        given = ", ".join(hosts)
        raise RequestRefused(
            403, f"{server} answers requests for 127.0.0.1 and localhost only; the header Host is {given!r:.100}"
        )


def equal_secrets(given: str, secret: str) -> bool:
    """Whether two texts are equal, in a time that says nothing about the place where they differ."""
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), secret.encode("utf-8", "surrogateescape"))


def bearer_token(request: Request) -> str:
    """The token in the header `Authorization: Bearer <token>`, or the password of an address such as `http://any:TOKEN@host`."""
    given = request.headers.get("Authorization", "")
    if given.startswith("Basic "):  # clients that send no bearer token, such as ms-swift's
        with contextlib.suppress(ValueError):
            return base64.b64decode(given[6:], validate=True).partition(b":")[2].decode("utf-8", "surrogateescape")
    return given.removeprefix("Bearer ") if given.startswith("Bearer ") else ""


def refuse_wrong_token(request: Request, token: str | None, *, hint: str) -> None:
    """Raise RequestRefused if the server has a token and the request has not. `hint` says where the token is."""
    if token is not None and not equal_secrets(bearer_token(request), token):
        raise RequestRefused(401, f"the header `Authorization: Bearer <token>` is missing or wrong: {hint}")


# bodies


async def body_chunks(request: Request, *, longest: int) -> AsyncIterator[bytes]:
    """The body of a request. Raises RequestRefused if it has more than `longest` bytes, the client disconnects, or no byte
    arrives for a minute."""
    from starlette.requests import ClientDisconnect

    given = request.headers.get("Content-Length", "0")
    if not given.isdigit() or int(given) > longest:
        raise RequestRefused(413, f"the body may have {longest} bytes, and Content-Length is {given:.20}")
    length, stream = 0, request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                chunk = await anext(stream, None)
        except ClientDisconnect:
            raise RequestRefused(400, "the client disconnected before the body was complete") from None
        except TimeoutError:
            raise RequestRefused(
                408, f"no byte of the body arrived for {BODY_SECONDS:g} s, and {length} bytes are no complete body"
            ) from None
        if chunk is None:
            return
        length += len(chunk)
        if length > longest:
            raise RequestRefused(413, f"the body may have {longest} bytes, and it has more")
        yield chunk


async def json_body(request: Request, *, longest: int, any_type: bool = False) -> Any:
    """The JSON value of a body. Raises RequestRefused.

    Unless `any_type`, the Content-Type must be application/json: a web page in a local browser cannot send it without permission.
    """
    content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if not any_type and content_type != "application/json":
        raise RequestRefused(415, f"Content-Type must be application/json; it is {content_type or 'missing'}")
    return json_value(await whole_body(request, longest=longest))


async def whole_body(request: Request, *, longest: int) -> bytes:
    """The body of a request. Raises RequestRefused as `body_chunks` does."""
    body = bytearray()
    async for chunk in body_chunks(request, longest=longest):
        body += chunk
    return bytes(body)


def json_value(body: bytes) -> Any:
    """The JSON value of a body. Raises RequestRefused."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, f"the body is not JSON: {error!s:.200}") from None
