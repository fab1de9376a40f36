"""What each rank computes of a micro-batch that several ranks compute together: the ranks of a set (`cluster.mesh`).

With `tensor`, the ranks have the same tokens and hidden states, and share the targets out. With `context` (context parallelism),
each has a part of the tokens: activations of layers are those of a part, and only attention and layers with a state need the
other ranks. Attention gathers their keys and values for its own queries, and gathers them again for the backward pass, in which
each rank gets the gradient of its own keys added up (as the all-gather variant of Llama 3, arXiv 2407.21783, section 3.3.2). A
layer with a state gathers hidden states in the same way, and each rank computes all tokens of it (`Tree.with_all_tokens`). A row
is cut into two pieces for each rank, the n-th from its start and the n-th from its end, because later tokens see more keys. What
a token sees is said by runs and contexts (`tree.py`), so sequences, packed rows, prefix trees and sliding windows are cut alike.

Each target is computed by one rank, and all ranks get its values: losses see all targets of a micro-batch, and the gradient of a
value goes to the rank that computed it. So gradients are parts, which are added up as those of other micro-batches.

Knows micro-batches, places and process groups. Does not know models or losses. Axis suffixes are those of batch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist

from turnwise.models.transfer import Move
from turnwise.training.batch import MicroBatch
from turnwise.training.sharded.ranks import Mesh
from turnwise.training.tree import FlatRun, KeyExchange, Tree, WholeRow

# Targets: each is computed by one rank


@dataclass(frozen=True, slots=True)
class _Divided:
    """Numbers that are divided among the ranks of a set."""

    own_C: torch.Tensor
    """Those of this rank, in ascending order."""
    order: torch.Tensor
    """Those of all ranks, one rank after the other."""
    counts: Sequence[int]
    """How many each rank has."""

    @classmethod
    def of(cls, owner: np.ndarray, rank: int, ranks: int) -> _Divided:
        """The numbers from 0 on, of which `owner` has the rank of each."""
        order, counts = np.argsort(owner, kind="stable"), np.bincount(owner, minlength=ranks)
        own = order[counts[:rank].sum() :][: counts[rank]]
        return cls(torch.from_numpy(own), torch.from_numpy(order), counts.tolist())

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        return replace(self, own_C=move(self.own_C), order=move(self.order))


@dataclass(frozen=True, slots=True)
class SetShare:
    """The `Share` of a rank in a micro-batch of its set."""

    of_predictions: _Divided
    of_targets: _Divided
    output_N: torch.Tensor
    """For each own target, its prediction among the own predictions."""
    mesh: Mesh

    def moved(self, move: Move) -> Self:
        """The same with other tensors (`Movable.moved`)."""
        return replace(
            self,
            of_predictions=self.of_predictions.moved(move),
            of_targets=self.of_targets.moved(move),
            output_N=move(self.output_N),
        )

    def places(self, *, each: bool) -> tuple[torch.Tensor | None, torch.Tensor]:
        """See `Share.places`."""
        return (self.output_N, self.of_targets.own_C) if each else (None, self.of_predictions.own_C)

    def joined(self, value_C: torch.Tensor, *, each: bool) -> torch.Tensor:
        """See `Share.joined`."""
        return _Joined.apply(value_C, self.of_targets if each else self.of_predictions, self.mesh.together)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """See `Share.total`."""
        return values if self.mesh.context is None else _Total.apply(values, self.mesh.context.get_group())


class _Joined(torch.autograd.Function):
    """The values of all ranks of a set."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, divided: _Divided, together: Any) -> torch.Tensor:
        ctx.own_C = divided.own_C
        padded = values.new_zeros(
            (max(divided.counts), *values.shape[1:]), dtype=torch.uint8 if values.dtype == torch.bool else values.dtype
        )
        padded[: len(values)] = values
        gathered = [torch.empty_like(padded) for _ in divided.counts]
        dist.all_gather(gathered, padded, group=together.get_group())
        found = torch.cat([one[:count] for one, count in zip(gathered, divided.counts, strict=True)]).to(values.dtype)
        return torch.empty_like(found).index_copy_(0, divided.order, found)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0][ctx.own_C], None, None


class _Total(torch.autograd.Function):
    """The sum over the ranks of a group, each of which has the gradient of its part."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


# Tokens: each rank has two pieces of the row


class _Keys:
    """The `KeyExchange` of the ranks that have parts of a row."""

    def __init__(self, group: Any, ranks: int) -> None:
        self._group, self._ranks = group, ranks

    def gathered(self, key_TJD: torch.Tensor) -> torch.Tensor:
        """See `KeyExchange.gathered`."""
        found = key_TJD.new_empty((self._ranks * len(key_TJD), *key_TJD.shape[1:]))
        dist.all_gather_into_tensor(found, key_TJD.contiguous(), group=self._group)
        return found

    def summed(self, gradient_KJD: torch.Tensor) -> torch.Tensor:
        """See `KeyExchange.summed`. Added up in float32 at least."""
        dtype = torch.promote_types(gradient_KJD.dtype, torch.float32)
        total = gradient_KJD.new_empty((len(gradient_KJD) // self._ranks, *gradient_KJD.shape[1:]), dtype=dtype)
        dist.reduce_scatter_tensor(total, gradient_KJD.to(dtype).contiguous(), group=self._group)
        return total.to(gradient_KJD.dtype)


@dataclass(frozen=True, slots=True)
class Cut:
    """A row of `tokens` tokens in two pieces for each of `ranks` ranks.

    Example: 7 tokens on 2 ranks: rank 0 has the places `0 1 6 7`, rank 1 has `2 3 4 5`; place 7 is padding.
    """

    tokens: int
    ranks: int

    @property
    def piece(self) -> int:
        """Tokens of a piece."""
        return -(-self.tokens // (2 * self.ranks))

    @property
    def padding(self) -> int:
        """How many places at the end of the row have no token."""
        return 2 * self.ranks * self.piece - self.tokens

    def places(self, rank: int) -> np.ndarray:
        """The places of a rank's tokens, in the order in which it has them."""
        starts = (rank * self.piece, (2 * self.ranks - 1 - rank) * self.piece)
        return np.concatenate([np.arange(start, start + self.piece) for start in starts])

    def key_of(self, place: np.ndarray) -> np.ndarray:
        """The number of a place among the tokens of all ranks, one rank after the other."""
        piece, late = place // self.piece, place >= self.ranks * self.piece
        rank = np.where(late, 2 * self.ranks - 1 - piece, piece)
        return 2 * self.piece * rank + place % self.piece + np.where(late, self.piece, 0)

    def tree(self, runs: Sequence[FlatRun], rank: int, exchange: KeyExchange) -> Tree:
        """The tree of a rank's tokens, of the row's `runs`."""
        padding = [FlatRun(self.tokens, self.padding, np.empty(0, dtype=np.int64))] if self.padding else []
        every = [*runs, *padding]
        key_T = torch.from_numpy(self.key_of(np.arange(self.tokens + self.padding)))
        whole = WholeRow(every, key_T, torch.from_numpy(self.places(rank)))
        return Tree.of(self._runs(every, rank), first_key=2 * self.piece * rank, exchange=exchange, whole=whole)

    def _runs(self, every: Sequence[FlatRun], rank: int) -> list[FlatRun]:
        """The runs of a rank's tokens: `start` is a place among these, `context` has numbers of `key_of`."""
        own: list[FlatRun] = []
        for offset, first in ((0, rank * self.piece), (self.piece, (2 * self.ranks - 1 - rank) * self.piece)):
            for run in every:
                start, stop = max(run.start, first), min(run.start + run.length, first + self.piece)
                if start < stop:
                    before = np.concatenate([run.context, np.arange(run.start, start)])
                    own.append(FlatRun(offset + start - first, stop - start, self.key_of(before)))
        return own


def own_part(micro: MicroBatch[Any], mesh: Mesh) -> MicroBatch[Any]:
    """What this rank computes of a micro-batch on the CPU: all of it if no other rank computes the same."""
    if mesh.together is None:
        return micro
    owner_U = np.zeros(len(micro.row_U), dtype=np.int64)
    if mesh.context is not None:
        cut = Cut(micro.token_ids_BL.numel(), mesh.context.size())
        key_U = cut.key_of((micro.row_U * micro.token_ids_BL.shape[1] + micro.column_U).numpy())
        owner_U = key_U // (2 * cut.piece)
        micro = _own_tokens(micro, mesh, cut)
        micro = replace(micro, row_U=torch.zeros_like(micro.row_U), column_U=torch.from_numpy(key_U % (2 * cut.piece)))
    if mesh.tensor is not None:  # equal shares of the predictions of the same tokens
        tensor = mesh.tensor.size()
        for owner in np.unique(owner_U):
            (own,) = np.nonzero(owner_U == owner)
            owner_U[own] = -1 - (owner * tensor + np.arange(len(own)) * tensor // len(own))
        owner_U = -1 - owner_U
    rank, ranks = mesh.together.get_local_rank(), mesh.together.size()
    of_predictions = _Divided.of(owner_U, rank, ranks)
    prediction_N = micro.prediction_N.numpy()
    of_targets = _Divided.of(owner_U[prediction_N], rank, ranks)
    number_U = np.zeros(len(owner_U), dtype=np.int64)
    number_U[of_predictions.own_C.numpy()] = np.arange(len(of_predictions.own_C))
    output_N = torch.from_numpy(number_U[prediction_N[of_targets.own_C.numpy()]])
    return replace(
        micro,
        row_U=micro.row_U[of_predictions.own_C],
        column_U=micro.column_U[of_predictions.own_C],
        share=SetShare(of_predictions, of_targets, output_N, mesh),
    )


def _own_tokens(micro: MicroBatch[Any], mesh: Mesh, cut: Cut) -> MicroBatch[Any]:
    """The micro-batch with this rank's tokens in one row, or with whole rows and the places of its tokens if these have images:
    each rank computes all images, and the gradient of a feature is that of its own tokens. Predictions are unchanged."""
    assert mesh.context is not None
    rank, (rows, length) = mesh.context.get_local_rank(), micro.token_ids_BL.shape
    place_T = torch.from_numpy(cut.places(rank))
    missing_T = place_T >= cut.tokens
    place_T = place_T.clamp_max(cut.tokens - 1)

    def own(column_T: torch.Tensor, padding: int) -> torch.Tensor:
        found_T = column_T[place_T]
        found_T[missing_T] = padding
        return found_T

    empty = np.empty(0, dtype=np.int64)
    runs = micro.tree.runs if micro.tree else [FlatRun(row * length, length, empty) for row in range(rows)]
    exchange = _Keys(mesh.context.get_group(), cut.ranks)
    whole = bool(micro.media_B)
    return replace(
        micro,
        token_ids_BL=micro.token_ids_BL if whole else own(micro.token_ids_BL.flatten(), 0)[None],
        position_BL=micro.position_BL if whole else own(micro.position_BL.flatten(), 0)[None],
        own_T=place_T if whole else None,
        tree=cut.tree(runs, rank, exchange),
        count_T=own(micro.count_T, 0),
        routes_TLK=None if micro.routes_TLK is None else own(micro.routes_TLK, -1),
    )
