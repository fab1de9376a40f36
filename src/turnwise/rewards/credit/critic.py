"""Estimators with a critic: they read `Episode.values_T`, and also return the critic's targets.

r_t is the reward of turn t, with the reward of the conversation added to the last turn. It is received at the turn's last
sampled token, except the penalties of single tokens (`Episode.penalties_T`), which are received at these tokens. The value after
the last turn is 0, also where a limit ended the conversation. Tokens between turns (tools, users) have no value and are no steps.
`whiten` subtracts the mean of all trained tokens (or turns) of the batch from the advantages, and divides by their standard
deviation. The estimators do not compare conversations, so a group of one is like any other.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from itertools import chain

from turnwise.options.algorithm import BilevelGae, CreditSection, CriticCredit, Gae, TurnGae
from turnwise.rewards.credit.credit import Episode, EpisodeGroups, Estimator, ValueEstimates, return_to_go, whitening

__all__ = ["bilevel_gae", "critic", "gae", "turn_gae"]

Entries = list[float | Sequence[float]]


def gae(batch: EpisodeGroups, options: Gae = Gae()) -> ValueEstimates:
    """Generalised advantage estimation over the sampled tokens of a conversation.

    With the value V_j before token j: `delta_j = r_j + gamma * V_(j+1) - V_j` and
    `A_j = delta_j + gamma * lam * A_(j+1)`; the critic's target is `A_j + V_j`, before whitening.

    Paper: High-Dimensional Continuous Control Using Generalized Advantage Estimation, arXiv 1506.02438.

    Example: one turn of two tokens with the values 0.5 and 0.8 and the reward 1, lam 0.5. The deltas are 0.3 and 0.2.

    >>> episode = Episode([1.0], tokens_T=[2], values_T=[[0.5, 0.8]])
    >>> estimates = gae([[episode]], Gae(lam=0.5, whiten=False))
    >>> rounded(estimates.advantages), rounded(estimates.returns)
    ([[[[0.4, 0.2]]]], [[[[0.9, 1.0]]]])
    """

    def of_episode(episode: Episode) -> tuple[Entries, Entries]:
        values, rewards = _token_values(episode), episode.token_rewards
        flat = _generalised(list(chain(*rewards)), list(chain(*values)), options.gamma, options.lam)
        advantages = _by_turn(flat, episode)
        return list(advantages), _sums(advantages, values)

    return _estimates(batch, [[of_episode(episode) for episode in group] for group in batch], options.whiten)


def turn_gae(batch: EpisodeGroups, options: TurnGae = TurnGae()) -> ValueEstimates:
    """Generalised advantage estimation over turns: all tokens of a turn have its advantage.

    With the value V_t of the state before turn t: `delta_t = r_t + gamma * V_(t+1) - V_t` and
    `A_t = delta_t + gamma * lam * A_(t+1)`; the critic's target is `A_t + V_t`, before whitening.

    Paper: Turn-PPO, arXiv 2512.17008.

    Example: values 0.5 and 0.8, the reward 1 in the second turn, lam 0.5. The deltas are 0.3 and 0.2.

    >>> estimates = turn_gae([[Episode([0.0, 1.0], values_T=[0.5, 0.8])]], TurnGae(gamma=1.0, lam=0.5, whiten=False))
    >>> rounded(estimates.advantages), rounded(estimates.returns)
    ([[[0.4, 0.2]]], [[[0.9, 1.0]]])
    """

    def of_episode(episode: Episode) -> tuple[Entries, Entries]:
        values = turn_values(episode)
        advantages = _generalised(episode.received, values, options.gamma, options.lam)
        return list(advantages), [advantage + value for advantage, value in zip(advantages, values, strict=True)]

    return _estimates(batch, [[of_episode(episode) for episode in group] for group in batch], options.whiten)


def critic(batch: EpisodeGroups, options: CriticCredit = CriticCredit()) -> ValueEstimates:
    """The return from the turn on, minus the value of the state before the turn: the third scheme of the multi-turn note.

    `A_t = G_t - V_t`; the critic's target is G_t. This is `turn_gae` with lam 1: the critic is only a baseline, so errors of the
    critic give no bias.

    >>> estimates = critic([[Episode([0.0, 1.0], values_T=[0.5, 0.8])]], CriticCredit(whiten=False))
    >>> rounded(estimates.advantages), rounded(estimates.returns)
    ([[[0.5, 0.2]]], [[[1.0, 1.0]]])
    """

    def of_episode(episode: Episode) -> tuple[Entries, Entries]:
        returns = return_to_go(episode.received, options.gamma)
        return [target - value for target, value in zip(returns, turn_values(episode), strict=True)], list(returns)

    return _estimates(batch, [[of_episode(episode) for episode in group] for group in batch], options.whiten)


def bilevel_gae(batch: EpisodeGroups, options: BilevelGae = BilevelGae()) -> ValueEstimates:
    """Generalised advantage estimation over turns, then over the tokens of each turn.

    With V_k, the value before the last token of turn k: `delta_k = r_k + turn_gamma * V_(k+1) - V_k`,
    `A_k = delta_k + turn_gamma * lam * A_(k+1)`. The target of the last token, `A_k + V_k`, is then the reward at the end of the
    turn, and `gae` with `gamma` and `lam` runs over the tokens of each turn by itself. Turns without sampled tokens are left out;
    their rewards count in the turn before. Penalties of single tokens are received at these tokens, and those before the last
    token of turn k + 1 also count in r_k.

    Paper: VAGEN, arXiv 2510.16907 (bi-level GAE; RAGEN has the same function).

    Example: two turns of two tokens; the second turn has the reward 1. With all factors 1, A_2 = 1 - 0.8 = 0.2 and
    A_1 = 0.8 - 0.4 + 0.2 = 0.6, so both turns have the target 1.

    >>> episode = Episode([0.0, 1.0], tokens_T=[2, 2], values_T=[[0.1, 0.4], [0.5, 0.8]])
    >>> estimates = bilevel_gae([[episode]], BilevelGae(lam=1.0, turn_gamma=1.0, whiten=False))
    >>> rounded(estimates.advantages), rounded(estimates.returns)
    ([[[[0.9, 0.6], [0.5, 0.2]]]], [[[[1.0, 1.0], [1.0, 1.0]]]])
    """

    def of_episode(episode: Episode) -> tuple[Entries, Entries]:
        values = _token_values(episode)
        token_rewards = episode.token_rewards
        sampled = [tokens for tokens in token_rewards if tokens]
        # What is received from the last token of a turn up to the last but one of the next turn. Rewards of tokens (with
        # penalties) [-1, 2], [] and [-3, 4]: sampled = [-1, 2] [-3, 4], rewards = 2 - 3, 4. The penalty -1 is received
        # inside the first turn, where the second pass runs over its tokens.
        rewards = [
            tokens[-1] + sum(later[:-1]) for tokens, later in itertools.zip_longest(sampled, sampled[1:], fillvalue=[])
        ]
        ends = [tokens[-1] for tokens in values if tokens]
        # one number for each turn with tokens: turns without tokens take none from the iterator
        upper = iter(
            [a + v for a, v in zip(_generalised(rewards, ends, options.turn_gamma, options.lam), ends, strict=True)]
        )
        advantages = [
            _generalised([*rewarded[:-1], next(upper)], tokens, options.gamma, options.lam) if tokens else []
            for rewarded, tokens in zip(token_rewards, values, strict=True)
        ]
        return list(advantages), _sums(advantages, values)

    return _estimates(batch, [[of_episode(episode) for episode in group] for group in batch], options.whiten)


def _generalised(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """The advantages of a sequence of steps; the value after the last step is 0."""
    following = [*values[1:], 0.0]
    deltas = [r + gamma * later - v for r, v, later in zip(rewards, values, following, strict=True)] if values else []
    return return_to_go(deltas, gamma * lam)


def turn_values(episode: Episode) -> list[float]:
    """The value of the state before each turn. Raises ValueError if there is none."""
    _check_values(episode)
    return [value if isinstance(value, float | int) else value[0] if len(value) else 0.0 for value in episode.values_T]


def _token_values(episode: Episode) -> list[list[float]]:
    """The value before each sampled token, by turn. Raises ValueError if there is another number of them."""
    _check_values(episode)
    values: list[list[float]] = []
    for turn, (value, count) in enumerate(zip(episode.values_T, episode.tokens_T, strict=True)):
        if isinstance(value, float | int) or len(value) != count:
            has = "one value" if isinstance(value, float | int) else f"{len(value)} values"
            raise ValueError(f"turn {turn} has {count} sampled tokens and {has}; it must have a value for each token")
        values.append([float(number) for number in value])
    return values


def _check_values(episode: Episode) -> None:
    if len(episode.values_T) != episode.turns:
        raise ValueError(
            f"the critic gave {len(episode.values_T)} entries for {episode.turns} turns; Trajectory.values must have an entry "
            f"for each turn"
        )


def _by_turn(flat: Sequence[float], episode: Episode) -> list[list[float]]:
    numbers = iter(flat)
    return [[next(numbers) for _ in range(count)] for count in episode.tokens_T]


def _sums(advantages: Sequence[Sequence[float]], values: Sequence[Sequence[float]]) -> Entries:
    """The critic's target for each token."""
    return [[a + v for a, v in zip(*turn, strict=True)] for turn in zip(advantages, values, strict=True)]


def _estimates(batch: EpisodeGroups, estimates: list[list[tuple[Entries, Entries]]], whiten: bool) -> ValueEstimates:
    advantages = [[entries for entries, _ in group] for group in estimates]
    returns = [[targets for _, targets in group] for group in estimates]
    if whiten:
        trained = [
            number
            for group, of_group in zip(batch, advantages, strict=True)
            for episode, entries in zip(group, of_group, strict=True)
            for entry, included in zip(entries, episode.trained_T, strict=True)
            if included
            for number in _numbers(entry)
        ]
        mean, factor = whitening(trained, [1] * len(trained))
        advantages = [
            [[_whitened(entry, mean, factor) for entry in entries] for entries in of_group] for of_group in advantages
        ]
    return ValueEstimates(advantages, returns)


def _numbers(entry: float | Sequence[float]) -> Sequence[float]:
    return [entry] if isinstance(entry, float | int) else entry


def _whitened(entry: float | Sequence[float], mean: float, factor: float) -> float | Sequence[float]:
    if isinstance(entry, float | int):
        return (entry - mean) * factor
    return [(number - mean) * factor for number in entry]


ESTIMATORS: Mapping[type[CreditSection], Estimator] = {
    Gae: Estimator(gae),
    TurnGae: Estimator(turn_gae),
    CriticCredit: Estimator(critic),
    BilevelGae: Estimator(bilevel_gae),
}
"""The estimators of this module, by the class of their options."""
