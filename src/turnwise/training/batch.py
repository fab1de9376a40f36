"""Packs trajectories into micro-batches: each sampled token is one target, weighted by its share of the batch's average.

The sequences of a batch form a *prefix tree*: tokens that several sequences have in common from the beginning are computed
once, whichever groups, trajectories or segments the sequences belong to. This includes sampled tokens: two conversations that
were sampled identically up to some token share all tokens before the difference. A token sees the tokens of its own sequence, at
the positions that they have in the sequence, so the result is that of separate rows (`tree.py`).

The tokens to train on are a flat list of targets: which token, predicted from which column, with which advantage and which
weight. A sampled token that several sequences share is one *prediction* and several targets, each with its own advantage and
weight. The weights are those of the whole batch (normalizer.py), so the division into micro-batches changes memory use and never
the result.

Axis suffixes in this folder: B rows, L columns, N targets, U distinct predictions, T tokens of a flat row, D hidden dimension,
H heads, V vocabulary; in tree.py others, which are listed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from turnwise.training.branch import Branch, branches_of, logprob_kind
from turnwise.training.normalizer import token_shares, weight_sums
from turnwise.training.options import Normalization
from turnwise.training.targets import Targets
from turnwise.training.tree import FlatRow, Tree, shared_prefix
from turnwise.types import Failure, LogprobKind, Media, Trajectory

__all__ = ["Batch", "MicroBatch", "pack", "share_saved", "stale_without_logprobs"]

_OVER_TOKENS = Normalization("token")
_CUT_TOKENS = 64
"""A further micro-batch costs as much as this number of tokens, besides the tokens that are in it."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The input of one forward pass, and its N targets: either rows padded on the right, or one flat row of prefix trees.

    Example: prompt `P P`, completions `a b`, `a c` and `d`, as a tree::

        token_ids_BL = P P a b c d
        position_BL  = 0 1 2 3 3 2
        predictions:   a from column 1, d from column 1, b from column 2, c from column 2
        targets:       a b, a c, d: prediction_N = 0 2 0 3 1
    """

    token_ids_BL: torch.Tensor
    position_BL: torch.Tensor
    tree: Tree | None
    """The prefix trees of a flat row; None for padded rows."""
    row_U: torch.Tensor
    """The row of a prediction."""
    column_U: torch.Tensor
    """The column whose logits predict the token."""
    token_U: torch.Tensor
    """The token that is predicted. No two predictions are equal in row, column and token."""
    prediction_N: torch.Tensor
    """The prediction of each target: an index into the columns with the axis U."""
    targets: Targets
    media_B: Sequence[Sequence[Media]] = ()
    """The images and videos in each row; empty if no row has any."""

    def to(self, device: torch.device) -> MicroBatch:
        """The same on another device."""
        return MicroBatch(
            token_ids_BL=self.token_ids_BL.to(device),
            position_BL=self.position_BL.to(device),
            tree=None if self.tree is None else self.tree.to(device),
            row_U=self.row_U.to(device),
            column_U=self.column_U.to(device),
            token_U=self.token_U.to(device),
            prediction_N=self.prediction_N.to(device),
            targets=self.targets.to(device),
            media_B=self.media_B,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """The data of one optimizer step."""

    micro_batches: list[MicroBatch]
    trajectories: int
    """Trajectories that count in the average, including those without a gradient."""
    tokens: int
    """Sampled tokens of those trajectories in turns with a weight above 0."""
    sequence_tokens: int
    """Tokens of the sequences in the forward pass, each sequence up to its last target."""
    computed_tokens: int
    """The same, where a prefix that sequences of a micro-batch share is counted once. Padding is not counted."""


def share_saved(batches: Sequence[Batch]) -> float:
    """The share of the sequences' tokens that are not computed, because sequences of a micro-batch share prefixes."""
    tokens = sum(batch.sequence_tokens for batch in batches)
    return 1 - sum(batch.computed_tokens for batch in batches) / tokens if tokens else 0.0


def pack(
    trajectories: Sequence[Trajectory],
    *,
    normalization: Normalization = _OVER_TOKENS,
    micro_batch_tokens: int = 8192,
    parallel: int = 1,
    share_prompts: bool = True,
    keep_zero: bool = False,
    kinds: Collection[LogprobKind] = (LogprobKind.SAMPLED,),
) -> Batch:
    """Pack the trajectories that have advantages.

    `normalization` sets how the loss is averaged (`normalizer.token_shares`): over tokens, which count by the weight of their
    turn, over segments or over trajectories, which then all count the same, or divided by a constant for each trajectory.

    Trajectories whose advantages are all zero count in the average, but are not in the forward pass, because their gradient
    is zero; `keep_zero` keeps them in, for losses with further terms. Sequences of a group with equal tokens and equal
    advantages are one sequence, at the weight of all of them.

    `parallel` micro-batches are computed at the same time: there are as many as keep all workers busy, of similar sizes.

    `kinds` are the kinds of log-probability that the loss can use (`BatchRequirements.logprob_kinds`); those of other kinds
    are dropped, and `Targets.known_N` is false for their tokens.

    Turns of weight 0 (`Turn.weight`) are excluded from numerator and denominator of the average: with them in the denominator,
    the size of the gradient would depend on how much of a conversation is masked. Advantages of 0 stay in the denominator:
    without them, the other tokens would count more the fewer tokens have an advantage. Tokens of weight 0 are no targets. They
    are context, and are not computed behind the last target.

    Raises ValueError if an advantage per token has another length than its turn has sampled tokens, or if the normalizer would
    divide by 0.
    """
    weighted = [(trajectory, *weight_sums(trajectory)) for trajectory in trajectories if trajectory.advantages]
    counted = [(trajectory, sums) for trajectory, sums, _ in weighted if any(sums)]
    shares = token_shares([sums for _, sums in counted], normalization)
    sequence_numbers = itertools.count()
    branches: list[tuple[str, Branch]] = []
    for (trajectory, _), shares_of_segments in zip(counted, shares, strict=True):
        if not keep_zero and not any(turn.weight and trajectory.has_advantage(turn.index) for turn in trajectory.turns):
            continue
        for branch in branches_of(trajectory, kinds, shares_of_segments, sequence_numbers):
            branches.append((trajectory.group, branch))
    merged = _merge_equal(branches)
    shared = [branch for branch in merged if share_prompts and not branch.media]
    separate = [branch for branch in merged if not share_prompts or branch.media]
    micro_batches = [
        *(_flat_row(part) for part in _divide(shared, micro_batch_tokens, parallel=parallel)),
        *(_padded_rows(part) for part in _by_length(separate, micro_batch_tokens)),
    ]
    return Batch(
        micro_batches=micro_batches,
        trajectories=len(counted),
        tokens=sum(tokens for _, _, tokens in weighted),
        sequence_tokens=sum(len(branch.token_ids) for branch in merged),
        computed_tokens=sum(len(branch.token_ids) for branch in separate)
        + sum(micro.token_ids_BL.numel() for micro in micro_batches if micro.tree is not None),
    )


def stale_without_logprobs(trajectory: Trajectory, *, kinds: Collection[LogprobKind], version: int) -> Failure | None:
    """Why weights of this version cannot be trained on a trajectory, or None if they can.

    They cannot if its log-probabilities are of a kind that the loss cannot use, and older weights sampled its tokens, so that
    the log-probabilities can no longer be computed.
    """
    unknown = {turn.index: kind for turn in trajectory.turns if (kind := logprob_kind(trajectory, turn)) not in kinds}
    if not unknown:
        return None
    for segment in trajectory.segments:
        for turn, sampled_by in zip(segment.turn, segment.version, strict=True):
            if turn in unknown and sampled_by != version:
                return Failure(
                    "engine",
                    f"turn {turn} was sampled by weights of version {sampled_by}, is learnt from by version {version}, and "
                    f"has log-probabilities of the kind '{unknown[turn]}'; importance correction needs "
                    f"{' or '.join(sorted(kinds))}. Use an engine that reports them, or train.overlap=false",
                )
    return None


def _merge_equal(branches: Sequence[tuple[str, Branch]]) -> list[Branch]:
    """Branches (with their groups), where equal branches of a group are one, with the sum of their shares."""
    merged: dict[tuple[str, bytes], Branch] = {}
    for group, branch in branches:
        key = (group, branch.identity())
        equal = merged.get(key)
        merged[key] = branch if equal is None else replace(equal, share=equal.share + branch.share)
    return list(merged.values())


def _divide(branches: Sequence[Branch], micro_batch_tokens: int, *, parallel: int) -> list[list[Branch]]:
    """Divide branches into micro-batches, in lexicographic order: the largest micro-batch is the first.

    Neighbors share the longest prefixes in this order. If micro-batches are computed in parallel, the limit is lowered as far as
    their number allows, so that they have similar sizes and no worker waits for the last one.
    """
    # big-endian bytes sort as the token ids themselves
    ordered = sorted(branches, key=lambda branch: branch.token_ids.astype(">i4").tobytes())
    if not ordered:
        return []
    lengths = np.array([len(branch.token_ids) for branch in ordered])
    neighbors = itertools.pairwise(branch.token_ids for branch in ordered)
    shared = np.array([0, *(shared_prefix(*pair) for pair in neighbors)])
    cuts, sizes = _cut(lengths, shared, micro_batch_tokens)
    if parallel > 1 and int((lengths - shared).sum()) > parallel * _CUT_TOKENS:
        most = -(-len(sizes) // parallel) * parallel
        low, high = max(sizes) // (2 * parallel), max(sizes)
        while high - low > _CUT_TOKENS:
            middle = (low + high) // 2
            other_cuts, other_sizes = _cut(lengths, shared, middle)
            if len(other_sizes) <= most:
                cuts, sizes, high = other_cuts, other_sizes, min(middle, max(other_sizes))
            else:
                low = middle
    parts = [ordered[start:end] for start, end in itertools.pairwise(cuts)]
    return [parts[index] for index in sorted(range(len(parts)), key=lambda index: -sizes[index])]


def _cut(lengths: np.ndarray, shared: np.ndarray, limit: int) -> tuple[list[int], list[int]]:
    """Where to cut a row of sequences into micro-batches of at most `limit` tokens; a longer sequence is a micro-batch alone.

    `shared` are the tokens that each sequence shares with the sequence before it. Each cut computes the prefix at the cut a
    second time. The cuts are those with the smallest number of tokens in all micro-batches, by dynamic programming. Returns the
    cuts, from 0 to the number of sequences, and the tokens of each micro-batch.
    """
    # own[j] - own[i]: tokens of the sequences i to j - 1, without the prefixes that they share with the sequence before them
    own = np.concatenate([[0], np.cumsum(lengths - shared)])
    # a micro-batch of the sequences i to j - 1 has opening[i] + own[j] tokens
    opening = lengths - own[1:]
    cost = np.zeros(len(lengths) + 1, dtype=np.int64)
    before = np.zeros(len(lengths) + 1, dtype=np.int64)
    first = 0
    for end in range(1, len(lengths) + 1):
        while first < end - 1 and opening[first] + own[end] > limit:
            first += 1
        costs = cost[first:end] + opening[first:end]
        before[end] = first + int(costs.argmin())
        cost[end] = costs.min() + own[end] + _CUT_TOKENS
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(int(before[cuts[-1]]))
    cuts.reverse()
    return cuts, [int(opening[start] + own[end]) for start, end in itertools.pairwise(cuts)]


def _by_length(branches: Sequence[Branch], micro_batch_tokens: int) -> Iterator[list[Branch]]:
    """Branches of similar length together, as many as fit into a micro-batch with their padding."""
    part: list[Branch] = []
    for branch in sorted(branches, key=lambda branch: -len(branch.token_ids)):
        if part and (len(part) + 1) * len(part[0].token_ids) > micro_batch_tokens:
            yield part
            part = []
        part.append(branch)
    if part:
        yield part


def _flat_row(branches: list[Branch]) -> MicroBatch:
    """A single row, in which each common prefix is present once. The branches are in lexicographic order."""
    row = FlatRow.of([branch.token_ids for branch in branches])
    # a token is predicted from the token before it in its sequence
    columns = [
        places[np.flatnonzero(branch.is_target) - 1] for branch, places in zip(branches, row.places, strict=True)
    ]
    targets = _targets(branches)
    column_N = np.concatenate(columns)
    _, first_U, prediction_N = np.unique(
        column_N << 32 | targets.token_N.numpy(), return_index=True, return_inverse=True
    )
    return MicroBatch(
        token_ids_BL=torch.from_numpy(row.token_ids[None]),
        position_BL=torch.from_numpy(row.position[None]),
        tree=Tree.of(row.runs),
        row_U=torch.zeros(len(first_U), dtype=torch.int64),
        column_U=torch.from_numpy(column_N[first_U]),
        token_U=targets.token_N[torch.from_numpy(first_U)],
        prediction_N=torch.from_numpy(prediction_N),
        targets=targets,
    )


def _padded_rows(branches: list[Branch]) -> MicroBatch:
    """A row for each sequence, padded on the right."""
    length = max(len(branch.token_ids) for branch in branches)
    token_ids = np.zeros((len(branches), length), dtype=np.int64)
    for row, branch in zip(token_ids, branches, strict=True):
        row[: len(branch.token_ids)] = branch.token_ids
    columns = [np.flatnonzero(branch.is_target) - 1 for branch in branches]
    targets = _targets(branches)
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_BL=torch.arange(length).expand(len(branches), length),
        tree=None,
        row_U=torch.from_numpy(np.repeat(np.arange(len(branches)), [len(column) for column in columns])),
        column_U=torch.from_numpy(np.concatenate(columns)),
        token_U=targets.token_N,
        prediction_N=torch.arange(len(targets.token_N)),
        targets=targets,
        media_B=[branch.media for branch in branches] if any(branch.media for branch in branches) else (),
    )


def _targets(branches: Sequence[Branch]) -> Targets:
    """The targets of all branches, in their order."""

    def column(values: Callable[[Branch], np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate([values(branch)[branch.is_target] for branch in branches]))

    return Targets(
        token_N=column(lambda branch: branch.token_ids),
        sequence_N=column(lambda branch: np.full(len(branch.turn), branch.number)),
        turn_N=column(lambda branch: branch.turn),
        version_N=column(lambda branch: branch.version),
        behaviour_logprob_N=column(lambda branch: branch.logprobs),
        known_N=column(lambda branch: branch.known),
        advantage_N=column(lambda branch: branch.advantages),
        weight_N=column(lambda branch: (branch.share * branch.weights).astype(np.float32)),
    )
