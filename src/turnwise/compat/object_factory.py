"""How a class of somebody else becomes objects, one for each conversation, and what becomes of what they show."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from turnwise.environments.environment import Environment
from turnwise.environments.tools.tool import Tool, Toolbox
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Message
from turnwise.user_code.object_references import resolve

__all__ = ["InFront", "Maker", "end", "messages_of", "number", "opened", "plain", "referred"]

InFront = Callable[[Sequence[Tool | Toolbox], Environment], Environment]
"""Puts tools in front of an environment: those given, and those of the recipe."""


@dataclass(frozen=True, slots=True)
class Maker:
    """A class, or a function that makes an object, with its arguments."""

    make: Callable[[], Any]
    name: str

    @classmethod
    def of(
        cls,
        found: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        wants: Sequence[str],
        check: Callable[[Any], None] | None = None,
        keep: Callable[[Any], None] | None = None,
    ) -> Maker:
        """Of a class or function, or a reference to one. One object is made to see whether it can be, and closed, or
        handed to `keep`.

        `wants` are the methods that it must have; `check` raises where something else is wrong with it. Raises ConfigError.
        """
        found = referred(found, "environment")
        name = getattr(found, "__name__", type(found).__name__)
        given = dict(arguments or {})
        with contextlib.suppress(ValueError):  # a builtin may have no signature
            try:
                inspect.signature(found).bind(**given)
            except TypeError as error:
                raise ConfigError(f"{name} cannot be made with the arguments {given}: {error}") from None
        maker = cls(partial(found, **given), name)
        try:
            with boundary("environment"):
                made = maker.make()
        except Failed as failed:
            raise ConfigError(f"{name} cannot be made: {failed.failure.message}") from failed
        if missing := [one for one in wants if not callable(getattr(made, one, None))]:
            raise ConfigError(
                f"{name} makes a {type(made).__name__} without {' and '.join(missing)}; what is played must have "
                f"{' and '.join(wants)}"
            )
        try:
            with boundary("environment"):
                if check is not None:
                    check(made)
                if keep is not None:
                    keep(made)
                elif not inspect.iscoroutinefunction(getattr(made, "close", None)):
                    end(made)
        except Failed as failed:
            raise ConfigError(f"{name}: {failed.failure.message}") from failed
        return maker


def end(made: Any) -> Any:
    """Close an object, if there is a way to."""
    close = getattr(made, "close", None)
    return close() if callable(close) else None


def referred(found: str | Callable[..., Any], argument: str) -> Callable[..., Any]:
    """What an argument of the environment names, or is. Raises ConfigError if it cannot be called."""
    key = f"environment.arguments.{argument}"
    if isinstance(found, str):
        found = resolve(found, key=key)
    if not callable(found):
        raise ConfigError(f"{key} is a {type(found).__name__}, {found!r:.80}; it must be a class or a function")
    return found


def messages_of(shown: Any, role: str) -> list[Message]:
    """What was shown, as messages: a text, parts or whole messages as they are, anything else as JSON; nothing is none."""
    if shown is None or (isinstance(shown, str) and not shown):
        return []
    if isinstance(shown, list) and shown and all(isinstance(one, Mapping) for one in shown):
        if all(isinstance(one.get("role"), str) for one in shown):
            return [dict(one) for one in shown]
        if all(isinstance(one.get("type"), str) for one in shown):
            return [{"role": role, "content": [dict(one) for one in shown]}]
    return [{"role": role, "content": shown if isinstance(shown, str) else _json(shown)}]


def opened(messages: Sequence[Message], shown: Any, *, between: str = "\n\n") -> list[Message]:
    """The row's messages, with what is shown at the start behind the last user's words."""
    told = messages_of(shown, "user")
    last = messages[-1]
    if len(told) != 1 or last["role"] != "user" or told[0]["role"] != "user" or set(told[0]) != {"role", "content"}:
        return [*messages, *told]
    before, added = last["content"], told[0]["content"]
    if isinstance(before, str) and isinstance(added, str):
        content: Any = f"{before}{between if before else ''}{added}"
    else:
        content = [*_parts(before), *_parts(added)]
    return [*messages[:-1], {**last, "content": content}]


def plain(value: Any) -> Any:
    """The same as JSON has it: arrays as lists, tuples as lists, what JSON does not know as text."""
    return json.loads(_json(value))


def number(value: Any, what: str) -> float:
    """A reward as a float. Raises TypeError, with `what` gave it, if it is no finite number."""
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()
    if not isinstance(value, int | float | np.number | np.bool_) or not math.isfinite(value):
        raise TypeError(f"{what} gave the reward {value!r:.80}; it must be a finite number")
    return float(value)


def _parts(content: Any) -> list[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return list(content)


def _json(value: Any) -> str:
    return json.dumps(_keyed(value), ensure_ascii=False, default=_default)


def _keyed(value: Any) -> Any:
    # the keys of an environment's dictionaries may be anything, those of JSON may not
    if isinstance(value, Mapping):
        return {str(key): _keyed(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_keyed(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _keyed(value.tolist())
    return str(value)
