"""Closes objects that were built only to check their construction: environments and tool classes, sync or async."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turnwise.errors import Failed, boundary

__all__ = ["close_tried", "close_tried_environment"]

_CLOSE_TIMEOUT = 30.0
"""Seconds."""
_log = logging.getLogger(__name__)


def close_tried(close: Callable[[], Any]) -> None:
    """Close an object that was built as a check. An async `close` runs in its own event loop, for at most 30 seconds."""

    async def wait() -> None:
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await result

    result = close()
    if inspect.isawaitable(result):
        with ThreadPoolExecutor(1) as thread:  # this thread may already run an event loop
            thread.submit(lambda: asyncio.run(wait())).result()


def close_tried_environment(close: Callable[[], Any], name: str) -> None:
    """`close_tried` for an environment. An error is only logged: `close` may not work if `begin` was never called."""
    try:
        with boundary("environment"):
            close_tried(close)
    except Failed as failed:
        _log.warning(
            "environment: %s was created as a check, and could not be closed: %s", name, failed.failure.message
        )
