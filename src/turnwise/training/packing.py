"""Packs token sequences into micro-batches, which are the inputs of forward passes.

The sequences of a micro-batch form a *prefix tree*: tokens that several sequences have in common from the beginning are computed
once, whichever groups, trajectories or segments the sequences belong to. This includes sampled tokens: two conversations that
were sampled identically up to some token share all tokens before the difference. A token sees the tokens of its own sequence, at
the positions that they have in the sequence, so the result is that of separate rows (`tree.py`).

Some tokens of a sequence are targets. The caller gives the columns with a number for each target (`Targets` for the policy,
`ValueTargets` for the critic). This module does not read them.

Axis suffixes in this folder: B rows, L columns, N targets, U distinct predictions, T tokens of a flat row, D hidden dimension,
H heads, V vocabulary; in tree.py others, which are listed there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from turnwise.training.tree import FlatRow, Tree, shared_prefix
from turnwise.types import Media

__all__ = ["MicroBatch", "PackedSequence", "default_micro_batch_tokens", "pack_sequences"]

_CUT_TOKENS = 64
"""A further micro-batch costs as much as this number of tokens, besides the tokens that are in it."""
_CPU_TOKENS, _LARGE_CPU_TOKENS, _ACCELERATOR_TOKENS = 2048, 3072, 16384
"""Tokens of a forward pass where the recipe gives no number."""


class PackedSequence(Protocol):
    """A token sequence with targets."""

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens, up to the last target."""
        ...

    @property
    def is_target(self) -> np.ndarray:
        """Whether a token is a target: one entry for each token."""
        ...

    @property
    def media(self) -> Sequence[Media]:
        """The images and videos in the sequence."""
        ...


class TargetColumns(Protocol):
    """Tensors with one entry for each target."""

    def to(self, device: torch.device) -> Self:
        """The same on another device."""
        ...


Packed = TypeVar("Packed", bound=PackedSequence)
Columns = TypeVar("Columns", bound=TargetColumns)


@dataclass(frozen=True, slots=True)
class MicroBatch(Generic[Columns]):
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
    targets: Columns
    media_B: Sequence[Sequence[Media]] = ()
    """The images and videos in each row; empty if no row has any."""

    def to(self, device: torch.device) -> MicroBatch[Columns]:
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


def default_micro_batch_tokens(device: torch.device, *, large: bool = False) -> int:
    """Tokens of a forward pass where the recipe gives no number. `large`: of a large model, one micro-batch at a time."""
    on_cpu = _LARGE_CPU_TOKENS if large else _CPU_TOKENS
    return on_cpu if device.type == "cpu" else _ACCELERATOR_TOKENS


def pack_sequences(
    sequences: Sequence[Packed],
    targets: Callable[[Sequence[Packed]], Columns],
    *,
    micro_batch_tokens: int,
    parallel: int = 1,
    share_prompts: bool = True,
) -> list[MicroBatch[Columns]]:
    """Pack sequences into micro-batches of at most `micro_batch_tokens` tokens; a longer sequence is a micro-batch alone.

    `targets` gives the columns of the targets of some sequences, in the order of the sequences and their tokens. `parallel`
    micro-batches are computed at the same time: there are as many as keep all workers busy, of similar sizes. Sequences with
    images, and all sequences without `share_prompts`, are rows of their own.
    """
    shared = [sequence for sequence in sequences if share_prompts and not sequence.media]
    separate = [sequence for sequence in sequences if not share_prompts or sequence.media]
    return [
        *(_flat_row(part, targets(part)) for part in _divide(shared, micro_batch_tokens, parallel=parallel)),
        *(_padded_rows(part, targets(part)) for part in _by_length(separate, micro_batch_tokens)),
    ]


def _divide(sequences: Sequence[Packed], micro_batch_tokens: int, *, parallel: int) -> list[list[Packed]]:
    """Divide sequences into micro-batches, in lexicographic order: the largest micro-batch is the first.

    Neighbors share the longest prefixes in this order. If micro-batches are computed in parallel, the limit is lowered as far as
    their number allows, so that they have similar sizes and no worker waits for the last one.
    """
    # big-endian bytes sort as the token ids themselves
    ordered = sorted(sequences, key=lambda sequence: sequence.token_ids.astype(">i4").tobytes())
    if not ordered:
        return []
    lengths = np.array([len(sequence.token_ids) for sequence in ordered])
    neighbors = itertools.pairwise(sequence.token_ids for sequence in ordered)
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


def _by_length(sequences: Sequence[Packed], micro_batch_tokens: int) -> Iterator[list[Packed]]:
    """Sequences of similar length together, as many as fit into a micro-batch with their padding."""
    part: list[Packed] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.token_ids)):
        if part and (len(part) + 1) * len(part[0].token_ids) > micro_batch_tokens:
            yield part
            part = []
        part.append(sequence)
    if part:
        yield part


def _flat_row(sequences: Sequence[PackedSequence], targets: Columns) -> MicroBatch[Columns]:
    """A single row, in which each common prefix is present once. The sequences are in lexicographic order."""
    row = FlatRow.of([sequence.token_ids for sequence in sequences])
    column_N = np.concatenate([places[_columns(one)] for one, places in zip(sequences, row.places, strict=True)])
    token_N = _target_tokens(sequences)
    _, first_U, prediction_N = np.unique(column_N << 32 | token_N, return_index=True, return_inverse=True)
    return MicroBatch(
        token_ids_BL=torch.from_numpy(row.token_ids[None]),
        position_BL=torch.from_numpy(row.position[None]),
        tree=Tree.of(row.runs),
        row_U=torch.zeros(len(first_U), dtype=torch.int64),
        column_U=torch.from_numpy(column_N[first_U]),
        token_U=torch.from_numpy(token_N[first_U]),
        prediction_N=torch.from_numpy(prediction_N),
        targets=targets,
    )


def _padded_rows(sequences: Sequence[PackedSequence], targets: Columns) -> MicroBatch[Columns]:
    """A row for each sequence, padded on the right."""
    length = max(len(sequence.token_ids) for sequence in sequences)
    token_ids = np.zeros((len(sequences), length), dtype=np.int64)
    for row, sequence in zip(token_ids, sequences, strict=True):
        row[: len(sequence.token_ids)] = sequence.token_ids
    columns = [_columns(sequence) for sequence in sequences]
    token_N = _target_tokens(sequences)
    return MicroBatch(
        token_ids_BL=torch.from_numpy(token_ids),
        position_BL=torch.arange(length).expand(len(sequences), length),
        tree=None,
        row_U=torch.from_numpy(np.repeat(np.arange(len(sequences)), [len(column) for column in columns])),
        column_U=torch.from_numpy(np.concatenate(columns)),
        token_U=torch.from_numpy(token_N),
        prediction_N=torch.arange(len(token_N)),
        targets=targets,
        media_B=[sequence.media for sequence in sequences] if any(sequence.media for sequence in sequences) else (),
    )


def _columns(sequence: PackedSequence) -> np.ndarray:
    """The places that the targets are predicted from: each is the place of the token before the target."""
    return np.flatnonzero(sequence.is_target) - 1


def _target_tokens(sequences: Sequence[PackedSequence]) -> np.ndarray:
    return np.concatenate([sequence.token_ids[sequence.is_target] for sequence in sequences])
