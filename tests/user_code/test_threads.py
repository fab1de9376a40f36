"""Threads run one job after another, and a job that does not return delays no other."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import os
import threading
import time
from typing import Any

import pytest

from turnwise.errors import Failed
from turnwise.user_code import threads
from turnwise.user_code.threads import run_in_thread


def run(function, name: str = "f"):
    return run_in_thread(function, name=name, kind="tool")


def this_thread() -> tuple[int, str]:
    return threading.get_ident(), threading.current_thread().name


def idle(number: int) -> None:
    """Wait until this number of threads is idle: a thread answers before it is idle."""
    deadline = time.monotonic() + 10
    while threads._threads.idle != number:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_idle_threads() -> None:
    threads._threads.__init__()


def in_event_loop(test):
    @functools.wraps(test)
    def run_test(*arguments, **keywords) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run_test


@in_event_loop
async def test_a_thread_is_used_again_under_the_name_of_its_job() -> None:
    first, name = await run(this_thread, "search")
    idle(1)
    second, other = await run(this_thread, "calculator")
    assert first == second != threading.get_ident()
    assert (name, other) == ("tool-search", "tool-calculator")


@in_event_loop
async def test_jobs_that_run_at_the_same_time_have_threads_of_their_own() -> None:
    together = threading.Barrier(5, timeout=10)
    await asyncio.gather(*(run(together.wait) for _ in range(5)))
    idle(5)


@in_event_loop
async def test_jobs_begin_in_the_order_in_which_they_are_given() -> None:
    together = threading.Barrier(8, timeout=10)
    await asyncio.gather(*(run(together.wait) for _ in range(8)))
    idle(8)
    begun: list[int] = []
    await asyncio.gather(*(run(functools.partial(begun.append, number)) for number in range(100)))
    assert begun == sorted(begun)


@in_event_loop
async def test_a_job_that_does_not_return_delays_no_other() -> None:
    end = threading.Event()
    stuck = asyncio.ensure_future(run(end.wait))
    await asyncio.sleep(0)
    assert await run(lambda: 3) == 3
    idle(1)
    stuck.cancel()
    end.set()
    idle(2)


@in_event_loop
async def test_a_thread_goes_on_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(Failed, match="wrong"):
        await run(fail)
    idle(1)
    assert await run(lambda: 1) == 1
    idle(1)


@in_event_loop
async def test_a_job_has_the_context_of_its_own_caller_only() -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def caller(value: str) -> str:
        variable.set(value)
        return await run(variable.get)

    assert await asyncio.create_task(caller("a")) == "a"
    idle(1)
    assert await run(variable.get) == "none"


@in_event_loop
async def test_the_number_of_idle_threads_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_MAX_IDLE", 2)
    together = threading.Barrier(6, timeout=10)
    before = threading.active_count()
    await asyncio.gather(*(run(together.wait) for _ in range(6)))
    idle(2)
    deadline = time.monotonic() + 10
    while threading.active_count() > before + 2:
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    threads.start(lambda: None, name="job")
    idle(1)
    child = os.fork()
    if not child:
        done = threading.Event()
        threads.start(done.set, name="job")
        os._exit(0 if done.wait(10) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_function_that_raises_after_its_coroutine_was_closed_is_no_complaint_of_asyncio() -> None:
    complaints: list[str] = []
    may_raise = threading.Event()

    def raises() -> None:
        may_raise.wait()
        raise ValueError("too late")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context["message"]))
        coroutine = run_in_thread(raises, name="raises", kind="tool")
        future: Any = coroutine.send(None)
        coroutine.close()  # as at a deadline
        may_raise.set()
        while not future.done():
            await asyncio.sleep(0.01)
        del future
        idle(1)
        await run(lambda: None)  # the thread forgets its last job
        gc.collect()

    asyncio.run(main())
    assert complaints == []
