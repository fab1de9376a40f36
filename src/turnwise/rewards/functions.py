"""The four kinds of reward functions, sync or async, each with its name and weight.

- `TrajectoryReward`: called for each finished trajectory; returns a number.
- `TurnReward`: called for each turn of a finished trajectory; returns a number.
- `GroupReward`: called once for all finished trajectories of a row; returns a list with one number for each.
- `BatchReward`: called once for all finished trajectories of a training step, an evaluation or a rollout; returns a list.

Their arguments are described by a `CallPlan`. Without one, they are called by position, with the values in `BY_POSITION`.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from turnwise.errors import ConfigError
from turnwise.rewards.arguments import POSITIONAL_PLANS, CallPlan
from turnwise.rewards.results import MAX_REWARD

__all__ = ["BatchReward", "GroupReward", "Number", "Numbers", "TrajectoryReward", "TurnReward"]

Number = float | None | Awaitable[float | None]
Numbers = Iterable[float | Exception | None] | Awaitable[Iterable[float | Exception | None]]


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    """The function's name in metrics and records."""
    function: Callable[..., Any]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight) or abs(self.weight) > MAX_REWARD:
            raise ConfigError(
                f"the reward function {self.name!r} has the weight {self.weight}; give a finite number, such as 0.5"
            )

    @property
    def source(self) -> str:
        """The function in an error message."""
        return f"the reward function {self.name!r}"


@dataclass(frozen=True, slots=True)
class TrajectoryReward(_Named):
    """A function of a finished trajectory. Its number times `weight` is added to the trajectory's reward."""

    plan: CallPlan = POSITIONAL_PLANS["trajectory"]


@dataclass(frozen=True, slots=True)
class TurnReward(_Named):
    """A function of a finished trajectory and one of its turns. Its number times `weight` is added to the turn's reward."""

    plan: CallPlan = POSITIONAL_PLANS["turns"]


@dataclass(frozen=True, slots=True)
class GroupReward(_Named):
    """A function of all trajectories of a group that did not fail, in the order of the group.

    It returns one number for each of them. None means that the function does not apply to a trajectory: it adds nothing there
    and has no entry in the trajectory's `rewards`. An exception in the list fails that trajectory and no other.

    Example, the shortest answer of a group gets 1::

        def shortest(trajectories):
            lengths = [trajectory.sampled_tokens for trajectory in trajectories]
            return [float(length == min(lengths)) for length in lengths]
    """

    plan: CallPlan = POSITIONAL_PLANS["group"]


@dataclass(frozen=True, slots=True)
class BatchReward(_Named):
    """A function of all trajectories of the batch that did not fail, in the order of the groups. Returns what a group function
    returns.

    Example, rewards with mean 0 over all trajectories of the step::

        def normalised(completions):
            lengths = [len(completion) for completion in completions]
            return [length - sum(lengths) / len(lengths) for length in lengths]
    """

    plan: CallPlan = POSITIONAL_PLANS["batch"]
