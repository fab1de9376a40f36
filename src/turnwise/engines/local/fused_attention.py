"""Attention of the fused pass, over the rows of the KV cache: one token of each row, or a chunk of a prompt.

Axes: R rows from the first to the last that is decoded, H query heads, K key-value heads, G = H / K query heads for each of
them, J = R * K, L tokens of a row, P tokens of a common prefix, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["AttentionDims", "DecodeAttention", "PrefillAttention"]

SHARED_READS = 2500
"""Rows times common tokens from which on reading these once pays for the copies that it needs (measured)."""


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

    If all rows have a long common prefix, its keys and values are read once, from the first row, for all rows (cascade
    attention): a decode step is limited by how much of the cache it reads.
    """

    def __init__(self, dims: AttentionDims, rows_B: np.ndarray, positions_B: np.ndarray, common_prefix: int) -> None:
        self._dims = dims
        self._first_row = int(rows_B[0])
        self._num_rows = int(rows_B[-1]) + 1
        self._rows = None if self._num_rows == len(rows_B) else dims.tensor(rows_B)
        self._prefix = common_prefix if common_prefix * len(rows_B) >= SHARED_READS else 0
        self._length = int(positions_B.max()) + 1
        self._mask_R1L = None
        if positions_B.min() != positions_B.max():
            lengths_R = np.zeros(self._num_rows, dtype=np.int64)
            lengths_R[rows_B] = positions_B + 1
            hidden_RL = np.arange(self._prefix, self._length) >= lengths_R[:, None]
            # rows in between that are not decoded are computed too: with everything hidden they would give NaN
            hidden_RL[lengths_R == 0] = False
            self._mask_R1L = dims.mask(hidden_RL).unsqueeze(1)

    def __call__(self, kv: torch.Tensor, q_BHD: torch.Tensor) -> torch.Tensor:
        """The attention output [B, H * D]. `kv` is the cache tensor [2, rows, K, capacity, D] of the layer."""
        dims = self._dims
        q_BHD = q_BHD * dims.scale
        if self._rows is not None:
            q_BHD = q_BHD.new_zeros(self._num_rows, *q_BHD.shape[1:]).index_copy_(0, self._rows, q_BHD)
        q_JGD = q_BHD.view(self._num_rows * dims.kv_heads, -1, dims.head_dim)
        own = kv[:, : self._num_rows].flatten(1, 2)[:, :, self._prefix : self._length]
        scores_JGL = torch.bmm(q_JGD, own[0].transpose(1, 2))
        if self._mask_R1L is not None:
            scores_JGL.view(self._num_rows, dims.heads, -1).add_(self._mask_R1L)
        if self._prefix:
            output_JGD = self._cascade(kv[:, self._first_row, :, : self._prefix], q_JGD, scores_JGL, own[1])
        else:
            output_JGD = torch.bmm(_softmax(scores_JGL), own[1])
        output_RD = output_JGD.view(self._num_rows, dims.heads * dims.head_dim)
        return output_RD if self._rows is None else output_RD.index_select(0, self._rows)

    def _cascade(
        self, prefix: torch.Tensor, q_JGD: torch.Tensor, scores_JGL: torch.Tensor, values_JLD: torch.Tensor
    ) -> torch.Tensor:
        """One softmax over the common prefix and each row's own tokens; `prefix` is [2, K, P, D]."""
        scores_JGP = self._by_row(torch.bmm(self._by_head(q_JGD), prefix[0].transpose(1, 2)))
        weights_JGL = _softmax(torch.cat((scores_JGP, scores_JGL), dim=-1))
        weights_KMP = self._by_head(weights_JGL[:, :, : self._prefix])
        output_JGD = torch.bmm(weights_JGL[:, :, self._prefix :], values_JLD)
        return output_JGD.add_(self._by_row(torch.bmm(weights_KMP, prefix[1])))

    def _by_head(self, values_JGX: torch.Tensor) -> torch.Tensor:
        """[R * K, G, X] to [K, R * G, X]: the queries of all rows for one key-value head are one matrix."""
        values_RKGX = values_JGX.unflatten(0, (self._num_rows, self._dims.kv_heads))
        return values_RKGX.transpose(0, 1).reshape(self._dims.kv_heads, -1, values_JGX.shape[-1])

    def _by_row(self, values_KMX: torch.Tensor) -> torch.Tensor:
        """[K, R * G, X] to [R * K, G, X]."""
        values_KRGX = values_KMX.unflatten(1, (self._num_rows, -1))
        return values_KRGX.transpose(0, 1).flatten(0, 1)


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
