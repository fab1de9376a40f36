"""Means, standard deviations, centring and discounted sums, as the estimators use them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Literal

from turnwise.user_code.reward_number import equal_rewards

__all__ = [
    "EPSILON",
    "Scale",
    "centred",
    "divisors",
    "leave_one_out",
    "return_to_go",
    "whitening",
    "width",
]

EPSILON = 1e-6
"""Added to a standard deviation before a division."""

Scale = Literal["std", "batch", "none"]
"""The divisor of centred rewards: the standard deviation of the group, of the batch, or 1."""


def width(values: Sequence[float]) -> float:
    """The standard deviation of the sample (divisor n - 1) plus 1e-6; 1 if the values are equal or fewer than two."""
    return 1.0 if len(values) < 2 or equal_rewards(values) else statistics.stdev(values) + EPSILON


def divisors(values: Sequence[Sequence[float]], scale: Scale) -> list[float]:
    """The divisor of each group, for the values of each group that are compared."""
    if scale == "batch":
        return [width([value for group in values for value in group])] * len(values)
    return [width(group) if scale == "std" else 1.0 for group in values]


def centred(values: Sequence[float]) -> list[float]:
    """The values minus their mean; zeros if they are equal or fewer than two."""
    if len(values) < 2 or equal_rewards(values):
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [value - mean for value in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """Each value minus the mean of the other values; zeros if they are equal or fewer than two."""
    count = len(values)
    return [value * count / max(count - 1, 1) for value in centred(values)]


def whitening(values: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """The mean of the values, and the factor `1 / sqrt(variance + 1e-8)`, where value number n occurs `counts[n]` times.

    The variance is that of the sample. The factor is 0 if the values are equal or fewer than two: whitened values are then 0.
    """
    present = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    number = sum(count for _, count in present)
    if number < 2 or equal_rewards([value for value, _ in present]):
        return 0.0, 0.0
    mean = math.fsum(value * count for value, count in present) / number
    variance = math.fsum(count * (value - mean) ** 2 for value, count in present) / (number - 1)
    return mean, (variance + 1e-8) ** -0.5


def return_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """For each reward, the sum of itself and the rewards after it, discounted by `gamma` for each step.

    Example: `return_to_go([1.0, 0.0, 2.0], 0.5)` is `[1.5, 1.0, 2.0]`.
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]
