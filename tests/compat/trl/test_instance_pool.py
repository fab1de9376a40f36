"""Instances that conversations of overlapping steps use one after the other."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from turnwise.compat.trl import EXHAUSTED, InstancePool, Lease
from turnwise.user_code.calls import conversations_of_step, scored_together


async def run_steps(chance: random.Random) -> tuple[int, int]:
    """Conversations of several steps at the same time, each step scored as one batch. Returns the limit of instances and the
    largest number of conversations that had one at the same time."""
    size, ahead, steps = chance.randint(1, 4), chance.randint(1, 3), 12
    limit = chance.randint(size, size * (ahead + 1))
    pool = InstancePool("Game", [])
    scored_together.set("batch")
    conversations_of_step.set(size)
    made, most, held = 0, 0, set[int]()

    async def make() -> Any:
        nonlocal made
        made += 1
        number = made
        await asyncio.sleep(chance.random() * 0.004)  # a later one may be created first
        return number if number <= limit else EXHAUSTED

    async def conversation() -> Lease:
        nonlocal most
        lease = await pool.lease(make)
        assert lease.instance not in held
        held.add(lease.instance)
        most = max(most, len(held))
        await asyncio.sleep(chance.random() * 0.002)
        lease.played()
        return lease

    running = [[asyncio.create_task(conversation()) for _ in range(size)] for _ in range(ahead + 1)]
    for step in range(steps):
        for lease in await asyncio.gather(*running.pop(0)):
            held.remove(lease.instance)
            lease.give_back(usable=True)
        if step + ahead + 1 < steps:
            running.append([asyncio.create_task(conversation()) for _ in range(size)])
    return limit, most


@pytest.mark.parametrize("seed", range(40))
def test_steps_that_overlap_get_instances_in_the_order_of_arrival(seed: int) -> None:
    limit, most = asyncio.run(asyncio.wait_for(run_steps(random.Random(seed)), 20))
    assert most <= limit


def test_a_constructor_that_fails_lets_the_next_conversation_create_an_instance() -> None:
    async def play() -> None:
        pool = InstancePool("Game", [])
        scored_together.set("batch")
        conversations_of_step.set(1)
        begun = asyncio.Event()

        async def fails() -> Any:
            begun.set()
            await asyncio.sleep(0.01)
            raise ValueError("no game today")

        async def makes() -> Any:
            return "a game"

        first = asyncio.create_task(pool.lease(fails))
        await begun.wait()
        second = asyncio.create_task(pool.lease(makes))
        await asyncio.sleep(0)
        assert not second.done()
        with pytest.raises(ValueError, match="no game today"):
            await first
        lease = await second
        assert (lease.instance, lease.new) == ("a game", True)
        lease.give_back(usable=True)
        assert pool.drain() == ["a game"]

    asyncio.run(play())
