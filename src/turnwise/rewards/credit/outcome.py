"""Estimators with one advantage for the whole conversation: all its turns have the same advantage."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise.rewards.credit.episode import Advantages, Batch
from turnwise.rewards.credit.statistics import Scale, centred, width

__all__ = ["grpo"]


def grpo(batch: Batch, *, scale: Scale = "std") -> Advantages:
    """Group-relative outcome advantage: `(R - mean) / (std + 1e-6)`, the same number for all turns of a conversation.

    R is the total reward of a conversation: the rewards of its turns and its own. The mean is that of its group. `scale="std"`
    divides by the standard deviation of the group's rewards, `scale="batch"` by that of all rewards of the batch;
    `scale="none"` does not divide (Dr. GRPO). Standard deviations are those of the sample (divisor n - 1), as in most
    implementations. All advantages of a group are 0 if its rewards are equal, or if it has fewer than two conversations.

    Papers: DeepSeekMath, arXiv 2402.03300 (GRPO); Understanding R1-Zero-like training, arXiv 2503.20783 (Dr. GRPO).

    Example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.577, so the advantages are 0.866, -0.866, -0.866, 0.866.

    >>> group = [Episode([0.0], outcome=reward) for reward in (1.0, 0.0, 0.0, 1.0)]
    >>> rounded(grpo([group]))
    [[[0.866], [-0.866], [-0.866], [0.866]]]
    """
    rewards = [[episode.reward for episode in group] for group in batch]
    of_batch = width([reward for group in rewards for reward in group])
    divisors = [{"std": width(group), "batch": of_batch, "none": 1.0}[scale] for group in rewards]
    return per_episode(
        batch,
        [[value / divisor for value in centred(group)] for group, divisor in zip(rewards, divisors, strict=True)],
    )


def per_episode(batch: Batch, values: Sequence[Sequence[float]]) -> Advantages:
    """The same advantage for all turns of each conversation."""
    return [
        [[value] * episode.turns for episode, value in zip(group, of_group, strict=True)]
        for group, of_group in zip(batch, values, strict=True)
    ]
