"""How the loss of a batch is averaged over its tokens.

The sum of a batch is divided by numbers of the batch (the batch of one optimizer step), so the division into micro-batches
does not change the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from turnwise.training.options import Normalization
from turnwise.types import Segment, Trajectory

__all__ = ["token_shares", "weight_sums"]


def weight_sums(trajectory: Trajectory) -> tuple[list[float], int]:
    """For each segment, the sum of the weights of its sampled tokens; and the number of tokens with a weight above 0."""
    # counted in the segments: the turn's completion still has the tokens that an environment removed (`Reply.resume`)
    weights = [turn.weight for turn in trajectory.turns]
    counts = [_counts(segment) for segment in trajectory.segments]
    sums = [float(sum(weights[turn] * count for turn, count in segment.items())) for segment in counts]
    return sums, sum(count for segment in counts for turn, count in segment.items() if weights[turn] > 0)


def token_shares(weight_sums: Sequence[Sequence[float]], normalization: Normalization) -> list[list[float]]:
    """The factor of a token of weight 1 in the loss, for each segment of each trajectory; 0 for segments without weight.

    `weight_sums` has the sum of the weights of the tokens of each segment, for each trajectory that counts in the average:

    - `token`: 1 / the sum of all weights.
    - `trajectory`: 1 / (the number of trajectories x the sum of the trajectory's weights).
    - `sequence`: 1 / (the number of segments with weight x the sum of the segment's weights).
    - `constant`: 1 / (the number of trajectories x `constant_length`). Dr. GRPO, arXiv 2503.20783.

    Example: two segments of 3 and 1 tokens in the first trajectory, one of 4 in the second, all tokens of weight 1::

        weight_sums = [[3, 1], [4]]    token: [[1/8, 1/8], [1/8]]    trajectory: [[1/8, 1/8], [1/8]]
        sequence: [[1/9, 1/3], [1/12]]    constant, length 10: [[1/20, 1/20], [1/20]]

    Raises ValueError if `constant` has no length above 0.
    """
    normalizer, constant_length = normalization.normalizer, normalization.constant_length
    if normalizer == "constant" and (constant_length is None or constant_length <= 0):
        raise ValueError(f"the normalizer 'constant' divides by constant_length={constant_length}: it must be above 0")
    trajectories = len(weight_sums)
    segments = sum(weight > 0 for sums in weight_sums for weight in sums)
    total = sum(weight for sums in weight_sums for weight in sums)

    def divisor(sums: Sequence[float], weight: float) -> float:
        if normalizer == "token":
            return total
        if normalizer == "trajectory":
            return trajectories * sum(sums)
        return segments * weight if normalizer == "sequence" else trajectories * float(constant_length or 0)

    return [[1.0 / divisor(sums, weight) if weight > 0 else 0.0 for weight in sums] for sums in weight_sums]


def _counts(segment: Segment) -> Counter[int]:
    counts = Counter(segment.turn)
    del counts[-1]  # tokens that the model did not sample
    return counts
