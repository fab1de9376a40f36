"""Whether the rewards of a group differ: without differences, most estimators give advantages of 0."""

from __future__ import annotations

from turnwise.types import Group
from turnwise.user_code.reward_number import equal_rewards

__all__ = ["has_reward_differences"]


def has_reward_differences(group: Group) -> bool:
    """Whether the trajectories of a group that have a reward differ in it, or in the rewards of their turns, by more than
    rounding. A trajectory without a reward is not compared: it gets no advantage."""
    scored = [
        trajectory for trajectory in group.trajectories if not trajectory.failed and trajectory.reward is not None
    ]
    totals = [trajectory.reward for trajectory in scored if trajectory.reward is not None]
    by_turn = [{turn.index: turn.reward for turn in trajectory.turns} for trajectory in scored]
    turns = {index for rewards in by_turn for index in rewards}
    return not equal_rewards(totals) or any(
        not equal_rewards(rewards.get(index, 0.0) for rewards in by_turn) for index in turns
    )
