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

from turnwise.engines.local.rows import PlaneShape, Rows

__all__ = ["FusedForward", "unfit"]

FAMILIES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
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

    def prefill(self, rows: Rows, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        # linear layers run on the packed tokens M; only attention is padded to [N, T]
        sequence_M = np.repeat(np.arange(len(lengths_N)), lengths_N)
        offset_M = np.arange(len(sequence_M)) - np.repeat(lengths_N.cumsum() - lengths_N, lengths_N)
        positions_M = starts_N[sequence_M] + offset_M
        places_MJ = self._place(rows, rows_N[sequence_M], positions_M)
        cos_M1D, sin_M1D = self._rotary(rows.capacity, positions_M)
        attention = _PromptAttention(self, rows_N, starts_N, lengths_N, (sequence_M, offset_M))
        hidden_MD = F.embedding(self._tensor(np.concatenate(tokens_N).astype(np.int64)), self._embedding)
        for index, layer in enumerate(self._layers):
            plane = rows.planes[index]
            normed_MD = self._normed(hidden_MD, layer.norm)
            last = index == len(self._layers) - 1
            q_MHD, k_MKD, v_MKD = self._heads_of(layer, normed_MD, cos_M1D, sin_M1D)
            plane.view(-1, self._dim).index_copy_(0, places_MJ.view(-1), torch.cat((k_MKD, v_MKD), 1).flatten(0, 1))
            if last:  # nothing is asked of the prompt but its keys and values
                break
            said_MD = attention(plane, q_MHD, k_MKD, v_MKD)
            hidden_MD = self._feed_forward(layer, hidden_MD + F.linear(said_MD, *layer.o))

    def decode(self, rows: Rows, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray) -> torch.Tensor:
        if self._places is None or self._places[0] is not rows_B or self._places[1] != rows.planes[0].shape:
            self._places = (rows_B, tuple(rows.planes[0].shape), self._place(rows, rows_B, np.zeros_like(rows_B)))
        positions_B1 = self._tensor(positions_B).unsqueeze(1)
        places_J = (self._places[2] + positions_B1).view(-1)
        attention = _StepAttention(self, rows_B, positions_B, positions_B1)
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
        q_MHD = F.linear(normed_MD, *layer.q).unflatten(1, (self._heads, self._dim))
        k_MKD = F.linear(normed_MD, *layer.k).unflatten(1, (self._kv_heads, self._dim))
        v_MKD = F.linear(normed_MD, *layer.v).unflatten(1, (self._kv_heads, self._dim))
        if layer.q_norm is not None and layer.k_norm is not None:
            q_MHD, k_MKD = self._normed(q_MHD, layer.q_norm), self._normed(k_MKD, layer.k_norm)
        return _rotated(q_MHD, cos_M1D, sin_M1D), _rotated(k_MKD, cos_M1D, sin_M1D), v_MKD

    def _feed_forward(self, layer: _Layer, hidden_MD: torch.Tensor) -> torch.Tensor:
        normed_MD = self._normed(hidden_MD, layer.mlp_norm)
        gated_MF = F.silu(F.linear(normed_MD, *layer.gate)).mul_(F.linear(normed_MD, *layer.up))
        return hidden_MD + F.linear(gated_MF, *layer.down)

    def _normed(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(values, weight.shape, weight, self._eps)

    def _place(self, rows: Rows, rows_M: np.ndarray, positions_M: np.ndarray) -> torch.Tensor:
        """Where in a plane's flat vectors the keys and values [2K] of each token lie."""
        heads, capacity = self._kv_heads, rows.capacity
        groups_J = np.repeat(np.arange(2) * rows.count * heads, heads) + np.tile(np.arange(heads), 2)
        return self._tensor((rows_M[:, None] * heads + groups_J) * capacity + positions_M[:, None])

    def _rotary(self, capacity: int, positions_M: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's own rotary table at these positions."""
        if len(self._table[0]) < capacity:
            everything = torch.arange(capacity, device=self._embedding.device).unsqueeze(0)
            cos, sin = self._model.model.rotary_emb(self._embedding[:1], everything)
            self._table = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
        positions = self._tensor(positions_M)
        return self._table[0].index_select(0, positions), self._table[1].index_select(0, positions)

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._embedding.device)


class _StepAttention:
    """Attention of one token a row, over the range of rows from the first to the last one that is decoded."""

    def __init__(
        self, forward: FusedForward, rows_B: np.ndarray, positions_B: np.ndarray, positions_B1: torch.Tensor
    ) -> None:
        self._heads, self._kv_heads, self._dim = forward._heads, forward._kv_heads, forward._dim
        self._scale = forward._scale
        self._length = int(positions_B.max()) + 1
        self._range = int(rows_B[-1]) + 1
        self._rows = None if self._range == len(rows_B) else forward._tensor(rows_B)
        self._mask_R1L = None
        if positions_B.min() != positions_B.max():
            keys_L = torch.arange(self._length, device=positions_B1.device)
            beyond_BL = keys_L > positions_B1
            if self._rows is not None:
                beyond_BL = beyond_BL.new_zeros(self._range, self._length).index_copy_(0, self._rows, beyond_BL)
            zeros_RL = torch.zeros(beyond_BL.shape, dtype=forward._embedding.dtype, device=keys_L.device)
            self._mask_R1L = zeros_RL.masked_fill_(beyond_BL, -torch.inf).unsqueeze(1)

    def __call__(self, plane: torch.Tensor, q_BHD: torch.Tensor) -> torch.Tensor:
        """What each row reads: [B, H * D]."""
        q_BHD = q_BHD * self._scale
        if self._rows is not None:
            q_BHD = q_BHD.new_zeros(self._range, *q_BHD.shape[1:]).index_copy_(0, self._rows, q_BHD)
        q_JGD = q_BHD.reshape(self._range * self._kv_heads, -1, self._dim)
        keys_JLD, values_JLD = plane[:, : self._range].flatten(1, 2)[:, :, : self._length].unbind(0)
        scores_JGL = torch.bmm(q_JGD, keys_JLD.transpose(1, 2))
        if self._mask_R1L is not None:
            scores_JGL.view(self._range, self._heads, self._length).add_(self._mask_R1L)
        weights_JGL = scores_JGL.softmax(dim=-1, dtype=torch.float32).to(scores_JGL.dtype)
        read_RD = torch.bmm(weights_JGL, values_JLD).view(self._range, self._heads * self._dim)
        return read_RD if self._rows is None else read_RD.index_select(0, self._rows)


class _PromptAttention:
    """Attention of new tokens over their row: those that were there and those before them."""

    def __init__(
        self,
        forward: FusedForward,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        lengths_N: np.ndarray,
        index: tuple[np.ndarray, np.ndarray],
    ) -> None:
        self._scale, self._groups = forward._scale, forward._heads // forward._kv_heads
        self._size = (len(rows_N), int(lengths_N.max()))
        self._index = tuple(forward._tensor(part) for part in index)
        self._fresh = not starts_N.any()
        self._length = int((starts_N + lengths_N).max())
        self._rows = forward._tensor(rows_N)
        keys_L = np.arange(self._length)
        ends_NT = starts_N[:, None] + np.arange(self._size[1])
        self._mask_N1TL = forward._tensor(keys_L <= ends_NT[:, :, None]).unsqueeze(1)

    def __call__(
        self, plane: torch.Tensor, q_MHD: torch.Tensor, k_MKD: torch.Tensor, v_MKD: torch.Tensor
    ) -> torch.Tensor:
        """What each new token reads: [M, H * D]."""
        if self._fresh:
            keys_NKLD, values_NKLD, mask = self._padded(k_MKD), self._padded(v_MKD), None
        else:
            both = plane[:, :, :, : self._length].index_select(1, self._rows)
            (keys_NKLD, values_NKLD), mask = both.unbind(0), self._mask_N1TL
        read_NHTD = F.scaled_dot_product_attention(
            self._padded(q_MHD),
            keys_NKLD.repeat_interleave(self._groups, dim=1),
            values_NKLD.repeat_interleave(self._groups, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
        )
        return read_NHTD.transpose(1, 2)[self._index].flatten(1)

    def _padded(self, values_MHD: torch.Tensor) -> torch.Tensor:
        padded_NTHD = values_MHD.new_zeros(*self._size, *values_MHD.shape[1:])
        padded_NTHD[self._index] = values_MHD
        return padded_NTHD.transpose(1, 2)


def _rotated(values_MHD: torch.Tensor, cos_M1D: torch.Tensor, sin_M1D: torch.Tensor) -> torch.Tensor:
    left, right = values_MHD.chunk(2, dim=-1)
    return values_MHD * cos_M1D + torch.cat((-right, left), dim=-1) * sin_M1D


def _pair(linear: nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    return linear.weight, linear.bias
