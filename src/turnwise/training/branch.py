"""One segment of a trajectory as numpy columns, up to its last target.

Knows how the turns of a trajectory (weight, advantage, kind of log-probability) become columns with an entry for each token.
Knows nothing of batches, averages or prefixes that are shared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from turnwise.types import LogprobKind, Media, Trajectory, Turn

__all__ = ["Branch", "branches_of", "logprob_kind"]


def logprob_kind(trajectory: Trajectory, turn: Turn) -> LogprobKind:
    """The kind of log-probability that the engine reported for a turn."""
    return turn.completion.logprob_kind if turn.completion is not None else trajectory.logprob_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One segment up to its last target, as numpy columns of equal length: one entry for each token."""

    token_ids: np.ndarray
    turn: np.ndarray
    version: np.ndarray
    logprobs: np.ndarray
    """0 where `known` is false."""
    known: np.ndarray
    """Whether the loss can use the log-probability of the token."""
    advantages: np.ndarray
    """0 where the token is no target."""
    weights: np.ndarray
    """Weight of the token's turn; 0 where the token is no target."""
    number: int
    """`Targets.sequence_N` of its tokens."""
    share: float
    """Share of a token of weight 1 in the batch's average."""
    sources: tuple[tuple[str, int], ...]
    """The segments that it stands for: the id of the trajectory, and the index of the segment."""
    media: Sequence[Media]

    @property
    def is_target(self) -> np.ndarray:
        """Whether the token is trained on."""
        return self.weights > 0

    def identity(self) -> bytes:
        """Equal for two branches that differ in nothing but the rounding of log-probabilities, so that one can stand for both."""
        # media by the tensors themselves: a group shares those of its prompt
        seen = np.array([(id(media.inputs), media.start) for media in self.media], dtype=np.int64)
        columns = (self.token_ids, self.turn, self.advantages, self.weights, self.version, self.known, seen)
        return b"".join(column.tobytes() for column in columns)


def branches_of(
    trajectory: Trajectory, kinds: Collection[LogprobKind], shares: Sequence[float], sequence_numbers: Iterator[int]
) -> Iterator[Branch]:
    """The segments of a trajectory that have targets. `shares`: `Branch.share` for each segment.

    Raises ValueError if an advantage per token has another length than its turn has sampled tokens.
    """
    turn_weights = np.array([turn.weight for turn in trajectory.turns], dtype=np.float64)
    known_turns = np.array([logprob_kind(trajectory, turn) in kinds for turn in trajectory.turns], dtype=bool)
    columns = zip(trajectory.segments, shares, _token_advantages(trajectory), strict=True)
    for index, (segment, share, advantages) in enumerate(columns):
        turn = np.array(segment.turn, dtype=np.int64)
        weights = np.where(turn >= 0, turn_weights[turn], 0.0)
        targets = np.flatnonzero(weights)
        if not len(targets):
            continue
        end = int(targets[-1]) + 1  # nothing is predicted from the tokens behind the last target
        turn, weights = turn[:end], weights[:end]
        known = known_turns[turn]
        logprobs = np.array(segment.logprobs[:end], dtype=np.float32)
        yield Branch(
            token_ids=np.array(segment.token_ids[:end], dtype=np.int64),
            turn=turn,
            version=np.array(segment.version[:end], dtype=np.int64),
            logprobs=np.where(known, logprobs, np.float32(0.0)),
            known=known,
            advantages=np.where(weights > 0, advantages[:end], np.float32(0.0)),
            weights=weights,
            number=next(sequence_numbers),
            share=share,
            sources=((trajectory.id, index),),
            media=[media for media in segment.media if media.start < end],
        )


def _token_advantages(trajectory: Trajectory) -> list[np.ndarray]:
    """The advantage of each token, a float32 column for each segment; 0 where the model did not sample the token.

    Raises ValueError if an entry of `advantages` is a sequence, and its turn has another number of sampled tokens.
    """
    turns = [np.array(segment.turn, dtype=np.int64) for segment in trajectory.segments]
    if all(isinstance(advantage, float | int) for advantage in trajectory.advantages):
        values = np.array(trajectory.advantages, dtype=np.float32)
        return [np.where(turn >= 0, values[turn], np.float32(0.0)) for turn in turns]
    columns = [np.zeros(len(turn), dtype=np.float32) for turn in turns]
    for index, advantage in enumerate(trajectory.advantages):
        places = [np.flatnonzero(turn == index) for turn in turns]
        count = sum(len(place) for place in places)
        values = np.array([advantage] * count if isinstance(advantage, float | int) else advantage, dtype=np.float32)
        if len(values) != count:
            raise ValueError(
                f"trajectory {trajectory.id}: turn {index} has {count} sampled tokens and {len(values)} advantages; an entry "
                f"of Trajectory.advantages is one number, or one number for each sampled token of the turn in the segments"
            )
        for column, place in zip(columns, places, strict=True):
            column[place], values = values[: len(place)], values[len(place) :]
    return columns
