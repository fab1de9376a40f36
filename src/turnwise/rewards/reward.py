"""What a conversation was worth: the environment's turn rewards, and the recipe's functions on top.

There are three kinds of reward functions, sync or async:

- `TrajectoryReward`: `function(trajectory) -> float`, asked about each finished trajectory by itself.
- `TurnReward`: `function(trajectory, turn) -> float`, asked about each turn.
- `GroupReward`: `function(trajectories) -> [float | None, ...]`, asked once about all finished trajectories of a group, for
  functions that compare trajectories, or that are faster in batches (a judge, a reward model). The reward functions of TRL
  and ms-swift have this form: their adapters are callables of this kind.

A function that raises, or that gives no finite number, breaks the trajectories that it was asked about and no other: it is no
zero, and does not enter the group's statistics. Trajectories that are broken already are not shown to any function.
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

LARGEST = 1e15
"""The largest reward, and the smallest below zero: advantages of larger ones do not fit into float32 gradients."""

Number = float | Awaitable[float]
Numbers = Sequence[float | None] | Awaitable[Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class TrajectoryReward:
    """A function of a finished trajectory, sync or async."""

    name: str
    function: Callable[[Trajectory], Number]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A function of a finished trajectory and one of its turns; the number is added to the turn's reward."""

    name: str
    function: Callable[[Trajectory, Turn], Number]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True)
class GroupReward:
    """A function of all trajectories of a group that did not break, in the order of the group.

    It gives one number for each of them. None says that the function does not apply to a trajectory: it adds nothing there and
    has no part in the trajectory's `rewards`.

    Example, the shortest answer of a group earns 1::

        def shortest(trajectories):
            lengths = [one.sampled_tokens for one in trajectories]
            return [float(length == min(lengths)) for length in lengths]
    """

    name: str
    function: Callable[[Sequence[Trajectory]], Numbers]
    weight: float = 1.0

    def __post_init__(self) -> None:
        _refuse_weight(self.name, self.weight)


@dataclass(frozen=True, slots=True)
class Scorer:
    """Turns what happened into `Turn.reward`, `Trajectory.rewards` and `Trajectory.reward`."""

    trajectory: Sequence[TrajectoryReward] = ()
    turns: Sequence[TurnReward] = ()
    groups: Sequence[GroupReward] = ()
    seconds: float | None = 120.0
    """What the functions of one trajectory may take together, and each function of a group for all its trajectories; as far as
    they are async."""

    async def score(self, groups: Sequence[Group]) -> None:
        """Score every trajectory that did not break and is not scored yet."""
        await asyncio.gather(*(self.score_group(group.trajectories) for group in groups))

    def score_when_finished(self, groups: Sequence[Group]) -> Callable[[Trajectory], Awaitable[Sequence[Trajectory]]]:
        """A function to be awaited with each trajectory of `groups` as its conversation ends. It scores the trajectories
        that can be scored then, which frees their environments, and returns them.

        Without functions of a group a trajectory is scored at once, else with the last one of its group."""
        members = {id(one): group for group in groups for one in group.trajectories}
        left = {id(group): len(group.trajectories) for group in groups}

        async def ended(trajectory: Trajectory) -> Sequence[Trajectory]:
            scored: Sequence[Trajectory] = [trajectory]
            if self.groups:
                group = members[id(trajectory)]
                left[id(group)] -= 1
                scored = () if left[id(group)] else group.trajectories
            await self.score_group(scored)
            return scored

        return ended

    async def score_group(self, trajectories: Sequence[Trajectory]) -> None:
        """Score the trajectories of one group; those that are broken or scored already stay as they are."""
        pending = [_Scores(one) for one in trajectories if not one.failed and one.reward is None]
        await _together([self._score_apart(one) for one in pending])
        if pending := [one for one in pending if not one.trajectory.failed]:
            await _together([self._score_together(reward, pending) for reward in self.groups])
        for one in pending:
            one.write()
        for trajectory in trajectories:
            handle, trajectory.environment = trajectory.environment, None
            if handle is not None:
                handle.release()

    async def _score_apart(self, scores: _Scores) -> None:
        """Ask the functions of a trajectory and those of its turns."""
        trajectory = scores.trajectory
        with conversation(trajectory.id):
            await self._ask_each(scores, trajectory)

    async def _ask_each(self, scores: _Scores, trajectory: Trajectory) -> None:
        try:
            async with deadline(self.seconds):
                scores.add("turns", sum(_number("the environment", turn.reward) for turn in trajectory.turns))
                for reward in self.turns:
                    values = [
                        reward.weight * await _ask(reward.name, reward.function, trajectory, turn)
                        for turn in trajectory.turns
                    ]
                    scores.add(reward.name, sum(values))
                    scores.turns.append((reward.name, values))
                for reward in self.trajectory:
                    value = await _ask(reward.name, reward.function, trajectory)
                    scores.add(reward.name, reward.weight * value)
        except Failed as failed:
            trajectory.fail(failed.failure)
        except TimeoutError:
            trajectory.fail(Failure("reward", f"the reward functions took longer than reward.timeout={self.seconds:g}"))

    async def _score_together(self, reward: GroupReward, pending: Sequence[_Scores]) -> None:
        """Ask a function of a group. Where it raises, all its trajectories break; a wrong number breaks its own."""
        who = f"the reward function {reward.name!r}"
        values: list[Any] | Failure
        try:
            with conversation(who):
                async with deadline(self.seconds):
                    given = await _call(who, reward.function, [one.trajectory for one in pending])
            values = _listed(who, given, len(pending))
        except Failed as failed:
            values = failed.failure
        except TimeoutError:
            values = Failure("reward", f"{who} took longer than reward.timeout={self.seconds:g}")
        if isinstance(values, Failure):
            for one in pending:
                one.trajectory.fail(values)
            return
        for one, value in zip(pending, values, strict=True):
            try:
                if value is not None:
                    one.add(reward.name, reward.weight * _number(who, value))
            except Failed as failed:
                one.trajectory.fail(failed.failure)


@dataclass(slots=True)
class _Scores:
    """What a trajectory has earned so far. Nothing is written into the trajectory until all functions have answered."""

    trajectory: Trajectory
    parts: dict[str, float] = field(default_factory=dict)
    turns: list[tuple[str, list[float]]] = field(default_factory=list)
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
        for name, values in self.turns:
            for turn, value in zip(self.trajectory.turns, values, strict=True):
                turn.add_reward(value, name)
        self.trajectory.rewards = self.parts
        self.trajectory.reward = total


async def _together(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    if len(work) == 1:  # no task of its own: where nothing waits, a trajectory is scored before anything else happens
        await work[0]
    else:
        await asyncio.gather(*work)


async def _ask(name: str, function: Callable[..., Number], *arguments: Any) -> float:
    who = f"the reward function {name!r}"
    return _number(who, await _call(who, function, *arguments))


async def _call(who: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """The one place where a reward function is called, of whichever kind. Raises Failed.

    A sync function runs in the event loop's thread, which is the main thread: it may set alarms, and it blocks everything else.
    """
    with boundary("reward", where=who):
        value = call_blocking(lambda: function(*arguments), kind="reward", name=who)
        return await call(lambda: value, kind="reward", name=who) if inspect.isawaitable(value) else value


def _listed(who: str, values: Any, count: int) -> list[Any]:
    """What a function of a group gave, as a list. Raises Failed if it is not one value for each trajectory."""
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        shape = f"{values!r:.80}"
    else:
        with boundary("reward"):
            listed = list(values)
        if len(listed) == count:
            return listed
        shape = f"{len(listed)} values"
    raise Failed(
        Failure(
            "reward",
            f"{who} gave {shape} for the {count} trajectories of a group; it must give a list with a number, or None, for each "
            f"of them, in their order",
        )
    )


def _number(who: str, value: Any) -> float:
    """A reward as a finite float. Raises Failed."""
    try:
        number = reward_number(value, who)
    except TypeError as error:
        raise Failed(Failure("reward", str(error))) from error
    if not math.isfinite(number):
        raise Failed(Failure("reward", f"{who} gave {number}; a reward must be a finite number"))
    if abs(number) > LARGEST:
        raise Failed(
            Failure("reward", f"{who} gave {number:g}; a reward must lie between -{LARGEST:g} and {LARGEST:g}")
        )
    return number


def _refuse_weight(name: str, weight: float) -> None:
    if not math.isfinite(weight) or abs(weight) > LARGEST:
        raise ConfigError(f"the reward function {name!r} has the weight {weight}; give a finite number, such as 0.5")
