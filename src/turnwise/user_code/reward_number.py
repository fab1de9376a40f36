"""Converts the reward that user code returns to a float.

Python numbers, booleans, numpy numbers, and arrays or tensors with one element are accepted. A text is refused although `float`
could parse it: a function that returns "1.0" has a defect, and the answer of a judge model must be parsed by its caller.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["number_or_none", "reward_number"]


def reward_number(value: Any, source: str) -> float:
    """The reward as a float, which may be NaN or infinite. `source` names the code that returned it.

    Raises TypeError if the value is not a number.
    """
    if isinstance(value, np.ndarray) and value.size == 1:
        value = value.item()  # float() of one with axes is deprecated
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(f"{source} gave the text {value!r:.80}; a reward must be a number: convert it with float(...)")
    if value is None:
        raise TypeError(f"{source} gave None; a reward must be a number, such as 0.0: is a `return` missing?")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        kind = type(value).__name__
        raise TypeError(f"{source} gave {value!r:.80} ({kind}); a reward must be one number: {error}") from None


def number_or_none(value: Any, who: str) -> float | TypeError | None:
    """An item of a list of rewards of another system. None and NaN give None; a value that is not a number gives the error."""
    if value is None:
        return None
    try:
        number = reward_number(value, who)
    except TypeError as error:
        return error
    return None if math.isnan(number) else number
