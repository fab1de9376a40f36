"""Means, standard deviations and centring, as the estimators use them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Literal

__all__ = ["EPSILON", "Scale", "all_equal", "centred", "leave_one_out", "width"]

EPSILON = 1e-6
"""Added to a standard deviation before a division."""

Scale = Literal["std", "batch", "none"]
"""The divisor of centred rewards: the standard deviation of the group, of the batch, or 1."""

_ROUNDING = 1e-12


def all_equal(values: Sequence[float]) -> bool:
    """Whether the values are equal, up to rounding."""
    if not values:
        return True
    low, high = min(values), max(values)
    return high - low <= _ROUNDING * max(abs(low), abs(high))


def width(values: Sequence[float]) -> float:
    """The standard deviation of the sample (divisor n - 1) plus 1e-6; 1 if the values are equal or fewer than two."""
    return 1.0 if len(values) < 2 or all_equal(values) else statistics.stdev(values) + EPSILON


def centred(values: Sequence[float]) -> list[float]:
    """The values minus their mean; zeros if they are equal or fewer than two."""
    if len(values) < 2 or all_equal(values):
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [value - mean for value in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """Each value minus the mean of the other values; zeros if they are equal or fewer than two."""
    count = len(values)
    return [value * count / max(count - 1, 1) for value in centred(values)]
