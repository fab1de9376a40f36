"""The forward pass of Llama, Mistral, Qwen2 and Qwen3, written out over the rows of the KV cache.

It reads the model's own parameters, or copies: of the weights of linear layers, in bfloat16 with autocast (hidden states and
the output layer stay in float32) and in oneDNN's layout where that is faster (`models/packed_weights.py`), and of the norms of
queries and keys, which are joined. `reload_parameters` makes the copies again.
Supports these four architectures without variations (`fused_support.unsupported_reason`); the generic pass runs all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from turnwise.engines.local.fused_attention import AttentionDims, DecodeAttention, PrefillAttention
from turnwise.engines.local.fused_parameters import FusedLayer, FusedParameters
from turnwise.engines.local.kv_cache import KVCache, KVShape
from turnwise.engines.local.prefix_index import SharedPrefix
from turnwise.models.autocast import Bfloat16Linears
from turnwise.models.packed_weights import PackedLayers, packed_bytes

__all__ = ["FusedForward"]


class _RMSNorm:
    """Root mean square norm, in few operations: a decode step of a small model spends most of its time in calls."""

    def __init__(self, eps: float, widths: Sequence[int], device: torch.device) -> None:
        self._eps = eps
        # for each width D: sqrt(D) and sqrt(D * eps)
        self._roots = {
            width: (torch.tensor(width**0.5, device=device), torch.tensor((width * eps) ** 0.5, device=device))
            for width in widths
        }

    def __call__(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if values.dtype != torch.float32:
            if weight.dim() == 1:
                return F.rms_norm(values, weight.shape, weight, self._eps)
            return F.rms_norm(values, values.shape[-1:], None, self._eps) * weight  # a weight for each head
        # x / sqrt(mean(x^2) + eps) = sqrt(D) * x / sqrt(sum(x^2) + D * eps), and that root is hypot(|x|, sqrt(D * eps)):
        # half as many operations. The division is one for each row; addcdiv over all values takes twice as long
        root_width, root_eps = self._roots[values.shape[-1]]
        root = torch.hypot(torch.linalg.vector_norm(values, dim=-1, keepdim=True), root_eps)
        return (values * torch.div(root_width, root)).mul_(weight)


class FusedForward:
    """Keys and values of a layer are one cache tensor [2, rows, kv heads, capacity, head dim].

    Axes: M tokens of all sequences of a prefill, B rows of a decode step, H query heads, K key-value heads, D head dimension
    (for `hidden` and `normed`: hidden size).
    """

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False) -> None:
        config = model.config
        attention = model.model.layers[0].self_attn
        self._copy = Bfloat16Linears(model) if autocast else None
        self._model: PreTrainedModel = model if self._copy is None else self._copy.model
        self._packed = PackedLayers() if self._copy is None and packed_bytes(self._model) else None
        self._parameters = FusedParameters.of(self._model, self._packed)
        self._dims = AttentionDims(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling,
            dtype=torch.bfloat16 if autocast else self._parameters.head.weight_IO.dtype,
            device=self._parameters.embedding.device,
        )
        self._rms_norm = _RMSNorm(config.rms_norm_eps, (attention.head_dim, config.hidden_size), model.device)
        self._rotary_table = (torch.zeros(0), torch.zeros(0))
        # (rows_B, shape of the cache tensors, flat index of the first token of each row) of the last decode step
        self._decode_index: tuple[np.ndarray, tuple[int, ...], torch.Tensor] | None = None

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        dims = self._dims
        return [KVShape(2, dims.kv_heads, dims.head_dim)] * len(self._parameters.layers)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._dims.dtype

    @contextmanager
    def inference(self) -> Iterator[None]:
        if self._copy is not None and self._copy.freed:
            self.reload_parameters(changed=False)
        with torch.inference_mode():
            yield

    def reload_parameters(self, *, changed: bool = True) -> None:
        if self._copy is not None:
            self._copy.refresh(force=changed)
        if changed and self._packed is not None:
            self._packed.clear()
        self._parameters = FusedParameters.of(self._model, self._packed)

    def free_copies(self) -> None:
        if self._copy is None and self._packed is None:
            return
        if self._copy is not None:
            self._copy.free()
        if self._packed is not None:
            self._packed.clear()
        self._parameters = FusedParameters.of(self._model)

    def prefill(self, kv: KVCache, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        # linear layers run on the M tokens of all sequences, one after the other, without padding
        sequence_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        offset_M = np.arange(len(sequence_M)) - np.repeat(lengths_N.cumsum() - lengths_N, lengths_N)
        positions_M = starts_N[sequence_M] + offset_M
        index_J = self._flat_index(kv, rows_N[sequence_M], positions_M).view(-1)
        cos_M1D, sin_M1D = self._rotary(kv.capacity, positions_M)
        attention = PrefillAttention(self._dims, rows_N, starts_N, lengths_N)
        token_ids_M = self._dims.tensor(np.concatenate(tokens_N).astype(np.int64))
        hidden_MD = F.embedding(token_ids_M, self._parameters.embedding)
        last = self._parameters.layers[-1]
        for layer, tensor in zip(self._parameters.layers, kv.tensors, strict=True):
            normed_MD = self._normed(hidden_MD, layer.norm)
            q_MHD, k_MKD, v_MKD = self._project(layer, normed_MD, cos_M1D, sin_M1D)
            self._write(tensor, index_J, k_MKD, v_MKD)
            if layer is last:  # only keys and values of the prompt are needed
                break
            hidden_MD = self._feed_forward(layer, hidden_MD + layer.o(attention(tensor, q_MHD)))

    def decode(
        self, kv: KVCache, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray, shared: SharedPrefix
    ) -> torch.Tensor:
        # steps with the same batch pass the same array of rows
        cached, shape = self._decode_index, tuple(kv.tensors[0].shape)
        if cached is None or cached[0] is not rows_B or cached[1] != shape:
            cached = self._decode_index = (rows_B, shape, self._flat_index(kv, rows_B, np.zeros_like(rows_B)))
        index_J = (cached[2] + self._dims.tensor(positions_B).unsqueeze(1)).view(-1)
        attention = DecodeAttention(self._dims, rows_B, positions_B, shared)
        cos_B1D, sin_B1D = self._rotary(kv.capacity, positions_B)
        hidden_BD = self._parameters.embedding.index_select(0, self._dims.tensor(tokens_B))
        for layer, tensor in zip(self._parameters.layers, kv.tensors, strict=True):
            q_BHD, k_BKD, v_BKD = self._project(layer, self._normed(hidden_BD, layer.norm), cos_B1D, sin_B1D)
            self._write(tensor, index_J, k_BKD, v_BKD)
            hidden_BD = self._feed_forward(layer, hidden_BD + layer.o(attention(tensor, q_BHD)))
        head = self._parameters.head
        return head(self._rms_norm(hidden_BD, self._parameters.norm).to(head.weight_IO.dtype)).float()

    def _project(
        self, layer: FusedLayer, normed_MD: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [M, H, D], keys and values [M, K, D]. Queries and keys are rotated; the scale is not applied.

        With autocast, queries and keys are normalized and rotated in float32, as in the model's own forward.
        """
        dims = self._dims
        num_rotated = dims.heads + dims.kv_heads
        qkv_MZD = layer.qkv.joined(normed_MD).view(normed_MD.size(0), -1, dims.head_dim)
        qk_MYD, v_MKD = qkv_MZD[:, :num_rotated], qkv_MZD[:, num_rotated:]
        if layer.qk_norm is not None:
            qk_MYD = self._rms_norm(qk_MYD.to(layer.qk_norm.dtype), layer.qk_norm)
        qk_MYD = _rotate(qk_MYD, cos_M1D, sin_M1D).to(dims.dtype)
        return qk_MYD[:, : dims.heads], qk_MYD[:, dims.heads :], v_MKD

    def _normed(self, hidden_MD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The normalized hidden states, in the dtype of the linear layers."""
        return self._rms_norm(hidden_MD, weight).to(self._dims.dtype)

    def _feed_forward(self, layer: FusedLayer, hidden_MD: torch.Tensor) -> torch.Tensor:
        normed_MD = self._normed(hidden_MD, layer.mlp_norm)
        gate_MF, up_MF = layer.gate_up(normed_MD)
        return hidden_MD + layer.down(F.silu(gate_MF).mul_(up_MF))

    def _write(self, tensor: torch.Tensor, index_J: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor) -> None:
        """Write keys and values to the cache tensor of a layer, seen as flat vectors [.., D]."""
        tensor.view(-1, self._dims.head_dim).index_copy_(0, index_J, torch.cat((k_MKD, v_MKD), 1).flatten(0, 1))

    def _flat_index(self, kv: KVCache, rows_M: np.ndarray, positions_M: np.ndarray) -> torch.Tensor:
        """Indices [M, 2K] of the keys and values of each token among the flat vectors of a cache tensor."""
        heads, capacity = self._dims.kv_heads, kv.capacity
        part_J = np.repeat(np.arange(2) * kv.num_rows * heads, heads) + np.tile(np.arange(heads), 2)
        return self._dims.tensor((rows_M[:, None] * heads + part_J) * capacity + positions_M[:, None])

    def _rotary(self, capacity: int, positions_M: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine [M, 1, D] of the model's own rotary embedding at these positions."""
        if len(self._rotary_table[0]) < capacity:
            embedding = self._parameters.embedding
            all_positions = torch.arange(capacity, device=embedding.device).unsqueeze(0)
            cos_1CD, sin_1CD = self._model.model.rotary_emb(embedding[:1], all_positions)
            # rotate_half is [-x2, x1]: with the minus sign in the sine, a roll of x is enough (`_rotate`)
            sin_1CD[..., : self._dims.head_dim // 2].neg_()
            self._rotary_table = cos_1CD[0].unsqueeze(1), sin_1CD[0].unsqueeze(1)
        positions = self._dims.tensor(positions_M)
        return self._rotary_table[0].index_select(0, positions), self._rotary_table[1].index_select(0, positions)


def _rotate(values_MHD: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(values_MHD * cos_M1D, values_MHD.roll(values_MHD.shape[-1] // 2, -1), sin_M1D)
