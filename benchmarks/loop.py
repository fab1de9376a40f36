"""Cost of the rollout loop without a model: `python benchmarks/loop.py`, about a minute.

A scripted engine returns completions that were encoded before the measurement. So the benchmark measures the rest: the
bookkeeping of conversations, the chat template, the tokenizer, tool calls and the event loop. The completions are alternately
a call of a calculator and an answer. The numbers in them differ between conversations, so texts are not cached.

* turns per second, with 64 to 10,000 concurrent conversations
* memory of a waiting conversation: the memory that Python has allocated since the start, divided by the number of conversations
* the cost of a late turn divided by the cost of an early turn: it must not grow with the length of the conversation

Seconds are CPU seconds of this process, so other processes on the machine have little effect. On an idle machine they are about
equal to wall time.
"""

from __future__ import annotations

import asyncio
import gc
import statistics
import sys
import time
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as Printed

from turnwise.chat.renderer import Renderer
from turnwise.engines.scripted import ScriptedEngine
from turnwise.environments.calculator import calculator
from turnwise.environments.environment import Environment, environment, user_message
from turnwise.environments.tools.toolbox import Tool, Tools
from turnwise.rollout.context import Limits, RolloutContext
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.types import Group, Opening, Reply, Row, Sampling, Stop, Turn

MODEL = Path(__file__).resolve().parent.parent / "demo" / "model"
TOOL = Tool.of(calculator)
LIVE = ((64, 64), (1_000, 1), (10_000, 1))
"""(concurrent conversations, repetitions)"""
TURNS = 6
LATE, EARLY, AROUND = 100, 5, 3
LONG, REPEATS = 110, 24


def row(number: int) -> Row:
    return Row(id=str(number), messages=[{"role": "user", "content": f"Customer {number}: what is {number}*2+1?"}])


def script(number: int, turns: int) -> list[str]:
    """Calls and answers alternately: `<tool_call>...`, `#### 7`, ..."""
    lines: list[str] = []
    for turn in range(2, turns + 2, 2):
        call = f'{{"name": "calculator", "arguments": {{"expression": "{number}*{turn}+1"}}}}'
        lines += [f"<tool_call>\n{call}\n</tool_call>", f"#### {number * turn + 1}"]
    return lines[:turns]


@environment
async def customer(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Asks for the next number until the script ends."""
    yield Opening(messages=row.messages)
    for question in range(1, TURNS // 2):
        yield user_message(f"Thank you. Customer {row.id} wants number {question}, too.")


class Parked:
    """A user who does not answer the model's second answer until `leave` is set."""

    def __init__(self, arrived: Callable[[], None], leave: asyncio.Event) -> None:
        self._arrived, self._leave = arrived, leave

    async def begin(self, row: Row) -> Opening:
        return Opening(messages=row.messages)

    async def step(self, turn: Turn) -> Reply:
        self._arrived()
        await self._leave.wait()
        return Reply(done=True)

    async def close(self) -> None:
        pass


class Timed:
    """An environment that measures the time from each of its answers to the next request."""

    def __init__(self, inner: Environment, seconds: list[float]) -> None:
        self._inner, self._seconds = inner, seconds
        self._left: float | None = None

    async def begin(self, row: Row) -> Opening:
        return await self._inner.begin(row)

    async def step(self, turn: Turn) -> Reply:
        reply = await self._inner.step(turn)
        now = time.process_time()
        if self._left is not None:
            self._seconds.append(now - self._left)
        self._left = now
        return reply

    async def close(self) -> None:
        await self._inner.close()


class Bench:
    """Sets conversations up."""

    def __init__(self) -> None:
        self.renderer = Renderer.from_pretrained(MODEL)
        self.ids: dict[str, Sequence[int]] = {}

    def groups(self, numbers: range) -> list[Group]:
        return [new_group(row(number), size=1, seed=0) for number in numbers]

    def table(
        self, groups: Sequence[Group], make: Callable[[], Environment], *, turns: int, live: int
    ) -> RolloutContext:
        """A rollout context whose engine has encoded completions."""
        scripts = {one.id: script(int(one.row.id), turns) for group in groups for one in group.trajectories}
        lines = [line for lines in scripts.values() for line in lines]
        encoded = self.renderer.tokenizer(lines, add_special_tokens=False)["input_ids"]
        ids = dict(zip(lines, encoded, strict=True))
        return RolloutContext(
            engine=ScriptedEngine(scripts, encode=ids.__getitem__, stop_token_id=self.renderer.stop_token_ids[0]),
            renderer=self.renderer,
            make_environment=make,
            sampling=Sampling(),
            limits=Limits(turns=turns, tokens=100_000, context=100_000),
            max_concurrent=live,
        )


async def turns_per_second(bench: Bench, live: int, times: int) -> float:
    groups = bench.groups(range(live * times))
    table = bench.table(groups, lambda: Tools([TOOL], then=customer()), turns=TURNS, live=live)
    gc.collect()
    started = time.process_time()
    await rollout_groups(groups, table)
    seconds = time.process_time() - started
    _whole(groups, turns=TURNS)
    return live * times * TURNS / seconds


async def memory(bench: Bench, steps: Sequence[int]) -> list[float]:
    """Kilobytes for each conversation that waits in its second turn, for growing numbers of conversations."""
    leave, arrived = asyncio.Event(), 0

    def count() -> None:
        nonlocal arrived
        arrived += 1

    groups = bench.groups(range(steps[-1]))
    table = bench.table(groups, lambda: Tools([TOOL], then=Parked(count, leave)), turns=2, live=steps[-1])
    tasks, found = [], []
    gc.collect()
    tracemalloc.start()
    for low, high in zip((0, *steps), steps, strict=False):
        tasks.append(asyncio.create_task(rollout_groups(groups[low:high], table)))
        while arrived < high:
            await asyncio.sleep(0.05)
        gc.collect()
        found.append(tracemalloc.get_traced_memory()[0] / high / 1024)
    tracemalloc.stop()
    leave.set()
    await asyncio.gather(*tasks)
    _whole(groups, turns=2)
    return found


async def late_and_early(bench: Bench) -> tuple[float, float]:
    """Seconds of a turn near turn 100 and near turn 5, with one conversation at a time."""
    groups = bench.groups(range(REPEATS))
    every: list[list[float]] = []

    def make() -> Environment:
        every.append([])
        return Timed(Tools([TOOL], then=asking()), every[-1])

    table = bench.table(groups, make, turns=LONG, live=1)
    await rollout_groups(groups, table)
    _whole(groups, turns=LONG)

    def around(turn: int) -> float:
        # entry n is the time between the answers to turns n and n + 1; an even number, because calls and answers alternate
        return statistics.median(sum(one[turn - AROUND : turn + AROUND]) for one in every) / (2 * AROUND)

    return around(LATE), around(EARLY)


@environment
async def asking(row: Row) -> AsyncGenerator[Opening | Reply, Turn]:
    """Asks without an end."""
    yield Opening(messages=row.messages)
    number = 0
    while True:
        number += 1
        yield user_message(f"Thank you. Customer {row.id} wants number {number}, too.")


def _whole(groups: Sequence[Group], *, turns: int) -> None:
    """Raises if a conversation failed: failed conversations would make the benchmark look fast."""
    for group in groups:
        for one in group.trajectories:
            if (
                one.failed
                or one.template_mismatch
                or one.stop not in (Stop.DONE, Stop.MAX_TURNS)
                or len(one.turns) != turns
            ):
                sys.exit(
                    f"conversation {one.id} ended with {one.stop} after {len(one.turns)} turns: "
                    f"{one.error or one.template_mismatch}"
                )


async def measure(console: Console) -> float:
    bench = Bench()
    await turns_per_second(bench, 64, 4)  # warm-up: imports and caches
    table = Printed("live conversations", "turns/s", "KiB each", title="the loop with a scripted engine")
    steps = [live for live, _ in LIVE if live >= 1_000]
    kilobytes = dict(zip(steps, await memory(bench, steps), strict=True))
    speeds: dict[int, float] = {}
    for live, times in LIVE:
        speeds[live] = await turns_per_second(bench, live, times)
        each = f"{kilobytes[live]:.1f}" if live in kilobytes else "-"
        table.add_row(f"{live:,}", f"{speeds[live]:,.0f}", each)
    late, early = await late_and_early(bench)
    console.print(table)
    console.print(
        f"turn {LATE} takes {1e6 * late:.0f} us and turn {EARLY} {1e6 * early:.0f} us: ratio {late / early:.2f}"
    )
    return speeds[1_000]


def main() -> None:
    print(f"loop_turns_per_second {asyncio.run(measure(Console())):.0f}")


if __name__ == "__main__":
    main()
