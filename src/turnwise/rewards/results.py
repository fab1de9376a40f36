"""Checks what reward functions return: a number for a trajectory or a turn, or a list with one item for each trajectory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

from turnwise.errors import Failed, boundary, failed_by
from turnwise.types import Failure
from turnwise.user_code.reward_number import reward_number

__all__ = ["MAX_REWARD", "finite_number", "list_item", "one_per_trajectory"]

MAX_REWARD = 1e15
"""The largest absolute reward: the advantages of larger rewards do not fit into float32 gradients."""


def finite_number(source: str, value: Any) -> float:
    """A reward as a finite float. `source` names the code that returned it. Raises Failed."""
    try:
        number = reward_number(value, source)
    except TypeError as error:
        raise Failed(Failure("reward", str(error))) from error
    if not math.isfinite(number):
        raise Failed(Failure("reward", f"{source} gave {number}; a reward must be a finite number"))
    if abs(number) > MAX_REWARD:
        message = f"{source} gave {number:g}; a reward must lie between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        raise Failed(Failure("reward", message))
    return number


def list_item(source: str, value: Any) -> float | None:
    """An item of a list of rewards: a number, or None for a function that does not apply. An exception is raised as Failed."""
    if isinstance(value, BaseException):
        raise failed_by(value, "reward", where=source)
    return None if value is None else finite_number(source, value)


def one_per_trajectory(source: str, values: Any, count: int, of: str) -> list[Any]:
    """The result of a function of several trajectories as a list. `of` names them: `a group`, `the step`.

    Raises Failed if it does not have one value for each trajectory.
    """
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        result = f"{values!r:.80}"
    else:
        with boundary("reward"):
            listed = list(values)
        if len(listed) == count:
            return listed
        result = f"{len(listed)} values"
    raise Failed(
        Failure(
            "reward",
            f"{source} gave {result} for the {count} trajectories of {of}; it must give a list with a number, or None, for "
            f"each of them, in their order",
        )
    )
