"""Imports the callables that a recipe names, and checks them against their arguments before the run begins.

Environments and tool classes are built once for this check. These objects are closed here, whether they are sync or async, and
an error while closing an environment is only logged, because `close` may not work without `begin`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from turnwise.compat.providers.provider import environment_target
from turnwise.config.recipe import renamed_arguments
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.options.section import Use
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve

# callables


def environment_constructor(use: Use) -> functools.partial[Any]:
    """What makes the environment, or the source of environments, that a recipe names: an object of the user, or `provider:name`.

    Raises ConfigError.
    """
    return named_callable(use, key="environment", find=environment_target)


def named_callable(
    use: Use,
    *,
    key: str,
    given: Sequence[Any] = (),
    partly: bool = False,
    find: Callable[[str], Any] | None = None,
) -> functools.partial[Any]:
    """The callable that `use` names, with its arguments bound. `given` stands for the positional arguments of later calls.
    `partly`: later calls have further arguments. Each call gets its own copy of lists and dictionaries among the arguments.
    `find` gives the object of the reference; None imports it.

    Raises ConfigError, with `key` as the place in the recipe, if the object cannot be imported, cannot be called, or does not
    accept the arguments.
    """
    target = resolve(use.use, key=key) if find is None else find(use.use)
    if not callable(target):
        raise ConfigError(
            f"{key}: {use.use} is a {type(target).__name__} and cannot be called; give a function or a class"
        )
    try:
        signature = inspect.signature(target)
        (signature.bind_partial if partly else signature.bind)(*given, **use.arguments)
    except (TypeError, ValueError) as error:  # ValueError: a builtin without a signature
        hint = renamed_arguments(use.use, use.arguments)
        if inspect.isasyncgenfunction(target) or inspect.isgeneratorfunction(target):
            hint += "; it is a generator function: write @environment above it (from turnwise import environment)"
        raise ConfigError(
            f"{key}: {use.use} cannot be called with the arguments {use.arguments}: {error}{hint}"
        ) from None
    return functools.partial(_call, target, use.arguments) if use.arguments else functools.partial(target)


def _call(target: Callable[..., Any], arguments: Mapping[str, Any], /, *given: Any, **named: Any) -> Any:
    return target(*given, **{**copy_containers(dict(arguments)), **named})


def reference_name(use: Use) -> str:
    """The name after the colon: `length` for `rewards.py:length`."""
    return use.use.rpartition(":")[2]


# objects that were built for a check

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
        _log.info("environment: %s was created as a check, and could not be closed: %s", name, failed.failure.message)
