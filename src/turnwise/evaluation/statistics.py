"""Statistics of an evaluation. Pure functions of numbers; the rows of the data are the independent units.

Conversations on one row are not independent, so all intervals are computed from one number for each row: the mean of its
conversations (clustered by row).
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "CONFIDENCE",
    "Estimate",
    "PairedTest",
    "estimate",
    "paired_test",
    "pass_all_k",
    "pass_at_k",
    "rate_estimate",
    "sign_flip_p",
    "t_cdf",
    "t_quantile",
]

CONFIDENCE = 0.95
"""The confidence level of all intervals."""
_EXACT_ROWS = 16  # rows for which all sign flips are enumerated: 65,536
_FLIPS = 20_000
_TINY = 1e-12  # differences below this are rounding errors


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over rows with its confidence interval. All are None without rows; the interval needs two rows."""

    mean: float | None
    low: float | None
    high: float | None
    rows: int
    """Number of rows with a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedTest:
    """Two models on the same rows: the first minus the second."""

    difference: Estimate
    p_t: float | None
    """Two-sided p-value of the paired t-test; None with fewer than two rows."""
    p_sign_flip: float | None
    """Two-sided p-value of the sign-flip permutation test; None without rows."""
    better: int
    """Rows in which the first model has the larger mean."""
    worse: int
    equal: int


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value for each row, with the t interval of `CONFIDENCE`.

    Example: `estimate([0.0, 1.0, 1.0])` has the mean 0.667 and the interval -0.768 to 2.101.
    """
    rows = len(values)
    if not rows:
        return Estimate(mean=None, low=None, high=None, rows=0)
    mean = statistics.fmean(values)
    if rows == 1:
        return Estimate(mean=mean, low=None, high=None, rows=1)
    half = t_quantile(0.5 + CONFIDENCE / 2, rows - 1) * statistics.stdev(values) / math.sqrt(rows)
    return Estimate(mean=mean, low=mean - half, high=mean + half, rows=rows)


def rate_estimate(shares: Sequence[float], *, samples: int) -> Estimate:
    """The mean of one share from 0 to 1 for each row, with a Wilson interval of `CONFIDENCE`, which stays in [0, 1].

    Each share is of at most `samples` conversations. The interval has the effective number of independent conversations of
    clustered data: the number whose variance the row means have (Korn and Graubard, 1998), at least the number of rows where
    all are equal. Example: `rate_estimate([0.0, 1.0, 1.0], samples=1)` has the mean 0.667 and the interval 0.044 to 0.989.
    """
    plain = estimate(shares)
    if plain.mean is None or plain.low is None:
        return plain
    rows, p = plain.rows, plain.mean
    variance = statistics.variance(shares) / rows
    most = float(rows * max(1, samples))
    effective = min(most, p * (1 - p) / variance) if variance > _TINY else float(rows)
    z = t_quantile(0.5 + CONFIDENCE / 2, rows - 1)
    middle = (p + z * z / (2 * effective)) / (1 + z * z / effective)
    half = z * math.sqrt(p * (1 - p) / effective + (z / (2 * effective)) ** 2) / (1 + z * z / effective)
    return Estimate(mean=p, low=max(0.0, min(p, middle - half)), high=min(1.0, max(p, middle + half)), rows=rows)


def pass_at_k(n: int, passed: int, k: int) -> float:
    """The probability that at least one of k samples passes: `1 - C(n - passed, k) / C(n, k)`.

    The unbiased estimate from n samples of which `passed` pass (Chen et al., 2021, https://arxiv.org/abs/2107.03374). Raises
    ValueError if k is not from 1 to n.
    """
    _check(n, passed, k)
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def pass_all_k(n: int, passed: int, k: int) -> float:
    """pass^k, the probability that all of k samples pass: `C(passed, k) / C(n, k)`.

    The unbiased estimate from n samples of which `passed` pass (Yao et al., 2024, https://arxiv.org/abs/2406.12045). Raises
    ValueError if k is not from 1 to n.
    """
    _check(n, passed, k)
    return math.comb(passed, k) / math.comb(n, k)


def _check(n: int, passed: int, k: int) -> None:
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"k={k} and passed={passed} of n={n} samples: k must be 1 to n, and passed 0 to n")


def paired_test(first: Sequence[float], second: Sequence[float]) -> PairedTest:
    """Compare two models by one value for each row; the values of a row have the same place in both.

    Raises ValueError if the lengths differ.
    """
    differences = [a - b for a, b in zip(first, second, strict=True)]
    better = sum(difference > _TINY for difference in differences)
    worse = sum(difference < -_TINY for difference in differences)
    return PairedTest(
        difference=estimate(differences),
        p_t=_paired_t_p(differences),
        p_sign_flip=sign_flip_p(differences),
        better=better,
        worse=worse,
        equal=len(differences) - better - worse,
    )


def _paired_t_p(differences: Sequence[float]) -> float | None:
    """The two-sided p-value of the t-test that the mean difference is 0."""
    if len(differences) < 2:
        return None
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation <= _TINY:
        return 1.0 if abs(mean) <= _TINY else 0.0
    t = mean / (deviation / math.sqrt(len(differences)))
    return 2.0 * (1.0 - t_cdf(abs(t), len(differences) - 1))


def sign_flip_p(differences: Sequence[float], *, flips: int = _FLIPS, seed: int = 0) -> float | None:
    """The two-sided p-value of the permutation test that flips the sign of each row's difference.

    The p-value is the share of sign patterns whose sum is at least as far from 0 as the observed sum. Up to 16 rows that
    differ, all patterns are enumerated; above, `flips` random patterns are drawn and the observed pattern is added.
    """
    if not differences:
        return None
    values = [difference for difference in differences if abs(difference) > _TINY]  # a difference of 0 has no sign
    bound = abs(sum(values)) - _TINY * max(1, len(values))
    if len(values) <= _EXACT_ROWS:
        signs = itertools.product((1, -1), repeat=len(values))
        extreme = sum(abs(sum(s * v for s, v in zip(pattern, values, strict=True))) >= bound for pattern in signs)
        return extreme / 2 ** len(values)
    generator = random.Random(seed)
    extreme = 0
    for _ in range(flips):
        bits = generator.getrandbits(len(values))
        extreme += abs(sum(value if bits >> place & 1 else -value for place, value in enumerate(values))) >= bound
    return (extreme + 1) / (flips + 1)


def t_cdf(t: float, degrees: int) -> float:
    """The distribution function of Student's t with `degrees` degrees of freedom."""
    if t * t < degrees:  # near 0 the tail is 1/2 less a small number
        return 0.5 + math.copysign(0.5 * _incomplete_beta(t * t / (degrees + t * t), 0.5, degrees / 2), t)
    tail = 0.5 * _incomplete_beta(degrees / (degrees + t * t), degrees / 2, 0.5)
    return 1.0 - tail if t >= 0 else tail


def t_quantile(p: float, degrees: int) -> float:
    """The value below which Student's t lies with probability `p`, from 0 to 1 exclusive, by bisection."""
    if p < 0.5:
        return -t_quantile(1.0 - p, degrees)
    high = 1.0
    while t_cdf(high, degrees) < p:
        high *= 2.0
    low = 0.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if t_cdf(middle, degrees) < p else (low, middle)
    return (low + high) / 2


def _incomplete_beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1.0) / (a + b + 2.0):  # where the fraction converges fast
        return 1.0 - _incomplete_beta(1.0 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)) / a
    # modified Lentz's method
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, 400):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1.0 / _away_from_zero(1.0 + numerator * d)
            c = _away_from_zero(1.0 + numerator / c)
            fraction *= c * d
        if abs(c * d - 1.0) < 1e-15:
            break
    return front * fraction


def _away_from_zero(value: float) -> float:
    return value if abs(value) > 1e-300 else 1e-300
