"""Warns, once for each problem, that a run cannot learn, with the likely cause and the fix.

`config` refuses recipes that cannot learn. This module finds problems that only appear during the run, from the metrics and the
trajectories of each step, and hands on the warnings of the monitors (`health`). It does not change the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config.schema import Config
from turnwise.runs.health import HealthMonitors, RunProblem
from turnwise.types import Group, Stop, Trajectory

__all__ = ["LearningWatch"]

_LIMITS = {
    Stop.LENGTH: "tokens_per_turn",
    Stop.MAX_TOKENS: "tokens",
    Stop.MAX_RESPONSE: "response_tokens",
}
"""Stop reasons that truncate an answer, and the limit behind each."""


@dataclass(slots=True)
class LearningWatch:
    """Checks each finished step of one run."""

    config: Config
    past: Iterable[Mapping[str, Any]] = ()
    """The metrics of the steps before the run was resumed."""
    _monitors: HealthMonitors = field(init=False)
    _reported: set[str] = field(default_factory=set)
    _equal: int = 0
    """Number of steps so far in which the rewards within each group were equal."""

    def __post_init__(self) -> None:
        self._monitors = HealthMonitors(self.config, self.past)

    def problems(self, metrics: Mapping[str, Any], groups: Sequence[Group]) -> list[RunProblem]:
        """Problems of the run after a step that were not reported before. `metrics` are the step's metrics."""
        found = [*self._of_step(metrics, groups), *self._monitors.findings(metrics, groups)]
        new = [finding for finding in found if finding.name not in self._reported]
        self._reported |= {finding.name for finding in new}
        return new

    def _of_step(self, metrics: Mapping[str, Any], groups: Sequence[Group]) -> list[RunProblem]:
        """Problems that keep the run from learning."""
        finished = [trajectory for group in groups for trajectory in group.trajectories if not trajectory.failed]
        if not finished:
            return []
        findings = {
            "cut": self._cut(finished),
            "constant_reward": self._without_difference(metrics, groups, finished),
            "gradient": self._without_gradient(metrics, finished),
        }
        return [RunProblem(name, text) for name, text in findings.items() if text is not None]

    def _cut(self, trajectories: Sequence[Trajectory]) -> str | None:
        """All answers were truncated."""
        stops = [trajectory.stop for trajectory in trajectories if trajectory.stop in _LIMITS]
        if len(stops) < len(trajectories):
            return None
        stop = max(_LIMITS, key=stops.count)
        name = _LIMITS[stop]
        return (
            f"all {len(trajectories)} conversations ended in the middle of an answer (stop/{stop} "
            f"{stops.count(stop) / len(trajectories):.2g}), cut by limits.{name}={getattr(self.config.limits, name)}: the reward "
            f"functions see incomplete answers. Either the limit is too low for this model (raise limits.{name}), or the model "
            f"does not end its turns (a base model, or a wrong chat template: `turnwise doctor` shows the stop tokens)"
        )

    def _without_difference(
        self, metrics: Mapping[str, Any], groups: Sequence[Group], trajectories: Sequence[Trajectory]
    ) -> str | None:
        """In the first steps, all conversations of a row had the same reward."""
        first_steps = self.config.health.constant_reward
        if first_steps is None or metrics["step"] > first_steps:
            return None
        alone = self.config.train.group_size == 1  # a group of one has no differences
        self._equal += metrics["reward/std"] == 0.0 if alone else metrics["groups/zero_std"] == 1.0
        if self._equal < min(first_steps, self.config.train.total_steps):
            return None
        return (
            f"in each of the first {self._equal} steps, all conversations of a row had the same reward, so all advantages "
            f"are 0 and the model does not learn from rewards. {self._cause(groups, trajectories)}"
        )

    def _cause(self, groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> str:
        sampling, reward = self.config.sampling, self.config.reward
        rewards = {trajectory.reward for trajectory in trajectories}
        names = [use.use for use in (*reward.trajectory, *reward.turns, *reward.group, *reward.batch)]
        if all(
            len({tuple(sample.assistant_texts) for sample in group.trajectories if not sample.failed}) <= 1
            for group in groups
        ):
            return (
                f"All answers to a row are identical: raise sampling.temperature ({sampling.temperature:g}), or "
                f"loosen top_k, top_p and min_p"
            )
        if rewards == {0.0} and not names:
            return (
                f"All rewards are 0: environment={self.config.environment.use} gave no reward, and the recipe has no reward "
                f"function. Add one (reward.trajectory), or return rewards from the environment (Reply.reward)"
            )
        if len(rewards) == 1:
            source = f"the reward functions ({', '.join(names)})" if names else self.config.environment.use
            return (
                f"Every reward of the last step was {rewards.pop():g}. Either the task is too hard or too easy for this model, "
                f"or the rewards are wrong: call {source} on an answer from trajectories.jsonl that should get another reward"
            )
        return (
            "The rewards differ between rows but not within a row: the rows are too easy or too hard for this model. Choose "
            "other rows, or raise train.group_size"
        )

    def _without_gradient(self, metrics: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> str | None:
        """The gradient is 0 although there are advantages."""
        turns = [
            (turn, trajectory.has_advantage(turn.index))
            for trajectory in trajectories
            if trajectory.advantages
            for turn in trajectory.turns
        ]
        if turns and not any(turn.weight for turn, _ in turns):
            return (
                f"loss_mask={self.config.loss_mask.use} gives all turns the weight 0, so no turn is trained on: use "
                f"another loss mask (docs/loss_masks.md)"
            )
        if metrics["grad_norm"] != 0.0 or not any(gain for _, gain in turns):
            return None
        if not any(turn.weight and gain for turn, gain in turns):
            return (
                f"the gradient is 0: loss_mask={self.config.loss_mask.use} gives the weight 0 to all turns with an advantage. "
                f"Use another loss mask (docs/loss_masks.md)"
            )
        return (
            "the gradient is 0 although advantages are not: the probabilities of the sampled tokens do not depend on the "
            "weights. This happens if sampling allows one token only (top_k=1, a narrow top_p or min_p): loosen sampling"
        )
