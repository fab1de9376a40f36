"""The sections `reward` and `credit` of a recipe."""

from __future__ import annotations

from typing import Literal

from turnwise.config.part import NonEmpty, Part, Seconds, Use

__all__ = ["Credit", "Reward", "RewardUse"]


class RewardUse(Use):
    """A reference to a reward function, or to a class: it is constructed once with `arguments`, and its instance is called."""

    weight: float = 1.0
    """The factor of the function's result in the reward."""
    name: NonEmpty | None = None
    """The function's name in metrics and records. Null: the name behind the colon of the reference."""


class Reward(Part):
    """Reward functions. Their results are added to the rewards that the environment gives."""

    trajectory: list[RewardUse] = []
    """Reward functions of one trajectory: sync or async, from a trajectory to a number."""
    turns: list[RewardUse] = []
    """Reward functions of one turn: sync or async, from a trajectory and a turn to a number, called for each turn."""
    group: list[RewardUse] = []
    """Reward functions of a group: from all finished trajectories of one row to a list of numbers, called once per row. None in
    the list means that the function does not apply to that trajectory."""
    timeout: Seconds | None = 120.0
    """The time limit of reward functions, in seconds: for all async functions of one trajectory together, and for each async
    function of a group. Null: no limit."""


class Credit(Part):
    """How rewards become advantages."""

    name: Literal["grpo"] = "grpo"
    """The credit assignment. `grpo`: a trajectory's reward minus the mean reward of its group."""
    scale: Literal["std", "none"] = "std"
    """Whether advantages are divided by the standard deviation of the group's rewards (`std`, GRPO) or not (`none`, Dr. GRPO)."""
