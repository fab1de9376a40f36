"""The forward pass of Llama, Mistral, Qwen2 and Qwen3, written out over the rows of the KV cache.

It reads the model's own parameters, or copies: of the weights of linear layers, in bfloat16 with autocast (hidden states and
the output layer stay in float32) and in oneDNN's layout where that is faster (`models/cpu.py`), and of the norms of queries and
keys, which are joined. `reload_parameters` makes the copies again. A linear layer may have a LoRA adapter. Its product is added
to that of the layer, as in the model's own forward; the weights are not merged, because a merged bfloat16 weight would lose
most of a small adapter by rounding.

Supports these four architectures without variations (`unsupported_reason`); the generic pass runs all others, and is the
reference to which this pass is compared (`forward.py`). Does not know requests or sampling.

Axes: R rows from the first to the last that is decoded, H query heads, K key-value heads, G = H / K query heads for each of
them, J = R * K, L tokens of a row, P tokens of a shared prefix, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from turnwise.engines.local.cache import KVCache, KVShape, SharedPrefix, StateShape
from turnwise.models.cpu import PackedLayers, fewest_rows, is_packed, onednn_linear, packed_bytes
from turnwise.models.lora import LinearAdapter, linear_adapter
from turnwise.models.precision import Bfloat16Linears, additive_mask

# Attention: one token of each row, or a chunk of a prompt

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
        return additive_mask(self.tensor(hidden), self.dtype)


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
            grouped = mask_TL is None or q_THD.device.type == "cpu"
            if not grouped:  # no fast kernel of GPUs takes a mask together with grouped heads
                repeats = q_THD.shape[1] // keys_1KLD.shape[1]
                keys_1KLD, values_1KLD = (heads.repeat_interleave(repeats, dim=1) for heads in (keys_1KLD, values_1KLD))
            output_1HTD = F.scaled_dot_product_attention(
                q_THD.transpose(0, 1).unsqueeze(0),
                keys_1KLD,
                values_1KLD,
                attn_mask=mask_TL,
                is_causal=mask_TL is None,
                scale=self._scale,
                enable_gqa=grouped,
            )
            outputs.append(output_1HTD[0].transpose(0, 1).flatten(1))
        return torch.cat(outputs)


def _causal_mask(dims: AttentionDims, start: int, end: int) -> torch.Tensor | None:
    """The additive mask [T, L] for new tokens from `start` to `end`; None if they begin the row (`is_causal` serves then)."""
    if start == 0:
        return None
    key_L, query_T = torch.arange(end, device=dims.device), torch.arange(start, end, device=dims.device)
    return additive_mask(key_L > query_T[:, None], dims.dtype)


def _softmax(scores_JGL: torch.Tensor) -> torch.Tensor:
    if scores_JGL.dtype == torch.float32:
        return scores_JGL.softmax(dim=-1)
    return scores_JGL.softmax(dim=-1, dtype=torch.float32).to(scores_JGL.dtype)


# Parameters: references to the model's own, and copies that are packed or joined


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """A linear layer, with or without an adapter."""

    weight_IO: torch.Tensor
    """The weight [O, I], transposed: a view, or a copy of several weights."""
    bias: torch.Tensor | None
    adapter: LinearAdapter | None
    onednn_rows: int
    """The number of rows from which on oneDNN is faster."""
    onednn_weight: torch.Tensor
    """The weight for oneDNN: in its own layout, or as it is."""

    @classmethod
    def of(cls, module: Any, packed: PackedLayers | None) -> FusedLinear:
        """The parameters of `nn.Linear`, or of peft's layer around it."""
        adapter = linear_adapter(module)
        base = module if adapter is None else module.get_base_layer()
        weight = base.weight
        rows = fewest_rows(weight, packed=packed is not None)
        onednn_weight = packed.of(weight) if packed is not None and is_packed(weight) else weight
        return cls(weight.t(), base.bias, adapter, rows, onednn_weight)

    def __call__(self, values_MD: torch.Tensor) -> torch.Tensor:
        if values_MD.size(0) >= self.onednn_rows:
            result_MF = onednn_linear(values_MD, self.onednn_weight, self.bias)
        elif self.bias is None:  # as F.linear, in fewer operations
            result_MF = torch.mm(values_MD, self.weight_IO)
        else:
            result_MF = torch.addmm(self.bias, values_MD, self.weight_IO)
        adapter = self.adapter
        if adapter is None:
            return result_MF
        low_MR = F.linear(values_MD.to(adapter.down.dtype), adapter.down)
        return (result_MF + F.linear(low_MR, adapter.up) * adapter.scale).to(result_MF.dtype)


@dataclass(frozen=True, slots=True)
class FusedLinears:
    """Linear layers with the same input. Packed weights are one matrix, because one large product is faster than several."""

    parts: Sequence[FusedLinear]
    """The layers; only one, if they are one matrix."""
    sizes: Sequence[int]
    """The outputs of each layer."""

    @classmethod
    def of(cls, modules: Sequence[Any], packed: PackedLayers | None) -> FusedLinears:
        """The parameters of these layers."""
        sizes = [module.out_features for module in modules]
        weights, biases = [module.weight for module in modules], [module.bias for module in modules]
        plain = all(type(module) is torch.nn.Linear for module in modules)
        if packed is None or not plain or len({bias is None for bias in biases}) > 1 or not is_packed(*weights):
            return cls([FusedLinear.of(module, packed) for module in modules], sizes)
        bias = None if biases[0] is None else torch.cat([bias.detach() for bias in biases])
        rows, onednn_weight = fewest_rows(*weights, packed=True), packed.of(*weights)
        # large weights are left to oneDNN for any number of rows, and need no second copy
        weight_IO = onednn_weight if rows == 1 else torch.cat([weight.detach().t() for weight in weights], dim=1)
        return cls([FusedLinear(weight_IO, bias, None, rows, onednn_weight)], sizes)

    def joined(self, values_MD: torch.Tensor) -> torch.Tensor:
        """The results of all layers, one behind the other in each row."""
        results = [part(values_MD) for part in self.parts]
        return results[0] if len(results) == 1 else torch.cat(results, dim=1)

    def __call__(self, values_MD: torch.Tensor) -> Sequence[torch.Tensor]:
        """The result of each layer."""
        if len(self.parts) < len(self.sizes):
            return torch.split_with_sizes(self.parts[0](values_MD), self.sizes, 1)
        return [part(values_MD) for part in self.parts]


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """The parameters of one layer."""

    norm: torch.Tensor
    qkv: FusedLinears
    o: FusedLinear
    qk_norm: torch.Tensor | None
    """The weights [H + K, D] of the norms of queries and keys, if it has any."""
    mlp_norm: torch.Tensor
    gate_up: FusedLinears
    down: FusedLinear


@dataclass(frozen=True, slots=True)
class FusedParameters:
    """The parameters of the model: references, and copies of those that are packed or joined."""

    embedding: torch.Tensor
    layers: Sequence[FusedLayer]
    norm: torch.Tensor
    head: FusedLinear

    @classmethod
    def of(cls, model: PreTrainedModel, packed: PackedLayers | None = None) -> FusedParameters:
        """Look up the parameters of a model that the fused pass supports, and make the copies."""
        inner, has_qk_norm = model.model, isinstance(model, Qwen3ForCausalLM)
        layers = [
            FusedLayer(
                norm=layer.input_layernorm.weight,
                qkv=FusedLinears.of((layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj), packed),
                o=FusedLinear.of(layer.self_attn.o_proj, packed),
                qk_norm=_qk_norm(layer.self_attn, model.config) if has_qk_norm else None,
                mlp_norm=layer.post_attention_layernorm.weight,
                gate_up=FusedLinears.of((layer.mlp.gate_proj, layer.mlp.up_proj), packed),
                down=FusedLinear.of(layer.mlp.down_proj, packed),
            )
            for layer in inner.layers
        ]
        return cls(inner.embed_tokens.weight, layers, inner.norm.weight, FusedLinear.of(model.lm_head, packed))


def _qk_norm(attention: Any, config: Any) -> torch.Tensor:
    """The weights [H + K, D] of the norms of all heads, queries first."""
    q_norm_HD = attention.q_norm.weight.expand(config.num_attention_heads, -1)
    k_norm_KD = attention.k_norm.weight.expand(config.num_key_value_heads, -1)
    return torch.cat((q_norm_HD, k_norm_KD)).detach()


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


# The pass


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
            dtype=torch.bfloat16 if autocast else self._parameters.embedding.dtype,
            device=self._parameters.embedding.device,
        )
        self._rms_norm = _RMSNorm(config.rms_norm_eps, (attention.head_dim, config.hidden_size), model.device)
        self._rotary_table = (torch.zeros(0), torch.zeros(0))
        # (rows_B, shape of the cache tensors, flat index of the first token of each row) of the last decode step
        self._decode_index: tuple[np.ndarray, tuple[int, ...], torch.Tensor] | None = None

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        return ()

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


# Support: which models the pass can run

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the length of the sequence."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the fused pass cannot run this model; None if it can."""
    if type(model) not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(family.__name__ for family in FAMILIES)}"
    config = model.config
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if type(model) is MistralForCausalLM and config.sliding_window is not None:
        return f"it has a sliding window of {config.sliding_window} tokens"
    if type(model) in (Qwen2ForCausalLM, Qwen3ForCausalLM) and set(config.layer_types) != {"full_attention"}:
        return "some of its layers have a sliding window"
    if config.rope_parameters["rope_type"] not in STATIC_ROPE:
        return f"its rotary embedding of type {config.rope_parameters['rope_type']} depends on the length"
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    if any(type(module) is not nn.Linear and linear_adapter(module) is None for module in [*linears, model.lm_head]):
        return "its projections are neither plain linear layers nor such layers with a LoRA adapter (DoRA, quantised weights)"
    if type(model.model.embed_tokens) is not nn.Embedding:
        return "its embedding is not a plain embedding layer (an adapter)"
    return None
