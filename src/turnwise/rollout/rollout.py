"""The multi-turn loop, the same for every engine, environment and mode.

`converse` is the loop: the model samples a turn, the environment replies, until a stop condition. `rollout` runs it for one
trajectory and turns failures into data. `rollout_groups` runs many trajectories at the same time; a failed conversation does
not affect the others. The user's environment is behind a guard: no method can end the run, and each is called in a task of its
own.

The loop knows a session only as a `ConversationSession`: `session.Session` records tokens and samples with an engine,
`text_session.TextSession` sends messages to an endpoint. The methods are called in this order::

    begin(opening)
    while await stop_reason() is None:
        turn = await generate()
        apply_reply(turn, reply)        # not after a turn that was cut by a limit, or without a turn
    apply_final_reply(reply)            # if a limit ended a conversation that has turns
    finish(stop)
    release()                           # always, also after a failure
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from turnwise.engines.engine import Batched, longest_sequence
from turnwise.environments.environment import (
    Environment,
    EnvironmentFactory,
    FinalReply,
    FinalReward,
    ProvidesHandle,
    in_episode,
)
from turnwise.errors import Failed, boundary
from turnwise.rollout.context import ConversationContext, Limits, RolloutContext, Runner, TextContext, seed_of
from turnwise.rollout.episode import RunningEpisode
from turnwise.rollout.session import Session
from turnwise.rollout.text_session import TextSession
from turnwise.types import EnvironmentHandle, Failure, Group, Opening, Reply, Row, Stop, Trajectory, Turn
from turnwise.user_code.calls import call, call_blocking, conversation, deadline, forget
from turnwise.user_code.copies import copy_containers, copy_opening, copy_reply, copy_row, copy_turn, take_rewards
from turnwise.user_code.reward_number import reward_number

T = TypeVar("T")
# the guard of an environment

_CLOSING_SECONDS = 30.0  # an environment whose `close` does not return must not stop the run
_log = logging.getLogger(__name__)


class GuardedEnvironment:
    """The environment of one conversation. All methods raise Failed, of the kind `environment`, whatever the user's code raises;
    `close` raises nothing."""

    __slots__ = ("_environment", "_watch_sampling")

    def __init__(self, make_environment: EnvironmentFactory) -> None:
        self._environment: Environment = call_blocking(
            make_environment, kind="environment", name="making an environment", shared=True
        )
        self._watch_sampling: Callable[[], Awaitable[None]] | None = None

    async def begin(self, row: Row) -> Opening:
        opening = await self._call(lambda: self._environment.begin(copy_row(row)), "begin")
        if isinstance(opening, Opening):  # else, the session refuses it
            self._watch_sampling = opening.watch_sampling
        with boundary("environment"):
            return copy_opening(opening)

    async def step(self, turn: Turn) -> Reply:
        given = copy_turn(turn)
        reply = await self._call(lambda: self._environment.step(given), "step")
        with boundary("environment"):
            take_rewards(turn, given)
            for name, value in turn.info.items():  # written by the environment, which may change the object later
                turn.info[name] = copy_containers(value)
            return copy_reply(reply)

    async def watched(self, sampling: Callable[[], Awaitable[T]]) -> T:
        """The result of `sampling`. It is cancelled if the environment does not wait for the turn any more."""
        if self._watch_sampling is None:
            return await sampling()
        turn = asyncio.ensure_future(sampling())
        watch = asyncio.ensure_future(self._call(self._watch_sampling, "watch_sampling"))
        try:
            await asyncio.wait({turn, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not turn.done():
                watch.result()  # raises
            return await turn
        finally:
            turn.cancel()
            watch.cancel()
            await asyncio.gather(turn, watch, return_exceptions=True)

    async def final_reply(self, turn: Turn) -> Reply:
        """What the environment says after a limit ended the conversation, whose last turn is `turn`: `final_reply`, or a reply
        with `final_reward`; an empty reply without a method of these names."""
        environment = self._environment
        if isinstance(environment, FinalReply):
            return await self._call(lambda: environment.final_reply(turn), "final_reply")
        if not isinstance(environment, FinalReward):
            return Reply(done=True)
        reward = await self._call(environment.final_reward, "final_reward")
        with boundary("environment"):
            return Reply(done=True, reward=None if reward is None else reward_number(reward, "final_reward()"))

    def environment_handle(self) -> EnvironmentHandle | None:
        """The object that reward functions may read after the conversation, if the environment exposes one."""
        with boundary("environment"):
            return self._environment.environment_handle() if isinstance(self._environment, ProvidesHandle) else None

    async def close(self, conversation: str) -> None:
        """Close the environment. If that fails, the conversation is kept and a warning is logged."""
        try:
            async with deadline(_CLOSING_SECONDS):
                await self._call(self._environment.close, "close")
        except (Failed, TimeoutError) as error:
            reason = str(error) or f"no answer in {_CLOSING_SECONDS:g} s"
            _log.warning("the environment of %s could not be closed: %s", conversation, reason)

    async def _call(self, method: Callable[[], Awaitable[T]], method_name: str) -> T:
        name = f"the environment {type(self._environment).__name__}.{method_name}"
        return await call(method, kind="environment", name=name)


# the interface of a session


class ConversationSession(Protocol):
    """One running conversation. All methods that raise, raise Failed."""

    @property
    def trajectory(self) -> Trajectory:
        """The record, filled while the conversation runs."""
        ...

    @property
    def turns_answered(self) -> int:
        """Turns that the environment has answered: the index of the turn in progress."""
        ...

    @property
    def truncation_reason(self) -> Stop | None:
        """Why the conversation ends if the last turn was cut, or if there was no room for a turn. None if it does not end: the
        environment bounded the turn itself, and answers it (`SamplingChange.answers_cut`)."""
        ...

    def begin(self, opening: Opening) -> None:
        """Take the environment's opening messages and tools."""
        ...

    async def stop_reason(self) -> Stop | None:
        """Why there is no further turn of the model, or None."""
        ...

    async def generate(self) -> Turn | None:
        """Let the model take a turn. None: the prompt leaves no room for a turn, which is known only now."""
        ...

    def apply_reply(self, turn: Turn, reply: Reply) -> None:
        """Take the environment's reply to the last turn."""
        ...

    def apply_final_reply(self, reply: Reply) -> None:
        """Take what the environment says of the turns after a limit ended the conversation."""
        ...

    def finish(self, stop: Stop) -> None:
        """The conversation has ended."""
        ...

    def release(self) -> None:
        """Free what the conversation holds."""
        ...


# the loop

OnFinished = Callable[[Trajectory], Awaitable[None]]


class _TimeLimits:
    """The limits of time of a conversation. Those who meet them are told who took the time."""

    __slots__ = ("_limits", "_sampling", "_session")

    def __init__(self, session: ConversationSession, limits: Limits) -> None:
        self._session = session
        self._limits = limits
        self._sampling = 0.0
        """Seconds in which the conversation has waited for the engine."""

    def of_turn(self) -> contextlib.AbstractAsyncContextManager[None]:
        """`limits.seconds_per_turn`. Raises Failed."""
        seconds = self._limits.seconds_per_turn
        return self._limit(seconds, lambda turn: f"turn {turn} took longer than limits.seconds_per_turn={seconds:g}")

    def of_conversation(self) -> contextlib.AbstractAsyncContextManager[None]:
        """`limits.seconds`. Raises Failed."""
        seconds = self._limits.seconds
        return self._limit(
            seconds, lambda turn: f"the conversation was in turn {turn} when limits.seconds={seconds:g} was over"
        )

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """The engine is awaited inside."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._sampling += time.perf_counter() - started

    @contextlib.asynccontextmanager
    async def _limit(self, seconds: float | None, problem: Callable[[int], str]) -> AsyncIterator[None]:
        started, sampled, limit = time.perf_counter(), self._sampling, deadline(seconds)
        try:
            async with limit:
                yield
        except TimeoutError:
            if not limit.expired:  # another limit
                raise
            if 2 * (self._sampling - sampled) > time.perf_counter() - started:
                reason = (
                    "most of it in the engine. The machine may be slow or busy: raise the limit, or lower "
                    "limits.tokens_per_turn or max_concurrent"
                )
            else:
                reason = "most of it in the environment: raise the limit if that needs longer"
            raise Failed(Failure("deadline", f"{problem(self._session.turns_answered)}, {reason}")) from None


async def converse(
    session: ConversationSession,
    environment: GuardedEnvironment,
    limits: _TimeLimits,
    begin_turn: Callable[[], Stop | None] | None = None,
) -> Stop:
    """Let the model and the environment take turns until one of them or a limit ends the conversation."""
    async with limits.of_turn():
        opening = await environment.begin(session.trajectory.row)
    session.begin(opening)
    if opening.done:
        return Stop.DONE
    while (stop := await session.stop_reason()) is None:
        if begin_turn is not None and (stop := begin_turn()) is not None:
            break
        async with limits.of_turn():
            with limits.sampling():
                turn = await environment.watched(session.generate)
            cut_by = session.truncation_reason
            if cut_by is not None and (turn is None or turn.finish_reason == "length"):
                return cut_by
            assert turn is not None, "no room for a turn, and no limit that says so"
            started = time.perf_counter()
            reply = await environment.step(turn)
            turn.seconds_environment = time.perf_counter() - started
        session.apply_reply(turn, reply)
        if reply.done:
            return Stop.DONE
    return stop


async def rollout(trajectory: Trajectory, context: ConversationContext) -> Trajectory:
    """Fill an empty trajectory with one conversation, and with those of the agents that its environment opens. A failure is
    recorded in it; only cancellation is raised."""
    episode = RunningEpisode(trajectory, context, _rollout_one)
    with in_episode(episode):
        try:
            return await _rollout_one(trajectory, context)
        finally:
            await episode.close()


async def _rollout_one(trajectory: Trajectory, context: ConversationContext) -> Trajectory:
    trajectory.started, started = time.time(), time.perf_counter()
    session = _new_session(trajectory, context)
    environment: GuardedEnvironment | None = None
    with conversation(trajectory.id, lockstep=context.lockstep):
        try:
            environment = GuardedEnvironment(context.make_environment)
            with boundary("internal"):
                await _complete(session, environment, context)
            trajectory.environment = environment.environment_handle()
        except Failed as failed:
            trajectory.fail(failed.failure)
            _log.info("%s failed: %s: %s\n%s", trajectory.id, *dataclasses.astuple(failed.failure))
        finally:
            session.release()
            trajectory.seconds = time.perf_counter() - started
            if environment is not None:
                await environment.close(trajectory.id)
    return trajectory


def _new_session(trajectory: Trajectory, context: ConversationContext) -> ConversationSession:
    """The session of a trajectory: of tokens with an engine, of messages only with an endpoint."""
    match context:
        case RolloutContext():
            limits = context.limits.within(longest_sequence(context.engine))
            return Session(trajectory, dataclasses.replace(context, limits=limits))
        case TextContext():
            return TextSession(trajectory, context)
        case _:
            raise TypeError(f"a conversation needs a RolloutContext or a TextContext; got a {type(context).__name__}")


async def _complete(
    session: ConversationSession, environment: GuardedEnvironment, context: ConversationContext
) -> None:
    """One conversation within `limits.seconds`, from the opening to the final reward and the sanity check.

    Raises Failed, of the kind `deadline` if it takes too long.
    """
    limits, trajectory = _TimeLimits(session, context.limits), session.trajectory
    async with limits.of_conversation():
        stop = await converse(session, environment, limits, context.begin_turn)
        if stop is not Stop.DONE and trajectory.turns:
            async with limits.of_turn():
                reply = await environment.final_reply(trajectory.turns[-1])
            session.apply_final_reply(reply)
        session.finish(stop)


def runner_of(context: ConversationContext) -> Runner:
    """The runner of the conversations with this context: `rollout` in this process, unless the context has another."""
    if context.make_runner is not None:
        return context.make_runner(context)
    return functools.partial(rollout, context=context)


async def rollout_group(group: Group, context: ConversationContext) -> Group:
    """Run the conversations of a group, at most `context.max_concurrent` at the same time."""
    await rollout_groups([group], context)
    return group


async def rollout_groups(
    groups: Sequence[Group],
    context: ConversationContext,
    *,
    on_finished: OnFinished | None = None,
    slots: asyncio.Semaphore | None = None,
) -> Sequence[Group]:
    """Run the conversations of several groups, at most `context.max_concurrent` at the same time.

    `on_finished` is awaited with each trajectory when its conversation has ended. `slots` limits the conversations of several
    calls together: each conversation waits for one of them (not in lockstep, where only one call runs at a time).
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if context.lockstep and not isinstance(context, TextContext):
        await _rollout_in_lockstep(trajectories, context, on_finished)
    else:
        await _rollout_concurrently(
            trajectories, context, on_finished, slots or asyncio.Semaphore(context.max_concurrent)
        )
    return groups


async def _rollout_concurrently(
    trajectories: Sequence[Trajectory],
    context: ConversationContext,
    on_finished: OnFinished | None,
    slots: asyncio.Semaphore,
) -> None:
    """Each conversation starts as soon as there is room for it."""
    run = runner_of(context)

    async def rollout_when_free(trajectory: Trajectory) -> None:
        async with slots:
            await run(trajectory)
        if on_finished is not None:
            await on_finished(trajectory)

    await _run_all(rollout_when_free(trajectory) for trajectory in trajectories)


async def _rollout_in_lockstep(
    trajectories: Sequence[Trajectory], context: ConversationContext, on_finished: OnFinished | None
) -> None:
    """One batch of conversations after the other. The engine receives the requests of a batch together, in a fixed order."""
    for start in range(0, len(trajectories), context.max_concurrent):
        batch = trajectories[start : start + context.max_concurrent]
        run = runner_of(_batched(context, batch))
        finished = await _run_all(run(trajectory) for trajectory in batch)
        if on_finished is not None:
            for trajectory in finished:
                await on_finished(trajectory)


def _batched(context: ConversationContext, batch: Sequence[Trajectory]) -> ConversationContext:
    """The context of a batch of conversations: an engine in this process gets their requests together."""
    if not isinstance(context, RolloutContext):
        return context
    return dataclasses.replace(context, engine=Batched(context.engine, [trajectory.id for trajectory in batch]))


async def _run_all(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """Run awaitables at the same time and return their results in order. If one raises, the others are cancelled and awaited."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        unfinished = [task for task in tasks if not task.done()]
        for task in unfinished:
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
        for task in tasks:
            forget(task)


def new_group(row: Row, *, size: int, seed: int, prefix: str = "") -> Group:
    """A group of empty trajectories with the ids `<prefix><row id>/<n>`. Each has a random stream of its own.

    The streams depend on `seed`, `prefix`, the row's id and n only: not on timing, and not on the rest of the batch.
    """
    group_id = f"{prefix}{row.id}"
    trajectories = [
        Trajectory(id=f"{group_id}/{n}", group=group_id, row=row, seed=seed_of(f"{seed}:{group_id}/{n}"))
        for n in range(size)
    ]
    return Group(id=group_id, row=row, trajectories=trajectories)
