"""Which conversations of a training step are recorded.

The choice depends on the step and on the rewards only, so a resumed run records what a run without interruption records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from turnwise.types import Trajectory

__all__ = ["Retention"]


@dataclass(frozen=True, slots=True)
class Retention:
    """The options `record.every` and `record.best_and_worst`."""

    every: int = 1
    """Each so many steps is recorded, and the first step and the last step."""
    best_and_worst: int | None = None
    """How many conversations with the highest rewards, with the lowest rewards and with an error are kept of each group."""

    @property
    def drops(self) -> bool:
        """Whether a conversation may be dropped."""
        return self.every > 1 or self.best_and_worst is not None

    def kept(self, trajectories: Sequence[Trajectory], *, step: int, steps: int) -> list[Trajectory]:
        """The conversations of step `step` of `steps` that are recorded, in their order."""
        if step % self.every and step not in (1, steps):
            return []
        if (count := self.best_and_worst) is None:
            return list(trajectories)
        groups: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            groups.setdefault(trajectory.group, []).append(trajectory)
        kept = {id(trajectory) for group in groups.values() for trajectory in _best_and_worst(group, count)}
        return [trajectory for trajectory in trajectories if id(trajectory) in kept]


def _best_and_worst(group: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """Of equal rewards, the first conversations count as the best, and the last as the worst."""
    scored = [trajectory for trajectory in group if trajectory.reward is not None]
    scored.sort(key=lambda trajectory: -(trajectory.reward or 0.0))  # stable
    unscored = [trajectory for trajectory in group if trajectory.reward is None and not trajectory.failed]
    failed = [trajectory for trajectory in group if trajectory.failed]
    return [*scored[:count], *scored[-count:], *unscored[:count], *failed[:count]]
