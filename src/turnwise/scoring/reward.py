"""What a conversation was worth: the environment's turn rewards, and the recipe's functions on top.

A reward function is handed a finished trajectory and gives a number. One that raises, or gives no finite number, breaks the
trajectory it was asked about and no other: it is no zero, and does not enter the group's statistics.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnwise.errors import Failed, boundary
from turnwise.types import Failure, Group, Trajectory, Turn

__all__ = ["Scorer", "TrajectoryReward", "TurnReward"]

Number = float | Awaitable[float]


@dataclass(frozen=True, slots=True)
class TrajectoryReward:
    """A function of a finished trajectory, sync or async."""

    name: str
    function: Callable[[Trajectory], Number]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A function of a finished trajectory and one of its turns; the number is added to the turn's reward."""

    name: str
    function: Callable[[Trajectory, Turn], Number]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Scorer:
    """Turns what happened into `Turn.reward`, `Trajectory.rewards` and `Trajectory.reward`."""

    trajectory: Sequence[TrajectoryReward] = ()
    turns: Sequence[TurnReward] = ()
    seconds: float | None = 120.0
    """What all functions together may take for one trajectory, as far as they are async."""

    async def score(self, groups: Sequence[Group]) -> None:
        """Score every trajectory that did not break."""
        await asyncio.gather(*(self.score_one(one) for group in groups for one in group.trajectories))

    async def score_one(self, trajectory: Trajectory) -> None:
        """Score a trajectory, unless it broke or is scored already."""
        if trajectory.failed or trajectory.reward is not None:
            return
        try:
            async with asyncio.timeout(self.seconds):
                parts, earned = await self._parts(trajectory)
        except Failed as failed:
            trajectory.fail(failed.failure)
            return
        except TimeoutError:
            trajectory.fail(Failure("reward", f"the reward functions took longer than reward.seconds={self.seconds:g}"))
            return
        for turn, value in zip(trajectory.turns, earned, strict=True):
            turn.reward += value
        trajectory.rewards = parts
        trajectory.reward = sum(parts.values())

    async def _parts(self, trajectory: Trajectory) -> tuple[dict[str, float], list[float]]:
        """The parts of a trajectory's reward by name, and what the turn functions give each turn."""
        parts = {"turns": sum(_finite("the environment", turn.reward) for turn in trajectory.turns)}
        earned = [0.0] * len(trajectory.turns)
        for reward in self.turns:
            values = [
                reward.weight * await _ask(reward.name, reward.function, trajectory, turn) for turn in trajectory.turns
            ]
            earned = [one + other for one, other in zip(earned, values, strict=True)]
            parts[reward.name] = parts.get(reward.name, 0.0) + sum(values)
        for reward in self.trajectory:
            value = reward.weight * await _ask(reward.name, reward.function, trajectory)
            parts[reward.name] = parts.get(reward.name, 0.0) + value
        return parts, earned


async def _ask(name: str, function: Callable[..., Number], *arguments: Any) -> float:
    with boundary("reward"):
        value = function(*arguments)
        if inspect.isawaitable(value):
            value = await value
    return _finite(f"the reward function {name!r}", value)


def _finite(who: str, value: Any) -> float:
    """A reward as a float; tensors and numpy numbers of one element are numbers too."""
    with boundary("reward"):
        number = float(value)
    if not math.isfinite(number):
        raise Failed(Failure("reward", f"{who} gave {number}; a reward must be a finite number"))
    return number
