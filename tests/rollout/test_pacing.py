"""How many groups are started, and which of them a step takes."""

from __future__ import annotations

import random

import pytest

from turnwise.rollout.pipeline import capacity, choose


@pytest.mark.parametrize(
    ("max_staleness", "version", "kept", "active", "expected"),
    [
        (0, 0, 0, 0, 4),
        (0, 0, 0, 4, 0),
        (0, 3, 2, 0, 2),  # two of the step's groups are replaced
        (1, 0, 0, 0, 8),
        (1, 0, 4, 4, 0),  # the next step's groups run during the training
        (1, 1, 0, 4, 4),
        (3, 5, 1, 9, 6),  # (3 + 5 + 1) * 4 - (5 * 4 + 1 + 9)
        (3, 8, 0, 0, 8),  # of 10 steps, two are left
        (0, 9, 0, 6, 0),
    ],
)
def test_as_many_groups_are_started_as_the_formula_says(
    max_staleness: int, version: int, kept: int, active: int, expected: int
) -> None:
    groups = capacity(max_staleness=max_staleness, batch_size=4, version=version, steps=10, kept=kept, active=active)
    assert groups == expected


@pytest.mark.parametrize(
    ("latest", "ready", "count", "in_order", "expected"),
    [
        ([5, 5, 5], "yyn", 2, False, [0, 1]),
        ([5, 5, 5], "nyy", 2, False, [1, 2]),
        ([5, 5, 5], "nyy", 2, True, None),
        ([5, 5, 5], "nny", 2, False, None),
        ([3, 5, 5], "nyy", 2, False, None),  # no later step may train on the first
        ([4, 5, 5], "nyy", 2, False, [1, 2]),
        ([4, 4, 4, 5, 5], "nnnyy", 2, False, None),  # three are left for the next step, which takes two
        ([4, 4, 4, 5, 5], "ynnyy", 2, False, [0, 3]),
        ([6, 4, 5], "yyy", 2, False, [1, 2]),  # the earliest first
        ([], "", 1, False, None),
    ],
)
def test_a_step_takes_the_groups_that_are_due_first_and_waits_for_those_that_no_later_step_may_use(
    latest: list[int], ready: str, count: int, in_order: bool, expected: list[int] | None
) -> None:
    flags = [letter == "y" for letter in ready]
    assert choose(latest, flags, count=count, version=3, batch_size=2, in_order=in_order) == expected


def test_if_all_groups_have_ended_there_are_always_some_to_take() -> None:
    for seed in range(300):
        generator = random.Random(seed)
        batch_size, max_staleness = generator.randint(1, 4), generator.randint(0, 4)
        latest: list[int] = []
        for version in range(30):
            count = capacity(
                max_staleness=max_staleness,
                batch_size=batch_size,
                version=version,
                steps=99,
                kept=0,
                active=len(latest),
            )
            latest += [version + max_staleness] * count
            ready = [generator.random() < 0.5 for _ in latest]
            options = {"count": batch_size, "version": version, "batch_size": batch_size, "in_order": False}
            chosen = choose(latest, ready, **options) or choose(latest, [True] * len(latest), **options)
            assert chosen is not None
            assert all(latest[index] >= version for index in chosen)
            latest = [last for index, last in enumerate(latest) if index not in chosen]
            assert all(last > version for last in latest)
