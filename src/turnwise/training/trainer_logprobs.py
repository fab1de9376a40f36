"""Writes the trainer's log-probabilities into the segments of trajectories, beside those of the engine."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence

import numpy as np

from turnwise.training.batch import Batch
from turnwise.types import Segment, Trajectory

__all__ = ["set_trainer_logprobs"]


def set_trainer_logprobs(
    trajectories: Sequence[Trajectory], batches: Sequence[Batch], logprobs: Sequence[Mapping[int, np.ndarray]]
) -> None:
    """Set `Segment.trainer_logprobs` of the segments that were in a forward pass. `logprobs` are `UpdateStats.logprobs`.

    Raises ValueError if a sequence has another number of log-probabilities than its segment has targets.
    """
    by_id = {trajectory.id: trajectory for trajectory in trajectories}
    for batch, of_sequences in zip(batches, logprobs, strict=False):
        for sequence, values in of_sequences.items():
            for id, index in batch.sources[sequence]:
                trajectory = by_id[id]
                weights = np.array([turn.weight for turn in trajectory.turns])
                trajectory.segments[index].trainer_logprobs = _column(trajectory.segments[index], weights, values)


def _column(segment: Segment, turn_weights: np.ndarray, values: np.ndarray) -> array[float]:
    """A value for each token of the segment. The targets are the tokens of turns with a weight above 0."""
    turn = np.array(segment.turn, dtype=np.int64)
    column = np.where(turn >= 0, np.float32(math.nan), np.float32(0.0)).astype(np.float32)
    targets = np.flatnonzero((turn >= 0) & (turn_weights[turn] > 0))
    if len(targets) != len(values):
        raise ValueError(f"a segment has {len(targets)} targets and {len(values)} log-probabilities of the trainer")
    column[targets] = values
    return array("f", column.tobytes())
