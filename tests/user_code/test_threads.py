"""Threads of users' functions: one job after another, the main thread for those that set signal handlers."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from support.conversations import Says, call, hold
from turnwise.environments.environment import environment
from turnwise.environments.tools.toolbox import Tools
from turnwise.errors import Failed
from turnwise.types import Opening, Reply, Row, Stop
from turnwise.user_code import threads
from turnwise.user_code.threads import run_in_thread

# Threads run one job after another, and a job that does not return delays no other.


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


@pytest.fixture
def no_idle_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of earlier tests may still return: their threads are idle elsewhere then."""
    monkeypatch.setattr(threads, "_threads", threads._Threads())


def in_event_loop(test):
    @functools.wraps(test)
    def run_test(*arguments, **keywords) -> None:
        asyncio.run(test(*arguments, **keywords))

    return run_test


@pytest.mark.usefixtures("no_idle_threads")
@in_event_loop
async def test_a_thread_is_used_again_under_the_name_of_its_job() -> None:
    first, name = await run(this_thread, "search")
    idle(1)
    second, other = await run(this_thread, "calculator")
    assert first == second != threading.get_ident()
    assert (name, other) == ("tool-search", "tool-calculator")


@pytest.mark.usefixtures("no_idle_threads")
@in_event_loop
async def test_jobs_that_run_at_the_same_time_have_threads_of_their_own() -> None:
    together = threading.Barrier(5, timeout=10)
    await asyncio.gather(*(run(together.wait) for _ in range(5)))
    idle(5)


@pytest.mark.usefixtures("no_idle_threads")
@in_event_loop
async def test_jobs_begin_in_the_order_in_which_they_are_given() -> None:
    together = threading.Barrier(8, timeout=10)
    await asyncio.gather(*(run(together.wait) for _ in range(8)))
    idle(8)
    begun: list[int] = []
    await asyncio.gather(*(run(functools.partial(begun.append, number)) for number in range(100)))
    assert begun == sorted(begun)


@pytest.mark.usefixtures("no_idle_threads")
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
async def test_a_function_whose_calls_do_not_return_is_not_called_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_MOST_ABANDONED", 2)
    end, closed = threading.Event(), list[object]()
    stuck = [asyncio.ensure_future(run(end.wait, "stuck")) for _ in range(3)]  # three at once are no more than three
    await asyncio.sleep(0.05)
    for one in stuck:
        one.cancel()
    await asyncio.wait(stuck)
    with pytest.raises(Failed, match="stuck: 3 calls have not returned although their conversations have ended"):
        await run(end.wait, "stuck")
    assert await run(lambda: 3, "other") == 3
    await run_in_thread(lambda: closed.append(1), name="stuck", kind="tool", closes=True)
    assert closed == [1]
    end.set()
    deadline = time.monotonic() + 10
    while threads._abandoned._counts["tool", "stuck"]:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)
    assert await run(end.wait, "stuck")


@in_event_loop
async def test_the_calls_of_objects_that_hang_are_counted_and_the_objects_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "_MOST_ABANDONED", 2)
    monkeypatch.setattr(threads, "_GRACE", 0.01)
    end, closed = threading.Event(), list[object]()
    for _ in range(2):
        foreign = threads.ThreadedObject(object, closed.append, name="a game")
        await foreign.make()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(foreign.ask(end.wait), 0.05)
        await foreign.close()
        assert foreign.busy
    assert len(closed) == 2
    with pytest.raises(Failed, match="a game: 2 calls have not returned"):
        await threads.ThreadedObject(object, None, name="a game").make()
    end.set()


@pytest.mark.usefixtures("no_idle_threads")
@in_event_loop
async def test_a_thread_goes_on_after_an_error() -> None:
    def fail() -> None:
        raise ValueError("wrong")

    with pytest.raises(Failed, match="wrong"):
        await run(fail)
    idle(1)
    assert await run(lambda: 1) == 1
    idle(1)


@pytest.mark.usefixtures("no_idle_threads")
@in_event_loop
async def test_a_job_has_the_context_of_its_own_caller_only() -> None:
    variable = contextvars.ContextVar("variable", default="none")

    async def caller(value: str) -> str:
        variable.set(value)
        return await run(variable.get)

    assert await asyncio.create_task(caller("a")) == "a"
    idle(1)
    assert await run(variable.get) == "none"


@pytest.mark.usefixtures("no_idle_threads")
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


@pytest.mark.usefixtures("no_idle_threads")
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


@pytest.mark.usefixtures("no_idle_threads")
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


# Sync functions that set signal handlers run in the main thread, whatever they do with Python's refusal elsewhere.


class Rang(Exception):
    """The alarm."""


def ring(*_: Any) -> None:
    raise Rang


def timed(seconds: float) -> bool:
    """Work within a second, as libraries do it with an alarm; True if it was ended."""
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        threading.Event().wait(seconds)
    except Rang:
        return True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return False


def swallowing(seconds: float) -> str:
    try:
        return str(timed(seconds))
    except Exception:  # as math-verify does
        return "0"


def test_a_tool_may_set_an_alarm() -> None:
    def wait(seconds: float) -> str:
        """Wait."""
        return swallowing(seconds)

    said = call("wait", '{"seconds": 0.01}') + call("wait", '{"seconds": 20}')
    trajectory = hold(Says(said, said, "bye"), lambda: Tools([wait]))
    assert [[one.content for one in turn.outcomes] for turn in trajectory.turns[:2]] == [["False", "True"]] * 2


def test_a_sync_environment_may_set_an_alarm() -> None:
    @environment
    def user(row: Row):  # type: ignore[no-untyped-def]
        yield Opening(messages=row.messages)
        yield Reply(done=True, reward=float(timed(0.01)) + 1.0)

    assert hold(Says("a"), user).turns[0].reward == 1.0


def test_one_that_catches_everything_is_noticed_all_the_same() -> None:
    def careless() -> str:
        try:
            return str(timed(0.01))
        except BaseException:
            return "0"

    assert asyncio.run(run_in_thread(careless, name="careless", kind="tool")) == "False"


def test_an_alarm_that_is_left_over_does_not_ring_later() -> None:
    def forgets() -> int:
        signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        return 1

    async def main() -> int:
        value = await run_in_thread(forgets, name="forgets", kind="tool")
        await asyncio.sleep(0.3)
        return value

    assert asyncio.run(main()) == 1
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


def test_where_the_event_loop_is_in_another_thread_it_is_told() -> None:
    told: list[str] = []

    def run() -> None:
        try:
            asyncio.run(run_in_thread(lambda: swallowing(0.01), name="elsewhere", kind="tool"))
        except Failed as failed:
            told.append(failed.failure.message)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert told == [
        "elsewhere sets a signal handler, which Python allows in the main thread only, and this run is in another thread: "
        "start the run in the main thread, or remove the handler"
    ]


def test_threads_that_are_not_ours_are_refused_as_ever() -> None:
    told: list[str] = []

    def run() -> None:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError as error:
            told.append(str(error))

    asyncio.run(run_in_thread(lambda: None, name="before", kind="tool"))
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert len(told) == 1
    assert "main thread" in told[0]


def test_another_run_is_not_concerned() -> None:
    assert asyncio.run(run_in_thread(lambda: swallowing(0.01), name="one", kind="tool")) == "False"
    where = asyncio.run(run_in_thread(threading.current_thread, name="one", kind="tool"))
    assert where is not threading.main_thread()


def test_math_verify_grades_in_tools_and_sync_environments() -> None:
    math_verify = pytest.importorskip("math_verify")

    def grade(answer: str) -> str:
        """Grade an answer."""
        return str(math_verify.verify(math_verify.parse("$\\frac{1}{2}$"), math_verify.parse(answer)))

    @environment
    def user(row: Row):  # type: ignore[no-untyped-def]
        turn = yield Opening(messages=row.messages)
        turn = turn or None
        yield Reply(done=True, reward=float(grade("$0.5$") == "True"))

    said = call("grade", '{"answer": "$0.5$"}') + call("grade", '{"answer": "$0.6$"}')
    trajectory = hold(Says(said, "bye"), lambda: Tools([grade], then=user()))
    assert [one.content for one in trajectory.turns[0].outcomes] == ["True", "False"]
    assert (trajectory.stop, trajectory.turns[1].reward) == (Stop.DONE, 1.0)


def test_code_interpreter_without_bubblewrap_is_refused_when_it_becomes_a_tool(tmp_path: Path) -> None:
    script = (
        "from turnwise.environments.sandbox import code_interpreter\n"
        "from turnwise.environments.tools.toolbox import Tools\n"
        "from turnwise.errors import ConfigError\n"
        "try:\n"
        "    Tools([code_interpreter])\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    source = Path(__file__).parent.parent.parent / "src"
    environ = {**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(source)}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=True)
    assert "bubblewrap" in ended.stdout
