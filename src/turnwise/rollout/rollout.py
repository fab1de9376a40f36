"""The loop: the model and its environment are introduced to each other. There is no other one.

It is the same for every engine, every environment and every mode. What breaks in a conversation is written into that
conversation, and never reaches its siblings.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from turnwise.chat.renderer import Renderer, Thinking
from turnwise.engines.batched import Batched
from turnwise.engines.engine import Engine
from turnwise.environments.environment import Environment, EnvironmentFactory, Exposes, FinalReward
from turnwise.errors import Failed, boundary
from turnwise.rollout.limits import Limits
from turnwise.rollout.session import Session
from turnwise.types import Failure, Group, Opening, Reply, Row, Sampling, Stop, Trajectory, Turn
from turnwise.user_code.calls import call, call_blocking, conversation, deadline, forget
from turnwise.user_code.reward_number import reward_number

__all__ = ["RolloutContext", "new_group", "rollout", "rollout_group", "rollout_groups"]

T = TypeVar("T")
_CLOSING_SECONDS = 30.0  # an environment that hangs in `close` must not hold up the run
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutContext:
    """Who sits at the table: everything that a conversation needs besides its row."""

    engine: Engine
    renderer: Renderer
    make_environment: EnvironmentFactory
    sampling: Sampling
    limits: Limits
    thinking: Thinking = "keep"
    """What becomes of earlier thoughts when a conversation goes on."""
    max_concurrent: int = 256
    """Conversations that are held at once."""
    lockstep: bool = False
    """Whether the engine answers all of them together, in an order that depends on no timing."""


class _UserEnvironment:
    """A user's environment: each of its methods runs in a task of its own, in the context of the conversation.

    All methods raise Failed, of the kind `environment`.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._name = f"the environment {type(environment).__name__}"

    async def begin(self, row: Row) -> Opening:
        return await self._call(lambda: self._environment.begin(row), "begin")

    async def step(self, turn: Turn) -> Reply:
        return await self._call(lambda: self._environment.step(turn), "step")

    async def final_reward(self) -> float:
        """What it adds to the last turn's reward, when a limit has ended the conversation; 0 where it does not say."""
        if not isinstance(self._environment, FinalReward):
            return 0.0
        return await self._call(self._environment.final_reward, "final_reward")

    async def close(self) -> None:
        await self._call(self._environment.close, "close")

    async def _call(self, method: Callable[[], Awaitable[Any]], what: str) -> Any:
        return await call(method, kind="environment", name=f"{self._name}.{what}")


async def converse(session: Session, environment: _UserEnvironment, table: RolloutContext) -> Stop:
    """The model speaks, the environment answers, until one of them or a limit says stop."""
    seconds = table.limits.seconds_per_turn
    async with deadline(seconds):
        opening = await environment.begin(session.trajectory.row)
    session.begin(opening)
    while (stop := session.stop_reason()) is None:
        async with deadline(seconds):
            turn = await session.generate()
            if turn.finish_reason == "length":
                return session.truncation_reason
            started = time.perf_counter()
            reply = await environment.step(turn)
            turn.seconds_environment = time.perf_counter() - started
        session.apply_reply(turn, reply)
        if reply.done:
            return Stop.DONE
    return stop


async def rollout(trajectory: Trajectory, table: RolloutContext) -> Trajectory:
    """Fill a trajectory with one conversation. What breaks is recorded in it; only cancellation is raised."""
    trajectory.started, started = time.time(), time.perf_counter()
    limits = table.limits
    session = Session(
        trajectory,
        engine=table.engine,
        renderer=table.renderer,
        sampling=table.sampling,
        limits=limits,
        thinking=table.thinking,
    )
    environment: _UserEnvironment | None = None
    with conversation(trajectory.id, lockstep=table.lockstep):
        try:
            made = call_blocking(table.make_environment, kind="environment", name="making an environment", shared=True)
            environment = _UserEnvironment(made)
            with boundary("internal"):
                await _converse_in_time(session, environment, table)
            with boundary("environment"):
                trajectory.environment = made.exposed() if isinstance(made, Exposes) else None
        except Failed as failed:
            trajectory.fail(failed.failure)
            _log.info("%s broke: %s: %s\n%s", trajectory.id, *dataclasses.astuple(failed.failure))
        finally:
            table.engine.release(trajectory.id)
            trajectory.seconds = time.perf_counter() - started
            if environment is not None:
                await _close(environment, trajectory.id)
    return trajectory


async def _converse_in_time(session: Session, environment: _UserEnvironment, table: RolloutContext) -> None:
    """Raises Failed, of the kind `deadline` where the conversation took too long."""
    limits, trajectory = table.limits, session.trajectory
    whole = deadline(limits.seconds)
    try:
        async with whole:
            stop = await converse(session, environment, table)
            if stop is not Stop.DONE and trajectory.turns:
                async with deadline(limits.seconds_per_turn):
                    final = await environment.final_reward()
                with boundary("environment"):
                    trajectory.turns[-1].add_reward(reward_number(final, "final_reward()"), "final_reward")
            session.finish(stop)
    except TimeoutError:
        turn = session.turns_answered
        if whole.expired:
            message = f"the conversation was in turn {turn} when limits.seconds={limits.seconds:g} was over"
        else:
            message = f"turn {turn} took longer than limits.seconds_per_turn={limits.seconds_per_turn:g}"
        raise Failed(Failure("deadline", message)) from None


async def rollout_group(group: Group, table: RolloutContext) -> Group:
    """Hold the conversations of a group, `context.max_concurrent` at a time."""
    await rollout_groups([group], table)
    return group


async def rollout_groups(
    groups: Sequence[Group], table: RolloutContext, *, done: Callable[[Trajectory], Awaitable[None]] | None = None
) -> Sequence[Group]:
    """Hold the conversations of several groups, `context.max_concurrent` at a time; `done` is awaited as each of them ends."""
    trajectories = [one for group in groups for one in group.trajectories]
    if table.lockstep:
        for start in range(0, len(trajectories), table.max_concurrent):
            part = trajectories[start : start + table.max_concurrent]
            together = replace(table, engine=Batched(table.engine, [one.id for one in part]))
            for one in await _all(rollout(one, together) for one in part):
                if done is not None:
                    await done(one)
        return groups

    places = asyncio.Semaphore(table.max_concurrent)

    async def hold(trajectory: Trajectory) -> None:
        async with places:
            await rollout(trajectory, table)
        if done is not None:
            await done(trajectory)

    await _all(hold(trajectory) for trajectory in trajectories)
    return groups


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return. Where one raises, the others are cancelled, and waited for."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        for task in tasks:
            forget(task)


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


async def _close(environment: _UserEnvironment, name: str) -> None:
    try:
        async with deadline(_CLOSING_SECONDS):
            await environment.close()
    except (Failed, TimeoutError) as error:
        # the conversation is whole: it is told, and kept
        _log.warning(
            "the environment of %s could not be closed: %s", name, str(error) or f"no answer in {_CLOSING_SECONDS:g} s"
        )
