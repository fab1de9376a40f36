"""Which turn is to thank: from the rewards of a group to an advantage for each turn.

One rule: accumulate first, centre after. Centring per-turn rewards before they are summed has the wrong sign when the
policy decides when it stops. Trajectories that broke are in no statistics and get no advantage.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from turnwise.types import Group

__all__ = ["Credit", "grpo"]

Credit = Callable[[Group], None]
"""Fills `Trajectory.advantages`, one number for each turn, of the trajectories of a group."""

_EPSILON = 1e-6


def grpo(group: Group, *, scale: Literal["std", "none"] = "std") -> None:
    """Group-relative outcome advantage: `(R - mean) / (std + 1e-6)`, the same for all turns of a trajectory.

    R is the whole reward of a trajectory, turns summed up. `std` is that of the sample (n - 1), as in most implementations;
    `scale="none"` leaves it out (Dr. GRPO). A group whose rewards are all equal, or with fewer than two whole trajectories,
    teaches nothing and gets zeros.

    Papers: DeepSeekMath, arXiv 2402.03300 (GRPO); Understanding R1-Zero-like training, arXiv 2503.20783 (Dr. GRPO).

    Example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.577, so the advantages are 0.866, -0.866, -0.866, 0.866.
    """
    whole = [one for one in group.trajectories if one.reward is not None and not one.failed]
    for one, advantage in zip(whole, _centred([one.reward or 0.0 for one in whole], scale), strict=True):
        one.advantages = [advantage] * len(one.turns)


def _centred(rewards: Sequence[float], scale: Literal["std", "none"]) -> list[float]:
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    width = statistics.stdev(rewards, mean) + _EPSILON if scale == "std" else 1.0
    return [(reward - mean) / width for reward in rewards]
