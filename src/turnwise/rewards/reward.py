"""Scores trajectories: the rewards that the environment gave to turns, and the recipe's reward functions.

There are three kinds of reward functions, sync or async:

- `TrajectoryReward`: `function(trajectory) -> float`, called for each finished trajectory.
- `TurnReward`: `function(trajectory, turn) -> float`, called for each turn.
- `GroupReward`: `function(trajectories) -> [float | None, ...]`, called once for all finished trajectories of a group, for
  functions that compare trajectories, or that are faster in batches (a judge, a reward model). The reward functions of TRL
  and ms-swift have this form: their adapters are callables of this kind.

A function that raises, or that does not return a finite number, fails the trajectories that it was called for and no others:
a failure is not a reward of zero, and is not part of the statistics of the group. Functions are not called for trajectories
that have failed before.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Failure, Group, Trajectory, Turn
from turnwise.user_code.calls import call, call_blocking
from turnwise.user_code.deadlines import conversation, deadline
from turnwise.user_code.reward_number import reward_number

__all__ = ["GroupReward", "Scorer", "TrajectoryReward", "TurnReward"]

MAX_REWARD = 1e15
"""The largest absolute reward: the advantages of larger rewards do not fit into float32 gradients."""

Number = float | Awaitable[float]
Numbers = Sequence[float | None] | Awaitable[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class TrajectoryReward:
    """A function of a finished trajectory, sync or async. Its number times `weight` is added to the trajectory's reward."""

    name: str
    function: Callable[[Trajectory], Number]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A function of a finished trajectory and one of its turns. Its number times `weight` is added to the turn's reward."""

    name: str
    function: Callable[[Trajectory, Turn], Number]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True)
class GroupReward:
    """A function of all trajectories of a group that did not fail, in the order of the group.

    It returns one number for each of them. None means that the function does not apply to a trajectory: it adds nothing there
    and has no entry in the trajectory's `rewards`.

    Example, the shortest answer of a group gets 1::

        def shortest(trajectories):
            lengths = [trajectory.sampled_tokens for trajectory in trajectories]
            return [float(length == min(lengths)) for length in lengths]
    """

    name: str
    function: Callable[[Sequence[Trajectory]], Numbers]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Sets `Trajectory.reward` and `Trajectory.rewards`, and adds the numbers of turn functions to the rewards of turns."""

    trajectory: Sequence[TrajectoryReward] = ()
    turns: Sequence[TurnReward] = ()
    groups: Sequence[GroupReward] = ()
    timeout: float | None = 120.0
    """Time limit in seconds: for all functions of one trajectory together, and for each group function. Only async code can be
    interrupted. None: no limit."""

    async def score(self, groups: Sequence[Group]) -> None:
        """Score all trajectories that did not fail and are not scored yet."""
        await asyncio.gather(*(self.score_group(group.trajectories) for group in groups))

    def scoring_callback(self, groups: Sequence[Group]) -> Callable[[Trajectory], Awaitable[Sequence[Trajectory]]]:
        """A function to be awaited with each trajectory of `groups` when its conversation has ended.

        It scores the trajectories that can be scored at that time, which closes their environments, and returns them. Without
        group functions, that is the trajectory itself; with them, all trajectories of a group when the last one has ended.
        """
        group_of = {id(trajectory): group for group in groups for trajectory in group.trajectories}
        unfinished = {id(group): len(group.trajectories) for group in groups}

        async def score(trajectory: Trajectory) -> Sequence[Trajectory]:
            ready: Sequence[Trajectory] = [trajectory]
            if self.groups:
                group = group_of[id(trajectory)]
                unfinished[id(group)] -= 1
                ready = () if unfinished[id(group)] else group.trajectories
            await self.score_group(ready)
            return ready

        return score

    async def score_group(self, trajectories: Sequence[Trajectory]) -> None:
        """Score the trajectories of one group. Those that failed or are scored already stay as they are."""
        pending = [_PendingScore(one) for one in trajectories if not one.failed and one.reward is None]
        await _run_all([self._apply_single_rewards(score) for score in pending])
        if pending := [score for score in pending if not score.trajectory.failed]:
            await _run_all([self._apply_group_reward(reward, pending) for reward in self.groups])
        for score in pending:
            score.write()
        for trajectory in trajectories:
            handle, trajectory.environment = trajectory.environment, None
            if handle is not None:
                handle.release()

    async def _apply_single_rewards(self, score: _PendingScore) -> None:
        """Call the functions of a trajectory and of its turns."""
        trajectory = score.trajectory
        with conversation(trajectory.id):
            try:
                async with deadline(self.timeout):
                    score.add("turns", sum(_number("the environment", turn.reward) for turn in trajectory.turns))
                    for reward in self.turns:
                        values = [
                            reward.weight * await _reward(reward.name, reward.function, trajectory, turn)
                            for turn in trajectory.turns
                        ]
                        score.add(reward.name, sum(values))
                        score.of_turns.append((reward.name, values))
                    for reward in self.trajectory:
                        value = await _reward(reward.name, reward.function, trajectory)
                        score.add(reward.name, reward.weight * value)
            except Failed as failed:
                trajectory.fail(failed.failure)
            except TimeoutError:
                message = f"the reward functions took longer than reward.timeout={self.timeout:g}"
                trajectory.fail(Failure("reward", message))

    async def _apply_group_reward(self, reward: GroupReward, pending: Sequence[_PendingScore]) -> None:
        """Call a function of a group. If it raises, all the trajectories fail; a wrong number fails its own trajectory."""
        source = f"the reward function {reward.name!r}"
        try:
            with conversation(source):
                async with deadline(self.timeout):
                    returned = await _call(source, reward.function, [score.trajectory for score in pending])
            values = _one_per_trajectory(source, returned, len(pending))
        except Failed as failed:
            return _fail_all(pending, failed.failure)
        except TimeoutError:
            return _fail_all(pending, Failure("reward", f"{source} took longer than reward.timeout={self.timeout:g}"))
        for score, value in zip(pending, values, strict=True):
            try:
                if value is not None:
                    score.add(reward.name, reward.weight * _number(source, value))
            except Failed as failed:
                score.trajectory.fail(failed.failure)


@dataclass(slots=True)
class _PendingScore:
    """The rewards of a trajectory so far. They are written into the trajectory when all functions have returned."""

    trajectory: Trajectory
    parts: dict[str, float] = field(default_factory=dict)
    """The parts of the trajectory's reward, by the name of the function."""
    of_turns: list[tuple[str, list[float]]] = field(default_factory=list)
    """The name of each turn function, and its reward for each turn."""

    def add(self, name: str, value: float) -> None:
        self.parts[name] = self.parts.get(name, 0.0) + value

    def write(self) -> None:
        if self.trajectory.failed:
            return
        try:
            total = _number("all reward functions together", sum(self.parts.values()))
        except Failed as failed:
            self.trajectory.fail(failed.failure)
            return
        for name, values in self.of_turns:
            for turn, value in zip(self.trajectory.turns, values, strict=True):
                turn.add_reward(value, name)
        self.trajectory.rewards = self.parts
        self.trajectory.reward = total


def _fail_all(pending: Sequence[_PendingScore], failure: Failure) -> None:
    for score in pending:
        score.trajectory.fail(failure)


async def _run_all(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(coroutines) == 1:  # without a task: if no function awaits, the trajectory is scored before other tasks run
        await coroutines[0]
    else:
        await asyncio.gather(*coroutines)


async def _reward(name: str, function: Callable[..., Number], *arguments: Any) -> float:
    source = f"the reward function {name!r}"
    return _number(source, await _call(source, function, *arguments))


async def _call(source: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a reward function of any kind. Raises Failed.

    A sync function runs in the event loop's thread, which is the main thread: it may set alarms, and it blocks all other work.
    """
    with boundary("reward", where=source):
        value = call_blocking(lambda: function(*arguments), kind="reward", name=source)
        return await call(lambda: value, kind="reward", name=source) if inspect.isawaitable(value) else value


def _one_per_trajectory(source: str, values: Any, count: int) -> list[Any]:
    """The result of a group function as a list. Raises Failed if it does not have one value for each trajectory."""
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        result = f"{values!r:.80}"
    else:
        with boundary("reward"):
            listed = list(values)
        if len(listed) == count:
            return listed
        result = f"{len(listed)} values"
    raise Failed(
        Failure(
            "reward",
            f"{source} gave {result} for the {count} trajectories of a group; it must give a list with a number, or None, for "
            f"each of them, in their order",
        )
    )


def _number(source: str, value: Any) -> float:
    """A reward as a finite float. Raises Failed."""
    try:
        number = reward_number(value, source)
    except TypeError as error:
        raise Failed(Failure("reward", str(error))) from error
    if not math.isfinite(number):
        raise Failed(Failure("reward", f"{source} gave {number}; a reward must be a finite number"))
    if abs(number) > MAX_REWARD:
        message = f"{source} gave {number:g}; a reward must lie between -{MAX_REWARD:g} and {MAX_REWARD:g}"
        raise Failed(Failure("reward", message))
    return number


def _refuse_weight(name: str, weight: float) -> None:
    if not math.isfinite(weight) or abs(weight) > MAX_REWARD:
        raise ConfigError(f"the reward function {name!r} has the weight {weight}; give a finite number, such as 0.5")
