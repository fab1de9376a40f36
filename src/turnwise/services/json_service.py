"""Sends JSON requests to an HTTP service, with timeouts, retries, rate limits and a maximum number of concurrent requests.

Each request runs the client of the standard library in a thread. A cancelled request closes its connection, which also ends
the thread. The rate limit holds for all conversations together: requests and tokens in a minute, and pauses that the service
asks for. It knows times and numbers only; the client asks it before each request.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import functools
import http.client
import json
import random
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from turnwise.errors import ConfigError, Failed, TurnwiseError
from turnwise.user_code.calls import waiting_for_others
from turnwise.user_code.threads import run_in_thread

# rate limits

_MINUTE = 60.0
_SPREAD = 0.2  # after a pause, requests start spread over this share of the pause, and not all at the same moment


class RateLimit:
    """Starts requests at even distances: with `requests_per_minute=120`, at least half a second apart.

    With `tokens_per_minute`, a request delays the next one by the time in which its own tokens become free. The number of tokens
    of a request is an estimate until `settle` corrects it. None: no such limit. `pause` delays all requests.

    All conversations share one object. It may be used in several event loops and threads. `clock` returns seconds.

    Raises ConfigError if a limit is not above 0.
    """

    def __init__(
        self,
        *,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, value in (("requests_per_minute", requests_per_minute), ("tokens_per_minute", tokens_per_minute)):
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0")
        self._seconds_per_request = 0.0 if requests_per_minute is None else _MINUTE / requests_per_minute
        self._seconds_per_token = 0.0 if tokens_per_minute is None else _MINUTE / tokens_per_minute
        self._clock = clock
        self._next_request = self._next_token = self._paused_until = 0.0
        """The times from which the limit of requests, the limit of tokens and a pause allow the next request."""
        self._last_pause = 0.0
        """Seconds of the last pause."""
        self._lock = threading.Lock()

    def reserve(self, tokens: int = 0) -> float:
        """Take the next free place for a request of about `tokens` tokens. Returns the seconds until its start."""
        with self._lock:
            now = self._clock()
            start = max(now, self._next_request, self._next_token, self._paused_until)
            self._next_request = start + self._seconds_per_request
            self._next_token = start + self._token_seconds(tokens)
            spread = random.uniform(0.0, _SPREAD * self._last_pause) if now < self._paused_until else 0.0
            return start - now + spread

    async def acquire(self, tokens: int = 0) -> None:
        """Wait until a request of about `tokens` tokens may start."""
        seconds = self.reserve(tokens)
        while seconds > 0:
            await asyncio.sleep(seconds)
            with self._lock:  # a pause may have begun meanwhile
                seconds = self._paused_until - self._clock()

    def settle(self, estimated: int, used: int) -> None:
        """Correct the estimate of a request by the number of tokens that it used."""
        with self._lock:
            self._next_token += self._token_seconds(used) - self._token_seconds(estimated)

    def pause(self, seconds: float) -> None:
        """Start no request in the next `seconds`."""
        with self._lock:
            until = self._clock() + seconds
            if until > self._paused_until:
                self._paused_until, self._last_pause = until, seconds

    def _token_seconds(self, tokens: int) -> float:
        """The time in which this number of tokens becomes free; at most a minute, so that no request waits without end."""
        return min(tokens * self._seconds_per_token, _MINUTE)


# requests

_MAX_ANSWER = 64 << 20  # maximum bytes of an answer
_MAX_ERROR = 300  # characters of a service's error that an error message quotes
_LONGEST_BACKOFF = 60.0  # seconds
_LONGEST_RETRY_AFTER = 600.0  # seconds; a service that asks for a longer pause gets a request after this time
_making = threading.Lock()


class ServiceError(TurnwiseError):
    """A service did not answer, or its answer does not follow the protocol."""


class RefusedError(ServiceError):
    """A service refused a request with a status that a repeated request would get again, such as 400 or 401."""

    def __init__(self, message: str, *, status: int, body: str) -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        """The answer, as text."""


class _Again(Exception):
    """A failed request that may succeed if it is repeated."""

    def __init__(self, problem: str, *, busy: bool = False, retry_after: float | None = None) -> None:
        super().__init__(problem)
        self.busy = busy
        """Whether the service has too many requests: status 429 or 503."""
        self.retry_after = retry_after
        """The seconds of the header Retry-After; None without it."""


class Service:
    """A URL that accepts a JSON object by POST and returns a JSON object.

    A request that gets no connection, no answer in `timeout` seconds, or status 5xx or 429 is repeated up to `retries`
    times. The pause before each retry grows by `pause` seconds; with `exponential`, it doubles up to a minute, and a random part
    of up to half is left out, so that conversations do not retry at the same time. All attempts together take at most `deadline`
    seconds. At most `max_concurrent` requests run at once; the time to wait for a free slot does not count.

    `rate_limit` bounds the requests of all services that share it. With status 429 or 503, all of them wait for the time that
    the header Retry-After gives, or, with `exponential` and without that header, for the pause. The time to wait for the rate
    limit does not count for deadlines.

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
        exponential: bool = False,
        rate_limit: RateLimit | None = None,
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
        self._exponential = exponential
        self._rate_limit = rate_limit or RateLimit()
        self.deadline = deadline if deadline is not None else self._longest()
        """The maximum time of `ask`, in seconds, without the time to wait for a free slot."""
        self._max_concurrent = max_concurrent
        self._headers = {"Content-Type": "application/json", "Accept": "application/json", **dict(headers)}
        self._slots: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            weakref.WeakKeyDictionary()
        )

    async def ask(self, question: Mapping[str, Any], *, tokens: int = 0) -> dict[str, Any]:
        """Send a request and return the answer. `tokens` is the estimated number of tokens, for the rate limit.

        Raises ServiceError if there is no answer after all attempts, or if the answer is not a JSON object; RefusedError if
        the status says that a repeated request would be refused too.
        """
        body = json.dumps(question).encode("utf-8")  # ASCII, because a model may have written incomplete characters
        slot = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_concurrent))
        async with slot:
            problem, attempt = "", 0
            try:
                async with asyncio.timeout(self.deadline) as time_limit:
                    for attempt in range(1, self._retries + 2):
                        await self._wait_for_rate_limit(time_limit, tokens)
                        try:
                            return await self._attempt(body)
                        except _Again as again:
                            problem = str(again)
                            if attempt <= self._retries:
                                await self._back_off(again, attempt)
            except TimeoutError:
                problem = f"{problem or 'no answer'}, stopped after the deadline of {self.deadline:g} s"
        times = "once" if attempt == 1 else f"{attempt} times"
        raise ServiceError(f"the service {self.url} was called {times}: {problem}")

    def settle(self, estimated: int, used: int) -> None:
        """Report to the rate limit how many tokens a request used, instead of the estimate that was given to `ask`."""
        self._rate_limit.settle(estimated, used)

    async def _wait_for_rate_limit(self, time_limit: asyncio.Timeout, tokens: int) -> None:
        """Wait until the rate limit allows a request. This time does not count for any deadline."""
        loop, until = asyncio.get_running_loop(), time_limit.when()
        assert until is not None
        remaining = until - loop.time()
        time_limit.reschedule(None)
        with waiting_for_others():
            await self._rate_limit.acquire(tokens)
        time_limit.reschedule(loop.time() + remaining)

    async def _back_off(self, again: _Again, attempt: int) -> None:
        """The pause after the failed attempt number `attempt`, counted from 1."""
        if again.retry_after is not None:
            self._rate_limit.pause(again.retry_after)  # the next attempt waits for the rate limit
            return
        pause = self._longest_pause(attempt)
        if self._exponential:
            pause *= random.uniform(0.5, 1.0)
            if again.busy:
                self._rate_limit.pause(pause)
                return
        await asyncio.sleep(pause)

    def _longest_pause(self, attempt: int) -> float:
        """The longest pause after attempt number `attempt`, in seconds."""
        return min(self._pause * 2 ** (attempt - 1), _LONGEST_BACKOFF) if self._exponential else self._pause * attempt

    def _longest(self) -> float:
        """A bound for the time of all attempts and the pauses between them."""
        if not self._exponential:
            return (self._timeout + self._pause * self._retries) * (self._retries + 1)
        pauses = sum(self._longest_pause(attempt) for attempt in range(1, self._retries + 1))
        return self._timeout * (self._retries + 1) + pauses + 1.0

    async def _attempt(self, body: bytes) -> dict[str, Any]:
        connection = self._connect()
        try:
            async with asyncio.timeout(self._timeout):
                status, answer, retry_after = await run_in_thread(
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
            busy = status in (429, 503)
            problem = f"status {status}: {text[:_MAX_ERROR]}"
            raise _Again(problem, busy=busy, retry_after=_seconds(retry_after) if busy else None)
        if status != 200:
            message = f"the service {self.url} returned the status {status}: {text[:_MAX_ERROR]}"
            raise RefusedError(message, status=status, body=text)
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

    def _exchange(self, connection: http.client.HTTPConnection, body: bytes) -> tuple[int, bytes, str | None]:
        """Status, answer and the header Retry-After."""
        path = (self._parts.path or "/") + (f"?{self._parts.query}" if self._parts.query else "")
        connection.request("POST", path, body, headers=dict(self._headers))
        response = connection.getresponse()
        return response.status, response.read(_MAX_ANSWER + 1), response.getheader("Retry-After")


def _seconds(retry_after: str | None) -> float | None:
    """The seconds that a header Retry-After asks for: a number of seconds or an HTTP date. None if it has neither."""
    if retry_after is None:
        return None
    try:
        seconds = float(retry_after)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER) if seconds == seconds else None


@functools.lru_cache(maxsize=64)
def _shared_limit(
    origin: str,
    headers: tuple[tuple[str, str], ...],
    requests_per_minute: float | None,
    tokens_per_minute: float | None,
) -> RateLimit:
    """The rate limit of one account (`headers`) on one server (`origin`)."""
    return RateLimit(requests_per_minute=requests_per_minute, tokens_per_minute=tokens_per_minute)


@functools.lru_cache(maxsize=64)
def _shared(
    url: str,
    timeout: float,
    deadline: float | None,
    retries: int,
    pause: float,
    max_concurrent: int,
    headers: tuple[tuple[str, str], ...],
    exponential: bool,
    requests_per_minute: float | None,
    tokens_per_minute: float | None,
) -> Service:
    origin = url.partition("://")[2].partition("/")[0]
    return Service(
        url,
        timeout=timeout,
        deadline=deadline,
        retries=retries,
        pause=pause,
        max_concurrent=max_concurrent,
        headers=headers,
        exponential=exponential,
        rate_limit=_shared_limit(origin, headers, requests_per_minute, tokens_per_minute),
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
    exponential: bool = False,
    requests_per_minute: float | None = None,
    tokens_per_minute: float | None = None,
) -> Service:
    """The service with these options. All conversations share it, so its limits bound all of them together.

    Services on the same server, with the same headers and the same limits, share one rate limit: a judge and a simulated user
    with the same key, for example. Raises ConfigError.
    """
    # tools are created in several threads; without the lock, each thread could create a service
    with _making:
        return _shared(
            url,
            timeout,
            deadline,
            retries,
            pause,
            max_concurrent,
            headers,
            exponential,
            requests_per_minute,
            tokens_per_minute,
        )


def _hang_up(connection: http.client.HTTPConnection) -> None:
    """Close a connection, so that the thread that waits for the connection ends."""
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
    connection.close()
