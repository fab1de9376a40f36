"""Estimators with one advantage for the conversation: all its turns have the same advantage.

R is the total reward of a conversation: the rewards of its turns and its own.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from turnwise.options.algorithm import (
    CreditSection,
    Gdpo,
    Gpg,
    Grpo,
    NoCredit,
    Opo,
    ReinforcePpBaseline,
    Remax,
    Rloo,
    Spo,
)
from turnwise.rewards.credit.credit import (
    Advantages,
    Episode,
    EpisodeGroups,
    Estimator,
    centred,
    divisors,
    leave_one_out,
    whitening,
)
from turnwise.user_code.reward_number import equal_rewards, is_rounding

__all__ = ["gdpo", "gpg", "grpo", "none", "opo", "reinforce_pp_baseline", "remax", "rloo", "spo"]


def grpo(batch: EpisodeGroups, options: Grpo = Grpo()) -> Advantages:
    """Group-relative outcome advantage: `(R - mean) / (std + 1e-6)`, the same number for all turns of a conversation.

    The mean is that of the group. `scale="std"` divides by the standard deviation of the group's rewards, `scale="batch"` by
    that of all rewards of the batch; `scale="none"` does not divide (Dr. GRPO). Standard deviations are those of the sample
    (divisor n - 1), as in most implementations. All advantages of a group are 0 if its rewards are equal, or if it has fewer
    than two conversations.

    Papers: DeepSeekMath, arXiv 2402.03300 (GRPO); Understanding R1-Zero-like training, arXiv 2503.20783 (Dr. GRPO).

    Example: rewards 1, 0, 0, 1 have mean 0.5 and std 0.577, so the advantages are 0.866, -0.866, -0.866, 0.866.

    >>> group = [Episode([0.0], outcome=reward) for reward in (1.0, 0.0, 0.0, 1.0)]
    >>> rounded(grpo([group]))
    [[[0.866], [-0.866], [-0.866], [0.866]]]
    """
    rewards = _rewards(batch)
    return _for_all_turns(
        batch,
        [
            [value / divisor for value in centred(group)]
            for group, divisor in zip(rewards, divisors(rewards, options.scale), strict=True)
        ],
    )


def rloo(batch: EpisodeGroups, options: Rloo = Rloo()) -> Advantages:
    """REINFORCE leave-one-out: R minus the mean reward of the other conversations of the group.

    This is `n / (n - 1)` times `grpo` with `scale="none"`. A group of one has nothing to compare with: its advantage is 0.

    Paper: Back to Basics, arXiv 2402.14740.

    Example: rewards 1, 0, 0.5. The first is compared with the mean of 0 and 0.5.

    >>> rounded(rloo([[Episode([1.0]), Episode([0.0]), Episode([0.5])]]))
    [[[0.75], [-0.75], [0.0]]]
    """
    return _for_all_turns(batch, [leave_one_out(group) for group in _rewards(batch)])


def opo(batch: EpisodeGroups, options: Opo = Opo()) -> Advantages:
    """R minus a mean in which each conversation of the group counts by its number of trained tokens.

    The weights approximate the baseline with the smallest variance of the gradient. A group of one has advantage 0, and so has
    a group without trained tokens.

    Paper: On-Policy RL with Optimal Reward Baseline, arXiv 2505.23585.

    Example: rewards 1 (30 tokens) and 0 (10 tokens) have the baseline 0.75.

    >>> rounded(opo([[Episode([1.0], tokens_T=[30]), Episode([0.0], tokens_T=[10])]]))
    [[[0.25], [-0.75]]]
    """

    def of_group(group: Sequence[Episode]) -> list[float]:
        rewards, lengths = [episode.reward for episode in group], [episode.trained_tokens for episode in group]
        if equal_rewards(rewards) or not any(lengths):
            return [0.0] * len(group)
        baseline = sum(reward * length for reward, length in zip(rewards, lengths, strict=True)) / sum(lengths)
        return [reward - baseline for reward in rewards]

    return _for_all_turns(batch, [of_group(group) for group in batch])


def gpg(batch: EpisodeGroups, options: Gpg = Gpg()) -> Advantages:
    """`alpha * (R - mean)`, where alpha makes up for groups without a gradient.

    alpha is the number of conversations of the batch, divided by the number of those whose group has unequal rewards. (verl
    counts rewards other than 0 instead.) A group of one has advantage 0.

    Paper: GPG, arXiv 2504.02546.

    Example: one group of two has unequal rewards and the other has not, so alpha is 2.

    >>> rounded(gpg([[Episode([1.0]), Episode([0.0])], [Episode([1.0]), Episode([1.0])]]))
    [[[1.0], [-1.0]], [[0.0], [0.0]]]
    """
    rewards = _rewards(batch)
    varied = sum(len(group) for group in rewards if not equal_rewards(group))
    alpha = sum(map(len, rewards)) / varied if varied else 1.0
    return _for_all_turns(batch, [[alpha * value for value in centred(group)] for group in rewards])


def remax(batch: EpisodeGroups, options: Remax = Remax()) -> Advantages:
    """R minus the reward of the greedy conversation of the same row (`Episode.baseline`).

    The greedy conversation is sampled at temperature 0 and is not trained on. A group of one needs nothing else. Equal rewards
    have advantage 0 if the greedy conversation has the same reward.

    Paper: ReMax, arXiv 2310.10505.

    >>> rounded(remax([[Episode([1.0], baseline=0.25), Episode([0.0], baseline=0.25)]]))
    [[[0.75], [-0.25]]]
    """
    return _for_all_turns(batch, _above_baseline(batch))


def spo(batch: EpisodeGroups, options: Spo = Spo()) -> Advantages:
    """R minus the value of the row before this step (`Episode.baseline`), whitened over the conversations of the batch.

    The value is that of `ValueTracker`: it does not depend on the conversations of the step, so that without whitening the
    expected gradient is the true one, also for groups of one. Equal differences are 0 after whitening.

    Paper: Single-stream Policy Optimization, arXiv 2509.13232.

    Example: rewards 1 and 0 on two rows with the values 0.75 and 0.25: differences 0.25 and -0.25, standard deviation 0.354.

    >>> batch = [[Episode([1.0], baseline=0.75)], [Episode([0.0], baseline=0.25)]]
    >>> rounded(spo(batch)), rounded(spo(batch, Spo(whiten=False)))
    ([[[0.707]], [[-0.707]]], [[[0.25]], [[-0.25]]])
    """
    values = _above_baseline(batch)
    flat = [value for group in values for value in group]
    mean, factor = whitening(flat, [1] * len(flat)) if options.whiten else (0.0, 1.0)
    return _for_all_turns(batch, [[(value - mean) * factor for value in group] for group in values])


def _above_baseline(batch: EpisodeGroups) -> list[list[float]]:
    def difference(episode: Episode) -> float:
        if episode.baseline is None:
            raise ValueError(
                "this estimator needs Episode.baseline: the reward of a greedy conversation, or a row's value"
            )
        return 0.0 if equal_rewards([episode.reward, episode.baseline]) else episode.reward - episode.baseline

    return [[difference(episode) for episode in group] for group in batch]


def reinforce_pp_baseline(batch: EpisodeGroups, options: ReinforcePpBaseline = ReinforcePpBaseline()) -> Advantages:
    """REINFORCE++ with a group baseline: `R - mean` of the group, then whitened over all trained tokens of the batch.

    Whitening subtracts the mean over tokens and divides by their standard deviation. Because tokens are counted, the mean is not
    0 where long and short conversations have different rewards. A group of one has 0 before whitening. If all rewards of the
    batch are equal within their groups, all advantages are 0.

    Paper: REINFORCE++, arXiv 2501.03262.

    Example: centred rewards 0.5 (3 tokens) and -0.5 (1 token). Over the four tokens, the mean is 0.25 and the standard deviation
    0.5.

    >>> rounded(reinforce_pp_baseline([[Episode([1.0], tokens_T=[3]), Episode([0.0], tokens_T=[1])]]))
    [[[0.5], [-1.5]]]
    """
    values = [centred(group) for group in _rewards(batch)]
    counts = [episode.trained_tokens for group in batch for episode in group]
    mean, factor = whitening([value for group in values for value in group], counts)
    return _for_all_turns(batch, [[(value - mean) * factor for value in group] for group in values])


def gdpo(batch: EpisodeGroups, options: Gdpo = Gdpo()) -> Advantages:
    """Normalises each part of the reward within its group, adds the parts, and normalises the sum over the batch.

    The parts are those of `Trajectory.rewards`: each reward function, and `turns` for the rewards of the environment. They are
    multiplied by the weights of the recipe, which the division by the standard deviation would remove. Therefore
    `Episode.weights` has the weight of each part, and a normalised part is multiplied by its absolute value. A part without an
    entry has weight 1. A conversation that a function did not score has 0 for this part, and is not in its statistics. A group
    of one has 0 for all parts.

    Paper: GDPO, arXiv 2601.05242.

    Example: the parts are large (10, 0) and small (0, 1). After normalisation they count the same, and cancel.

    >>> rounded(gdpo([[Episode([0.0], parts={"a": 10.0, "b": 0.0}), Episode([0.0], parts={"a": 0.0, "b": 1.0})]]))
    [[[0.0], [0.0]]]
    >>> rounded(gdpo([[Episode([0.0], parts={"a": 10.0, "b": 0.0}), Episode([0.0], parts={"a": 0.0})]]))
    [[[0.707], [-0.707]]]
    """

    def of_group(group: Sequence[Episode]) -> list[float]:
        sums = [0.0] * len(group)
        for name in sorted({name for episode in group for name in episode.parts}):
            places = [place for place, episode in enumerate(group) if name in episode.parts]
            values = [group[place].parts[name] for place in places]
            # without an epsilon: parts of different size must count exactly the same
            factor = abs(group[0].weights.get(name, 1.0)) / (1.0 if equal_rewards(values) else statistics.stdev(values))
            for place, value in zip(places, centred(values), strict=True):
                sums[place] += factor * value
        return sums

    sums = [of_group(group) for group in batch]
    flat = [value for group in sums for value in group]
    if is_rounding(max(map(abs, flat), default=0.0), 0.0):  # the division would enlarge rounding errors
        return _for_all_turns(batch, [[0.0] * len(group) for group in batch])
    mean = statistics.fmean(flat)
    (divisor,) = divisors([flat], "std")
    return _for_all_turns(batch, [[(value - mean) / divisor for value in group] for group in sums])


def none(batch: EpisodeGroups, options: NoCredit = NoCredit()) -> Advantages:
    """No advantage for any turn, whatever the rewards: a teacher alone is learnt from.

    >>> none([[Episode([0.0, 1.0])]])
    [[[0.0, 0.0]]]
    """
    return _for_all_turns(batch, [[0.0] * len(group) for group in batch])


def _rewards(batch: EpisodeGroups) -> list[list[float]]:
    return [[episode.reward for episode in group] for group in batch]


def _for_all_turns(batch: EpisodeGroups, values: Sequence[Sequence[float]]) -> Advantages:
    """The same advantage for all turns of each conversation."""
    return [
        [[value] * episode.turns for episode, value in zip(group, of_group, strict=True)]
        for group, of_group in zip(batch, values, strict=True)
    ]


ESTIMATORS: Mapping[type[CreditSection], Estimator] = {
    NoCredit: Estimator(none),
    Grpo: Estimator(grpo),
    Rloo: Estimator(rloo),
    Opo: Estimator(opo),
    Gpg: Estimator(gpg),
    Remax: Estimator(remax),
    Spo: Estimator(spo),
    ReinforcePpBaseline: Estimator(reinforce_pp_baseline),
    Gdpo: Estimator(gdpo),
}
"""The estimators of this module, by the class of their options."""
