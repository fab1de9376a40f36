"""An object of a user's class that belongs to one conversation: created, called and closed without blocking the event loop.

Sync code runs in a thread of its own, so it may block, hang or raise. Async code is awaited. There is one call at a time, and the
object is closed exactly once, however the conversation ends.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from turnwise.errors import Failed, boundary
from turnwise.types import Row
from turnwise.user_code.calls import spawn
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["ThreadedObject", "columns_for"]

T = TypeVar("T")

_GRACE = 1.0  # seconds for a call that is still running when the conversation has ended
_log = logging.getLogger(__name__)


class ThreadedObject(Generic[T]):
    """Holds the object that `make` returns. `end` closes it; None if the object needs no closing.

    If the conversation ends while the object is being created, the thread that creates it also closes it. If a call is still
    running, it has a second to end. Then the object is closed anyway, which also ends a call that does not return.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], Any] | None, *, name: str) -> None:
        self._make = make
        self._end = end
        self._name = name
        self._instances: list[T] = []
        self._over = False
        self._lock = threading.Lock()
        self._busy: asyncio.Future[Any] | None = None

    async def make(self) -> T:
        """Create the object. Raises Failed if that fails."""
        return await self._aside(self._make_or_end)

    def adopt(self, instance: T) -> T:
        """Hold an object that was created elsewhere."""
        self._instances.append(instance)
        return instance

    @property
    def busy(self) -> bool:
        """Whether a call is still running, even if the conversation no longer waits for it."""
        return self._busy is not None and not self._busy.done()

    async def ask(self, function: Callable[[], Any]) -> Any:
        """The result of a function, sync or async. Raises what an async function raises; errors of a sync function as Failed."""
        if inspect.iscoroutinefunction(function):
            return await function()
        result = await self._aside(function)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Close the object, if it was created and is not closed."""
        if self._busy is not None and self.busy:
            await asyncio.wait({self._busy}, timeout=_GRACE)
        with self._lock:
            objects, self._instances, self._over = self._instances, [], True
        for instance in objects:
            if self._end is not None:
                result = await run_in_thread(
                    lambda instance=instance, end=self._end: end(instance), name=self._name, kind="environment"
                )
                if inspect.isawaitable(result):
                    await result

    async def _aside(self, function: Callable[[], Any]) -> Any:
        self._busy = spawn(run_in_thread(function, name=self._name, kind="environment"))
        return await asyncio.shield(self._busy)  # the conversation may end before the call does

    def _make_or_end(self) -> T:
        instance = self._make()
        with self._lock:
            if not self._over:
                self._instances.append(instance)
                return instance
        try:
            with boundary("environment"):
                self._end_late(instance)
        except Failed as failed:
            _log.warning(
                "%s was created after its conversation had ended, and could not be closed: %s", self._name, failed
            )
        return instance

    def _end_late(self, instance: T) -> None:
        result = self._end(instance) if self._end is not None else None
        if inspect.iscoroutine(result):
            asyncio.run(result)


def columns_for(
    function: Callable[..., Any], row: Row, *, name: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The columns of a row that a function has as parameters; all columns if it has `**row`.

    `extra` are columns in addition to `row.fields`. Raises KeyError if a required column is missing.
    """
    columns = {**row.fields, **(extra or {})}
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        arguments = dict(columns)
    else:
        arguments = {parameter.name: columns[parameter.name] for parameter in parameters if parameter.name in columns}
    for parameter in parameters:
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and parameter.default is parameter.empty and parameter.name not in arguments:
            have = ", ".join(sorted(columns)) or "none"
            raise KeyError(
                f"{name} needs the column {parameter.name!r}, and row {row.id!r} has no such column; its columns are: {have}. "
                f"Add the column to the data, or map another column to it: data.columns.{parameter.name}=<column>"
            )
    return arguments
