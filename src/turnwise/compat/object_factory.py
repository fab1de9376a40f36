"""Makes objects of classes of other systems, one for each conversation, and converts their observations to messages."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Message
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve


@dataclass(frozen=True, slots=True)
class ObjectFactory:
    """A class, or a function that makes an object, with its arguments."""

    make: Callable[[], Any]
    name: str

    @classmethod
    def of(
        cls,
        reference: str | Callable[..., Any],
        arguments: Mapping[str, Any] | None = None,
        *,
        wants: Sequence[str],
        check: Callable[[Any], None] | None = None,
        keep: Callable[[Any], None] | None = None,
    ) -> ObjectFactory:
        """From a class or function, or a reference to one. Makes one object as a test, and closes it or passes it to `keep`.

        `wants` are the methods that the object must have. `check` raises if something else is wrong. Raises ConfigError.
        """
        reference = referred(reference, "environment")
        name = getattr(reference, "__name__", type(reference).__name__)
        given = dict(arguments or {})
        with contextlib.suppress(ValueError):  # a builtin may have no signature
            try:
                inspect.signature(reference).bind(**given)
            except TypeError as error:
                raise ConfigError(f"{name} cannot be created with the arguments {given}: {error}") from None
        maker = cls(lambda: reference(**copy_containers(given)), name)
        try:
            with boundary("environment"):
                instance = maker.make()
        except Failed as failed:
            raise ConfigError(f"{name} cannot be created: {failed.failure.message}") from failed
        if missing := [method for method in wants if not callable(getattr(instance, method, None))]:
            raise ConfigError(
                f"{name} makes a {type(instance).__name__} without {' and '.join(missing)}; what is played must have "
                f"{' and '.join(wants)}"
            )
        try:
            with boundary("environment"):
                if check is not None:
                    check(instance)
                if keep is not None:
                    keep(instance)
                elif not inspect.iscoroutinefunction(getattr(instance, "close", None)):
                    end(instance)
        except Failed as failed:
            raise ConfigError(f"{name}: {failed.failure.message}") from failed
        return maker


def end(instance: Any) -> Any:
    """Call `close` of an object, if it has one."""
    close = getattr(instance, "close", None)
    return close() if callable(close) else None


def referred(reference: str | Callable[..., Any], argument: str) -> Callable[..., Any]:
    """The callable that an argument of the environment contains or refers to. Raises ConfigError if it is not callable."""
    key = f"environment.arguments.{argument}"
    if isinstance(reference, str):
        reference = resolve(reference, key=key)
    if not callable(reference):
        raise ConfigError(f"{key} is a {type(reference).__name__}, {reference!r:.80}; it must be a class or a function")
    return reference


def messages_of(shown: Any, role: str) -> list[Message]:
    """An observation as messages. Texts, content parts and messages stay unchanged; other values become JSON; None gives none."""
    if shown is None or (isinstance(shown, str) and not shown):
        return []
    if isinstance(shown, list) and shown and all(isinstance(item, Mapping) for item in shown):
        if all(isinstance(item.get("role"), str) for item in shown):
            return [dict(item) for item in shown]
        if all(isinstance(item.get("type"), str) for item in shown):
            return [{"role": role, "content": [dict(item) for item in shown]}]
    return [{"role": role, "content": shown if isinstance(shown, str) else _json(shown)}]


def opened(messages: Sequence[Message], shown: Any, *, between: str = "\n\n") -> list[Message]:
    """The messages of the row, with the first observation appended to the last user message."""
    added_messages = messages_of(shown, "user")
    last = messages[-1]
    if (
        len(added_messages) != 1
        or last["role"] != "user"
        or added_messages[0]["role"] != "user"
        or set(added_messages[0]) != {"role", "content"}
    ):
        return [*messages, *added_messages]
    before, added = last["content"], added_messages[0]["content"]
    if isinstance(before, str) and isinstance(added, str):
        content: Any = f"{before}{between if before else ''}{added}"
    else:
        content = [*_parts(before), *_parts(added)]
    return [*messages[:-1], {**last, "content": content}]


def plain(value: Any) -> Any:
    """The value converted to JSON types: arrays and tuples become lists, unknown types become text."""
    return json.loads(_json(value))


def number(value: Any, what: str) -> float:
    """A reward as a float. Raises TypeError, which names `what`, if it is not a finite number."""
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
    # an environment's dictionaries may have keys of any type, JSON only texts
    if isinstance(value, Mapping):
        return {str(key): _keyed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_keyed(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _default(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return _keyed(value.tolist())
    return str(value)
