"""Sends JSON requests to an HTTP service, with timeouts, retries and a maximum number of concurrent requests.

Each request runs the client of the standard library in a thread. A cancelled request closes its connection, which also ends
the thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import http.client
import json
import socket
import ssl
import threading
import weakref
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from turnwise.errors import ConfigError, Failed, TurnwiseError
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Service", "ServiceError", "service"]

_MAX_ANSWER = 64 << 20  # maximum bytes of an answer
_MAX_ERROR = 300  # characters of a service's error that an error message quotes
_making = threading.Lock()


class ServiceError(TurnwiseError):
    """A service did not answer, or its answer does not follow the protocol."""


class _Again(Exception):
    """A failed request that may succeed if it is repeated."""


class Service:
    """A URL that accepts a JSON object by POST and returns a JSON object.

    A request that gets no connection, no answer in `timeout` seconds, or status 5xx or 429 is repeated up to `retries`
    times. The pause before each retry grows by `pause` seconds. All attempts together take at most `deadline` seconds. At most
    `max_concurrent` requests run at once; the time to wait for a free slot does not count.

    Raises ConfigError if the URL or an option is invalid.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        deadline: float | None = None,
        retries: int = 3,
        pause: float = 1.0,
        max_concurrent: int = 64,
        headers: tuple[tuple[str, str], ...] = (),
    ) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:  # a port that is not a number, or an incomplete IPv6 address
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{url!r} is not the address of a service; it must have the form http://host:port/path")
        for name, value, least in (
            ("timeout", timeout, 0),
            ("deadline", 1 if deadline is None else deadline, 0),
            ("max_concurrent", max_concurrent, 0),
        ):
            if not value > least:
                raise ConfigError(f"the service {url}: {name} is {value}; it must be above {least}")
        if retries < 0 or pause < 0:
            raise ConfigError(f"the service {url}: retries={retries} and pause={pause} must be 0 or more")
        self.url = url
        self._parts = parts
        self._timeout, self._retries, self._pause = timeout, retries, pause
        self._deadline = deadline if deadline is not None else (timeout + pause * retries) * (retries + 1)
        self._max_concurrent = max_concurrent
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **dict(headers)}
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def deadline(self) -> float:
        """The maximum time of `ask`, in seconds, without the time to wait for a free slot."""
        return self._deadline

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises ServiceError if there is no answer after all attempts, or if the answer is not a JSON object.
        """
        body = json.dumps(question).encode("utf-8")  # ASCII, because a model may have written incomplete characters
        slot = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_concurrent))
        async with slot:
            problem, attempt = "", 0
            try:
                async with asyncio.timeout(self._deadline):
                    for attempt in range(1, self._retries + 2):
                        if attempt > 1:
                            await asyncio.sleep(self._pause * (attempt - 1))
                        try:
                            return await self._attempt(body)
                        except _Again as again:
                            problem = str(again)
            except TimeoutError:
                problem = f"{problem or 'no answer'}, stopped after the deadline of {self._deadline:g} s"
        times = "once" if attempt == 1 else f"{attempt} times"
        raise ServiceError(f"the service {self.url} was called {times}: {problem}")

    async def _attempt(self, body: bytes) -> dict[str, Any]:
        connection = self._connect()
        try:
            async with asyncio.timeout(self._timeout):
                status, answer = await run_in_thread(
                    lambda: self._exchange(connection, body), name=self.url, kind="service"
                )
        except TimeoutError:
            raise _Again(f"no answer within {self._timeout:g} s") from None
        except Failed as failed:
            if isinstance(failed.__cause__, TimeoutError):
                raise _Again(f"no answer within {self._timeout:g} s") from None
            raise _Again(failed.failure.message) from None
        finally:
            _hang_up(connection)
        text = answer.decode("utf-8", errors="replace")
        if status >= 500 or status == 429:
            raise _Again(f"status {status}: {text[:_MAX_ERROR]}")
        if status != 200:
            raise ServiceError(f"the service {self.url} returned the status {status}: {text[:_MAX_ERROR]}")
        if len(answer) > _MAX_ANSWER:
            raise ServiceError(f"the service {self.url} returned more than {_MAX_ANSWER >> 20} MB")
        try:
            parsed = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            raise ServiceError(f"the service {self.url} must return JSON; it returned: {text[:_MAX_ERROR]!r}") from None
        if not isinstance(parsed, dict):
            raise ServiceError(f"the service {self.url} must return a JSON object; it returned: {text[:_MAX_ERROR]!r}")
        return parsed

    def _connect(self) -> http.client.HTTPConnection:
        host = self._parts.hostname or ""
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, self._parts.port, timeout=self._timeout, context=context)
        return http.client.HTTPConnection(host, self._parts.port, timeout=self._timeout)

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes]:
        path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        connection.request("POST", path, body, headers=dict(self._headers))
        response = connection.getresponse()
        return response.status, response.read(_MAX_ANSWER + 1)


@functools.lru_cache(maxsize=64)
def _shared(
    url: str,
    timeout: float,
    deadline: float | None,
    retries: int,
    pause: float,
    max_concurrent: int,
    headers: tuple[tuple[str, str], ...],
) -> Service:
    return Service(
        url,
        timeout=timeout,
        deadline=deadline,
        retries=retries,
        pause=pause,
        max_concurrent=max_concurrent,
        headers=headers,
    )


def service(
    url: str,
    *,
    timeout: float,
    deadline: float | None = None,
    retries: int,
    pause: float,
    max_concurrent: int,
    headers: tuple[tuple[str, str], ...] = (),
) -> Service:
    """The service with these options. All conversations share it, so `max_concurrent` bounds all of them together."""
    with _making:  # tools are created in several threads; without the lock, each thread could create a service
        return _shared(url, timeout, deadline, retries, pause, max_concurrent, headers)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Close a connection, so that the thread that waits for the connection ends."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    connection.close()
