"""What a reward is: a float, converted from what user code returns, and when two rewards are equal.

Python numbers, booleans, numpy numbers, and arrays or tensors with one element are accepted. A text is refused although `float`
could parse it: a function that returns "1.0" has a defect, and the answer of a judge model must be parsed by its caller.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Any

_ROUNDING = 1e-9
"""The largest difference of rewards that counts as a rounding error; relative for rewards above 1."""


def is_rounding(difference: float, largest: float) -> bool:
    """Whether a difference of rewards is a rounding error, such as that of 0.1 + 0.2 and 0.3. `largest` is the largest absolute
    value of the rewards that are compared."""
    return math.isfinite(difference) and abs(difference) <= _ROUNDING * max(1.0, abs(largest))


def reaches(reward: float, bound: float) -> bool:
    """Whether a reward is at least the bound, up to rounding: 0.1 + 0.2 + 0.7 reaches 1."""
    return reward >= bound or is_rounding(bound - reward, max(abs(reward), abs(bound)))


def equal_rewards(rewards: Iterable[float]) -> bool:
    """Whether the rewards are equal up to rounding: the one rule for advantages, metrics, dynamic sampling and warnings.

    Example: `equal_rewards([0.1 + 0.2, 0.3])` is true. So is the result for fewer than two rewards.
    """
    values = list(rewards)
    if not values:
        return True
    low, high = min(values), max(values)
    return is_rounding(high - low, max(abs(low), abs(high)))


def reward_number(value: Any, source: str) -> float:
    """The reward as a float, which may be NaN or infinite. `source` names the code that returned it.

    Raises TypeError if the value is not a number.
    """
    numpy = sys.modules.get("numpy")  # not imported here: environments that have no arrays start without it
    if numpy is not None and isinstance(value, numpy.ndarray) and value.size == 1:
        value = value.item()  # float() of one with axes is deprecated
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{source} gave the text {value!r:.80}; a reward must be a number: convert it with float(...)")
    if value is None:
        raise TypeError(f"{source} gave None; a reward must be a number, such as 0.0: is a `return` missing?")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        kind = type(value).__name__
        parts = (
            ". Write a function for each part: each has a name and a weight"
            if isinstance(value, dict)
            else f": {error}"
        )
        raise TypeError(f"{source} gave {value!r:.80} ({kind}); a reward must be one number{parts}") from None


def added(rewards: Iterable[float | None]) -> float | None:
    """The sum of the numbers. None if there is none: no reward is not the reward 0.

    Example: `added([None, 0.5])` is 0.5.
    """
    numbers = [reward for reward in rewards if reward is not None]
    return sum(numbers) if numbers else None


def number_or_none(value: Any, who: str) -> float | TypeError | None:
    """An item of a list of rewards of another system. None and NaN give None; a value that is not a number gives the error."""
    if value is None:
        return None
    try:
        number = reward_number(value, who)
    except TypeError as error:
        return error
    return None if math.isnan(number) else number
