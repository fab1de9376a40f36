"""Credit assignment: computes the advantages of all trajectories of a step from their rewards.

Rule: accumulate rewards first, centre them afterwards. If each turn's reward is centred before the rewards of a
trajectory are summed, the gradient has the wrong sign when the policy controls how many turns it takes. Failed
trajectories are not part of the statistics and get no advantage.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal

from turnwise.types import Group

__all__ = ["Credit", "grpo"]

Credit = Callable[[Sequence[Group]], None]
"""Sets `Trajectory.advantages` of the trajectories of all groups of a training step. Called once per step, after rewards and
turn weights are set.

`advantages` has one entry per turn. An entry is either a number, which holds for all tokens of the turn, or a sequence with
one number per token that the turn sampled, in their order: `[0.5, [0.1, -0.2, 0.3]]` is one advantage for the first turn
and one for each of the three tokens of the second turn. A trajectory that is not trained on keeps an empty list: a failed
trajectory, or one without a reward.
"""

_EPSILON = 1e-6


def grpo(groups: Sequence[Group], *, scale: Literal["std", "none"] = "std") -> None:
    """Group-relative outcome advantage: `(R - mean) / (std + 1e-6)`, the same number for all turns of a trajectory.

    R is the total reward of a trajectory: the rewards of its turns and its own. Mean and standard deviation are those of its
    group. The standard deviation is that of the sample (n - 1), as in most implementations; `scale="none"` does not divide
    by it (Dr. GRPO). All advantages of a group are 0 if all rewards are equal, or if fewer than two trajectories have a reward
    and did not fail.

    Papers: DeepSeekMath, arXiv 2402.03300 (GRPO); Understanding R1-Zero-like training, arXiv 2503.20783 (Dr. GRPO).

    Example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.577, so the advantages are 0.866, -0.866, -0.866, 0.866.
    """
    for group in groups:
        scored = [(t, t.reward) for t in group.trajectories if t.reward is not None and not t.failed]
        advantages = _centred([reward for _, reward in scored], scale)
        for (trajectory, _), advantage in zip(scored, advantages, strict=True):
            trajectory.advantages = [advantage] * len(trajectory.turns)


def _centred(rewards: Sequence[float], scale: Literal["std", "none"]) -> list[float]:
    if len(rewards) < 2 or max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    width = statistics.stdev(rewards, mean) + _EPSILON if scale == "std" else 1.0
    return [(reward - mean) / width for reward in rewards]
