"""The forward pass of decoders with pre-normalization and gated feed-forward layers, written out over the rows of the cache.

`FAMILIES` lists them: Llama and others of its form, Qwen3.5, Qwen3-Next, LFM2, and hybrids of attention and Mamba 2, also with
both in one layer (Falcon-H1) and with one of attention, Mamba 2 and feed-forward in each (Nemotron-H). Their recurrent layers are
in `recurrent.py`; the modules of experts are the model's own. Of a vision model, it runs the text part.

It reads the model's own parameters, or copies: of the weights of linear layers, in bfloat16 with autocast (hidden states and
the output layer stay in float32) and in oneDNN's layout where that is faster (`models/cpu.py`), and of small ones that are joined
or computed. `reload_parameters` makes the copies again.

Supports these text parts without variations (`unsupported_reason`); the generic pass runs all others, and is the reference to
which this pass is compared (`forward.py`). Does not know requests or sampling.

Axes: R rows from the first to the last that is decoded, H query heads, K key-value heads, G = H / K query heads for each of
them, J = R * K, L tokens of a row, P tokens of a shared prefix, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from turnwise.engines.local.cache import KVCache, KVShape, SharedPrefix, StateShape
from turnwise.engines.local.linears import FusedLinear, FusedLinears, LayerSource, ModelRows, RMSNorm, SharedBase
from turnwise.engines.local.recurrent import (
    GatedDeltaRule,
    Mamba2,
    ManyTokens,
    OneToken,
    Recurrent,
    ShortConvolution,
    Tokens,
)
from turnwise.engines.local.row_cache import routed
from turnwise.models.cpu import PackedLayers, packed_bytes
from turnwise.models.lora import linear_adapter, shares_base
from turnwise.models.model_config import STATIC_ROPE
from turnwise.models.precision import Bfloat16Linears, additive_mask, in_evaluation
from turnwise.models.precision import autocast as bfloat16_autocast
from turnwise.models.transfer import from_arrays

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
        return self.tensors(values)[0]

    def tensors(self, *values: np.ndarray) -> list[torch.Tensor]:
        """Arrays on the model's device, in one copy."""
        return from_arrays(values, self.device)

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
class _Family:
    """Where the layers of an architecture have their parts."""

    qk_norms: tuple[str, str] | None = None
    """The norms of queries and keys."""
    gated: bool = False
    """Whether the output of attention is multiplied by a gate, which the projection of queries computes too."""
    centred: bool = False
    """Whether the factor of a norm is 1 + its weight."""
    recurrent: Callable[[Any, LayerSource, torch.dtype], Recurrent] | None = None
    """What computes a recurrent layer."""
    blocks: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {"input_layernorm": ("self_attn",), "post_attention_layernorm": ("mlp",)}
    )
    """The norms of a layer, in order, and the modules that read each; a layer need not have all of these modules."""
    last_norm: str = "norm"
    rotary: str | None = "rotary_emb"
    eps: str = "rms_norm_eps"
    output: str = "o_proj"
    feed_forward: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """The projection of gate and values may be one layer; without a gate, it is that of values, and the activation the squared
    ReLU."""
    ungated: bool = False


_QK = _Family(qk_norms=("q_norm", "k_norm"))
_GATED_DELTA = _Family(
    qk_norms=_QK.qk_norms,
    gated=True,
    centred=True,
    recurrent=GatedDeltaRule,
    blocks={"input_layernorm": ("self_attn", "linear_attn"), "post_attention_layernorm": ("mlp",)},
)
_SHORT_CONVOLUTION = _Family(
    qk_norms=("q_layernorm", "k_layernorm"),
    recurrent=ShortConvolution,
    blocks={"operator_norm": ("self_attn", "conv"), "ffn_norm": ("feed_forward",)},
    last_norm="embedding_norm",
    eps="norm_eps",
    output="out_proj",
    feed_forward=("w1", "w3", "w2"),
)
_MAMBA2 = _Family(
    recurrent=Mamba2,
    blocks={"input_layernorm": ("self_attn", "mamba"), "pre_ff_layernorm": ("feed_forward",)},
    last_norm="final_layernorm",
)
FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(
        ("LlamaModel", "MistralModel", "MixtralModel", "Qwen2Model", "Qwen2VLTextModel", "Qwen2_5_VLTextModel"),
        _Family(),
    ),
    **dict.fromkeys(("Qwen3Model", "Qwen3MoeModel", "Qwen3VLTextModel", "Qwen3VLMoeTextModel"), _QK),
    **dict.fromkeys(("Qwen3_5TextModel", "Qwen3_5MoeTextModel", "Qwen3NextModel"), _GATED_DELTA),
    "Lfm2Model": _SHORT_CONVOLUTION,
    "Lfm2MoeModel": replace(_SHORT_CONVOLUTION, rotary="pos_emb"),
    **dict.fromkeys(("BambaModel", "FalconH1Model"), _MAMBA2),
    "GraniteMoeHybridModel": _Family(
        recurrent=Mamba2,
        blocks={
            "input_layernorm": ("self_attn", "mamba"),
            "post_attention_layernorm": ("block_sparse_moe", "shared_mlp"),
        },
        feed_forward=("input_linear", "output_linear"),
    ),
    "NemotronHModel": _Family(
        recurrent=Mamba2,
        blocks={"norm": ("mixer",)},
        last_norm="norm_f",
        rotary=None,
        eps="layer_norm_epsilon",
        feed_forward=("up_proj", "down_proj"),
        ungated=True,
    ),
}
"""By the name of the class of the text part, in transformers: to import them all would take a third of a second."""


def _family(text: Any) -> _Family | None:
    """The layers of a text part; None if they are not known."""
    kind = type(text)
    return FAMILIES.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def text_part(model: PreTrainedModel) -> Any:
    """The decoder without its output layer; of a vision model, the part that reads text and the embeddings of images."""
    return model.get_decoder()


def _is_expert_block(module: nn.Module) -> bool:
    """Whether a module sends each token to some of its experts."""
    return "experts" in dict(module.named_children())


def _expert_blocks(text: Any) -> list[nn.Module]:
    return [module for layer in text.layers for module in layer.children() if _is_expert_block(module)]


def _attention_modules(text: Any) -> Iterator[Any]:
    return (module for layer in text.layers for module in layer.children() if _attends(module))


def _attends(module: nn.Module) -> bool:
    return "q_proj" in dict(module.named_children())


def fused_packed_bytes(model: PreTrainedModel) -> int:
    """The memory for the packed weights in the fused pass: 0 if they are not packed, or if it does not run this model."""
    if unsupported_reason(model) is not None:
        return 0
    text, head = text_part(model), model.get_output_embeddings()
    read = {head, *text.modules()} - {module for block in _expert_blocks(text) for module in block.modules()}
    return packed_bytes(model, without=set(model.modules()) - read)


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """The parameters of an attention layer."""

    qkv: FusedLinears
    o: FusedLinear
    qk_norm: torch.Tensor | None
    """The weights [H + K, D] of the norms of queries and keys, if it has any."""
    gated: bool
    """Whether the projection of queries computes the gate of each head after its query."""
    input_scale: float = 1.0
    """A factor of Falcon-H1."""


@dataclass(frozen=True, slots=True)
class FusedFeedForward:
    """The parameters of a feed-forward layer."""

    inputs: FusedLinears
    """The projections of gate and values, or of values only."""
    output: FusedLinear
    gate_scale: float = 1.0
    """A factor of Falcon-H1."""

    def __call__(self, normed_MD: torch.Tensor) -> torch.Tensor:
        """What the layer adds to the hidden states [M, D]."""
        gate_MF, *values = self.inputs(normed_MD)
        if not values:
            return self.output(F.relu(gate_MF).square())
        if self.gate_scale != 1.0:
            gate_MF = gate_MF * self.gate_scale
        return self.output(F.silu(gate_MF).mul_(values[0]))


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A part of a layer that reads normalized hidden states."""

    module: FusedAttention | Recurrent | FusedFeedForward | nn.Module
    scale: float = 1.0
    """A factor of its result (Falcon-H1)."""

    @property
    def keeps(self) -> bool:
        """Whether it keeps something of a token for later tokens."""
        return not isinstance(self.module, (FusedFeedForward, nn.Module))


@dataclass(frozen=True, slots=True)
class FusedBlock:
    """A norm, and the parts that read its result, whose sum is added to the hidden states. A layer is one block, or two."""

    norm: torch.Tensor
    parts: Sequence[FusedPart]


@dataclass(frozen=True, slots=True)
class FusedParameters:
    """The parameters of the model: references, and copies of those that are packed or joined."""

    embedding: torch.Tensor
    blocks: Sequence[FusedBlock]
    norm: torch.Tensor
    head: FusedLinear
    rotary: Callable[..., Any] | None
    """The model's rotary embedding."""

    @classmethod
    def of(cls, model: PreTrainedModel, source: LayerSource, dtype: torch.dtype) -> FusedParameters:
        """Look up the parameters of a model that the fused pass supports, and make the copies. `dtype` is that of hidden states
        between linear layers."""
        text = text_part(model)
        family = FAMILIES[type(text).__name__]
        blocks = [block for layer in text.layers for block in _blocks(layer, family, source, dtype)]
        norm = _norm(text.get_submodule(family.last_norm), family)
        head = FusedLinear.of(model.get_output_embeddings(), source)
        rotary = None if family.rotary is None else getattr(text, family.rotary)
        return cls(text.get_input_embeddings().weight, blocks, norm, head, rotary)

    @property
    def parts(self) -> Iterator[FusedPart]:
        """The parts of all layers, in order."""
        return (part for block in self.blocks for part in block.parts)

    @property
    def last_keeping(self) -> int:
        """The index of the last block with a part that keeps something of a token."""
        return max(index for index, block in enumerate(self.blocks) if any(part.keeps for part in block.parts))


def _blocks(layer: Any, family: _Family, source: LayerSource, dtype: torch.dtype) -> Iterator[FusedBlock]:
    children = dict(layer.named_children())
    for norm, names in family.blocks.items():
        parts = [_part(layer, children[name], family, source, dtype) for name in names if name in children]
        yield FusedBlock(_norm(children[norm], family), parts)


def _part(layer: Any, module: Any, family: _Family, source: LayerSource, dtype: torch.dtype) -> FusedPart:
    if _is_expert_block(module):
        return FusedPart(module)
    if _attends(module):
        qkv = FusedLinears.of((module.q_proj, module.k_proj, module.v_proj), source)
        output = FusedLinear.of(module.get_submodule(family.output), source)
        attention = FusedAttention(
            qkv, output, _qk_norm(module, family), family.gated, getattr(layer, "attention_in_multiplier", 1.0)
        )
        return FusedPart(attention, getattr(layer, "attn_out_multiplier", 1.0))
    if not {"conv", "conv1d"}.isdisjoint(dict(module.named_children())):
        assert family.recurrent is not None
        return FusedPart(family.recurrent(module, source, dtype), getattr(layer, "ssm_out_multiplier", 1.0))
    *inputs, output = (module.get_submodule(name) for name in family.feed_forward)
    if len(inputs) == 1:
        size = inputs[0].out_features
        sizes = [size] if family.ungated else [size // 2] * 2
        projections = FusedLinears([FusedLinear.of(inputs[0], source)], sizes)
    else:
        projections = FusedLinears.of(inputs, source)
    feed_forward = FusedFeedForward(
        projections, FusedLinear.of(output, source), getattr(module, "gate_multiplier", 1.0)
    )
    return FusedPart(feed_forward, getattr(module, "down_multiplier", 1.0))


def _norm(module: Any, family: _Family) -> torch.Tensor:
    """The factor of a norm; in float32 if it is computed, as the model's own."""
    return 1.0 + module.weight.detach().float() if family.centred else module.weight


def _qk_norm(attention: Any, family: _Family) -> torch.Tensor | None:
    """The weights [H + K, D] of the norms of all heads, queries first."""
    if family.qk_norms is None:
        return None
    q_norm_D, k_norm_D = (_norm(attention.get_submodule(name), family) for name in family.qk_norms)
    config = attention.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return torch.cat((q_norm_D.expand(heads, -1), k_norm_D.expand(kv_heads, -1))).detach()


@dataclass(frozen=True, slots=True)
class _Scales:
    """Factors of Granite and Falcon-H1, 1 in other models."""

    embedding: float
    residual: float
    logits: float
    """Logits are divided by it."""

    @classmethod
    def of(cls, config: Any) -> _Scales:
        embedding, residual, divisor, factor = (
            float(getattr(config, name, 1.0))
            for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "lm_head_multiplier")
        )
        return cls(embedding, residual, divisor / factor)


# The pass

_Rotary = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Pass:
    """What the layers of one pass share."""

    attention: DecodeAttention | PrefillAttention
    tokens: Tokens | None
    """The new tokens, for recurrent layers."""
    index_J: torch.Tensor
    """Where the keys and values of each token are written."""
    rotary: _Rotary | None
    """Cosine and sine of each token."""
    tensors: Iterator[torch.Tensor]
    """The keys and values of the next layers."""
    states: Iterator[torch.Tensor]
    """The states of the next layers."""


class FusedForward:
    """Keys and values of a layer are one cache tensor [2, rows, kv heads, capacity, head dim].

    Axes: M tokens of all sequences of a prefill, B rows of a decode step, H query heads, K key-value heads, D head dimension
    (for `hidden` and `normed`: hidden size).
    """

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False) -> None:
        config, text = model.config.get_text_config(), text_part(model)
        attention = next(_attention_modules(text))
        self.copy = Bfloat16Linears(model) if autocast else None
        """What has bfloat16 copies of weights, with autocast."""
        self._model: PreTrainedModel = model if self.copy is None else self.copy.model
        self._packed = PackedLayers() if self.copy is None and fused_packed_bytes(model) else None
        self._base = SharedBase(self._model, model, torch.bfloat16 if autocast else None)
        embedding = text.get_input_embeddings().weight
        self._dims = AttentionDims(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            scale=attention.scaling * getattr(attention, "key_multiplier", 1.0),
            dtype=torch.bfloat16 if autocast else embedding.dtype,
            device=embedding.device,
        )
        self._parameters = self._read(self._packed)
        self._scales = _Scales.of(config)
        eps: float = getattr(config, FAMILIES[type(text).__name__].eps)
        self._rms_norm = RMSNorm(eps, (attention.head_dim, config.hidden_size), embedding.device)
        self._rotary_table = (torch.zeros(0), torch.zeros(0))
        # (rows_B, shape of the cache tensors, flat index of the first token of each row) of the last decode step
        self._decode_index: tuple[np.ndarray, tuple[int, ...], torch.Tensor] | None = None

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        modules = [part.module for part in self._parameters.parts]
        others = (FusedAttention, FusedFeedForward, nn.Module)
        return [shape for module in modules if not isinstance(module, others) for shape in module.state_shapes]

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        dims = self._dims
        attending = [part for part in self._parameters.parts if isinstance(part.module, FusedAttention)]
        return [KVShape(2, dims.kv_heads, dims.head_dim)] * len(attending)

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._dims.dtype

    @contextmanager
    def inference(self) -> Iterator[None]:
        self.restore_copies()
        # what the pass computes itself has no other mode for training
        experts = [part.module for part in self._parameters.parts if isinstance(part.module, nn.Module)]
        with in_evaluation(*experts), torch.inference_mode():
            yield

    def restore_copies(self) -> None:
        """Make the copies of weights again if they were freed."""
        if self.copy is not None and self.copy.freed:
            self.reload_parameters(changed=False)

    def reload_parameters(self, *, changed: bool = True) -> None:
        if self.copy is not None:
            self.copy.refresh(force=changed)
        if changed and self._packed is not None:
            self._packed.clear()
        self._parameters = self._read(self._packed)

    def free_copies(self) -> None:
        if self.copy is None and self._packed is None:
            return
        if self.copy is not None:
            self.copy.free()
        if self._packed is not None:
            self._packed.clear()
        self._parameters = self._read(None)

    def _read(self, packed: PackedLayers | None) -> FusedParameters:
        return FusedParameters.of(self._model, LayerSource(packed, self._base), self._dims.dtype)

    def add_model(self, model: PreTrainedModel) -> bool:
        source = self._base.source
        if unsupported_reason(model) is not None or not shares_base(source, model):
            return False
        # the first model's modules of experts compute for all
        blocks = _expert_blocks(text_part(source)) + _expert_blocks(text_part(model))
        if any(linear_adapter(part) is not None for block in blocks for part in block.modules()):
            return False
        self._base.add(model)
        self.reload_parameters(changed=False)
        return True

    def of_models(self, models_M: np.ndarray) -> ModelRows | None:
        return None if self._base.count == 1 else ModelRows(models_M, self._dims.device)

    def prefill(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        models_N: np.ndarray | None = None,
        *,
        angles_M: np.ndarray | None = None,
    ) -> None:
        """See `CachedForward`. `angles_M`: positions for the rotary embedding, if they are not the index in the sequence."""
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        # linear layers run on the M tokens of all sequences, one after the other, without padding
        sequence_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        offset_M = np.arange(len(sequence_M)) - np.repeat(lengths_N.cumsum() - lengths_N, lengths_N)
        rows_M, positions_M = rows_N[sequence_M], starts_N[sequence_M] + offset_M
        self._base.rows = None if models_N is None else self.of_models(models_N[sequence_M])
        angles_M = positions_M if angles_M is None else angles_M
        index_MJ, angle_M, ids_M = self._dims.tensors(
            self._flat_index(kv, rows_M, positions_M), angles_M, np.concatenate(tokens_N).astype(np.int64)
        )
        now = _Pass(
            attention=PrefillAttention(self._dims, rows_N, starts_N, lengths_N),
            tokens=ManyTokens(rows_N, lengths_N, self._dims.device) if kv.states else None,
            index_J=index_MJ.view(-1),
            rotary=self._rotary(angle_M, max(kv.capacity, int(angles_M.max()) + 1)),
            tensors=iter(kv.tensors),
            states=iter(kv.states),
        )
        hidden_MD = self._embedded(ids_M)
        blocks = self._parameters.blocks
        # of the last block that keeps something, what it keeps is enough, unless experts are recorded
        last = self._parameters.last_keeping if kv.routes is None else len(blocks)
        with self._routed(kv, rows_M, positions_M):
            for index, block in enumerate(blocks[: last + 1]):
                hidden_MD = self._add(block, hidden_MD, now, only_cache=index == last)

    def decode(
        self,
        kv: KVCache,
        rows_B: np.ndarray,
        positions_B: np.ndarray,
        tokens_B: np.ndarray,
        shared: SharedPrefix,
        models: ModelRows | None = None,
        *,
        angles_B: np.ndarray | None = None,
    ) -> torch.Tensor:
        """See `CachedForward`, and `prefill`."""
        self._base.rows = models
        # steps with the same batch pass the same array of rows
        cached, shape = self._decode_index, tuple(kv.tensors[0].shape)
        if cached is None or cached[0] is not rows_B or cached[1] != shape:
            flat = self._dims.tensor(self._flat_index(kv, rows_B, np.zeros_like(rows_B)))
            cached = self._decode_index = (rows_B, shape, flat)
        angles_B = positions_B if angles_B is None else angles_B
        index_B, angle_B, ids_B = self._dims.tensors(positions_B, angles_B, tokens_B.astype(np.int64))
        now = _Pass(
            attention=DecodeAttention(self._dims, rows_B, positions_B, shared),
            tokens=OneToken(rows_B, self._dims.device) if kv.states else None,
            index_J=(cached[2] + index_B.unsqueeze(1)).view(-1),
            rotary=self._rotary(angle_B, max(kv.capacity, int(angles_B.max()) + 1)),
            tensors=iter(kv.tensors),
            states=iter(kv.states),
        )
        hidden_BD = self._embedded(ids_B)
        with self._routed(kv, rows_B, positions_B):
            for block in self._parameters.blocks:
                hidden_BD = self._add(block, hidden_BD, now)
        head = self._parameters.head
        normed_BD = self._rms_norm(hidden_BD, self._parameters.norm)
        logits_BV = head(normed_BD.to(head.weight_IO.dtype)).float()
        return logits_BV if self._scales.logits == 1.0 else logits_BV.div_(self._scales.logits)

    def _embedded(self, ids_M: torch.Tensor) -> torch.Tensor:
        hidden_MD = self._parameters.embedding.index_select(0, ids_M)
        return hidden_MD if self._scales.embedding == 1.0 else hidden_MD.mul_(self._scales.embedding)

    def _add(self, block: FusedBlock, hidden_MD: torch.Tensor, now: _Pass, *, only_cache: bool = False) -> torch.Tensor:
        """The hidden states [M, D] after a block. `only_cache`: only what it keeps is needed."""
        normed_MD = self._rms_norm(hidden_MD, block.norm)
        for part in block.parts:
            output_MD = self._output(part.module, normed_MD, now, only_cache=only_cache)
            hidden_MD = torch.add(hidden_MD, output_MD, alpha=self._scales.residual * part.scale)
        return hidden_MD

    def _output(
        self,
        module: FusedAttention | Recurrent | FusedFeedForward | nn.Module,
        normed_MD: torch.Tensor,
        now: _Pass,
        *,
        only_cache: bool,
    ) -> torch.Tensor:
        """What a part adds to the hidden states [M, D]."""
        if isinstance(module, nn.Module):
            with bfloat16_autocast(normed_MD.device, self.copy is not None):
                return module(normed_MD.unsqueeze(0))[0]
        normed_MD = normed_MD.to(self._dims.dtype)  # that of the linear layers
        if isinstance(module, FusedFeedForward):
            return module(normed_MD)
        if isinstance(module, FusedAttention):
            return self._attend(module, normed_MD, now, only_cache=only_cache)
        assert now.tokens is not None
        return module(normed_MD, [next(now.states) for _ in module.state_shapes], now.tokens)

    def _attend(self, layer: FusedAttention, normed_MD: torch.Tensor, now: _Pass, *, only_cache: bool) -> torch.Tensor:
        tensor = next(now.tensors)
        if layer.input_scale != 1.0:
            normed_MD = normed_MD * layer.input_scale
        q_MHD, gate_MHD, k_MKD, v_MKD = self._project(layer, normed_MD, now.rotary)
        self._write(tensor, now.index_J, k_MKD, v_MKD)
        if only_cache:
            return normed_MD
        output_MD = now.attention(tensor, q_MHD)
        return layer.o(output_MD if gate_MHD is None else output_MD * gate_MHD.sigmoid().flatten(1))

    def _project(
        self, layer: FusedAttention, normed_MD: torch.Tensor, rotary: _Rotary | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Queries [M, H, D], their gates, keys and values [M, K, D]. Queries and keys are rotated; the scale is not applied.

        With autocast, queries and keys are normalized and rotated in float32, as in the model's own forward.
        """
        dims, gate_MHD = self._dims, None
        num_rotated = dims.heads + dims.kv_heads
        qkv_MZD = layer.qkv.joined(normed_MD).view(normed_MD.size(0), -1, dims.head_dim)
        if layer.gated:
            queries_MHD, gate_MHD = qkv_MZD[:, : 2 * dims.heads].unflatten(1, (-1, 2)).unbind(2)
            qkv_MZD = torch.cat((queries_MHD, qkv_MZD[:, 2 * dims.heads :]), dim=1)
        qk_MYD, v_MKD = qkv_MZD[:, :num_rotated], qkv_MZD[:, num_rotated:]
        if layer.qk_norm is not None:
            qk_MYD = self._rms_norm(qk_MYD.to(layer.qk_norm.dtype), layer.qk_norm)
        if rotary is not None:
            qk_MYD = _rotate(qk_MYD, *rotary)
        qk_MYD = qk_MYD.to(dims.dtype)
        return qk_MYD[:, : dims.heads], gate_MHD, qk_MYD[:, dims.heads :], v_MKD

    def _routed(self, kv: KVCache, rows_M: np.ndarray, positions_M: np.ndarray) -> AbstractContextManager[None]:
        """Inside, the experts of these tokens are those that are prescribed in the cache, and are recorded there."""
        if kv.routes is None:
            return nullcontext()
        return routed(kv, self._dims.tensor(rows_M), self._dims.tensor(positions_M), len(rows_M))

    def _write(self, tensor: torch.Tensor, index_J: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor) -> None:
        """Write keys and values to the cache tensor of a layer, seen as flat vectors [.., D]."""
        tensor.view(-1, self._dims.head_dim).index_copy_(0, index_J, torch.cat((k_MKD, v_MKD), 1).flatten(0, 1))

    def _flat_index(self, kv: KVCache, rows_M: np.ndarray, positions_M: np.ndarray) -> np.ndarray:
        """Indices [M, 2K] of the keys and values of each token among the flat vectors of a cache tensor."""
        heads, capacity = self._dims.kv_heads, kv.capacity
        part_J = np.repeat(np.arange(2) * kv.num_rows * heads, heads) + np.tile(np.arange(heads), 2)
        return (rows_M[:, None] * heads + part_J) * capacity + positions_M[:, None]

    def _rotary(self, positions_M: torch.Tensor, needed: int) -> _Rotary | None:
        """Cosine and sine [M, 1, D] of the model's own rotary embedding at these positions, which are below `needed`; None if it
        has none. `needed` may be beyond the capacity of the cache: positions after a video may be beyond the index in the
        sequence."""
        embed = self._parameters.rotary
        if embed is None:
            return None
        if len(self._rotary_table[0]) < needed:
            embedding = self._parameters.embedding
            all_positions = torch.arange(needed, device=embedding.device).unsqueeze(0)
            cos_1CD, sin_1CD = embed(embedding[:1], all_positions)
            # rotate_half is [-x2, x1]: with the minus sign in the sine, a roll of x is enough (`_rotate`)
            sin_1CD[..., : sin_1CD.shape[-1] // 2].neg_()
            self._rotary_table = cos_1CD[0].unsqueeze(1), sin_1CD[0].unsqueeze(1)
        return self._rotary_table[0].index_select(0, positions_M), self._rotary_table[1].index_select(0, positions_M)


def _rotate(values_MHD: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor) -> torch.Tensor:
    """The values, of which the first numbers of a head are rotated: as many as there are cosines."""
    rotated = cos_M1D.shape[-1]
    if rotated < values_MHD.shape[-1]:
        first_MHD = _rotate(values_MHD[..., :rotated], cos_M1D, sin_M1D)
        return torch.cat((first_MHD, values_MHD[..., rotated:]), dim=-1)
    return torch.addcmul(values_MHD * cos_M1D, values_MHD.roll(rotated // 2, -1), sin_M1D)


# Support: which models the pass can run

_LINEARS = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj_b",
    "in_proj_a",
    "w1",
    "w2",
    "w3",
    "input_linear",
    "output_linear",
    "lm_head",
)
"""Linear layers whose names do not end with `_proj`."""


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why the fused pass cannot run this model; None if it can."""
    text = text_part(model)
    if (family := _family(text)) is None:
        return f"its text part, {type(text).__name__}, is none of {', '.join(FAMILIES)}"
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is None:
        return "it has no output layer"
    for name in ("hidden_act", "mamba_hidden_act", "mlp_hidden_act"):
        needed = ("relu2",) if family.ungated and name == "mlp_hidden_act" else ("silu", "swish")
        if (activation := getattr(config, name, needed[0])) not in needed:
            return f"its activation is {activation}, not {needed[0]}"
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds and getattr(config, "sliding_window", None) is not None:
        return f"it has a sliding window of {config.sliding_window} tokens"
    if "sliding_attention" in kinds:
        return "some of its layers have a sliding window"
    if next(_attention_modules(text), None) is None:
        return "none of its layers attends to all tokens"
    rotates = family.rotary is not None and getattr(text, family.rotary) is not None
    if rotates and config.rope_parameters["rope_type"] not in STATIC_ROPE:
        return f"its rotary embedding of type {config.rope_parameters['rope_type']} depends on the length"
    return _unsupported_layer(text, head)


def _unsupported_layer(text: Any, head: nn.Module) -> str | None:
    """Which layer is something else than the plain one, or than a linear layer with an adapter."""
    own = {module for block in _expert_blocks(text) for module in block.modules()}
    for name, module in [*text.named_modules(), ("lm_head", head)]:
        kind = name.rpartition(".")[2]
        linear = (kind.endswith("_proj") or kind in _LINEARS) and module not in own
        if linear and type(module) is not nn.Linear and linear_adapter(module) is None:
            return "its projections are neither plain linear layers nor such layers with a LoRA adapter (DoRA, quantised weights)"
        if (
            kind in ("conv1d", "conv")
            and type(module) is not nn.Conv1d
            and not type(module).__name__.endswith("ShortConv")
        ):
            return "a convolution has an adapter"
    if type(text.get_input_embeddings()) is not nn.Embedding:
        return "its embedding is not a plain embedding layer (an adapter)"
    return None
