"""What an estimator receives of a conversation, and how its result is applied to trajectories.

An estimator sees an `Episode`: rewards, weights and token counts, no texts and no token ids; some also see states or scores of
states, which are read from the trajectory here. Invariant: failed trajectories, and trajectories without a reward, are taken
out before the estimator is called. They are part of no statistics and get no advantage. Means, standard deviations, centring
and discounted sums are defined once, for all estimators. Does not know which estimator runs, and does not change rewards.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from turnwise.errors import Failed, boundary
from turnwise.options.algorithm import Scale
from turnwise.rewards.credit.tracker import ValueTracker
from turnwise.rewards.functions import finite_number
from turnwise.types import Failure, Group, Message, Trajectory, Turn
from turnwise.user_code.reward_number import equal_rewards, is_rounding

_log = logging.getLogger(__name__)

# Episode: the numbers of a conversation


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
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights in the recipe of the parts of the reward; 1 for a part that is missing."""
    baseline: float | None = None
    """What the reward is compared with, for some estimators: the reward of the greedy conversation of the same row, or the row's
    value in a `ValueTracker`."""
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


EpisodeGroups = Sequence[Sequence[Episode]]
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


# Credit: applies an estimator to the trajectories of a training step


@dataclass(frozen=True, slots=True)
class Estimator:
    """A line in a table of estimators. The options are the estimator's section of a recipe."""

    estimate: Callable[[EpisodeGroups, Any], Advantages | ValueEstimates]
    """`(batch, options) -> advantages`."""
    read: Callable[[Trajectory, Any], Episode] = lambda trajectory, options: episode_of(trajectory)
    """`(trajectory, options) -> episode`, for an estimator that needs more of a trajectory than its rewards."""


@dataclass(frozen=True, slots=True)
class Credit:
    """Credit assignment: computes the advantages of all trajectories of a training step from their rewards.

    A call sets `Trajectory.advantages` of all groups of a step, and `Trajectory.returns` if the estimator has a critic. It is
    called once per step, after rewards, turn weights and values are set.

    `advantages` has one entry per turn. An entry is either a number, which holds for all tokens of the turn, or a sequence with
    one number per token that the turn sampled, in their order: `[0.5, [0.1, -0.2, 0.3]]` is one advantage for the first turn
    and one for each of the three tokens of the second turn. A trajectory that is not trained on keeps an empty list: a failed
    trajectory, or one without a reward.
    """

    name: str
    """The name of the estimator in a recipe: `credit.name`."""
    estimate: Callable[[EpisodeGroups], Advantages | ValueEstimates]
    """The estimator, with its options bound."""
    needs_values: Literal["turn", "token"] | None = None
    """What `Trajectory.values` must hold before the call: the value of the state before each turn, the value before each sampled
    token, or nothing. An estimator of turns also accepts values of tokens, and reads the first of each turn."""
    needs_baseline: bool = False
    """Whether each group must have a greedy conversation (`Group.baseline`). A group whose greedy conversation failed is not
    trained on. Neither are agents whose name has no greedy conversation, of which the log warns."""
    read: Callable[[Trajectory], Episode] = episode_of
    """Reads the numbers that the estimator needs from a trajectory."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """`Episode.weights`."""
    tracker: ValueTracker | None = None
    """The values of rows that rewards are compared with; None: the estimator needs none. A call adds the rewards of the step."""

    def __call__(self, groups: Sequence[Group]) -> None:
        read = [self._read(group) for group in groups]
        scored = [[trajectory for trajectory, _ in pairs] for pairs in read]
        estimates = self.estimate([[episode for _, episode in pairs] for pairs in read])
        returns = estimates.returns if isinstance(estimates, ValueEstimates) else None
        advantages = estimates.advantages if isinstance(estimates, ValueEstimates) else estimates
        if self.tracker is not None:
            for group, pairs in zip(groups, read, strict=True):
                self.tracker.add(_agent(group), group.row.id, (episode.reward for _, episode in pairs))
        for place, trajectories in enumerate(scored):
            for number, trajectory in enumerate(trajectories):
                trajectory.advantages = advantages[place][number]
                trajectory.returns = [] if returns is None else returns[place][number]

    def _read(self, group: Group) -> list[tuple[Trajectory, Episode]]:
        """The trajectories of a group that have a reward and did not fail. If its numbers cannot be read, it fails."""
        baseline = _baseline(group) if self.needs_baseline else None
        if self.needs_baseline and baseline is None:
            return []
        if self.tracker is not None:
            baseline = self.tracker.value(_agent(group), group.row.id)
        read: list[tuple[Trajectory, Episode]] = []
        for trajectory in group.trajectories:
            if trajectory.failed or trajectory.reward is None:
                continue
            try:
                read.append((trajectory, replace(self.read(trajectory), baseline=baseline, weights=self.weights)))
            except Failed as failed:
                trajectory.fail(failed.failure)
        return read


def _agent(group: Group) -> str:
    """The name of the agent whose conversations the group has; empty: those of the row."""
    return group.trajectories[0].agent if group.trajectories else ""


def _baseline(group: Group) -> float | None:
    """The reward of the greedy conversation of a group; None if it has none, or if the conversation failed.

    Of a group of agents: the mean reward of the agents of that name that the same policy played in the greedy episode, without
    those that failed. Those of another policy, and with `train=False`, are no conversations of the group.
    """
    if group.baseline is None:
        return None
    name = _agent(group)
    agents = [agent for agent in group.baseline.agents if agent.agent == name and agent.policy == group.policy]
    played = [agent for agent in agents if agent.trained]
    greedy = played if name else [group.baseline]
    rewards = [one.reward for one in greedy if not one.failed and one.reward is not None]
    if name and not rewards:
        _log.warning(
            "the %d conversations of the agent %r in the group %s are not trained on: credit compares them with the "
            "trained agents of that name in the episode at temperature 0, which has %s. Let the environment open the agent in "
            "each episode, or use an estimator without a greedy baseline (credit.name=rloo)",
            len(group.trajectories),
            name,
            group.id,
            f"{len(greedy)}, and none with a reward" if greedy else "none",
        )
    return sum(rewards) / len(rewards) if rewards else None


# States: what some estimators also read from a trajectory


def with_states(trajectory: Trajectory, *, key: str | None) -> Episode:
    """The episode with a name of the state before each turn, for GiGPO.

    With a key, that is `turn.info[key]` of the turn before, as JSON; None (a state of its own) if the turn before has no such
    entry. The first turns of a group are in the same state. Without a key, the name is the text of the messages that the model
    received since its last turn; None if it received none.

    Raises Failed if there is a key, the trajectory has several turns, and none of the turns before the last has such an entry.
    """
    turns = trajectory.turns
    if key is None:
        return replace(episode_of(trajectory), states_T=[_observation(trajectory, turn) for turn in turns])
    _need_entry(
        turns[:-1],
        key,
        agent=trajectory.agent,
        rule=f"credit.name=gigpo with credit.state_key={key} needs the name of the state after at least one turn before the last",
        fix="or remove credit.state_key to compare the messages that the model received",
    )
    names = [None if key not in turn.info else _json(turn.info[key]) for turn in turns]
    return replace(episode_of(trajectory), states_T=["first turn", *names[:-1]][: len(names)])


def with_potentials(trajectory: Trajectory, *, key: str) -> Episode:
    """The episode with `turn.info[key]`, the score of the state after each turn; None where it is missing or None.

    Raises Failed if a score is not a finite number, and if no turn has such an entry. Turns that a limit has cut do not need it:
    the environment does not see them.
    """
    _need_entry(
        [turn for turn in trajectory.turns if turn.finish_reason != "length"],
        key,
        agent=trajectory.agent,
        rule="credit.name=turn_potential needs the score of the state after at least one turn, or None for no score",
        fix="or set credit.key to the key that the environment uses",
    )
    return replace(episode_of(trajectory), potentials_T=[_potential(turn, key) for turn in trajectory.turns])


def _need_entry(turns: Sequence[Turn], key: str, *, agent: str, rule: str, fix: str) -> None:
    """Raises Failed if there are turns, and none has an entry `turn.info[key]`. `agent` is the agent that took them, if any."""
    by = f"in the next turn of the agent {agent!r}: turn" if agent else "Reply"
    if turns and all(key not in turn.info for turn in turns):
        present = ", ".join(sorted({repr(name) for turn in turns for name in turn.info})) or "none"
        raise Failed(
            Failure(
                "reward",
                f"no turn has an entry turn.info[{key!r}] (other entries: {present:.200}); {rule}. Let the environment set the "
                f"entry ({by}(info={{{key!r}: ...}})), {fix}",
            )
        )


def _observation(trajectory: Trajectory, turn: Turn) -> str | None:
    """The messages between the model's last turn and this turn, as JSON. None if there are none, or if they are not known."""
    if turn.message_index is None:
        return None
    histories: Sequence[Sequence[Message]] = [*trajectory.previous_histories, trajectory.messages]
    prompt = histories[turn.history][: turn.message_index]
    if turn.index == 0:
        return _json(list(prompt))
    last = max((n for n, message in enumerate(prompt) if message["role"] == "assistant"), default=-1)
    received = list(prompt[last + 1 :])
    return _json(received) if received else None


def _json(value: Any) -> str:
    # an object without a JSON type, such as an image, is equal to itself only
    with boundary("reward"):
        return json.dumps(value, sort_keys=True, default=lambda other: f"{type(other).__name__} {id(other)}")


def _potential(turn: Turn, key: str) -> float | None:
    value = turn.info.get(key)
    return None if value is None else finite_number(f"turn.info[{key!r}] of turn {turn.index}", value)


# Statistics that the estimators share

EPSILON = 1e-6
"""Added to a standard deviation before a division."""


def width(values: Sequence[float]) -> float:
    """The standard deviation of the sample (divisor n - 1) plus 1e-6; 1 if the values are equal or fewer than two."""
    return 1.0 if len(values) < 2 or equal_rewards(values) else statistics.stdev(values) + EPSILON


def divisors(values: Sequence[Sequence[float]], scale: Scale) -> list[float]:
    """The divisor of each group, for the values of each group that are compared."""
    if scale == "batch":
        return [width([value for group in values for value in group])] * len(values)
    return [width(group) if scale == "std" else 1.0 for group in values]


def centred(values: Sequence[float]) -> list[float]:
    """The values minus their mean; zeros if they are equal or fewer than two."""
    if len(values) < 2 or equal_rewards(values):
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    return [value - mean for value in values]


def leave_one_out(values: Sequence[float]) -> list[float]:
    """Each value minus the mean of the other values; zeros if they are equal or fewer than two."""
    count = len(values)
    return [value * count / max(count - 1, 1) for value in centred(values)]


def whitening(values: Sequence[float], counts: Sequence[int]) -> tuple[float, float]:
    """The mean of the values, and the factor `1 / sqrt(variance + 1e-8)`, where value number n occurs `counts[n]` times.

    The variance is that of the sample. The factor is 0 if the values are equal or fewer than two: whitened values are then 0.
    """
    present = [(value, count) for value, count in zip(values, counts, strict=True) if count]
    number = sum(count for _, count in present)
    if number < 2 or equal_rewards([value for value, _ in present]):
        return 0.0, 0.0
    mean = math.fsum(value * count for value, count in present) / number
    variance = math.fsum(count * (value - mean) ** 2 for value, count in present) / (number - 1)
    return mean, (variance + 1e-8) ** -0.5


def return_to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    """For each reward, the sum of itself and the rewards after it, discounted by `gamma` for each step.

    Example: `return_to_go([1.0, 0.0, 2.0], 0.5)` is `[1.5, 1.0, 2.0]`.
    """
    returns: list[float] = []
    following = 0.0
    for reward in reversed(rewards):
        following = reward + gamma * following
        returns.append(following)
    return returns[::-1]
