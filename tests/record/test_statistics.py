"""Statistics against scipy, and against the enumeration of all samples."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from scipy import stats

from turnwise.record.evaluation import (
    estimate,
    paired_test,
    pass_all_k,
    pass_at_k,
    rate_estimate,
    sign_flip_p,
    t_cdf,
    t_quantile,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 7, 29, 255, 4999])
def test_students_t_is_that_of_scipy(degrees: int) -> None:
    for t in (-30.0, -2.5, -0.1, 0.0, 0.01, 0.7, 1.96, 5.0, 40.0):
        assert t_cdf(t, degrees) == pytest.approx(stats.t.cdf(t, degrees), rel=1e-10, abs=1e-13)
    for p in (0.001, 0.025, 0.4, 0.5, 0.9, 0.975, 0.9995):
        assert t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("rows", [2, 3, 10, 100])
def test_the_interval_is_that_of_scipy(rows: int) -> None:
    generator = random.Random(rows)
    values = [generator.gauss(0.3, 2.0) for _ in range(rows)]
    low, high = stats.t.interval(0.95, rows - 1, loc=sum(values) / rows, scale=stats.sem(values))
    result = estimate(values)
    assert (result.mean, result.low, result.high) == pytest.approx((sum(values) / rows, low, high))
    assert result.rows == rows


def test_intervals_of_few_rows() -> None:
    assert (estimate([]).mean, estimate([]).rows) == (None, 0)
    assert (estimate([2.0]).mean, estimate([2.0]).low, estimate([2.0]).high) == (2.0, None, None)
    assert (estimate([1.0, 1.0]).low, estimate([1.0, 1.0]).high) == (1.0, 1.0)


def test_intervals_of_rates_stay_between_0_and_1() -> None:
    for shares in ([0.0, 1.0, 1.0], [1.0, 1.0], [0.0] * 5, [0.5] * 4, [0.25, 0.75, 1.0], [0.0] * 99 + [1.0]):
        result = rate_estimate(shares, samples=4)
        assert result.low is not None
        assert result.high is not None
        assert 0.0 <= result.low <= (result.mean or 0.0) <= result.high <= 1.0
        assert result.low < result.high  # also where all rows are equal: few rows say little
    assert rate_estimate([1.0], samples=1).low is None
    many = [1.0, 0.0] * 400
    assert (rate_estimate(many, samples=1).low, estimate(many).low) == pytest.approx((0.4655, 0.4653), abs=4e-4)


@pytest.mark.parametrize("p", [0.02, 0.2, 0.5, 0.9])
@pytest.mark.parametrize("rows", [5, 20])
def test_intervals_of_rates_contain_the_rate_often_enough(p: float, rows: int) -> None:
    covered = 0.0
    for passed in range(rows + 1):
        result = rate_estimate([1.0] * passed + [0.0] * (rows - passed), samples=1)
        assert result.low is not None
        assert result.high is not None
        if result.low <= p <= result.high:
            covered += math.comb(rows, passed) * p**passed * (1 - p) ** (rows - passed)
    assert covered >= 0.94


@pytest.mark.parametrize(("n", "passed"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (6, 1)])
def test_pass_at_k_and_pass_all_k_are_the_means_over_all_subsets(n: int, passed: int) -> None:
    samples = [True] * passed + [False] * (n - passed)
    for k in range(1, n + 1):
        subsets = list(itertools.combinations(samples, k))
        assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
        assert pass_all_k(n, passed, k) == pytest.approx(sum(map(all, subsets)) / len(subsets))


def test_both_are_unbiased() -> None:
    """The expectation over all outcomes of n samples with pass probability p is the probability itself."""
    n, p = 5, 0.3
    for k in (1, 2, 3, 5):
        weights = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        at = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
        every = sum(weight * pass_all_k(n, c, k) for c, weight in enumerate(weights))
        assert (at, every) == pytest.approx((1 - (1 - p) ** k, p**k))


@pytest.mark.parametrize(("n", "passed", "k"), [(3, 1, 0), (3, 1, 4), (3, 4, 1), (3, -1, 1)])
def test_k_is_at_most_the_number_of_samples(n: int, passed: int, k: int) -> None:
    for function in (pass_at_k, pass_all_k):
        with pytest.raises(ValueError, match=f"k={k} and passed={passed} of n={n}"):
            function(n, passed, k)


@pytest.mark.parametrize("rows", [2, 5, 12, 60])
def test_the_paired_test_is_that_of_scipy(rows: int) -> None:
    generator = random.Random(rows)
    first = [generator.random() for _ in range(rows)]
    second = [value + generator.gauss(-0.1, 0.3) for value in first]
    result = paired_test(first, second)
    assert result.p_t == pytest.approx(stats.ttest_rel(first, second).pvalue, rel=1e-8)
    interval = stats.ttest_rel(first, second).confidence_interval(0.95)
    assert (result.difference.low, result.difference.high) == pytest.approx((interval.low, interval.high))
    assert result.better + result.worse + result.equal == rows
    assert result.better == sum(a > b for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("rows", [2, 4, 10])
def test_the_sign_flip_test_is_the_exact_permutation_test_of_scipy(rows: int) -> None:
    generator = random.Random(rows)
    differences = [generator.choice([-1.0, -0.5, 0.0, 0.5, 1.0, 1.5]) for _ in range(rows)]
    expected = stats.permutation_test(
        (differences,), lambda x: abs(sum(x)), permutation_type="samples", alternative="greater", n_resamples=10**6
    )
    assert sign_flip_p(differences) == pytest.approx(expected.pvalue)


def test_the_sign_flip_test_of_many_rows_is_sampled() -> None:
    generator = random.Random(7)
    differences = [generator.gauss(0.3, 1.0) for _ in range(40)]
    exact = stats.ttest_1samp(differences, 0.0).pvalue  # close to the permutation test for normal differences
    assert sign_flip_p(differences) == pytest.approx(exact, abs=0.02)
    assert sign_flip_p(differences) == sign_flip_p(differences)
    assert sign_flip_p([1.0] * 40) == pytest.approx(1 / 20_001)


def test_equal_models_and_models_that_always_differ() -> None:
    same = paired_test([1.0, 0.0, 0.5], [1.0, 0.0, 0.5])
    assert (same.p_t, same.p_sign_flip, same.better, same.worse, same.equal) == (1.0, 1.0, 0, 0, 3)
    shifted = paired_test([1.0, 1.0], [0.0, 0.0])
    assert (shifted.p_t, shifted.p_sign_flip, shifted.better) == (0.0, 0.5, 2)
    assert paired_test([], []).p_sign_flip is None
    with pytest.raises(ValueError, match="zip"):
        paired_test([1.0], [])
