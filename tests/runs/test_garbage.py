"""During a run, the garbage collector skips what existed at the start, and runs more rarely."""

from __future__ import annotations

import asyncio
import gc

import pytest

from turnwise.runs.training_run import frozen_start_objects


async def inside() -> tuple[tuple[int, int, int], int]:
    async with frozen_start_objects():
        return gc.get_threshold(), gc.get_freeze_count()


@pytest.mark.parametrize(("before", "expected"), [(700, 100_000), (200_000, 200_000), (0, 0)])
def test_the_collector_is_changed_for_the_run_only(before: int, expected: int) -> None:
    original, frozen_before = gc.get_threshold(), gc.get_freeze_count()
    gc.set_threshold(before, 7, 5)
    try:
        thresholds, frozen = asyncio.run(inside())
        assert thresholds == (expected, 7, 5)
        assert frozen > frozen_before
        assert gc.get_threshold() == (before, 7, 5)
    finally:
        gc.set_threshold(*original)
