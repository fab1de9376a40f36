"""A question put to an HTTP service, in JSON, with the patience that was agreed on.

Knows nothing of what is asked. The standard library's client runs in a thread of its own for each request; a request that is
given up closes its connection, so the thread ends too.
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

_LARGEST = 64 << 20  # bytes of an answer
_LAST_STRAW = 300  # characters of somebody's error that are told
_making = threading.Lock()


class ServiceError(TurnwiseError):
    """A service that did not answer, or not as agreed."""


class _Again(Exception):
    """Something that may be over when asked again."""


class Service:
    """A URL that takes a JSON object by POST and answers with one.

    What may pass by itself (no connection, no answer in time, status 5xx or 429) is tried again up to `retries` times, after a
    pause that grows by `pause` seconds each time, as long as `deadline` seconds for all attempts together allow. `timeout` is
    for one attempt. At most `max_concurrent` questions are out at once; who waits for that uses up no time.

    Raises ConfigError if the URL is none.
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
        except ValueError:  # a port that is no number, or half of an IPv6 address
            parts, port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"{url!r} is no address of a service; write http://host:port/path")
        for name, value, least in (
            ("timeout", timeout, 0),
            ("deadline", 1 if deadline is None else deadline, 0),
            ("max_concurrent", max_concurrent, 0),
        ):
            if not value > least:
                raise ConfigError(f"the service {url}: {name} is {value}; give a number above {least}")
        if retries < 0 or pause < 0:
            raise ConfigError(f"the service {url}: retries={retries} and pause={pause} must be 0 or more")
        self.url = url
        self._parts = parts
        self._timeout, self._retries, self._pause = timeout, retries, pause
        self._deadline = deadline if deadline is not None else (timeout + pause * retries) * (retries + 1)
        self._concurrent = max_concurrent
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **dict(headers)}
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def deadline(self) -> float:
        """The longest that `ask` takes once it is its turn."""
        return self._deadline

    async def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Put a question.

        Raises ServiceError when there is no answer after all attempts, or one that is no JSON object.
        """
        body = json.dumps(question).encode("utf-8")  # ASCII, whatever half characters a model may have written
        slot = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._concurrent))
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
                problem = f"{problem or 'no answer'}, given up after {self._deadline:g} s"
        times = "once" if attempt == 1 else f"{attempt} times"
        raise ServiceError(f"the service {self.url} was asked {times}: {problem}")

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
            raise _Again(f"status {status}: {text[:_LAST_STRAW]}")
        if status != 200:
            raise ServiceError(f"the service {self.url} refused with status {status}: {text[:_LAST_STRAW]}")
        if len(answer) > _LARGEST:
            raise ServiceError(f"the service {self.url} answered more than {_LARGEST >> 20} MB")
        try:
            found = json.loads(text)
        except (json.JSONDecodeError, RecursionError):
            raise ServiceError(f"the service {self.url} answered no JSON: {text[:_LAST_STRAW]!r}") from None
        if not isinstance(found, dict):
            raise ServiceError(f"the service {self.url} answered no JSON object: {text[:_LAST_STRAW]!r}")
        return found

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
        return response.status, response.read(_LARGEST + 1)


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
    """The service of these options: one for all conversations, so that `max_concurrent` holds for all of them together."""
    with _making:  # tools are made in threads, many at once, and a cache alone lets each of them make its own
        return _shared(url, timeout, deadline, retries, pause, max_concurrent, headers)


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """End what a thread may still be waiting for."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    connection.close()
