"""Closing what was made only to see whether it can be made: environments and classes of tools, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turnwise.errors import Failed, boundary

__all__ = ["close_tried", "close_tried_environment"]

_CLOSING_SECONDS = 30.0
_log = logging.getLogger(__name__)


def close_tried(close: Callable[[], Any]) -> None:
    """Close what was made to see whether it can be; an async `close` runs in a loop of its own, with a bound."""

    async def wait() -> None:
        async with asyncio.timeout(_CLOSING_SECONDS):
            await found

    found = close()
    if inspect.isawaitable(found):
        with ThreadPoolExecutor(1) as thread:  # this thread may have a loop that runs
            thread.submit(lambda: asyncio.run(wait())).result()


def close_tried_environment(close: Callable[[], Any], name: str) -> None:
    """`close_tried` for an environment: where it fails, a warning, since it was not begun."""
    try:
        with boundary("environment"):
            close_tried(close)
    except Failed as failed:  # not begun, and so perhaps not ready to be closed
        _log.warning("environment: %s, made to be tried out, could not be closed: %s", name, failed.failure.message)
