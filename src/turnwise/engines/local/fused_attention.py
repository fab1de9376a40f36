"""Attention of the fused pass, over the rows of the KV cache: one token of each row, or a chunk of a prompt.

Axes: R rows from the first to the last that is decoded, H query heads, K key-value heads, G = H / K query heads for each of
them, J = R * K, L tokens of a row, P tokens of a shared prefix, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from turnwise.engines.local.prefix_index import SharedPrefix

__all__ = ["AttentionDims", "DecodeAttention", "PrefillAttention"]

LONG_ROWS_READS = 3000
"""Keys that must be saved for long rows to be computed separately: a second call costs as much as reading these (measured)."""
_COPIED_READS = 2
"""A key that is copied before it is read costs as much as this number of keys that are read."""


@dataclass(frozen=True, slots=True)
class AttentionDims:
    """The dimensions of a model's attention, and where its tensors are."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    device: torch.device

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        """The array on the model's device."""
        return torch.from_numpy(values).to(self.device)

    def mask(self, hidden: np.ndarray) -> torch.Tensor:
        """An additive mask: -inf where `hidden` is true, 0 elsewhere."""
        zeros = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill_(self.tensor(hidden), -torch.inf)


class DecodeAttention:
    """Attention of one token of each row, computed over the range of rows from the first to the last.

    The keys and values of a shared prefix are read once for the rows of a group, from the first of these rows (cascade
    attention): a decode step is limited by how much of the cache it reads. If a few rows are much longer than the others, they
    are computed separately, so that the other rows are not padded to their length.
    """

    def __init__(self, dims: AttentionDims, rows_B: np.ndarray, positions_B: np.ndarray, shared: SharedPrefix) -> None:
        self._dims = dims
        self._num_rows = int(rows_B[-1]) + 1
        self._rows = None if self._num_rows == len(rows_B) else dims.tensor(rows_B)
        self._start = shared.tokens
        self._prefix = _Prefix.of_batch(dims, shared, rows_B, self._num_rows) if shared.tokens else None
        lengths_B = positions_B + 1
        self._length = _main_length(lengths_B, self._num_rows, self._start)
        long_B = lengths_B > self._length
        self._long = None
        if long_B.any():
            self._long = _LongRows(dims, rows_B, lengths_B, long_B, shared)
        self._mask_R1L = None
        if lengths_B.min() < self._length:
            lengths_R = np.zeros(self._num_rows, dtype=np.int64)
            lengths_R[rows_B] = lengths_B
            hidden_RL = np.arange(self._start, self._length) >= lengths_R[:, None]
            # rows in between that are not decoded are computed too: with everything hidden they would give NaN
            hidden_RL[lengths_R == 0] = False
            self._mask_R1L = dims.mask(hidden_RL).unsqueeze(1)

    def __call__(self, kv: torch.Tensor, q_BHD: torch.Tensor) -> torch.Tensor:
        """The attention output [B, H * D]. `kv` is the cache tensor [2, rows, K, capacity, D] of the layer."""
        dims = self._dims
        q_BHD = q_BHD * dims.scale
        q_RHD = q_BHD
        if self._rows is not None:
            q_RHD = q_BHD.new_zeros(self._num_rows, *q_BHD.shape[1:]).index_copy_(0, self._rows, q_BHD)
        output_RD = _attend(dims, q_RHD, self._own(kv), self._mask_R1L, kv, self._prefix)
        output_BD = output_RD if self._rows is None else output_RD.index_select(0, self._rows)
        if self._long is None:
            return output_BD
        return self._long.replace(output_BD, kv, q_BHD)

    def _own(self, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows' own keys [J, D, L] and values [J, L, D]: views, made in one operation each."""
        _, rows, heads, capacity, dim = kv.shape
        size, length, row = self._num_rows * heads, self._length - self._start, capacity * dim
        start = kv.storage_offset() + self._start * dim
        keys_JDL = kv.as_strided((size, dim, length), (row, 1, dim), start)
        values_JLD = kv.as_strided((size, length, dim), (row, dim, 1), start + rows * heads * row)
        return keys_JDL, values_JLD


class _Prefix:
    """A shared prefix of R rows, whose keys and values [K, P, D] are read from one row for each group.

    `members` has for each group the row to read from, and the places of the group's rows among the R rows. The queries of all
    rows of a group for one key-value head are one matrix. Groups of similar size are padded to n rows and computed in one call:
    copying the keys of N groups next to each other for that takes less time than N calls.
    """

    def __init__(
        self, dims: AttentionDims, tokens: int, members: Sequence[tuple[int, np.ndarray]], num_rows: int
    ) -> None:
        self._dims, self._tokens = dims, tokens
        self._order, self._place = None, None
        if len(members) == 1:
            self._calls = [([members[0][0]], num_rows)]
            return
        self._calls = []
        orders: list[np.ndarray] = []
        for together in _of_similar_size(members):
            longest = len(together[0][1])
            self._calls.append(([row for row, _ in together], len(together) * longest))
            orders += [np.resize(places, longest) for _, places in together]  # padded with rows of the same group
        order_M = np.concatenate(orders)
        if len(order_M) != num_rows or (order_M != np.arange(num_rows)).any():
            place_R = np.zeros(num_rows, dtype=np.int64)  # rows that are not decoded get the values of another row
            place_R[order_M] = np.arange(len(order_M))
            self._order, self._place = dims.tensor(order_M), dims.tensor(place_R)

    @classmethod
    def of_batch(cls, dims: AttentionDims, shared: SharedPrefix, rows_B: np.ndarray, num_rows: int) -> _Prefix:
        """The prefix of all requests of a step, whose R rows are the first `num_rows` rows of the cache."""
        members = [(int(rows_B[group[0]]), rows_B[group]) for group in shared.groups]
        return cls(dims, shared.tokens, members, num_rows)

    def scores(self, kv: torch.Tensor, q_JGD: torch.Tensor) -> torch.Tensor:
        """Products [J, G, P] of the queries with the keys."""
        return self._products(q_JGD, [keys.transpose(1, 2) for keys in self._of_calls(kv[0])])

    def outputs(self, kv: torch.Tensor, weights_JGP: torch.Tensor) -> torch.Tensor:
        """Products [J, G, D] of the attention weights with the values."""
        return self._products(weights_JGP, self._of_calls(kv[1]))

    def _of_calls(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """The keys or values [N * K, P, D] of the groups of each call."""
        of_groups = [[part[row, :, : self._tokens] for row in rows] for rows, _ in self._calls]
        return [groups[0] if len(groups) == 1 else torch.cat(groups) for groups in of_groups]

    def _products(self, left_JGX: torch.Tensor, right: Sequence[torch.Tensor]) -> torch.Tensor:
        """[J, G, Y]: one matrix product for each group and key-value head. `right` are [N * K, X, Y]."""
        heads, group = self._dims.kv_heads, left_JGX.shape[1]
        left_RKGX = left_JGX.view(-1, heads, *left_JGX.shape[1:])
        if self._order is not None:
            left_RKGX = left_RKGX.index_select(0, self._order)
        results: list[torch.Tensor] = []
        lefts = torch.split_with_sizes(left_RKGX, [rows for _, rows in self._calls])
        for left, right_EXY in zip(lefts, right, strict=True):
            count = len(right_EXY) // heads
            left_NKnGX = left.view(count, -1, *left.shape[1:]).transpose(1, 2)
            result_EMY = torch.bmm(left_NKnGX.reshape(right_EXY.size(0), -1, left.shape[-1]), right_EXY)
            result_NKnGY = result_EMY.view(count, heads, -1, group, result_EMY.shape[-1])
            results.append(result_NKnGY.transpose(1, 2).flatten(0, 1))
        result_RKGY = results[0] if len(results) == 1 else torch.cat(results)
        if self._place is not None:
            result_RKGY = result_RKGY.index_select(0, self._place)
        return result_RKGY.flatten(0, 1)


def _of_similar_size(members: Sequence[tuple[int, np.ndarray]]) -> list[list[tuple[int, np.ndarray]]]:
    """Groups together whose sizes differ by less than a factor of 2, the largest first."""
    together: list[list[tuple[int, np.ndarray]]] = []
    for member in sorted(members, key=lambda member: -len(member[1])):
        if not together or 2 * len(member[1]) <= len(together[-1][0][1]):
            together.append([])
        together[-1].append(member)
    return together


def _attend(
    dims: AttentionDims,
    q_RHD: torch.Tensor,
    own: tuple[torch.Tensor, torch.Tensor],
    mask_R1L: torch.Tensor | None,
    kv: torch.Tensor,
    prefix: _Prefix | None,
) -> torch.Tensor:
    """Attention [R, H * D] of one token of each of R rows, over each row's own keys [J, D, L] and values [J, L, D] and those
    of a shared prefix, which are in `kv`. The queries are scaled."""
    rows = len(q_RHD)
    q_JGD = q_RHD.view(rows * dims.kv_heads, -1, dims.head_dim)
    keys_JDL, values_JLD = own
    scores_JGL = torch.bmm(q_JGD, keys_JDL)
    if mask_R1L is not None:
        scores_JGL.view(rows, dims.heads, -1).add_(mask_R1L)
    if prefix is None:
        return torch.bmm(_softmax(scores_JGL), values_JLD).view(rows, -1)
    # one softmax over both parts
    weights_JGL = _softmax(torch.cat((prefix.scores(kv, q_JGD), scores_JGL), dim=-1))
    tokens = weights_JGL.shape[-1] - scores_JGL.shape[-1]
    output_JGD = torch.bmm(weights_JGL[:, :, tokens:], values_JLD)
    return output_JGD.add_(prefix.outputs(kv, weights_JGL[:, :, :tokens])).view(rows, -1)


def _main_length(lengths_B: np.ndarray, num_rows: int, prefix: int) -> int:
    """The number of tokens to which all rows are computed together. Longer rows are computed separately.

    It is the length of one of the rows, and the one with which the fewest keys are read.
    """
    longest = int(lengths_B.max())
    if (longest - int(lengths_B.min())) * num_rows < LONG_ROWS_READS:
        return longest
    sorted_B = np.sort(lengths_B)
    longer_B = len(sorted_B) - np.searchsorted(sorted_B, sorted_B, side="right")
    separate_B = longer_B * (longest - prefix) * (1 + _COPIED_READS) + LONG_ROWS_READS * (longer_B > 0)
    return int(sorted_B[(num_rows * (sorted_B - prefix) + separate_B).argmin()])


class _LongRows:
    """Attention of the rows that are longer than the others: n rows, whose keys and values are copied."""

    def __init__(
        self,
        dims: AttentionDims,
        rows_B: np.ndarray,
        lengths_B: np.ndarray,
        long_B: np.ndarray,
        shared: SharedPrefix,
    ) -> None:
        self._dims = dims
        self._places, self._rows = dims.tensor(np.flatnonzero(long_B)), dims.tensor(rows_B[long_B])
        lengths_n = lengths_B[long_B]
        self._start, self._length = shared.tokens, int(lengths_n.max())
        self._mask_n1L = dims.mask(np.arange(self._start, self._length) >= lengths_n[:, None]).unsqueeze(1)
        self._prefix = None
        if shared.tokens:
            place_B = long_B.cumsum() - 1
            long_of = [(int(rows_B[group[0]]), place_B[group[long_B[group]]]) for group in shared.groups]
            long_of = [(row, places) for row, places in long_of if len(places)]
            self._prefix = _Prefix(dims, shared.tokens, long_of, len(lengths_n))

    def replace(self, output_BD: torch.Tensor, kv: torch.Tensor, q_BHD: torch.Tensor) -> torch.Tensor:
        """The output [B, H * D] with the right values for the long rows. The queries are scaled."""
        keys_JLD, values_JLD = kv[:, self._rows, :, self._start : self._length].flatten(1, 2)
        q_nHD = q_BHD.index_select(0, self._places)
        own = keys_JLD.transpose(1, 2), values_JLD
        output_nD = _attend(self._dims, q_nHD, own, self._mask_n1L, kv, self._prefix)
        return output_BD.index_copy_(0, self._places, output_nD)


class PrefillAttention:
    """Causal attention of new tokens over their row: the tokens that are cached, and the new tokens before.

    Row by row, directly over the cache: nothing is gathered or padded.
    """

    def __init__(self, dims: AttentionDims, rows_N: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray) -> None:
        self._scale = dims.scale
        ends_N = starts_N + lengths_N
        self._rows = list(zip(rows_N.tolist(), ends_N.tolist(), lengths_N.tolist(), strict=True))
        self._masks = [_causal_mask(dims, *bounds) for bounds in zip(starts_N.tolist(), ends_N.tolist(), strict=True)]

    def __call__(self, kv: torch.Tensor, q_MHD: torch.Tensor) -> torch.Tensor:
        """The attention output [M, H * D] of each new token. `kv` is [2, rows, K, capacity, D]."""
        outputs = []
        queries = q_MHD.split([length for _, _, length in self._rows])
        for (row, end, _), mask_TL, q_THD in zip(self._rows, self._masks, queries, strict=True):
            keys_1KLD, values_1KLD = kv[:, row, :, :end].unsqueeze(1).unbind(0)
            output_1HTD = F.scaled_dot_product_attention(
                q_THD.transpose(0, 1).unsqueeze(0),
                keys_1KLD,
                values_1KLD,
                attn_mask=mask_TL,
                is_causal=mask_TL is None,
                scale=self._scale,
                enable_gqa=True,
            )
            outputs.append(output_1HTD[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def _causal_mask(dims: AttentionDims, start: int, end: int) -> torch.Tensor | None:
    """The additive mask [T, L] for new tokens from `start` to `end`; None if they begin the row (`is_causal` serves then)."""
    return None if start == 0 else dims.mask(np.arange(end) > np.arange(start, end)[:, None])


def _softmax(scores_JGL: torch.Tensor) -> torch.Tensor:
    if scores_JGL.dtype == torch.float32:
        return scores_JGL.softmax(dim=-1)
    return scores_JGL.softmax(dim=-1, dtype=torch.float32).to(scores_JGL.dtype)
