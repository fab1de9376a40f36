"""Turn-level estimators as their papers define them. They are biased; each docstring says how.

r_t is the reward of turn t, with the reward of the conversation added to the last turn. Turns that are not trained on (weight 0)
are in no statistics, and their advantage is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from turnwise.rewards.credit.episode import Advantages, Batch, Episode
from turnwise.rewards.credit.outcome import grpo
from turnwise.rewards.credit.statistics import Scale, centred, divisors, return_to_go

__all__ = ["igpo", "mt_grpo", "turn_potential"]

Normalised = dict[tuple[int, int], float]
"""Normalised rewards by conversation and turn."""


def mt_grpo(batch: Batch, *, outcome_weight: float = 1.0, scale: Literal["std", "none"] = "std") -> Advantages:
    """The normalised reward of the turn, plus the normalised outcome; for the last turn only the outcome.

    The reward of turn t is normalised over the conversations of the group that have turn t; the outcome (the reward of the last
    turn) over all conversations of the group. `scale="none"` only subtracts the means. A turn that only one conversation has is
    normalised to 0; a group of one has advantages of 0.

    Bias: rewards are centred before they are accumulated. A turn has no credit for rewards between the next turn and the
    outcome. If the model decides when to stop, the gradient can have the wrong sign (docs/credit.md).

    Paper: Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design, arXiv 2505.11821.

    Example: the first turns have the rewards 1 and 0 (mean 0.5), the outcomes are 2 and 0 (mean 1).

    >>> rounded(mt_grpo([[Episode([1.0, 0.0], outcome=2.0), Episode([0.0, 0.0])]], scale="none"))
    [[[1.5, 1.0], [-1.5, -1.0]]]
    """

    def of_group(group: Sequence[Episode]) -> list[list[float | Sequence[float]]]:
        outcome = _normalised(group, [(n, one.turns - 1) for n, one in enumerate(group) if one.turns], scale)
        rewards: Normalised = {}
        for turn in range(max((episode.turns for episode in group), default=0)):
            rewards |= _normalised(group, _trained_turns(group, turn), scale)
        return [
            [
                (outcome_weight if turn < episode.turns - 1 else 1.0) * outcome[number, episode.turns - 1]
                + (rewards[number, turn] if turn < episode.turns - 1 else 0.0)
                if episode.trained_T[turn]
                else 0.0
                for turn in range(episode.turns)
            ]
            for number, episode in enumerate(group)
        ]

    return [of_group(group) for group in batch]


def igpo(
    batch: Batch,
    *,
    gamma: float = 1.0,
    normalise: Literal["separate", "joint"] = "separate",
    scale: Literal["std", "none"] = "std",
) -> Advantages:
    """Normalised rewards, accumulated afterwards: `A_t = z_t + gamma * z_(t+1) + ...`.

    z is the reward of a turn, normalised over all turns of the group. `separate`: the rewards of the last turns (the outcome) are
    normalised among themselves, and the rewards of all other turns (the information gain, which a turn reward function gives)
    among themselves. `joint`: all together. A group of one has 0 for the outcome.

    Bias: rewards are centred before they are accumulated. The number of means that are subtracted then depends on the number of
    turns, which the model decides; the gradient can have the wrong sign (docs/credit.md).

    Paper: Information Gain-based Policy Optimization, arXiv 2510.14967.

    Example: the outcomes 1 and 0 have mean 0.5, the turn rewards 0.4 and 0 have mean 0.2.

    >>> rounded(igpo([[Episode([0.4, 1.0]), Episode([0.0, 0.0])]], scale="none"))
    [[[0.7, 0.5], [-0.7, -0.5]]]
    """

    def of_group(group: Sequence[Episode]) -> list[list[float | Sequence[float]]]:
        turns = [
            place
            for turn in range(max((one.turns for one in group), default=0))
            for place in _trained_turns(group, turn)
        ]
        last = [(number, turn) for number, turn in turns if turn == group[number].turns - 1]
        earlier = [(number, turn) for number, turn in turns if turn < group[number].turns - 1]
        sets = [turns] if normalise == "joint" else [last, earlier]
        z: Normalised = {}
        for places in sets:
            z |= _normalised(group, places, scale)
        returns = [
            return_to_go([z.get((number, turn), 0.0) for turn in range(episode.turns)], gamma)
            for number, episode in enumerate(group)
        ]
        return [
            [value if trained else 0.0 for value, trained in zip(values, episode.trained_T, strict=True)]
            for values, episode in zip(returns, group, strict=True)
        ]

    return [of_group(group) for group in batch]


def turn_potential(
    batch: Batch, *, decay: float = 0.5, weight: float = 1.0, initial: float = 0.0, scale: Scale = "std"
) -> Advantages:
    """The advantage of `grpo`, plus the changes of a score of the state.

    The environment or a turn reward function scores the state after a turn (`Episode.potentials_T`). The change
    `d_t = score_t - previous score` (`initial` before the first turn) is divided among turn t and the turns before it, with the
    weights 1, decay, decay^2, ..., whose sum is made 1. It is multiplied by `weight` and added. Turns without a score have no
    change; the next score is compared with the last one before. All changes of a conversation add up to its last score minus
    `initial`, so visiting states again gains nothing.

    Bias: the gradient is that of `grpo` plus a term that prefers turns that raise the score. This term points in the direction of
    the true gradient as far as the score predicts the final reward. A group of one, and equal rewards, have only the changes.

    Reference: turn credit of prime-rl, pull request 3282; potentials: Ng, Harada and Russell, 1999.

    Example, decay 0.5: the second change, 0.6, is divided into 0.4 for the second turn and 0.2 for the first.

    >>> first = Episode([0.0, 0.0], potentials_T=[0.3, 0.9])
    >>> rounded(turn_potential([[first, Episode([0.0])]]))
    [[[0.5, 0.4], [0.0]]]
    """
    advantages = grpo(batch, scale=scale)
    for group, of_group in zip(batch, advantages, strict=True):
        for episode, values in zip(group, of_group, strict=True):
            shares = _shares(episode, decay, initial)
            values[:] = [
                float(value) + weight * share if isinstance(value, float | int) else value
                for value, share in zip(values, shares, strict=True)
            ]
    return advantages


def _shares(episode: Episode, decay: float, initial: float) -> list[float]:
    """The share of each turn in the changes of the score."""
    shares, previous = [0.0] * episode.turns, initial
    for turn, score in enumerate(episode.potentials_T):
        if score is None:
            continue
        weights = [decay**distance for distance in range(turn + 1)]
        for distance, part in enumerate(weights):
            shares[turn - distance] += (score - previous) * part / sum(weights)
        previous = score
    return shares


def _trained_turns(group: Sequence[Episode], turn: int) -> list[tuple[int, int]]:
    """The conversations, with the turn, that have this turn and train on it."""
    return [(n, turn) for n, episode in enumerate(group) if turn < episode.turns and episode.trained_T[turn]]


def _normalised(
    group: Sequence[Episode], places: Sequence[tuple[int, int]], scale: Literal["std", "none"]
) -> Normalised:
    """The rewards at these turns, centred and divided by their standard deviation."""
    rewards = [group[number].received[turn] for number, turn in places]
    (divisor,) = divisors([rewards], scale)
    return {place: value / divisor for place, value in zip(places, centred(rewards), strict=True)}
