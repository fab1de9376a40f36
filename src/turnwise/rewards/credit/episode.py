"""The numbers that an estimator receives of a conversation: rewards and token counts, no texts and no tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from turnwise.types import Trajectory
from turnwise.user_code.reward_number import is_rounding

__all__ = ["Advantages", "Batch", "Episode", "ValueEstimates", "episode_of"]


@dataclass(frozen=True, slots=True)
class Episode:
    """A conversation as an estimator sees it. `_T` are lists with one entry for each turn of the model.

    Example: two turns with the rewards 0.2 and 0, and a reward of 1 for the conversation: `Episode([0.2, 0.0], outcome=1.0)`.
    """

    rewards_T: Sequence[float]
    """The reward of each turn, minus its penalties."""
    outcome: float = 0.0
    """The reward of the conversation that belongs to no turn. It is received after the last turn."""
    tokens_T: Sequence[int] = ()
    """The number of sampled tokens of each turn in the segments. Empty: one token for each turn."""
    trained_T: Sequence[bool] = ()
    """Whether a turn is trained on: its weight is above 0, and it has sampled tokens. Empty: all turns are."""
    states_T: Sequence[str | None] = ()
    """A name of the state before each turn; equal names are equal states. None: the state is equal to no other."""
    potentials_T: Sequence[float | None] = ()
    """A score of the state after each turn; None where there is none."""
    values_T: Sequence[float | Sequence[float]] = ()
    """`Trajectory.values`."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the reward by reward function, as in `Trajectory.rewards`."""
    penalties_T: Sequence[Sequence[float]] = ()
    """What is subtracted from the reward for each sampled token of each turn. `rewards_T` and `total` are without it already.
    Empty, or an empty list for a turn: nothing."""
    baseline: float | None = None
    """The reward of the greedy conversation of the same row, where there is one."""
    total: float | None = None
    """The reward of the conversation, if it is known more exactly than as the sum of the other fields."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens_T", self.tokens_T or [1] * self.turns)
        object.__setattr__(self, "trained_T", self.trained_T or [True] * self.turns)
        object.__setattr__(self, "penalties_T", self.penalties_T or [()] * self.turns)

    @property
    def turns(self) -> int:
        """The number of turns."""
        return len(self.rewards_T)

    @property
    def reward(self) -> float:
        """The reward of the conversation: of its turns and its own."""
        return sum(self.rewards_T) + self.outcome if self.total is None else self.total

    @property
    def received(self) -> list[float]:
        """The reward of each turn, with the reward of the conversation added to the last turn."""
        rewards = list(self.rewards_T)
        if rewards:
            rewards[-1] += self.outcome
        return rewards

    @property
    def token_rewards(self) -> list[list[float]]:
        """The reward at each sampled token, by turn: that of the turn at its last token, and minus its penalty at each token.

        The reward of a turn without sampled tokens is received at the last token before it.
        """
        rewards: list[list[float]] = []
        last: list[float] | None = None
        for received, penalties, count in zip(self.received, self.penalties_T, self.tokens_T, strict=True):
            tokens = [-penalty for penalty in penalties] or [0.0] * count
            rewards.append(tokens)
            last = tokens or last
            if last is not None:
                last[-1] += received + sum(penalties)
        return rewards

    @property
    def has_penalties(self) -> bool:
        """Whether tokens of a turn have different rewards."""
        return any(any(penalties) for penalties in self.penalties_T)

    @property
    def trained_tokens(self) -> int:
        """The number of tokens that are trained on."""
        return sum(count for count, trained in zip(self.tokens_T, self.trained_T, strict=True) if trained)


Batch = Sequence[Sequence[Episode]]
"""The conversations of a training step that have a reward and did not fail, by group."""

Advantages = list[list[list[float | Sequence[float]]]]
"""For each group, conversation and turn: a number, or a number for each sampled token of the turn."""


@dataclass(frozen=True, slots=True)
class ValueEstimates:
    """The result of an estimator with a critic."""

    advantages: Advantages
    returns: Advantages
    """The critic's targets, in the shape of `Episode.values_T`."""


def episode_of(trajectory: Trajectory) -> Episode:
    """The numbers of a scored trajectory, without states, potentials and a baseline."""
    counts = Counter[int]()
    for segment in trajectory.segments:
        counts.update(segment.turn)
    tokens_T = [counts[turn.index] for turn in trajectory.turns]
    rewards_T = [turn.reward for turn in trajectory.turns]
    total = trajectory.reward or 0.0
    outcome = total - math.fsum(rewards_T)
    largest = max(abs(total), *(abs(reward) for reward in rewards_T), 0.0)
    if trajectory.penalties:
        penalties = [math.fsum(of_turn) for of_turn in trajectory.penalties]
        rewards_T = [reward - penalty for reward, penalty in zip(rewards_T, penalties, strict=True)]
        total -= math.fsum(penalties)
    return Episode(
        rewards_T,
        outcome=0.0 if is_rounding(outcome, largest) else outcome,
        tokens_T=tokens_T,
        trained_T=[turn.weight > 0 and count > 0 for turn, count in zip(trajectory.turns, tokens_T, strict=True)],
        values_T=trajectory.values,
        parts=trajectory.rewards,
        penalties_T=trajectory.penalties,
        total=total,
    )
