"""Enumerated problems: the exact gradient of the expected reward, and the gradient that an estimator gives in expectation.

A problem is a tree of decisions. A policy takes an action at each decision, with a softmax over parameters of its own for each
decision (`SEVERAL_STATES`) or with one parameter for all decisions (`STOPPING`). An action is a turn of the model: it has a
number of tokens and a reward, and leads to the next decision or ends the conversation with an outcome. All conversations can be
listed, so nothing is sampled: expectations are sums in float64.

- The true gradient is that of `J = sum of p(conversation) * reward` with respect to the parameters.
- The expected gradient of an estimator for groups of G conversations is the sum over all groups of
  `p(group) / G * sum over conversations and turns of A_t * gradient of log p(action)`. Equal groups in another order are
  computed once. The batch is this group.
- A large group has each conversation as often as its probability says (4,096 in all): sampling noise and the conversation's own
  part in means and standard deviations vanish.

Gradients are sums over turns: how a loss averages over tokens is not part of the estimator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from turnwise.rewards.credit.credit import Advantages, Episode, EpisodeGroups, ValueEstimates

__all__ = ["LARGE", "SEVERAL_STATES", "Estimator", "Problem", "expected_gradient", "large_group_gradient", "stopping"]

LARGE = 4096
"""The size of a large group."""

Estimator = Callable[[EpisodeGroups], Advantages | ValueEstimates]


@dataclass(frozen=True)
class Action:
    """A turn of the model."""

    reward: float
    tokens: int = 1
    next: str | None = None
    """The decision that follows; None ends the conversation."""
    outcome: float = 0.0
    """The reward of the conversation, if it ends."""


@dataclass(frozen=True)
class Conversation:
    """A possible conversation: its probability, the gradient of log p of each turn, and its numbers."""

    probability: float
    scores_T: np.ndarray
    """The gradient of the log-probability of each turn's action, [turns, parameters]."""
    episode: Episode


@dataclass(frozen=True)
class Problem:
    """A tree of decisions, and the probability of each action at each decision."""

    decisions: Mapping[str, Sequence[Action]]
    start: str
    probabilities: Mapping[str, Sequence[float]]
    scores: Mapping[str, np.ndarray]
    """The gradient of log p of each action at each decision, [actions, parameters]."""
    potentials: Mapping[str | None, float] = field(default_factory=dict)
    """A score of the state of each decision, and of the end (None)."""

    def value(self, decision: str | None) -> float:
        """The expected sum of rewards from a decision on."""
        if decision is None:
            return 0.0
        pairs = zip(self.probabilities[decision], self.decisions[decision], strict=True)
        return sum(p * (action.reward + action.outcome + self.value(action.next)) for p, action in pairs)

    def conversations(self, *, errors: float = 0.0) -> list[Conversation]:
        """All conversations. The values of the critic are exact, plus `errors` times a fixed error of each decision."""
        return list(self._from(self.start, 1.0, [], errors))

    def _from(
        self, decision: str, probability: float, path: list[tuple[str, int]], errors: float
    ) -> Sequence[Conversation]:
        found: list[Conversation] = []
        for number, action in enumerate(self.decisions[decision]):
            p, steps = probability * self.probabilities[decision][number], [*path, (decision, number)]
            if p == 0:
                continue
            if action.next is not None:
                found += self._from(action.next, p, steps, errors)
                continue
            found.append(self._conversation(p, steps, errors))
        return found

    def _conversation(self, probability: float, steps: Sequence[tuple[str, int]], errors: float) -> Conversation:
        actions = [self.decisions[decision][number] for decision, number in steps]
        names = sorted(self.decisions)
        values = [self.value(decision) + errors * math.sin(3.0 * (names.index(decision) + 1)) for decision, _ in steps]
        rewards, outcome = [action.reward for action in actions], actions[-1].outcome
        episode = Episode(
            rewards,
            outcome=outcome,
            tokens_T=[action.tokens for action in actions],
            states_T=[decision for decision, _ in steps],
            potentials_T=[self.potentials.get(action.next, 0.0) for action in actions],
            # the value before each token: all tokens of a turn follow from its first
            values_T=[self._token_values(v, a, errors) for v, a in zip(values, actions, strict=True)],
            parts={"turns": sum(rewards), "outcome": outcome},
            baseline=self._greedy_reward(),
        )
        scores = np.stack([self.scores[decision][number] for decision, number in steps])
        return Conversation(probability, scores, episode)

    def _token_values(self, value: float, action: Action, errors: float) -> list[float]:
        following = action.reward + action.outcome + self.value(action.next)
        return [value, *[following + errors * 0.3] * (action.tokens - 1)]

    def _greedy_reward(self) -> float:
        reward, decision = 0.0, self.start
        while decision is not None:
            number = int(np.argmax(self.probabilities[decision]))
            action = self.decisions[decision][number]
            reward, decision = reward + action.reward + action.outcome, action.next
        return reward

    def true_gradient(self) -> np.ndarray:
        """The gradient of the expected reward, [parameters]."""
        return sum(
            (c.probability * c.episode.reward * c.scores_T.sum(0) for c in self.conversations()),
            start=np.zeros(next(iter(self.scores.values())).shape[1]),
        )


def expected_gradient(problem: Problem, estimator: Estimator, *, size: int, errors: float = 0.0) -> np.ndarray:
    """The gradient that the estimator gives in expectation, for groups of `size` conversations. Exact, [parameters]."""
    kinds = problem.conversations(errors=errors)
    total = np.zeros_like(problem.true_gradient())
    for chosen in itertools.combinations_with_replacement(range(len(kinds)), size):
        group = [kinds[number] for number in chosen]
        orders = math.factorial(size) // math.prod(math.factorial(chosen.count(number)) for number in set(chosen))
        weight = orders * math.prod(kind.probability for kind in group) / size
        total += weight * _gradient(group, estimator)
    return total


def large_group_gradient(problem: Problem, estimator: Estimator, *, errors: float = 0.0) -> np.ndarray:
    """The gradient in a group of `LARGE` conversations, each as often as its probability says, [parameters].

    Raises ValueError if a probability is no multiple of 1 / LARGE.
    """
    group: list[Conversation] = []
    for kind in problem.conversations(errors=errors):
        count = round(kind.probability * LARGE)
        if not math.isclose(count, kind.probability * LARGE, abs_tol=1e-6):
            raise ValueError(f"the probability {kind.probability} is no multiple of 1/{LARGE}")
        group += [kind] * count
    return _gradient(group, estimator) / len(group)


def _gradient(group: Sequence[Conversation], estimator: Estimator) -> np.ndarray:
    """The sum of `A_t * gradient of log p` over the turns of a group.

    Where a turn has an advantage for each token, that of the first token counts: the others follow from it with probability 1.
    """
    estimates = estimator([[kind.episode for kind in group]])
    (advantages,) = estimates.advantages if isinstance(estimates, ValueEstimates) else estimates
    total = np.zeros(group[0].scores_T.shape[1])
    for kind, of_turns in zip(group, advantages, strict=True):
        firsts = [entry if isinstance(entry, float | int) else entry[0] for entry in of_turns]
        total += np.array(firsts) @ kind.scores_T
    return total


def stopping(probability: float) -> Problem:
    """The model continues with this probability, at most twice, with one parameter: the logit of continuing.

    Continuing pays 0.2 and then 0.5; the last turn always pays 0.4 (rewards of turns, because they are all that differs).
    """
    scores = np.array([[-probability], [1 - probability]])
    chances = (1 - probability, probability)
    end = Action(0.4)
    return Problem(
        decisions={
            "first": (end, Action(0.2, next="second")),
            "second": (end, Action(0.5, next="third")),
            "third": (end,),
        },
        start="first",
        probabilities={"first": chances, "second": chances, "third": (1.0,)},
        scores={"first": scores, "second": scores, "third": np.zeros((1, 1))},
        potentials={"second": 0.3, "third": 0.6, None: 0.5},
    )


def _softmax_scores(sizes: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """The gradient of log softmax at each decision, with a logit of its own for each action."""
    total, start, scores = sum(map(len, sizes.values())), 0, {}
    for decision, chances in sizes.items():
        own = np.eye(len(chances)) - np.array(chances)
        scores[decision] = np.zeros((len(chances), total))
        scores[decision][:, start : start + len(chances)] = own
        start += len(chances)
    return scores


_CHANCES = {"start": (0.5, 0.25, 0.25), "searched": (0.5, 0.5), "guessed": (0.25, 0.75), "late": (0.5, 0.5)}

SEVERAL_STATES = Problem(
    decisions={
        "start": (
            Action(0.0, tokens=2, outcome=0.3),
            Action(0.2, tokens=3, next="searched"),
            Action(0.0, tokens=1, next="guessed"),
        ),
        "searched": (Action(0.0, tokens=2, outcome=1.0), Action(-0.1, tokens=4, next="late")),
        "guessed": (Action(0.0, tokens=1, outcome=0.0), Action(0.3, tokens=2, next="late")),
        "late": (Action(0.0, tokens=2, outcome=0.6), Action(0.0, tokens=1, outcome=0.0)),
    },
    start="start",
    probabilities=_CHANCES,
    scores=_softmax_scores(_CHANCES),
    potentials={"searched": 0.5, "guessed": 0.1, "late": 0.3, None: 0.4},
)
"""Four decisions and nine parameters. The model decides how many turns it takes, by two ways that meet in one state. Rewards of
turns, some of which mislead, and an outcome at the end."""
