"""Warns, once for each problem, that a run cannot learn, with the likely cause and the fix.

`config` refuses recipes that cannot learn. This module finds problems that only appear during the run, from the metrics and the
trajectories of each step, and hands on the warnings of the monitors (`health`). It does not change the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from turnwise.config.schema import Config
from turnwise.record.metrics import cut_answers
from turnwise.rewards.differences import has_reward_differences
from turnwise.rewards.turn_weights import was_cut
from turnwise.runs.health import HealthMonitors, RunProblem
from turnwise.types import Group, Trajectory
from turnwise.user_code.reward_number import equal_rewards

__all__ = ["LearningWatch"]


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
        noisy = self._noisy_rewards(groups)
        findings = {
            "cut": cut_answers(finished, self.config.limits, least=1.0),
            "constant_reward": self._without_difference(metrics, groups, finished),
            "noisy_reward": noisy,
            "gradient": None if noisy else self._without_gradient(metrics, finished),
        }
        return [RunProblem(name, text) for name, text in findings.items() if text is not None]

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

    def _cause(self, groups: Sequence[Group], finished: Sequence[Trajectory]) -> str:
        """Why the rewards of each row were equal in the last step."""
        sampling, environment = self.config.sampling, self.config.environment.use
        rewards = [trajectory.reward for trajectory in finished if trajectory.reward is not None]
        names = self._reward_functions()
        compared = [group for group in map(_finished, groups) if len(group.trajectories) > 1]
        failed = sum(trajectory.failed for group in groups for trajectory in group.trajectories)
        if failed and not compared:
            return (
                f"{failed} of {failed + len(finished)} conversations of the last step failed, so no row had two rewards to "
                f"compare: `turnwise show {self.config.output} --failed` prints their errors"
            )
        if finished and not rewards:
            return (
                f"None of the {len(finished)} conversations of the last step has a reward: the reward functions "
                f"({', '.join(names)}) returned None for all of them, which means that they do not apply. Return a number"
            )
        if compared and all(_answers(group) == 1 for group in compared):
            return (
                f"All answers to a row are identical: raise sampling.temperature ({sampling.temperature:g}), or "
                f"loosen top_k, top_p and min_p"
            )
        if rewards and equal_rewards([*rewards, 0.0]) and not names:
            return (
                f"All rewards are 0: the recipe has no reward function, and environment={environment} gave 0 or nothing to "
                f"all {len(finished)} conversations of the last step. If it gives a reward for right answers, all answers were "
                f"wrong: look at them (`turnwise show {self.config.output} --worst 3`), and choose easier rows or another "
                f"model. If it gives none, return one (Reply.reward), or add a reward function (reward.trajectory)"
            )
        if rewards and equal_rewards(rewards):
            source = f"the reward functions ({', '.join(names)})" if names else environment
            return (
                f"Every reward of the last step was {rewards[0]:g}. Either the task is too hard or too easy for this model, "
                f"or the rewards are wrong: call {source} on an answer from trajectories.jsonl that should get another reward"
            )
        return (
            "The rewards differ between rows but not within a row: the rows are too easy or too hard for this model. Choose "
            "other rows, or raise train.group_size"
        )

    def _noisy_rewards(self, groups: Sequence[Group]) -> str | None:
        """All answers to a row are identical, and their rewards differ: the gradients of a group cancel."""
        compared = [group for group in map(_finished, groups) if len(group.trajectories) > 1]
        noisy = [group for group in compared if has_reward_differences(group)]
        if not noisy or any(_answers(group) > 1 for group in noisy):
            return None
        names = self._reward_functions()
        source = f"the reward functions ({', '.join(names)})" if names else self.config.environment.use
        first = noisy[0]
        rewards = ", ".join(f"{t.reward:g}" for t in first.trajectories[:4] if t.reward is not None)
        return (
            f"in all {len(noisy)} groups with reward differences, the answers are identical and only their rewards differ (row "
            f"{first.row.id}: {rewards}), so the gradients of a group cancel and nothing is learnt. {source} must give identical "
            f"conversations the same reward (a judge: temperature 0), and the model must give different answers: raise "
            f"sampling.temperature ({self.config.sampling.temperature:g})"
        )

    def _reward_functions(self) -> list[str]:
        reward = self.config.reward
        return [use.use for use in (*reward.trajectory, *reward.turns, *reward.group, *reward.batch)]

    def _without_gradient(self, metrics: Mapping[str, Any], trajectories: Sequence[Trajectory]) -> str | None:
        """The gradient is 0 although there are advantages."""
        trained = [trajectory for trajectory in trajectories if trajectory.advantages]
        turns = [(turn, trajectory.has_advantage(turn.index)) for trajectory in trained for turn in trajectory.turns]
        mask = f"loss_mask={self.config.loss_mask.use}"
        if turns and not any(turn.weight for turn, _ in turns):
            excluded = self._excluded(trained, f"{mask} gives all turns the weight 0")
            return f"{excluded}, so no turn is trained on: {self._include()}"
        if metrics["grad_norm"] != 0.0 or not any(gain for _, gain in turns):
            return None
        if metrics.get("correction/rejected") == 1.0:
            return (
                "the gradient is 0: correction.rejection removed all tokens from the loss, because trainer and engine differ "
                "more than it allows. Look at correction/k3 and ratio/max_deviation; lower train.max_staleness, compare the "
                "dtypes, or widen the bounds"
            )
        if not any(turn.weight and gain for turn, gain in turns):
            gained = [one for one in trained if any(one.has_advantage(turn.index) for turn in one.turns)]
            excluded = self._excluded(gained, f"{mask} gives the weight 0 to all turns with an advantage")
            return f"the gradient is 0: {excluded}. {self._include().capitalize()}"
        return (
            "the gradient is 0 although advantages are not: the probabilities of the sampled tokens do not depend on the "
            "weights. This happens if sampling allows one token only (top_k=1, a narrow top_p or min_p): loosen sampling"
        )

    def _excluded(self, trajectories: Sequence[Trajectory], by_mask: str) -> str:
        """What excludes these conversations from the loss; `by_mask` says what the loss mask does."""
        cut = sum(was_cut(trajectory) for trajectory in trajectories) if self.config.train.overlong_filter else 0
        others = "" if cut == len(trajectories) else f", and of the others {by_mask}"
        filtered = (
            f"train.overlong_filter excludes the {cut} conversations whose last answer was cut by a limit{others}"
        )
        return filtered if cut else by_mask

    def _include(self) -> str:
        """How turns are trained on again."""
        if self.config.train.overlong_filter:
            return (
                f"raise the limit that cuts (limits.tokens_per_turn={self.config.limits.tokens_per_turn}), set "
                f"train.overlong_filter=false, or use another loss mask (docs/loss_masks.md)"
            )
        return "use another loss mask (docs/loss_masks.md)"


def _finished(group: Group) -> Group:
    """The group without conversations that failed or have no reward."""
    compared = [one for one in group.trajectories if not one.failed and one.reward is not None]
    return replace(group, trajectories=compared)


def _answers(group: Group) -> int:
    """How many different sequences of answers the conversations of a group have."""
    return len({tuple(trajectory.assistant_texts) for trajectory in group.trajectories})
