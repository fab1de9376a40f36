"""Converts an answer of the model into an action of a gymnasium environment, or into an error message for the model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from turnwise.errors import ConfigError

__all__ = ["ActionParser", "InvalidAction"]

_INTEGER = re.compile(r"[+-]?\d+")


class InvalidAction(Exception):
    """An answer is not a valid action. The text is sent to the model, and names the allowed actions."""


class ActionParser:
    """Parses actions of one action space. None stands for a space of all texts.

    Raises ConfigError if actions of the space cannot be written as text and no `function` is given.
    """

    def __init__(self, space: Any, function: Callable[[str], Any] | None = None) -> None:
        if function is not None and inspect.iscoroutinefunction(function):
            raise ConfigError(f"the action {function.__name__} is async; parsing an answer must be sync: write def")
        self._space = space
        self._read = function if function is not None else _reader(space)
        self._allowed = _allowed(space)

    def read(self, text: str) -> Any:
        """Parse the action in an answer.

        Raises InvalidAction.
        """
        try:
            action = self._read(text)
        except ValueError as error:
            raise InvalidAction(
                str(error) or f"There is no action in your answer. Allowed is {self._allowed}."
            ) from None
        if self._space is not None and not self._space.contains(action):
            raise InvalidAction(f"{str(action)[:80]!r} is not allowed. Allowed is {self._allowed}.")
        return action


def _reader(space: Any) -> Callable[[str], Any]:
    kind = type(space).__name__
    if space is None or kind == "Text":
        return str.strip
    if kind == "Discrete":
        return _last_integer
    raise ConfigError(
        f"the actions of {space} have no form in words: set environment.arguments.action to a function of the answer that gives "
        f"an action"
    )


def _last_integer(text: str) -> int:
    integers = _INTEGER.findall(text)
    if not integers:
        raise ValueError
    return int(integers[-1][:18])


def _allowed(space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete":
        return f"an integer from {space.start} to {space.start + space.n - 1}"
    if kind == "Text":
        characters = "".join(sorted(space.character_set))
        shown = characters if len(characters) <= 40 else f"{characters[:40]}..."
        return f"a text of {space.min_length} to {space.max_length} of the characters {shown!r}"
    return "any text" if space is None else str(space)
