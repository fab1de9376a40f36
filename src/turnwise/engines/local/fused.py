"""The forward pass of the Llama, Mistral, Qwen2 and Qwen3 families, written out over the slots' cache.

It reads the model's own parameters, which nobody copies: what the trainer changes in place is what is run next. It knows
these four architectures and refuses every variation of them (`unfit` says which); what it cannot do, the generic pass does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, MistralForCausalLM, PreTrainedModel, Qwen2ForCausalLM, Qwen3ForCausalLM

from turnwise.engines.local.kv_cache import KVCache, PlaneShape

__all__ = ["FusedForward", "unfit"]

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
SHARED_READS = 2500
"""Rows times tokens in common from which on reading these once pays for the copies that it takes (measured)."""
STATIC_ROPE = ("default", "linear", "llama3", "yarn")


def unfit(model: PreTrainedModel) -> str | None:
    """Why the fused pass cannot run this model, or None if it can."""
    if type(model) not in FAMILIES:
        return f"{type(model).__name__} is none of {', '.join(family.__name__ for family in FAMILIES)}"
    config = model.config
    if config.hidden_act not in ("silu", "swish"):
        return f"its activation is {config.hidden_act}, not silu"
    if type(model) is MistralForCausalLM and config.sliding_window is not None:
        return f"it attends to a window of {config.sliding_window} tokens"
    if type(model) in (Qwen2ForCausalLM, Qwen3ForCausalLM) and set(config.layer_types) != {"full_attention"}:
        return "some of its layers attend to a window"
    if config.rope_parameters["rope_type"] not in STATIC_ROPE:
        return f"its rotary table of type {config.rope_parameters['rope_type']} depends on the length"
    linears = [module for name, module in model.named_modules() if name.endswith("_proj")]
    if any(type(module) is not nn.Linear for module in [*linears, model.lm_head]):
        return "its projections are not plain linear layers (adapters, or quantised weights)"
    return None


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's own parameters."""

    norm: torch.Tensor
    q: tuple[torch.Tensor, torch.Tensor | None]
    k: tuple[torch.Tensor, torch.Tensor | None]
    v: tuple[torch.Tensor, torch.Tensor | None]
    o: tuple[torch.Tensor, torch.Tensor | None]
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate: tuple[torch.Tensor, torch.Tensor | None]
    up: tuple[torch.Tensor, torch.Tensor | None]
    down: tuple[torch.Tensor, torch.Tensor | None]


class FusedForward:
    """Keys and values of a layer are one plane [2, rows, kv heads, capacity, head dim]."""

    def __init__(self, model: PreTrainedModel) -> None:
        config = model.config
        self._model = model
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._dim = model.model.layers[0].self_attn.head_dim
        self._scale = model.model.layers[0].self_attn.scaling
        self._eps = config.rms_norm_eps
        self._shapes = tuple(PlaneShape(2, self._kv_heads, self._dim) for _ in range(config.num_hidden_layers))
        self._zero = torch.zeros(1, device=model.device)
        self._floors = {
            width: torch.tensor((width * self._eps) ** 0.5, device=model.device)
            for width in (self._dim, config.hidden_size)
        }
        self._table = (torch.zeros(0), torch.zeros(0))
        self._places: tuple[np.ndarray, tuple[int, ...], torch.Tensor] | None = None
        self.refresh()

    @property
    def shapes(self) -> Sequence[PlaneShape]:
        return self._shapes

    @contextmanager
    def guard(self) -> Iterator[None]:
        with torch.inference_mode():
            yield

    def refresh(self) -> None:
        inner = self._model.model
        self._embedding = inner.embed_tokens.weight
        self._norm, self._head = inner.norm.weight, _pair(self._model.lm_head)
        self._layers = [
            _Layer(
                norm=layer.input_layernorm.weight,
                q=_pair(layer.self_attn.q_proj),
                k=_pair(layer.self_attn.k_proj),
                v=_pair(layer.self_attn.v_proj),
                o=_pair(layer.self_attn.o_proj),
                q_norm=layer.self_attn.q_norm.weight if isinstance(self._model, Qwen3ForCausalLM) else None,
                k_norm=layer.self_attn.k_norm.weight if isinstance(self._model, Qwen3ForCausalLM) else None,
                mlp_norm=layer.post_attention_layernorm.weight,
                gate=_pair(layer.mlp.gate_proj),
                up=_pair(layer.mlp.up_proj),
                down=_pair(layer.mlp.down_proj),
            )
            for layer in inner.layers
        ]

    def prefill(self, rows: KVCache, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        # linear layers run on all tokens M, one after the other
        sequence_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        offset_M = np.arange(len(sequence_M)) - np.repeat(lengths_N.cumsum() - lengths_N, lengths_N)
        positions_M = starts_N[sequence_M] + offset_M
        places_MJ = self._place(rows, rows_N[sequence_M], positions_M)
        cos_M1D, sin_M1D = self._rotary(rows.capacity, positions_M)
        attention = _PromptAttention(self, rows_N, starts_N, lengths_N)
        hidden_MD = F.embedding(self._tensor(np.concatenate(tokens_N).astype(np.int64)), self._embedding)
        for index, layer in enumerate(self._layers):
            plane = rows.planes[index]
            normed_MD = self._normed(hidden_MD, layer.norm)
            last = index == len(self._layers) - 1
            q_MHD, k_MKD, v_MKD = self._heads_of(layer, normed_MD, cos_M1D, sin_M1D)
            plane.view(-1, self._dim).index_copy_(0, places_MJ.view(-1), torch.cat((k_MKD, v_MKD), 1).flatten(0, 1))
            if last:  # nothing is asked of the prompt but its keys and values
                break
            read_MD = attention(plane, q_MHD)
            hidden_MD = self._feed_forward(layer, hidden_MD + F.linear(read_MD, *layer.o))

    def decode(
        self, rows: KVCache, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray, shared: int
    ) -> torch.Tensor:
        if self._places is None or self._places[0] is not rows_B or self._places[1] != rows.planes[0].shape:
            self._places = (rows_B, tuple(rows.planes[0].shape), self._place(rows, rows_B, np.zeros_like(rows_B)))
        positions_B1 = self._tensor(positions_B).unsqueeze(1)
        places_J = (self._places[2] + positions_B1).view(-1)
        attention = _StepAttention(self, rows_B, positions_B, shared)
        cos_B1D, sin_B1D = self._rotary(rows.capacity, positions_B)
        hidden_BD = F.embedding(self._tensor(tokens_B), self._embedding)
        for layer, plane in zip(self._layers, rows.planes, strict=True):
            q_BHD, k_BKD, v_BKD = self._heads_of(layer, self._normed(hidden_BD, layer.norm), cos_B1D, sin_B1D)
            plane.view(-1, self._dim).index_copy_(0, places_J, torch.cat((k_BKD, v_BKD), 1).flatten(0, 1))
            hidden_BD = self._feed_forward(layer, hidden_BD + F.linear(attention(plane, q_BHD), *layer.o))
        return F.linear(self._normed(hidden_BD, self._norm), *self._head).float()

    def _heads_of(
        self, layer: _Layer, normed_MD: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [M, H, D], keys and values [M, K, D]; the rotary embedding is in the first two, the scale in none."""
        q_MHD = F.linear(normed_MD, *layer.q).view(-1, self._heads, self._dim)
        k_MKD = F.linear(normed_MD, *layer.k).view(-1, self._kv_heads, self._dim)
        v_MKD = F.linear(normed_MD, *layer.v).view(-1, self._kv_heads, self._dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            q_MHD, k_MKD = self._normed(q_MHD, layer.q_norm), self._normed(k_MKD, layer.k_norm)
        return _rotated(q_MHD, cos_M1D, sin_M1D), _rotated(k_MKD, cos_M1D, sin_M1D), v_MKD

    def _feed_forward(self, layer: _Layer, hidden_MD: torch.Tensor) -> torch.Tensor:
        normed_MD = self._normed(hidden_MD, layer.mlp_norm)
        gated_MF = F.silu(F.linear(normed_MD, *layer.gate)).mul_(F.linear(normed_MD, *layer.up))
        return hidden_MD + F.linear(gated_MF, *layer.down)

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if values.dtype != torch.float32:
            return F.rms_norm(values, weight.shape, weight, self._eps)
        # the same in half as many operations: sqrt(sum x^2 + D eps) is a hypotenuse
        width = values.shape[-1]
        root = torch.hypot(torch.linalg.vector_norm(values, dim=-1, keepdim=True), self._floors[width])
        return torch.addcdiv(self._zero, values, root, value=width**0.5).mul_(weight)

    def _place(self, rows: KVCache, rows_M: np.ndarray, positions_M: np.ndarray) -> torch.Tensor:
        """Where in a plane's flat vectors the keys and values [2K] of each token lie."""
        heads, capacity = self._kv_heads, rows.capacity
        groups_J = np.repeat(np.arange(2) * rows.count * heads, heads) + np.tile(np.arange(heads), 2)
        return self._tensor((rows_M[:, None] * heads + groups_J) * capacity + positions_M[:, None])

    def _rotary(self, capacity: int, positions_M: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own rotary table at these positions."""
        if len(self._table[0]) < capacity:
            everything = torch.arange(capacity, device=self._embedding.device).unsqueeze(0)
            cos_1CD, sin_1CD = self._model.model.rotary_emb(self._embedding[:1], everything)
            # the sign of the half that is turned to the front goes with the sine
            sin_1CD[..., : self._dim // 2].neg_()
            self._table = cos_1CD[0].unsqueeze(1), sin_1CD[0].unsqueeze(1)
        positions = self._tensor(positions_M)
        return self._table[0].index_select(0, positions), self._table[1].index_select(0, positions)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._embedding.device)


class _StepAttention:
    """Attention of one token a row, over the range of rows from the first to the last one that is decoded.

    The first `shared` tokens, where they are many, are read once for all rows, from the first of them: what all rows
    together read of the cache is what a step waits for.
    """

    def __init__(self, forward: FusedForward, rows_B: np.ndarray, positions_B: np.ndarray, shared: int) -> None:
        self._heads, self._kv_heads, self._dim = forward._heads, forward._kv_heads, forward._dim
        self._scale = forward._scale
        self._first = int(rows_B[0])
        self._range = int(rows_B[-1]) + 1
        self._rows = None if self._range == len(rows_B) else forward._tensor(rows_B)
        self._shared = shared if shared * len(rows_B) >= SHARED_READS else 0
        self._length = int(positions_B.max()) + 1
        self._mask_R1L = None
        if positions_B.min() != positions_B.max():
            lengths_R = np.zeros(self._range, dtype=np.int64)
            lengths_R[rows_B] = positions_B + 1
            beyond_RL = np.arange(self._shared, self._length) >= lengths_R[:, None]
            # a row in between that nobody decodes must not give NaN
            beyond_RL[lengths_R == 0] = False
            mask_RL = torch.zeros(beyond_RL.shape, dtype=forward._embedding.dtype, device=forward._embedding.device)
            self._mask_R1L = mask_RL.masked_fill_(forward._tensor(beyond_RL), -torch.inf).unsqueeze(1)

    def __call__(self, plane: torch.Tensor, q_BHD: torch.Tensor) -> torch.Tensor:
        """What each row reads: [B, H * D]."""
        q_BHD = q_BHD * self._scale
        if self._rows is not None:
            q_BHD = q_BHD.new_zeros(self._range, *q_BHD.shape[1:]).index_copy_(0, self._rows, q_BHD)
        q_JGD = q_BHD.view(self._range * self._kv_heads, -1, self._dim)
        own = plane[:, : self._range].flatten(1, 2)[:, :, self._shared : self._length]
        scores_JGL = torch.bmm(q_JGD, own[0].transpose(1, 2))
        if self._mask_R1L is not None:
            scores_JGL.view(self._range, self._heads, -1).add_(self._mask_R1L)
        if self._shared:
            read_JGD = self._cascade(plane[:, self._first, :, : self._shared], q_JGD, scores_JGL, own[1])
        else:
            read_JGD = torch.bmm(_softmax(scores_JGL), own[1])
        read_RD = read_JGD.view(self._range, self._heads * self._dim)
        return read_RD if self._rows is None else read_RD.index_select(0, self._rows)

    def _cascade(
        self, common: torch.Tensor, q_JGD: torch.Tensor, scores_JGL: torch.Tensor, values_JLD: torch.Tensor
    ) -> torch.Tensor:
        """One softmax over the tokens that all rows share and each row's own; `common` is [2, K, P, D]."""
        common_JGP = self._row_first(torch.bmm(self._head_first(q_JGD), common[0].transpose(1, 2)))
        weights_JGL = _softmax(torch.cat((common_JGP, scores_JGL), dim=-1))
        common_KMP = self._head_first(weights_JGL[:, :, : self._shared])
        read_JGD = torch.bmm(weights_JGL[:, :, self._shared :], values_JLD)
        return read_JGD.add_(self._row_first(torch.bmm(common_KMP, common[1])))

    def _head_first(self, values_JGX: torch.Tensor) -> torch.Tensor:
        """[R * K, G, X] to [K, R * G, X]: all rows' queries of one head of keys are one matrix."""
        rows_first = values_JGX.unflatten(0, (self._range, self._kv_heads))
        return rows_first.transpose(0, 1).reshape(self._kv_heads, -1, values_JGX.shape[-1])

    def _row_first(self, values_KMX: torch.Tensor) -> torch.Tensor:
        heads_first = values_KMX.unflatten(1, (self._range, -1))
        return heads_first.transpose(0, 1).flatten(0, 1)


class _PromptAttention:
    """Attention of new tokens over their row: those that were there and those before them. Row by row, where they lie:
    nothing is gathered or padded."""

    def __init__(self, forward: FusedForward, rows_N: np.ndarray, starts_N: np.ndarray, lengths_N: np.ndarray) -> None:
        self._scale = forward._scale
        ends_N = starts_N + lengths_N
        self._rows = list(zip(rows_N.tolist(), ends_N.tolist(), lengths_N.tolist(), strict=True))
        self._masks = [self._mask(forward, *bounds) for bounds in zip(starts_N.tolist(), ends_N.tolist(), strict=True)]

    def __call__(self, plane: torch.Tensor, q_MHD: torch.Tensor) -> torch.Tensor:
        """What each new token reads: [M, H * D]."""
        read = []
        queries = q_MHD.split([length for _, _, length in self._rows])
        for (row, end, _), mask_TL, q_THD in zip(self._rows, self._masks, queries, strict=True):
            keys_1KLD, values_1KLD = plane[:, row, :, :end].unsqueeze(1).unbind(0)
            read_1HTD = F.scaled_dot_product_attention(
                q_THD.transpose(0, 1).unsqueeze(0),
                keys_1KLD,
                values_1KLD,
                attn_mask=mask_TL,
                is_causal=mask_TL is None,
                scale=self._scale,
                enable_gqa=True,
            )
            read.append(read_1HTD[0].transpose(0, 1).flatten(1))
        return torch.cat(read)

    @staticmethod
    def _mask(forward: FusedForward, start: int, end: int) -> torch.Tensor | None:
        """What is added to the scores [T, L]; None for a prompt from its first token."""
        if start == 0:
            return None
        beyond_TL = np.arange(end) > np.arange(start, end)[:, None]
        mask_TL = torch.zeros(beyond_TL.shape, dtype=forward._embedding.dtype, device=forward._embedding.device)
        return mask_TL.masked_fill_(forward._tensor(beyond_TL), -torch.inf)


def _rotated(values_MHD: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(values_MHD * cos_M1D, values_MHD.roll(values_MHD.shape[-1] // 2, -1), sin_M1D)


def _softmax(scores_JGL: torch.Tensor) -> torch.Tensor:
    if scores_JGL.dtype == torch.float32:
        return scores_JGL.softmax(dim=-1)
    return scores_JGL.softmax(dim=-1, dtype=torch.float32).to(scores_JGL.dtype)


def _pair(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear.weight, linear.bias
