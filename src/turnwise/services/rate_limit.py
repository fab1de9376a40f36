"""Keeps the requests of all conversations within the limits of a service: requests and tokens in a minute.

Knows times and numbers only. The client of a service asks it before each request, and reports pauses that the service asks for.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable

from turnwise.errors import ConfigError

__all__ = ["RateLimit"]

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
