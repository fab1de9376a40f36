"""The loop: the model and its environment are introduced to each other. There is no other one.

It is the same for every engine, every environment and every mode. What breaks in a conversation is written into that
conversation, and never reaches its siblings.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

from turnwise.engines.batched import Batched
from turnwise.engines.engine import Engine
from turnwise.environments.environment import Environment, EnvironmentFactory, Settles
from turnwise.errors import Failed, boundary
from turnwise.rollout.limits import Limits
from turnwise.rollout.renderer import Renderer, Thinking
from turnwise.rollout.session import Session
from turnwise.types import Failure, Group, Row, Sampling, Stop, Trajectory

__all__ = ["Table", "new_group", "rollout", "rollout_group", "rollout_groups"]

_CLOSING_SECONDS = 30.0  # an environment that hangs in `close` must not hold up the run
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Who sits at the table: everything that a conversation needs besides its row."""

    engine: Engine
    renderer: Renderer
    make_environment: EnvironmentFactory
    sampling: Sampling
    limits: Limits
    thinking: Thinking = "keep"
    """What becomes of earlier thoughts when a conversation goes on."""
    concurrent: int = 256
    """Conversations that are held at once."""
    lockstep: bool = False
    """Whether the engine answers all of them together, in an order that depends on no timing."""


async def converse(session: Session, environment: Environment, table: Table) -> Stop:
    """The model speaks, the environment answers, until one of them or a limit says stop."""
    seconds = table.limits.seconds_per_turn
    async with asyncio.timeout(seconds):
        with boundary("environment"):
            opening = await environment.begin(session.trajectory.row)
    session.begin(opening)
    while (stop := session.reached()) is None:
        async with asyncio.timeout(None if table.lockstep else seconds) as deadline:
            turn = await session.generate()
            if table.lockstep and seconds is not None:  # until now it was the others that were waited for
                deadline.reschedule(asyncio.get_running_loop().time() + seconds)
            if turn.finish_reason == "length":
                return session.cut
            started = time.perf_counter()
            with boundary("environment"):
                reply = await environment.step(turn)
            turn.seconds_environment = time.perf_counter() - started
        session.hear(turn, reply)
        if reply.done:
            return Stop.DONE
    return stop


async def rollout(trajectory: Trajectory, table: Table) -> Trajectory:
    """Fill a trajectory with one conversation. What breaks is recorded in it; only cancellation is raised."""
    started = time.perf_counter()
    limits = table.limits
    session = Session(
        trajectory,
        engine=table.engine,
        renderer=table.renderer,
        sampling=table.sampling,
        limits=limits,
        thinking=table.thinking,
    )
    environment: Environment | None = None
    try:
        with boundary("environment"):
            environment = table.make_environment()
        async with asyncio.timeout(limits.seconds):
            stop = await converse(session, environment, table)
            if stop is not Stop.DONE and trajectory.turns and isinstance(environment, Settles):
                await _settle(environment, trajectory, limits)
            session.finish(stop)
    except Failed as failed:
        trajectory.fail(failed.failure)
    except TimeoutError:
        trajectory.fail(Failure("deadline", _overdue(session.answered, limits, time.perf_counter() - started)))
    finally:
        table.engine.release(trajectory.id)
        trajectory.seconds = time.perf_counter() - started
        if environment is not None:
            await _close(environment, trajectory.id)
    return trajectory


async def rollout_group(group: Group, table: Table) -> Group:
    """Hold the conversations of a group, `table.concurrent` at a time."""
    await rollout_groups([group], table)
    return group


async def rollout_groups(
    groups: Sequence[Group], table: Table, *, done: Callable[[Trajectory], Awaitable[None]] | None = None
) -> Sequence[Group]:
    """Hold the conversations of several groups, `table.concurrent` at a time; `done` is awaited as each of them ends."""
    trajectories = [one for group in groups for one in group.trajectories]
    if table.lockstep:
        for start in range(0, len(trajectories), table.concurrent):
            part = trajectories[start : start + table.concurrent]
            together = replace(table, engine=Batched(table.engine, [one.id for one in part]))
            for one in await asyncio.gather(*(rollout(one, together) for one in part)):
                if done is not None:
                    await done(one)
        return groups

    places = asyncio.Semaphore(table.concurrent)

    async def hold(trajectory: Trajectory) -> None:
        async with places:
            await rollout(trajectory, table)
        if done is not None:
            await done(trajectory)

    await asyncio.gather(*(hold(trajectory) for trajectory in trajectories))
    return groups


def new_group(row: Row, *, size: int, seed: int, prefix: str = "") -> Group:
    """A group of empty trajectories with ids `<prefix><row id>/<n>`, each with a random stream of its own.

    The streams depend on `seed`, `prefix`, row and number only: not on timing, and not on what else is in the batch.
    """
    name = f"{prefix}{row.id}"
    trajectories = [
        Trajectory(id=f"{name}/{n}", group=name, row=row, seed=_seed(f"{seed}:{name}/{n}")) for n in range(size)
    ]
    return Group(id=name, row=row, trajectories=trajectories)


def _seed(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def _overdue(turn: int, limits: Limits, seconds: float) -> str:
    if limits.seconds is not None and seconds >= limits.seconds:
        return f"the conversation was in turn {turn} when limits.seconds={limits.seconds:g} was over"
    return f"turn {turn} took longer than limits.seconds_per_turn={limits.seconds_per_turn:g}"


async def _settle(environment: Settles, trajectory: Trajectory, limits: Limits) -> None:
    """Ask for what the whole conversation has earned, which a limit ended."""
    async with asyncio.timeout(limits.seconds_per_turn):
        with boundary("environment"):
            trajectory.turns[-1].reward += await environment.settle()


async def _close(environment: Environment, name: str) -> None:
    try:
        async with asyncio.timeout(_CLOSING_SECONDS):
            with boundary("environment"):
                await environment.close()
    except (Failed, TimeoutError) as error:
        # the conversation is whole: it is told, and kept
        _log.warning(
            "the environment of %s could not be closed: %s", name, str(error) or f"no answer in {_CLOSING_SECONDS:g} s"
        )
