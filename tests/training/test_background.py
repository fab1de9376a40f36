"""Threads of long computations."""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from turnwise.training.update import StopFlag, run_cancellable, run_to_completion

NAME = contextvars.ContextVar("NAME", default="none")


@pytest.mark.parametrize("run", [run_cancellable, run_to_completion])
def test_a_computation_has_a_thread_that_ends_with_it(run: Callable[..., Any]) -> None:
    threads: list[threading.Thread] = []

    def work(stop: StopFlag) -> str:
        threads.append(threading.current_thread())
        return NAME.get()

    async def twice() -> list[str]:
        NAME.set("mine")
        return [await run(work), await run(work)]

    assert asyncio.run(twice()) == ["mine", "mine"]
    assert len({id(thread) for thread in threads}) == 2
    assert threading.main_thread() not in threads
    deadline = time.monotonic() + 10
    while any(thread.is_alive() for thread in threads):  # else OpenMP keeps threads for each of them
        assert time.monotonic() < deadline
        time.sleep(0.01)
