"""Callables that a recipe names: imported, and checked against their arguments before the run begins."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.config.known_names import renamed_arguments
from turnwise.config.schema import Use
from turnwise.errors import ConfigError
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.object_references import resolve

__all__ = ["named_callable", "reference_name"]


def named_callable(use: Use, *, key: str, given: Sequence[Any] = (), partly: bool = False) -> functools.partial[Any]:
    """The callable that `use` names, with its arguments bound. `given` stands for the positional arguments of later calls.
    `partly`: later calls have further arguments. Each call gets its own copy of lists and dictionaries among the arguments.

    Raises ConfigError, with `key` as the place in the recipe, if the object cannot be imported, cannot be called, or does not
    accept the arguments.
    """
    target = resolve(use.use, key=key)
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
