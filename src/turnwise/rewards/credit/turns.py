"""Estimators with an advantage for each turn: rewards are accumulated first, and centred afterwards.

r_t is the reward of turn t, with the reward of the conversation added to the last turn. G_t is the return from turn t on: `r_t
+ gamma * r_(t+1) + gamma^2 * r_(t+2) + ...`. A turn that is not trained on (weight 0) keeps its reward, which is part of the
returns of earlier turns. Its own return is in no mean and no standard deviation, and its advantage is 0.

`mt_grpo`, `igpo` and `turn_potential` are as their papers define them. They are biased; each docstring says how. Each docstring
names the paper of its estimator. Pure functions of numbers: they know no texts, no tokens and no models.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence

from turnwise.options.algorithm import (
    CreditSection,
    Discounted,
    Gigpo,
    Grpo,
    Igpo,
    Kevin,
    MtGrpo,
    ReinforcePp,
    Shared,
    TurnPotential,
    TurnReturn,
)
from turnwise.rewards.credit.credit import (
    Advantages,
    Episode,
    EpisodeGroups,
    Estimator,
    Scale,
    centred,
    divisors,
    leave_one_out,
    return_to_go,
    whitening,
    with_potentials,
    with_states,
)
from turnwise.rewards.credit.outcome import grpo
from turnwise.user_code.reward_number import equal_rewards

__all__ = [
    "discounted",
    "gigpo",
    "igpo",
    "kevin",
    "mt_grpo",
    "reinforce_pp",
    "shared",
    "turn_potential",
    "turn_return",
]


# Accumulate first, centre afterwards

Returns = list[list[list[float]]]
"""For each group, conversation and turn: a number."""


def turn_return(batch: EpisodeGroups, options: TurnReturn = TurnReturn()) -> Advantages:
    """The return from the turn on, minus the mean return of the other conversations of the group at the same turn.

    `A_t = G_t - mean of G_t of the other conversations that have turn t`. If no other conversation has turn t, the mean is that
    of the last turns of the others. The mean does not depend on the conversation itself, so the gradient is unbiased for any
    size of the group. `scale` divides by the standard deviation of all returns of the group (`std`) or of the batch (`batch`).
    A group of one has advantages of 0. If no turn has a reward, gamma is 1 and the conversations of the group have equally many
    turns, this is `rloo`, up to the scale.

    Paper: policy gradients with reward to go (Sutton and others, 1999), with the leave-one-out baseline of arXiv 2402.14740.

    Example: returns (3, 2) and (1,). The first turns are compared with each other. The second turn of the first conversation is
    compared with the last turn of the other: 2 - 1. With gamma 0, the first turns have 1 and 1.

    >>> rounded(turn_return([[Episode([1.0, 2.0]), Episode([1.0])]], TurnReturn(scale="none")))
    [[[2.0, 1.0], [-2.0]]]
    >>> rounded(turn_return([[Episode([1.0, 2.0]), Episode([1.0])]], TurnReturn(gamma=0, scale="none")))
    [[[0.0, 1.0], [0.0]]]
    """
    returns = [[return_to_go(episode.received, options.gamma) for episode in group] for group in batch]
    return _scaled(batch, returns, _minus_others(batch, returns), options.scale)


def shared(batch: EpisodeGroups, options: Shared = Shared()) -> Advantages:
    """Each turn has the final reward R of the conversation: the first scheme of the multi-turn note.

    `baseline="group"` subtracts the mean R of the other conversations of the group (this is `rloo`); a group of one has
    advantage 0. `baseline="none"` subtracts nothing: the advantages are the numbers of the note, and equal rewards have
    advantages other than 0.

    >>> rounded(shared([[Episode([0.0, 0.0], outcome=1.0), Episode([0.0])]], Shared(baseline="none")))
    [[[1.0, 1.0], [0.0]]]
    >>> rounded(shared([[Episode([0.0, 0.0], outcome=1.0), Episode([0.0])]]))
    [[[1.0, 1.0], [-1.0]]]
    """
    returns = [[[episode.reward] * episode.turns for episode in group] for group in batch]
    if options.baseline == "none":
        return _scaled(batch, returns, returns, "none")
    centred_rewards = [leave_one_out([episode.reward for episode in group]) for group in batch]
    values = [
        [[value] * episode.turns for episode, value in zip(group, of_group, strict=True)]
        for group, of_group in zip(batch, centred_rewards, strict=True)
    ]
    return _scaled(batch, returns, values, "none")


def discounted(batch: EpisodeGroups, options: Discounted = Discounted()) -> Advantages:
    """A turn has `R * gamma^(turns after it)`: the second scheme of the multi-turn note.

    R is the final reward of the conversation. `baseline="group"` subtracts the mean of `R * gamma^(turns after it)` over the
    other conversations of the group at the same turn, as in `turn_return`; a group of one has advantages of 0.
    `baseline="none"` subtracts nothing.
    The estimator prefers short conversations: it follows the gradient of the discounted reward.

    >>> rounded(discounted([[Episode([0.0, 0.0, 0.0], outcome=1.0)]], Discounted(gamma=0.5, baseline="none")))
    [[[0.25, 0.5, 1.0]]]
    """
    returns = [
        [[episode.reward * options.gamma**later for later in reversed(range(episode.turns))] for episode in group]
        for group in batch
    ]
    return _scaled(batch, returns, returns if options.baseline == "none" else _minus_others(batch, returns), "none")


def kevin(batch: EpisodeGroups, options: Kevin = Kevin()) -> Advantages:
    """The discounted return from the turn on, normalised over all turns of all conversations of the group.

    `A_t = (G_t - mean) / (std + 1e-6)`, with one mean and one standard deviation for all turns of the group. A group with a
    single turn has advantage 0.

    Bias: with gamma below 1, rewards of later turns count less than in the objective that is reported. The mean contains the
    conversation's own turns, so long conversations pull it towards themselves; this vanishes in large groups.

    Paper: Kevin, arXiv 2507.11948.

    Example, gamma 0.5: the returns are 1 + 0.5 * 2 = 2, 2 and 0.5; their mean is 1.5.

    >>> rounded(kevin([[Episode([1.0, 2.0]), Episode([0.5])]], Kevin(gamma=0.5, scale="none")))
    [[[0.5, 0.5], [-1.0]]]
    """
    returns = [[return_to_go(episode.received, options.gamma) for episode in group] for group in batch]

    def of_group(group: Sequence[Episode], of_episodes: Sequence[Sequence[float]]) -> list[list[float]]:
        pooled = _trained(group, of_episodes)
        if len(pooled) < 2 or equal_rewards(pooled):
            return [[0.0] * episode.turns for episode in group]
        mean = statistics.fmean(pooled)
        return [[value - mean for value in values] for values in of_episodes]

    values = [of_group(group, of_episodes) for group, of_episodes in zip(batch, returns, strict=True)]
    return _scaled(batch, returns, values, options.scale)


def gigpo(batch: EpisodeGroups, options: Gigpo = Gigpo()) -> Advantages:
    """The advantage of the conversation, plus `omega` times the advantage among all turns in the same state.

    `A_t = (R - mean R of the group) + omega * (G_t - mean G of the turns of the group whose state is that before turn t)`.
    A state that occurs once has 0 for the second term. `scale="std"` divides each term by the standard deviation of the numbers
    that it compares. A group of one has only the second term, from states that it visits twice.

    Bias: both means contain the turn itself, which scales the terms by (n - 1) / n; n differs from state to state. With gamma
    below 1, the second term follows the discounted reward.

    Paper: GiGPO, arXiv 2505.10978.

    Example: both conversations begin in state a. The first returns are 1 and 0, and so are the rewards.

    >>> first, second = Episode([0.0, 1.0], states_T=["a", "b"]), Episode([0.0], states_T=["a"])
    >>> rounded(gigpo([[first, second]], Gigpo(gamma=1.0)))
    [[[1.0, 0.5], [-1.0]]]
    """
    advantages: Returns = []
    for group in batch:
        rewards = [episode.reward for episode in group]
        (of_group,) = divisors([rewards], options.scale)
        values = [[value / of_group] * episode.turns for value, episode in zip(centred(rewards), group, strict=True)]
        turns_in: dict[str, list[tuple[int, int]]] = defaultdict(list)
        returns = [return_to_go(episode.received, options.gamma) for episode in group]
        for number, episode in enumerate(group):
            for turn, state in enumerate(episode.states_T):
                if state is not None and episode.trained_T[turn]:
                    turns_in[state].append((number, turn))
        for turns in turns_in.values():
            compared = [returns[number][turn] for number, turn in turns]
            (of_state,) = divisors([compared], options.scale)
            for (number, turn), value in zip(turns, centred(compared), strict=True):
                values[number][turn] += options.omega * value / of_state
        advantages.append(values)
    return _scaled(batch, advantages, advantages, "none")


def reinforce_pp(batch: EpisodeGroups, options: ReinforcePp = ReinforcePp()) -> Advantages:
    """REINFORCE++: the return from a token on, whitened over all trained tokens of the batch.

    The reward of a turn is received at its last token; `gamma` discounts each sampled token. Whitening subtracts the mean over
    tokens and divides by their standard deviation (of the sample). Groups play no role, so a group of one is like any other.
    With gamma 1 and without penalties of single tokens, all tokens of a turn have the same advantage; otherwise the result has a
    number for each token.

    Bias: the standard deviation and the mean contain the conversation itself; this vanishes in large batches. verl's function
    returns 0 for all turns but the last where turns are separated by tokens of tools; here it does not.

    Paper: REINFORCE++, arXiv 2501.03262.

    Example: returns 1 (two tokens) and 0 (two tokens) have mean 0.5 and standard deviation 0.577.

    >>> rounded(reinforce_pp([[Episode([1.0], tokens_T=[2]), Episode([0.0], tokens_T=[2])]]))
    [[[0.866], [-0.866]]]
    >>> rounded(reinforce_pp([[Episode([1.0], tokens_T=[2]), Episode([0.0], tokens_T=[2])]], ReinforcePp(gamma=0.5)))
    [[[[0.261, 1.306]], [[-0.783, -0.783]]]]
    """
    episodes = [episode for group in batch for episode in group]
    returns = [_token_returns(episode, options.gamma) for episode in episodes]
    trained = [
        value
        for episode, of_turns in zip(episodes, returns, strict=True)
        for values, included in zip(of_turns, episode.trained_T, strict=True)
        if included
        for value in values
    ]
    mean, factor = whitening(trained, [1] * len(trained))
    whitened: list[list[float | Sequence[float]]] = []
    for episode, of_turns in zip(episodes, returns, strict=True):
        entries: list[float | Sequence[float]] = []
        for values, included in zip(of_turns, episode.trained_T, strict=True):
            # with gamma 1 and without penalties, all tokens of a turn have the same return: one number stands for them
            tokens = [(value - mean) * factor if included else 0.0 for value in values]
            by_token = options.gamma != 1.0 or episode.has_penalties
            entries.append(tokens if by_token else (tokens[0] if tokens else 0.0))
        whitened.append(entries)
    result = iter(whitened)
    return [[next(result) for _ in group] for group in batch]


def _token_returns(episode: Episode, gamma: float) -> list[list[float]]:
    """The discounted return from each sampled token on, by turn."""
    # over the tokens of all turns as one row: rewards [0 1] [] [0 2] with gamma 0.5 are returns [0.75 1.5] [] [1 2]
    rewards = episode.token_rewards
    returns = iter(return_to_go([reward for tokens in rewards for reward in tokens], gamma))
    return [[next(returns) for _ in tokens] for tokens in rewards]


def _minus_others(batch: EpisodeGroups, returns: Returns) -> Returns:
    """Each return minus the mean of the other conversations' returns at the same turn.

    Where no other conversation has the turn, the mean is that of their last turns; 0 if there are no others.
    """
    return [_group_minus_others(group, of_group) for group, of_group in zip(batch, returns, strict=True)]


def _group_minus_others(group: Sequence[Episode], returns: Sequence[Sequence[float]]) -> list[list[float]]:
    # The returns of trained turns, by the index of the turn and by conversation. Returns (3, 2) and (1,):
    #     at_turn = {0: {0: 3, 1: 1}, 1: {0: 2}}   last = {0: 2, 1: 1}   result = (3 - 1, 2 - 1) and (1 - 3,)
    # Invariant: a conversation's own returns are in no mean that is subtracted from them, which would bias the gradient.
    at_turn: dict[int, dict[int, float]] = defaultdict(dict)
    last: dict[int, float] = {}
    for number, episode in enumerate(group):
        for turn in range(episode.turns):
            if episode.trained_T[turn]:
                at_turn[turn][number] = last[number] = returns[number][turn]
    result = [[0.0] * episode.turns for episode in group]
    for turn, compared in at_turn.items():
        if len(compared) > 1:
            values = leave_one_out(list(compared.values()))
        else:
            ((number, value),) = compared.items()
            others = [latest for other, latest in last.items() if other != number]
            values = [0.0 if not others or equal_rewards([value, *others]) else value - statistics.fmean(others)]
        for number, value in zip(compared, values, strict=True):
            result[number][turn] = value
    return result


def _trained(group: Sequence[Episode], values: Sequence[Sequence[float]]) -> list[float]:
    """The values of all turns of a group that are trained on."""
    return [
        value
        for episode, of_episode in zip(group, values, strict=True)
        for value, included in zip(of_episode, episode.trained_T, strict=True)
        if included
    ]


def _scaled(batch: EpisodeGroups, compared: Returns, values: Returns, scale: Scale) -> Advantages:
    """The values divided by the standard deviation of the compared numbers; 0 for turns that are not trained on."""
    widths = divisors([_trained(group, of_group) for group, of_group in zip(batch, compared, strict=True)], scale)
    return [
        [
            [value / width if included else 0.0 for value, included in zip(of_episode, episode.trained_T, strict=True)]
            for episode, of_episode in zip(group, of_group, strict=True)
        ]
        for group, of_group, width in zip(batch, values, widths, strict=True)
    ]


# As their papers define them, with a bias that the docstring explains

Normalised = dict[tuple[int, int], float]
"""Normalised rewards by conversation and turn."""


def mt_grpo(batch: EpisodeGroups, options: MtGrpo = MtGrpo()) -> Advantages:
    """The normalised reward of the turn, plus the normalised outcome; for the last turn only the outcome.

    The reward of turn t is normalised over the conversations of the group that have turn t; the outcome (the reward of the last
    turn) over all conversations of the group. `scale="none"` only subtracts the means. A turn that only one conversation has is
    normalised to 0; a group of one has advantages of 0.

    Bias: rewards are centred before they are accumulated. A turn has no credit for rewards between the next turn and the
    outcome. If the model decides when to stop, the gradient can have the wrong sign (docs/credit.md).

    Paper: Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design, arXiv 2505.11821.

    Example: the first turns have the rewards 1 and 0 (mean 0.5), the outcomes are 2 and 0 (mean 1).

    >>> rounded(mt_grpo([[Episode([1.0, 0.0], outcome=2.0), Episode([0.0, 0.0])]], MtGrpo(scale="none")))
    [[[1.5, 1.0], [-1.5, -1.0]]]
    """

    def of_group(group: Sequence[Episode]) -> list[list[float | Sequence[float]]]:
        outcome = _normalised(group, [(n, one.turns - 1) for n, one in enumerate(group) if one.turns], options.scale)
        rewards: Normalised = {}
        for turn in range(max((episode.turns for episode in group), default=0)):
            rewards |= _normalised(group, _trained_turns(group, turn), options.scale)
        return [
            [
                (options.outcome_weight if turn < episode.turns - 1 else 1.0) * outcome[number, episode.turns - 1]
                + (rewards[number, turn] if turn < episode.turns - 1 else 0.0)
                if episode.trained_T[turn]
                else 0.0
                for turn in range(episode.turns)
            ]
            for number, episode in enumerate(group)
        ]

    return [of_group(group) for group in batch]


def igpo(batch: EpisodeGroups, options: Igpo = Igpo()) -> Advantages:
    """Normalised rewards, accumulated afterwards: `A_t = z_t + gamma * z_(t+1) + ...`.

    z is the reward of a turn, normalised over all turns of the group. `separate`: the rewards of the last turns (the outcome) are
    normalised among themselves, and the rewards of all other turns (the information gain, which a turn reward function gives)
    among themselves. `joint`: all together. A group of one has 0 for the outcome.

    Bias: rewards are centred before they are accumulated. The number of means that are subtracted then depends on the number of
    turns, which the model decides; the gradient can have the wrong sign (docs/credit.md).

    Paper: Information Gain-based Policy Optimization, arXiv 2510.14967.

    Example: the outcomes 1 and 0 have mean 0.5, the turn rewards 0.4 and 0 have mean 0.2.

    >>> rounded(igpo([[Episode([0.4, 1.0]), Episode([0.0, 0.0])]], Igpo(scale="none")))
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
        sets = [turns] if options.normalise == "joint" else [last, earlier]
        z: Normalised = {}
        for places in sets:
            z |= _normalised(group, places, options.scale)
        returns = [
            return_to_go([z.get((number, turn), 0.0) for turn in range(episode.turns)], options.gamma)
            for number, episode in enumerate(group)
        ]
        return [
            [value if trained else 0.0 for value, trained in zip(values, episode.trained_T, strict=True)]
            for values, episode in zip(returns, group, strict=True)
        ]

    return [of_group(group) for group in batch]


def turn_potential(batch: EpisodeGroups, options: TurnPotential = TurnPotential()) -> Advantages:
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
    advantages = grpo(batch, Grpo(scale=options.scale))
    for group, of_group in zip(batch, advantages, strict=True):
        for episode, values in zip(group, of_group, strict=True):
            shares = _shares(episode, options.decay, options.initial)
            values[:] = [
                float(value) + options.weight * share if isinstance(value, float | int) else value
                for value, share in zip(values, shares, strict=True)
            ]
    return advantages


def _shares(episode: Episode, decay: float, initial: float) -> list[float]:
    """The share of each turn in the changes of the score."""
    shares, previous = [0.0] * episode.turns, initial
    for turn, score in enumerate(episode.potentials_T):
        if score is None:
            continue
        # The parts of a change have the sum of the change, and the next change begins at this score. So all shares of a
        # conversation have the sum last score - initial, and a score that falls and rises again gains nothing.
        weights = [decay**distance for distance in range(turn + 1)]
        for distance, part in enumerate(weights):
            shares[turn - distance] += (score - previous) * part / sum(weights)
        previous = score
    return shares


def _trained_turns(group: Sequence[Episode], turn: int) -> list[tuple[int, int]]:
    """The conversations, with the turn, that have this turn and train on it."""
    return [(n, turn) for n, episode in enumerate(group) if turn < episode.turns and episode.trained_T[turn]]


def _normalised(group: Sequence[Episode], places: Sequence[tuple[int, int]], scale: Scale) -> Normalised:
    """The rewards at these turns, centred and divided by their standard deviation."""
    rewards = [group[number].received[turn] for number, turn in places]
    (divisor,) = divisors([rewards], scale)
    return {place: value / divisor for place, value in zip(places, centred(rewards), strict=True)}


ESTIMATORS: Mapping[type[CreditSection], Estimator] = {
    TurnReturn: Estimator(turn_return),
    Shared: Estimator(shared),
    Discounted: Estimator(discounted),
    Kevin: Estimator(kevin),
    Gigpo: Estimator(gigpo, read=lambda trajectory, options: with_states(trajectory, key=options.state_key)),
    ReinforcePp: Estimator(reinforce_pp),
    MtGrpo: Estimator(mt_grpo),
    Igpo: Estimator(igpo),
    TurnPotential: Estimator(
        turn_potential, read=lambda trajectory, options: with_potentials(trajectory, key=options.key)
    ),
}
"""The estimators of this module, by the class of their options."""
