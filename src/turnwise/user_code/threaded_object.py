"""An object of somebody else's class, for one conversation: made, asked and closed beside the event loop.

Knows nothing of what is asked. Whatever is sync runs in a thread of its own, so it may block, hang or raise; whatever is
async is awaited. It is asked one thing at a time, and closed once, on every path out.
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

_GRACE = 1.0  # seconds for what is still going on when the conversation is over
_log = logging.getLogger(__name__)


class ThreadedObject(Generic[T]):
    """Holds the object that `make` gives. `end` closes it; the object itself may have no way to be closed.

    A conversation may end while its object is still being made: it is then closed by the thread that has made it. One that is
    still busy has a second to come to an end, and is closed all the same: that is what frees one that hangs.
    """

    def __init__(self, make: Callable[[], T], end: Callable[[T], Any] | None, *, name: str) -> None:
        self._make = make
        self._end = end
        self._name = name
        self._made: list[T] = []
        self._over = False
        self._lock = threading.Lock()
        self._busy: asyncio.Future[Any] | None = None

    async def make(self) -> T:
        """Make it. Raises Failed if it cannot be."""
        return await self._aside(self._make_or_end)

    def adopt(self, made: T) -> T:
        """Hold an object that was made before."""
        self._made.append(made)
        return made

    @property
    def busy(self) -> bool:
        """Whether a call is still running, also where its conversation has given it up."""
        return self._busy is not None and not self._busy.done()

    async def ask(self, function: Callable[[], Any]) -> Any:
        """What a function answers, sync or async. Raises whatever that raises; from a thread, as Failed."""
        if inspect.iscoroutinefunction(function):
            return await function()
        result = await self._aside(function)
        return await result if inspect.isawaitable(result) else result

    async def close(self) -> None:
        """Close it, if it was made and was not closed before."""
        if self._busy is not None and self.busy:
            await asyncio.wait({self._busy}, timeout=_GRACE)
        with self._lock:
            made, self._made, self._over = self._made, [], True
        for one in made:
            if self._end is not None:
                result = await run_in_thread(
                    lambda one=one, end=self._end: end(one), name=self._name, kind="environment"
                )
                if inspect.isawaitable(result):
                    await result

    async def _aside(self, function: Callable[[], Any]) -> Any:
        self._busy = spawn(run_in_thread(function, name=self._name, kind="environment"))
        return await asyncio.shield(self._busy)  # the conversation may be over before it is

    def _make_or_end(self) -> T:
        made = self._make()
        with self._lock:
            if not self._over:
                self._made.append(made)
                return made
        try:
            with boundary("environment"):
                self._end_late(made)
        except Failed as failed:
            _log.warning("%s, made when its conversation was over, could not be closed: %s", self._name, failed)
        return made

    def _end_late(self, made: T) -> None:
        result = self._end(made) if self._end is not None else None
        if inspect.iscoroutine(result):
            asyncio.run(result)


def columns_for(
    function: Callable[..., Any], row: Row, *, name: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The columns of a row that a function names as its parameters; all of them where it takes whatever comes (`**row`).

    `extra` are columns beside those of `row.fields`. Raises KeyError, with the row's columns, if it needs one that is not
    there.
    """
    columns = {**row.fields, **(extra or {})}
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        given = dict(columns)
    else:
        given = {one.name: columns[one.name] for one in parameters if one.name in columns}
    for one in parameters:
        by_name = one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        if by_name and one.default is one.empty and one.name not in given:
            have = ", ".join(sorted(columns)) or "none"
            raise KeyError(
                f"{name} wants the column {one.name!r}, and row {row.id!r} has none of that name; its columns are: {have}. Add "
                f"it to the data, or map one to it: data.columns.{one.name}=<column>"
            )
    return given
