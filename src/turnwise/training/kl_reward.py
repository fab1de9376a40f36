"""The KL divergence in the reward: what each sampled token costs, because it is more likely than under the reference model.

The penalties are set before credit assignment, which subtracts them from the rewards. Knows trajectories and a learner. Does
not know recipes, or the KL divergence in the loss (`losses.py`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Literal

from turnwise.training.batch import logprob_kind
from turnwise.training.learner import Learner
from turnwise.training.losses import kl_numbers
from turnwise.training.value_batch import StateBatch, ValuePacking, by_turn, pack_states
from turnwise.types import Failure, Group, LogprobKind, Trajectory

_LARGEST_CHANGE = 0.2
"""The largest relative error of the divergence that changes an adaptive coefficient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KlRewardMetrics:
    """The metrics `kl_reward/<field>` of a training step."""

    divergence: float | None
    """Mean over the conversations of the mean estimate of a token, in nats."""
    penalty: float | None
    """What is subtracted from the reward of a conversation, on average."""
    coef: float
    """The coefficient of this step."""

    def named(self) -> dict[str, float | None]:
        """The metrics by their names in metrics.jsonl."""
        return {f"kl_reward/{column.name}": getattr(self, column.name) for column in fields(self)}


@dataclass(slots=True)
class KlReward:
    """Computes the penalties of `reward.kl`, and adapts their coefficient if there is a target.

    With d, the log-probability of a token under the policy that sampled it minus its log-probability under the reference model,
    the penalty of the token is `coef` times the estimate of the KL divergence (`training/losses.py`). Tokens of turns that are
    not trained on have the penalty 0.

    After a step with n conversations, an adaptive coefficient is multiplied by `1 + e * n / horizon`, where e is the relative
    error of the divergence, `divergence / target - 1`, clipped to [-0.2, 0.2]: Ziegler and others, 2019, arXiv 1909.08593.
    """

    learner: Learner
    _: KW_ONLY
    estimator: Literal["k1", "k2", "k3"]
    coef: float
    """The coefficient of the next step."""
    target: float | None
    """The divergence, in nats, that an adaptive coefficient aims at; None: the coefficient stays."""
    horizon: int
    """The number of conversations in which an adaptive coefficient changes by at most a factor of about 1.2."""
    micro_batch_tokens: int | None
    """Tokens of a forward pass; None: the learner's default."""

    async def set_penalties(self, groups: Sequence[Group]) -> KlRewardMetrics:
        """Set `Trajectory.penalties` of all trajectories that have a reward. Before credit, after the weights of turns.

        A trajectory whose penalty is not finite fails.
        """
        trajectories = [
            trajectory
            for group in groups
            for trajectory in group.trajectories
            if trajectory.reward is not None and not trajectory.failed
        ]
        means: list[float] = []
        for trajectory, estimates in zip(trajectories, await self._estimates(trajectories), strict=True):
            flat = [number for of_turn in estimates for number in of_turn]
            if not math.isfinite(sum(flat)):
                trajectory.fail(_not_finite(self.estimator))
                continue
            trained = [
                number
                for turn, of_turn in zip(trajectory.turns, estimates, strict=True)
                if turn.weight > 0
                for number in of_turn
            ]
            trajectory.penalties = [
                [self.coef * number if turn.weight > 0 else 0.0 for number in of_turn]
                for turn, of_turn in zip(trajectory.turns, estimates, strict=True)
            ]
            if trained:
                means.append(statistics.fmean(trained))
        penalties = [math.fsum(map(math.fsum, t.penalties)) for t in trajectories if not t.failed]
        metrics = KlRewardMetrics(
            divergence=statistics.fmean(means) if means else None,
            penalty=statistics.fmean(penalties) if penalties else None,
            coef=self.coef,
        )
        self._adapt(metrics.divergence, len(means))
        return metrics

    def _adapt(self, divergence: float | None, conversations: int) -> None:
        if self.target is None or divergence is None:
            return
        error = divergence / self.target - 1.0
        error = min(max(error, -_LARGEST_CHANGE), _LARGEST_CHANGE)
        self.coef *= 1.0 + error * conversations / self.horizon

    async def _estimates(self, trajectories: Sequence[Trajectory]) -> list[list[list[float]]]:
        """For each trajectory and turn, the estimate of the divergence for each sampled token."""
        batch = token_batch(self.learner, trajectories, self.micro_batch_tokens)
        reference = await self.learner.logprobs(batch, reference=True)
        sampled = await sampled_logprobs(self.learner, trajectories, self.micro_batch_tokens)
        return by_turn(trajectories, kl_numbers(sampled, reference, self.estimator))


def token_batch(learner: Learner, trajectories: Sequence[Trajectory], micro_batch_tokens: int | None) -> StateBatch:
    """A state before each sampled token."""
    required = learner.requirements
    packing = ValuePacking(
        level="token",
        micro_batch_tokens=required.tokens(micro_batch_tokens),
        parallel=1,
        share_prompts=required.share_prompts,
    )
    return pack_states(trajectories, packing, with_routes=True)


async def sampled_logprobs(
    learner: Learner, trajectories: Sequence[Trajectory], micro_batch_tokens: int | None
) -> list[float]:
    """The log-probability of each sampled token under the policy that sampled it, in the order of `by_turn`: the engine's, or the
    learner's own where the engine's is of a kind that cannot be used."""
    kinds = learner.requirements.logprob_kinds
    reported = [number for trajectory in trajectories for number in _reported(trajectory, kinds)]
    if any(math.isnan(number) for number in reported):
        own = await learner.logprobs(token_batch(learner, trajectories, micro_batch_tokens))
        reported = [o if math.isnan(number) else number for number, o in zip(reported, own, strict=True)]
    return reported


def _reported(trajectory: Trajectory, kinds: Collection[LogprobKind]) -> list[float]:
    """The log-probability that the engine reported for each sampled token, by turn; NaN where its kind cannot be used."""
    # in the order of the states (`value_batch`), not of the segments, in which a turn may be divided:
    #     turn   . 0 0 . 1 1    . 0    logprobs   0 -1 -2 0 -3 -4    0 -5    by_turn   [-1 -2 -5] [-3 -4]
    by_turn: list[list[float]] = [[] for _ in trajectory.turns]
    for segment in trajectory.segments:
        for turn, logprob in zip(segment.turn, segment.logprobs, strict=True):
            if turn >= 0:
                by_turn[turn].append(logprob)
    return [
        logprob if logprob_kind(trajectory, turn) in kinds else math.nan
        for turn, logprobs in zip(trajectory.turns, by_turn, strict=True)
        for logprob in logprobs
    ]


def _not_finite(estimator: str) -> Failure:
    return Failure(
        "reward",
        f"the KL divergence from the reference model is not a finite number (reward.kl.estimator={estimator}): the "
        f"reference model gives a token of the conversation almost no probability. Use reward.kl.estimator=k1, or another "
        f"reference model",
    )
