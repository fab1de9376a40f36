"""Calls the methods of a user's class: sync or async, with the signatures of all versions of verl.

Sync methods run in a thread. While a method runs, turnwise provides verl's names, because methods may also import them.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from turnwise.compat.verl.names import verl_names
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.user_code.calls import spawn
from turnwise.user_code.deadlines import conversation_name
from turnwise.user_code.run_in_thread import run_in_thread

__all__ = ["ConversationResource", "call", "defines", "follow_verl_logging", "takes"]

T = TypeVar("T")
_log = logging.getLogger(__name__)
_calls = logging.getLogger(f"{__name__}.calls")
"""The calls of users' methods. Its level is that of `VERL_LOGGING_LEVEL`, also with `TURNWISE_LOG=debug`, which prints the story
of one conversation."""
_LEVEL = "VERL_LOGGING_LEVEL"
_MOST_CHARACTERS = 300


async def call(
    method: Callable[..., Any], *arguments: Any, keywords: Mapping[str, Any] | None = None, name: str, kind: str
) -> Any:
    """Call a method and wait for it.

    If the method takes fewer positional arguments, the last ones are left out: verl's base classes have
    `finalize_interaction(self)`, users write `finalize_interaction(self, instance_id, **kwargs)`. Raises Failed with `kind`.
    """
    result: Any = "an exception"
    try:
        with boundary(kind):
            bound = _fitting(method, arguments, keywords or {})
            with verl_names():
                if inspect.iscoroutinefunction(method):
                    result = await bound()
                else:
                    result = await run_in_thread(bound, name=name, kind=kind)
                    result = await result if inspect.isawaitable(result) else result
                return result
    finally:
        if _calls.isEnabledFor(logging.DEBUG):
            given = [*map(_short, arguments), *(f"{key}={_short(value)}" for key, value in (keywords or {}).items())]
            _calls.debug("%s: %s(%s) -> %s", conversation_name(), name, ", ".join(given), _short(result))


def follow_verl_logging() -> None:
    """Print each call of a user's method if `VERL_LOGGING_LEVEL` is DEBUG. Raises ConfigError for an unknown level."""
    level, levels = os.environ.get(_LEVEL, "WARN").upper(), logging.getLevelNamesMapping()
    if level not in levels:
        raise ConfigError(f"{_LEVEL}={level} is not a log level; the levels are: {', '.join(levels)}")
    _calls.setLevel(level)


def _short(value: Any) -> str:
    """A value in a log line: one line of at most `_MOST_CHARACTERS` characters."""
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def takes(method: Callable[..., Any], keyword: str, *, anything: bool = False) -> bool:
    """Whether a method has a parameter of this name. With `anything`, `**kwargs` counts too."""
    parameters = inspect.signature(method).parameters
    swallows = anything and any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return swallows or keyword in parameters


def defines(kind: type, method: str, base: type) -> bool:
    """Whether a class overrides a method of `base`, or of a copy of `base` with the same class name."""
    own = getattr(kind, method, None)
    owner = next((parent for parent in kind.__mro__ if method in vars(parent)), kind)
    return callable(own) and owner.__name__ != base.__name__


class ConversationResource(Generic[T]):
    """A resource of one conversation: acquired with `take`, and released exactly once with `give` if it was acquired.

    If `take` is still running when the conversation ends, the resource is released as soon as `take` returns.
    """

    def __init__(self, take: Callable[[], Awaitable[T]], give: Callable[[T], Awaitable[Any]], name: str) -> None:
        self._take = take
        self._give = give
        self._name = name
        self._taking: asyncio.Future[T] | None = None
        self._given = False

    async def acquire(self) -> T:
        self._taking = spawn(_awaited(self._take()))
        return await asyncio.shield(self._taking)

    async def release(self) -> None:
        """Release the resource. Has no effect if it was not acquired, or if it was released before."""
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
            _log.warning("%s could not be released: %s", self._name, error)


_late: set[asyncio.Future[Any]] = set()
"""Strong references to running tasks: the event loop has weak references only."""


async def _awaited(awaitable: Awaitable[T]) -> T:
    return await awaitable


def _result(taking: asyncio.Future[T]) -> T | None:
    return None if taking.cancelled() or taking.exception() is not None else taking.result()


def _fitting(method: Callable[..., Any], arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Callable[[], Any]:
    """The method, bound to as many positional arguments as it takes and to all keywords. Raises TypeError."""
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
