"""`Credit`: applies an estimator to the trajectories of a training step.

Failed trajectories, and trajectories without a reward, are taken out before the estimator is called. They are part of no
statistics and get no advantage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from turnwise.errors import Failed
from turnwise.rewards.credit.episode import Advantages, Batch, Episode, ValueEstimates, episode_of
from turnwise.types import Group, Trajectory

__all__ = ["Credit"]


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit assignment: computes the advantages of all trajectories of a training step from their rewards.

    A call sets `Trajectory.advantages` of all groups of a step, and `Trajectory.returns` if the estimator has a critic. It is
    called once per step, after rewards, turn weights and values are set.

    `advantages` has one entry per turn. An entry is either a number, which holds for all tokens of the turn, or a sequence with
    one number per token that the turn sampled, in their order: `[0.5, [0.1, -0.2, 0.3]]` is one advantage for the first turn
    and one for each of the three tokens of the second turn. A trajectory that is not trained on keeps an empty list: a failed
    trajectory, or one without a reward.
    """

    name: str
    """The name of the estimator in a recipe: `credit.name`."""
    estimate: Callable[[Batch], Advantages | ValueEstimates]
    """The estimator, with its options bound."""
    needs_values: Literal["turn", "token"] | None = None
    """What `Trajectory.values` must hold before the call: the value of the state before each turn, the value before each sampled
    token, or nothing. An estimator of turns also accepts values of tokens, and reads the first of each turn."""
    needs_baseline: bool = False
    """Whether each group must have a greedy conversation (`Group.baseline`). A group whose greedy conversation failed is not
    trained on."""
    read: Callable[[Trajectory], Episode] = episode_of
    """Reads the numbers that the estimator needs from a trajectory."""

    def __call__(self, groups: Sequence[Group]) -> None:
        read = [self._read(group) for group in groups]
        scored = [[trajectory for trajectory, _ in pairs] for pairs in read]
        estimates = self.estimate([[episode for _, episode in pairs] for pairs in read])
        returns = estimates.returns if isinstance(estimates, ValueEstimates) else None
        advantages = estimates.advantages if isinstance(estimates, ValueEstimates) else estimates
        for place, trajectories in enumerate(scored):
            for number, trajectory in enumerate(trajectories):
                trajectory.advantages = advantages[place][number]
                trajectory.returns = [] if returns is None else returns[place][number]

    def _read(self, group: Group) -> list[tuple[Trajectory, Episode]]:
        """The trajectories of a group that have a reward and did not fail. If its numbers cannot be read, it fails."""
        baseline = _baseline(group)
        if self.needs_baseline and baseline is None:
            return []
        read: list[tuple[Trajectory, Episode]] = []
        for trajectory in group.trajectories:
            if trajectory.failed or trajectory.reward is None:
                continue
            try:
                read.append((trajectory, replace(self.read(trajectory), baseline=baseline)))
            except Failed as failed:
                trajectory.fail(failed.failure)
        return read


def _baseline(group: Group) -> float | None:
    """The reward of the greedy conversation of a group; None if it has none, or if the conversation failed."""
    greedy = group.baseline
    return None if greedy is None or greedy.failed else greedy.reward
