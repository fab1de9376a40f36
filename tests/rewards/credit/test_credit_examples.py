"""The examples in the docstrings of the estimators, and where each estimator names its paper."""

from __future__ import annotations

import doctest
from types import ModuleType
from typing import Any

import pytest

from turnwise.rewards.credit import critic, outcome, turns
from turnwise.rewards.credit.credit import Episode

FOLDER = (outcome, turns, turns, critic)
ESTIMATORS = [(module, name) for module in FOLDER for name in module.__all__ if name != "Baseline"]


def rounded(value: Any) -> Any:
    return round(value, 3) + 0.0 if isinstance(value, int | float) else [rounded(entry) for entry in value]


@pytest.mark.parametrize(("module", "name"), ESTIMATORS, ids=[name for _, name in ESTIMATORS])
def test_the_example_in_the_docstring_is_right(module: ModuleType, name: str) -> None:
    function = getattr(module, name)
    (test,) = doctest.DocTestFinder(recurse=False).find(
        function, name, module, extraglobs={"Episode": Episode, "rounded": rounded}
    )
    assert test.examples
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0
    own = name in ("shared", "discounted", "critic")  # schemes of the multi-turn note, which cites no paper
    assert own or any(word in function.__doc__ for word in ("Paper", "Reference"))


def test_a_wrong_example_would_be_noticed() -> None:
    (test,) = doctest.DocTestFinder(recurse=False).find(
        outcome.grpo, "grpo", outcome, extraglobs={"Episode": Episode, "rounded": lambda value: value}
    )
    assert doctest.DocTestRunner(verbose=False).run(test, out=lambda _: None).failed == 1
