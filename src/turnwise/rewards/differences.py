"""Whether the rewards of a group differ: without differences, most estimators give advantages of 0."""

from __future__ import annotations

from turnwise.types import Group

__all__ = ["has_reward_differences"]


def has_reward_differences(group: Group) -> bool:
    """Whether the trajectories of a group that did not fail differ in their rewards, or in the rewards of their turns."""
    rewards = {
        (trajectory.reward, *((turn.index, turn.reward) for turn in trajectory.turns if turn.reward))
        for trajectory in group.trajectories
        if not trajectory.failed
    }
    return len(rewards) > 1
