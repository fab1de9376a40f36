"""Signs that a run cannot learn: each is told once, with its likely cause and the fix.

What is certain before the run begins is refused by `config`; what shows only in the conversations is found here, from the
metrics of a step and its conversations. It changes nothing about the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from turnwise.config.schema import Config
from turnwise.types import Group, Stop, Trajectory

__all__ = ["LearningWatch"]

_FIRST_STEPS = 3
"""Steps without a difference in any group before it is told: one may be chance."""

_LIMITS = {
    Stop.LENGTH: "tokens_per_turn",
    Stop.MAX_TOKENS: "tokens",
    Stop.MAX_RESPONSE: "response_tokens",
}
"""Stop reasons that cut an answer, and the limit behind each."""


@dataclass(slots=True)
class LearningWatch:
    """Looks at each finished step of one run."""

    config: Config
    _told: set[str] = field(default_factory=set)
    _equal: int = 0
    """Steps from the first on in which no group had a difference."""

    def problems(self, metrics: Mapping[str, Any], groups: Sequence[Group]) -> list[str]:
        """What keeps the run from learning and was not told before. `metrics` are those of the step."""
        whole = [one for group in groups for one in group.trajectories if not one.failed]
        if not whole:
            return []
        found = {"cut": self._cut(whole), "equal": self._without_difference(metrics, groups, whole)}
        found["gradient"] = self._without_gradient(metrics, whole)
        new = {name: text for name, text in found.items() if text is not None and name not in self._told}
        self._told |= new.keys()
        return list(new.values())

    def _cut(self, whole: Sequence[Trajectory]) -> str | None:
        """All answers were cut."""
        stops = [one.stop for one in whole if one.stop in _LIMITS]
        if len(stops) < len(whole):
            return None
        stop = max(_LIMITS, key=stops.count)
        name = _LIMITS[stop]
        return (
            f"all {len(whole)} conversations ended in the middle of an answer (stop/{stop} "
            f"{stops.count(stop) / len(whole):.2g}), cut by limits.{name}={getattr(self.config.limits, name)}: rewards see half "
            f"an answer. Either the limit is too low for this model (raise limits.{name}), or the model never says the token "
            f"that ends a turn (a base model, another chat template: `turnwise doctor` shows the stop tokens)"
        )

    def _without_difference(
        self, metrics: Mapping[str, Any], groups: Sequence[Group], whole: Sequence[Trajectory]
    ) -> str | None:
        """In the first steps, all conversations of a row earned the same."""
        if metrics["step"] > _FIRST_STEPS:
            return None
        self._equal += metrics["groups/zero_std"] == 1.0
        if self._equal < min(_FIRST_STEPS, self.config.train.steps):
            return None
        return (
            f"in each of the first {self._equal} steps, all conversations of a row earned the same, so all advantages are 0 "
            f"and nothing is learnt from rewards. {self._cause(groups, whole)}"
        )

    def _cause(self, groups: Sequence[Group], whole: Sequence[Trajectory]) -> str:
        sampling, reward = self.config.sampling, self.config.reward
        rewards = {one.reward for one in whole}
        names = [use.use for use in (*reward.trajectory, *reward.turns, *reward.group)]
        if all(
            len({tuple(one.assistant_texts) for one in group.trajectories if not one.failed}) <= 1 for group in groups
        ):
            return (
                f"The answers of a row are the same, word for word: raise sampling.temperature ({sampling.temperature:g}), or "
                f"loosen top_k, top_p and min_p"
            )
        if rewards == {0.0} and not names:
            return (
                f"Nothing was earned: environment={self.config.environment.use} gave no reward, and the recipe names no reward "
                f"function. Add one (reward.trajectory), or have the environment give rewards (Reply.reward)"
            )
        if len(rewards) == 1:
            source = f"the reward functions ({', '.join(names)})" if names else self.config.environment.use
            return (
                f"Every reward of the last step was {rewards.pop():g}: try {source} by hand on an answer from trajectories.jsonl "
                f"that should earn something else; or the task is too hard (or too easy) for this model"
            )
        return (
            "Rows differ and answers to one row do not: the rows are too easy or too hard for this model. Choose others, or "
            "raise train.group_size"
        )

    def _without_gradient(self, metrics: Mapping[str, Any], whole: Sequence[Trajectory]) -> str | None:
        """The gradient is 0 although there is something to learn."""
        turns = [(turn, one.has_advantage(turn.index)) for one in whole if one.advantages for turn in one.turns]
        if turns and not any(turn.weight for turn, _ in turns):
            return (
                f"loss_mask={self.config.loss_mask.use} gives all turns the weight 0, so there is nothing to learn from: use "
                f"another rule (docs/loss_masks.md)"
            )
        if metrics["grad_norm"] != 0.0 or not any(gain for _, gain in turns):
            return None
        if not any(turn.weight and gain for turn, gain in turns):
            return (
                f"the gradient is 0: loss_mask={self.config.loss_mask.use} leaves out all turns that have an advantage. Use "
                f"another rule (docs/loss_masks.md)"
            )
        return (
            "the gradient is 0 although advantages are not: what is learnt from does not depend on the weights. Answers of one "
            "possible token (top_k=1, a narrow top_p or min_p) are so; loosen sampling"
        )
