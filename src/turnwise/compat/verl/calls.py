"""Calling the methods of a user's class: sync or async, in any of the signatures that verl's generations had.

Sync methods run beside the event loop. While a method runs, verl's names are ours, since methods import too.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from turnwise.compat.verl.names import verl_names
from turnwise.errors import Failed, boundary
from turnwise.user_code.calls import spawn
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["Lease", "call", "defines", "takes"]

T = TypeVar("T")
_log = logging.getLogger(__name__)


async def call(
    method: Callable[..., Any], *arguments: Any, keywords: Mapping[str, Any] | None = None, name: str, kind: str
) -> Any:
    """Call a method and wait for it.

    Positional arguments are left off from the end where the method does not take them: verl's base classes have
    `finalize_interaction(self)`, users write `finalize_interaction(self, instance_id, **kwargs)`. Raises Failed, of `kind`.
    """
    with boundary(kind):
        bound = _fitting(method, arguments, keywords or {})
        with verl_names():
            if inspect.iscoroutinefunction(method):
                return await bound()
            result = await run_in_thread(bound, name=name, kind=kind)
            return await result if inspect.isawaitable(result) else result


def takes(method: Callable[..., Any], keyword: str, *, anything: bool = False) -> bool:
    """Whether a method has a parameter of that name; with `anything`, or one that swallows all keywords."""
    parameters = inspect.signature(method).parameters
    swallows = anything and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return swallows or keyword in parameters


def defines(kind: type, method: str, base: type) -> bool:
    """Whether a class has a method that is not just that of `base`, or of a copy of it by the same name."""
    own = getattr(kind, method, None)
    owner = next((one for one in kind.__mro__ if method in vars(one)), kind)
    return callable(own) and owner.__name__ != base.__name__


class Lease(Generic[T]):
    """Something that is taken for a conversation, and given back exactly once if it was taken.

    What was still being taken when the conversation ended is given back as soon as it is there.
    """

    def __init__(self, take: Callable[[], Awaitable[T]], give: Callable[[T], Awaitable[Any]], name: str) -> None:
        self._take = take
        self._give = give
        self._name = name
        self._taking: asyncio.Future[T] | None = None
        self._given = False

    async def take(self) -> T:
        self._taking = spawn(_awaited(self._take()))
        return await asyncio.shield(self._taking)

    async def give(self) -> None:
        """Give it back. What could not be taken is not given back, and a second time does nothing."""
        if self._taking is None or self._given:
            return
        self._given = True
        if not self._taking.done():
            self._taking.add_done_callback(self._give_late)
        elif (taken := _result(self._taking)) is not None:
            await self._give(taken)

    def _give_late(self, taking: asyncio.Future[T]) -> None:
        if (taken := _result(taking)) is not None:
            _late.add(task := spawn(_awaited(self._give(taken))))
            task.add_done_callback(self._was_given)

    def _was_given(self, task: asyncio.Future[Any]) -> None:
        _late.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Failed):
            _log.warning("%s could not be given back: %s", self._name, error)


_late: set[asyncio.Future[Any]] = set()
"""The event loop itself remembers tasks weakly only."""


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _result(taking: asyncio.Future[T]) -> T | None:
    return None if taking.cancelled() or taking.exception() is not None else taking.result()


def _fitting(method: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[[], Any]:
    """The method with as many of the arguments as it takes, and all of the keywords."""
    signature = inspect.signature(method)
    first: TypeError | None = None
    for count in range(len(arguments), -1, -1):
        try:
            signature.bind(*arguments[:count], **keywords)
        except TypeError as error:
            first = first or TypeError(f"{method.__qualname__}: {error}")
            continue
        return partial(method, *arguments[:count], **keywords)
    assert first is not None
    raise first
