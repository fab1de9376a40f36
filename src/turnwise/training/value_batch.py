"""Packs trajectories for the critic: a state is the sequence before a sampled token, and its value is read before that token.

An estimator needs the value before each turn or before each sampled token. The states of a trajectory are in the order of its
turns; within a turn, in the order of its sampled tokens in the segments. A turn without sampled tokens has no state. The
log-probabilities of all sampled tokens are computed on the same batches (`Learner.logprobs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, Self, TypeVar

import numpy as np
import torch

from turnwise.models.grammar import AllowedColumn
from turnwise.models.transfer import Move, to_host
from turnwise.training.batch import Columns, MicroBatch, pack_sequences, routes_of
from turnwise.types import Media, Trajectory

__all__ = [
    "StateBatch",
    "StatePlaces",
    "StateSequence",
    "ValueBatch",
    "ValuePacking",
    "ValueTargets",
    "by_turn",
    "pack_state_sequences",
    "pack_states",
    "pack_value_targets",
    "set_values",
    "token_sequences",
]


@dataclass(frozen=True, slots=True)
class StatePlaces:
    """Where the estimates of a micro-batch belong: the numbers of its states, in the order of all states of the batch."""

    place_N: torch.Tensor

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        return replace(self, place_N=move(self.place_N))


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTargets:
    """What the critic is trained on: columns with an entry for each of the N states of a micro-batch."""

    old_value_N: torch.Tensor
    """The critic's estimate from before the update, with which the advantages were computed."""
    return_N: torch.Tensor
    """The number that the estimate should be (`Trajectory.returns`)."""
    weight_N: torch.Tensor
    """The share of the state in the average: the weight of its turn, divided by the sum over the batch."""

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        moved = {column.name: move(getattr(self, column.name)) for column in fields(self)}
        return replace(self, **moved)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """States whose values are computed."""

    micro_batches: list[MicroBatch[StatePlaces]]
    states: int
    """The number of states."""

    def in_order(self, results: Sequence[torch.Tensor]) -> list[float]:
        """Numbers [N] of the states of each micro-batch, in the order of the states; 0 for micro-batches without a result."""
        result_S = torch.zeros(self.states, dtype=torch.float64)
        for micro, result_N in zip(self.micro_batches, to_host(results), strict=False):
            result_S[micro.targets.place_N] = result_N.double()
        return result_S.tolist()

    def rows_in_order(self, results: Sequence[torch.Tensor], width: int) -> torch.Tensor:
        """The same for rows [N, X] of numbers, as a float64 tensor [S, X]."""
        result_SX = torch.zeros((self.states, width), dtype=torch.float64)
        for micro, result_NX in zip(self.micro_batches, to_host(results), strict=False):
            result_SX[micro.targets.place_N] = result_NX.double()
        return result_SX


@dataclass(frozen=True, slots=True)
class ValueBatch:
    """The data of one optimizer step of the critic."""

    micro_batches: list[MicroBatch[ValueTargets]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuePacking:
    """How trajectories are packed for a critic."""

    level: Literal["turn", "token"]
    """Whether there is a value before each turn, or before each sampled token."""
    micro_batch_tokens: int
    parallel: int = 1
    """How many micro-batches are computed at the same time."""
    share_prompts: bool = True


@dataclass(frozen=True, slots=True)
class StateSequence:
    """A segment up to its last state, with the numbers of its states in the batch."""

    token_ids: np.ndarray
    is_target: np.ndarray
    """Whether there is a state before the token."""
    media: Sequence[Media]
    places: np.ndarray
    routes: np.ndarray | None = None
    """The experts of each token, for log-probabilities of the policy."""
    copies: int = 1
    allowed: AllowedColumn | None = None


def pack_states(trajectories: Sequence[Trajectory], packing: ValuePacking, *, with_routes: bool = False) -> StateBatch:
    """Pack all states of the trajectories, also those of turns that are not trained on: estimators need their values.

    `with_routes`: with the experts of their tokens, for log-probabilities of the policy.
    """
    sequences: list[StateSequence] = []
    states = 0
    for trajectory in trajectories:
        places, count = _numbered(trajectory, packing.level)
        sequences += _sequences(trajectory, places, offset=states, with_routes=with_routes)
        states += count
    return pack_state_sequences(sequences, states, packing)


def pack_state_sequences(sequences: Sequence[StateSequence], states: int, packing: ValuePacking) -> StateBatch:
    """Pack sequences that have some of `states` states."""

    def columns(part: Sequence[StateSequence]) -> StatePlaces:
        return StatePlaces(torch.from_numpy(np.concatenate([sequence.places for sequence in part])))

    return StateBatch(_packed(sequences, columns, packing), states)


def token_sequences(trajectories: Sequence[Trajectory]) -> Iterator[tuple[int, list[StateSequence], int]]:
    """Of each trajectory: the number of its first state, its segments with a state before each trained token, and the number of
    its states. The numbers are those of `by_turn`, in which all sampled tokens have a state."""
    offset = 0
    for trajectory in trajectories:
        places, count = _numbered(trajectory, "token")
        trained = np.repeat([turn.weight > 0 for turn in trajectory.turns], _counts(trajectory, "token"))
        yield offset, list(_sequences(trajectory, places, offset=offset, included=trained)), count
        offset += count


def pack_value_targets(trajectories: Sequence[Trajectory], packing: ValuePacking) -> ValueBatch:
    """Pack the states that the critic is trained on: those of turns with a weight, in trajectories with `returns`.

    Raises ValueError if `values` or `returns` have another number of entries than the trajectory has states.
    """
    sequences: list[StateSequence] = []
    values, returns, weights = [], [], []
    states = 0
    for trajectory in trajectories:
        if not trajectory.returns:
            continue
        places, count = _numbered(trajectory, packing.level)
        counts = _counts(trajectory, packing.level)
        weight = np.repeat([turn.weight for turn in trajectory.turns], counts)
        sequences += _sequences(trajectory, places, offset=states, included=weight > 0)
        values.append(_flat(trajectory, "values", trajectory.values, counts))
        returns.append(_flat(trajectory, "returns", trajectory.returns, counts))
        weights.append(weight)
        states += count
    if not sequences:
        return ValueBatch([])
    value_S, return_S, weight_S = (np.concatenate(column) for column in (values, returns, weights))
    # the sum is that of the batch, so the division into micro-batches does not change the loss
    weight_S = weight_S / weight_S.sum()

    def columns(part: Sequence[StateSequence]) -> ValueTargets:
        places = np.concatenate([sequence.places for sequence in part])
        old_value_N, return_N, weight_N = (
            torch.from_numpy(column_S[places].astype(np.float32)) for column_S in (value_S, return_S, weight_S)
        )
        return ValueTargets(old_value_N=old_value_N, return_N=return_N, weight_N=weight_N)

    return ValueBatch(_packed(sequences, columns, packing))


def set_values(trajectories: Sequence[Trajectory], values: Sequence[float], level: Literal["turn", "token"]) -> None:
    """Set `Trajectory.values` from the values of all states, in the order of `pack_states`.

    With one value for each turn, a turn without sampled tokens has the value before the next turn that has tokens, because the
    model sampled nothing in between; 0 after the last.
    """
    for trajectory, turns in zip(trajectories, by_turn(trajectories, values, level), strict=True):
        if level == "token":
            trajectory.values = list(turns)
            continue
        # backwards: values [[0.5], [], [0.2], []] become 0.5 0.2 0.2 0
        following = 0.0
        entries: list[float | Sequence[float]] = []
        for turn in reversed(turns):
            following = turn[0] if turn else following
            entries.append(following)
        trajectory.values = entries[::-1]


V = TypeVar("V")


def by_turn(
    trajectories: Sequence[Trajectory], values: Sequence[V], level: Literal["turn", "token"] = "token"
) -> list[list[list[V]]]:
    """The values of all states, in the order of `pack_states`, as lists for each trajectory and turn."""
    numbers = iter(values)
    return [
        [[next(numbers) for _ in range(count)] for count in _counts(trajectory, level)] for trajectory in trajectories
    ]


def _counts(trajectory: Trajectory, level: Literal["turn", "token"]) -> list[int]:
    """The number of states of each turn."""
    counts = np.zeros(len(trajectory.turns), dtype=np.int64)
    for segment in trajectory.segments:
        turn = np.array(segment.turn, dtype=np.int64)
        counts += np.bincount(turn[turn >= 0], minlength=len(counts))
    return [int(count) if level == "token" else min(int(count), 1) for count in counts]


def _numbered(trajectory: Trajectory, level: Literal["turn", "token"]) -> tuple[list[np.ndarray], int]:
    """For each segment, the number of the state before each token in the trajectory, -1 where there is none; and their count."""
    # A turn can be divided among segments, and segments can have the turns in any order, so each turn has its own counter. Two
    # segments, of which the second continues turn 0 after turn 1, and . is a token that the model did not sample:
    #     turn   . 0 0 . 1 1 1    . 0        counts   token: 3 3   turn: 1 1
    #     place, level token   . 0 1 . 3 4 5    . 2
    #     place, level turn    . 0 . . 1 . .    . .
    # Invariant: the numbers of a trajectory are 0 to count - 1, in the order of its turns, as in `by_turn`.
    counts = _counts(trajectory, level)
    following = np.concatenate([[0], np.cumsum(counts)])  # the number of the next state of each turn
    ends = following[1:].copy()
    places: list[np.ndarray] = []
    for segment in trajectory.segments:
        place = np.full(len(segment.turn), -1, dtype=np.int64)
        for index, turn in enumerate(segment.turn):
            if turn >= 0 and following[turn] < ends[turn]:
                place[index] = following[turn]
                following[turn] += 1
        places.append(place)
    return places, int(ends[-1]) if len(ends) else 0


def _sequences(
    trajectory: Trajectory,
    places: Sequence[np.ndarray],
    *,
    offset: int,
    included: np.ndarray | None = None,
    with_routes: bool = False,
) -> Iterator[StateSequence]:
    """The segments that have states. `included` has an entry for each state of the trajectory; None includes all."""
    for segment, place in zip(trajectory.segments, places, strict=True):
        is_target = place >= 0
        if included is not None:
            is_target[is_target] = included[place[is_target]]
        targets = np.flatnonzero(is_target)
        if not len(targets):
            continue
        end = int(targets[-1]) + 1  # no state is after the last target
        yield StateSequence(
            token_ids=np.array(segment.token_ids[:end], dtype=np.int64),
            is_target=is_target[:end],
            media=[media for media in segment.media if media.start < end],
            places=place[targets] + offset,
            routes=routes_of(segment, end) if with_routes else None,
        )


def _packed(
    sequences: Sequence[StateSequence],
    columns: Callable[[Sequence[StateSequence]], Columns],
    packing: ValuePacking,
) -> list[MicroBatch[Columns]]:
    return pack_sequences(
        sequences,
        columns,
        micro_batch_tokens=packing.micro_batch_tokens,
        parallel=packing.parallel,
        share_prompts=packing.share_prompts,
    )


def _flat(
    trajectory: Trajectory, name: str, entries: Sequence[float | Sequence[float]], counts: Sequence[int]
) -> np.ndarray:
    """The numbers of all states of a trajectory, from an entry for each turn.

    Raises ValueError if an entry has another length than its turn has states.
    """
    numbers: list[float] = []
    for turn, (entry, count) in enumerate(zip(entries, counts, strict=True)):
        of_turn = [entry] * min(count, 1) if isinstance(entry, float | int) else list(entry)
        if len(of_turn) != count:
            raise ValueError(
                f"trajectory {trajectory.id}: turn {turn} has {count} states and {len(of_turn)} numbers in Trajectory.{name}"
            )
        numbers += of_turn
    return np.array(numbers, dtype=np.float64)
