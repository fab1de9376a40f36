"""The section `reward` of a recipe."""

from __future__ import annotations

from turnwise.config.section import NonEmpty, Seconds, Section, Use

__all__ = ["RewardSection", "RewardUse"]


class RewardUse(Use):
    """A reference to a reward function, or to a class: it is constructed once with `arguments`, and its instance is called."""

    weight: float = 1.0
    """The factor by which the function's result is multiplied before it is added to the reward."""
    name: NonEmpty | None = None
    """The function's name in metrics and records. Null: the name after the colon of the reference."""


class RewardSection(Section):
    """Reward functions. Their results are added to the rewards that the environment gives."""

    trajectory: list[RewardUse] = []
    """Reward functions of one trajectory. Each is called when a conversation has ended, and returns a number. Its arguments are
    chosen by the names of its parameters, such as `trajectory`, `completion` or a column of the row (docs/rewards.md)."""
    turns: list[RewardUse] = []
    """Reward functions of one turn. Each is called for each turn of a conversation and returns a number. It can have the
    parameters `turn` and `index`, and those of a function of one trajectory."""
    group: list[RewardUse] = []
    """Reward functions of a group. Each is called once for each row, with lists that have one item for each trajectory of the
    row that did not fail, such as `trajectories` or `completions`. It returns a list of numbers. None in the list: the
    function does not apply to that trajectory."""
    batch: list[RewardUse] = []
    """Reward functions of the batch. Each is called once for all trajectories of a training step, an evaluation or a rollout
    that did not fail, when all conversations have ended. Parameters and result are those of a function of a group."""
    timeout: Seconds | None = 120.0
    """The time limit of reward functions, in seconds. For async functions: one limit for all functions of a trajectory and its
    turns together, and one for each call of a group or batch function. For sync functions: one limit for each call, which is
    then interrupted. Null: no limit."""
