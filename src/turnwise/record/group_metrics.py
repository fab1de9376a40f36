"""Metrics that compare conversations with each other: equal answers in a group, and parts of the reward that disagree."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence

from turnwise.types import Group, Trajectory
from turnwise.user_code.reward_number import equal_rewards

__all__ = ["duplicate_share", "lowest_correlation"]


def duplicate_share(groups: Sequence[Group]) -> float | None:
    """The share of conversations whose answers equal those of another conversation of the group.

    Conversations that failed are left out, and groups with one conversation. None if there are no others.
    """
    counts = [
        Counter(tuple(trajectory.assistant_texts) for trajectory in group.trajectories if not trajectory.failed)
        for group in groups
    ]
    counts = [count for count in counts if count.total() > 1]
    total = sum(count.total() for count in counts)
    return sum(number for count in counts for number in count.values() if number > 1) / total if total else None


def lowest_correlation(trajectories: Sequence[Trajectory]) -> tuple[float, str, str] | None:
    """The lowest Pearson correlation of two parts of the reward, over the conversations that have both, with their names.

    `turns` is the part that the environment gave to turns. A part that is the same for all conversations has no correlation.
    None if no two parts have one. A correlation needs three conversations: of two, it is always 1 or -1.
    """
    names = sorted({name for trajectory in trajectories for name in trajectory.rewards})
    found = [
        (value, first, second)
        for first, second in itertools.combinations(names, 2)
        if (value := _correlation([t.rewards for t in trajectories], first, second)) is not None
    ]
    return min(found, default=None)


def _correlation(rewards: Sequence[dict[str, float]], first: str, second: str) -> float | None:
    pairs = [(parts[first], parts[second]) for parts in rewards if first in parts and second in parts]
    columns = list(zip(*pairs, strict=True))
    if len(pairs) < 3 or any(map(equal_rewards, columns)):
        return None
    return statistics.correlation(*columns)
