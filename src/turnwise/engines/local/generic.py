"""Runs any decoder of transformers with keys and values over the rows of the KV cache, through the model's own forward.

Knows how transformers uses a cache, and masks of four dimensions. Refuses models that keep another kind of state from token
to token (recurrent models, linear attention) and encoder-decoder models.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from turnwise.engines.local.kv_cache import KVCache, KVShape
from turnwise.engines.local.prefix_index import SharedPrefix
from turnwise.errors import EngineError
from turnwise.models.attention import ignored_by_sdpa
from turnwise.models.autocast import Bfloat16Linears, autocast

__all__ = ["GenericForward"]

LAYER_TYPES = ("full_attention", "sliding_attention")
WITH_4D_MASK = ("sdpa", "eager", "turnwise_tree")
"""Attention implementations that take a mask of four dimensions; turnwise_tree is the trainer's, and is sdpa here."""


class GenericForward:
    """Keys and values of a layer are two cache tensors, because their shapes may differ."""

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False) -> None:
        self._copy = Bfloat16Linears(model) if autocast else None
        self._model: PreTrainedModel = model if self._copy is None else self._copy.model
        self._config = model.config.get_text_config()
        self._layer_types = _layer_types(model)
        self._kv_shapes = _probe_kv_shapes(model)
        self._device = next(model.parameters()).device
        self._dtype = torch.bfloat16 if autocast else next(model.parameters()).dtype

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        return self._kv_shapes

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._dtype

    @contextmanager
    def inference(self) -> Iterator[None]:
        if self._copy is not None and self._copy.freed:
            self._copy.refresh()
        # not torch.inference_mode: a model may create tables here (rotary embeddings) that it also trains with later
        training = [module for module in self._model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad(), autocast(self._device, self._copy is not None):
                yield
        finally:
            for module in training:
                module.training = True

    def reload_parameters(self, *, changed: bool = True) -> None:
        # the model's own forward reads its parameters: only copies have to be made again
        if self._copy is not None:
            self._copy.refresh(force=changed)

    def free_copies(self) -> None:
        if self._copy is not None:
            self._copy.free()

    def prefill(self, kv: KVCache, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        longest = max(len(tokens) for tokens in tokens_N)
        padded_NT = np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens in tokens_N])
        self._run(kv, rows_N, starts_N, np.array([len(tokens) for tokens in tokens_N]), padded_NT)

    def decode(
        self, kv: KVCache, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray, shared: SharedPrefix
    ) -> torch.Tensor:
        return self._run(kv, rows_B, positions_B, np.ones_like(rows_B), tokens_B[:, None])

    def _run(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        lengths_N: np.ndarray,
        tokens_NT: np.ndarray,
        *,
        model_inputs: Mapping[str, Any] | None = None,
        position_3NT: np.ndarray | None = None,
        logits_to_keep: int | torch.Tensor = 1,
    ) -> torch.Tensor:
        """Run right-padded tokens; returns float32 logits [N, V] of the last column, or [N, K, V] of the columns
        `logits_to_keep`.

        `model_inputs` are arguments of the model's forward, token ids included (None: only the token ids). `position_3NT`
        are position ids on three axes (None: the index in the sequence).
        """
        steps_T = np.arange(tokens_NT.shape[1])
        index_NT = starts_N[:, None] + steps_T
        length = int((starts_N + lengths_N).max())
        valid_NT = steps_T < lengths_N[:, None]
        contiguous = np.array_equal(rows_N, np.arange(len(rows_N)) + rows_N[0])
        view = _RowView(
            rows_N=self._tensor(rows_N),
            rows=slice(int(rows_N[0]), int(rows_N[-1]) + 1) if contiguous else None,
            write_rows_M=self._tensor(rows_N[np.nonzero(valid_NT)[0]]),
            write_index_M=self._tensor(index_NT[valid_NT]),
            valid=tuple(self._tensor(part) for part in np.nonzero(valid_NT)),
            length=length,
        )
        # padding is computed and not used, but its position must be within the model's tables
        position_ids = np.minimum(index_NT, length - 1) if position_3NT is None else position_3NT
        if model_inputs is None:
            model_inputs = {"input_ids": self._tensor(tokens_NT.astype(np.int64))}
        output = self._model(
            **model_inputs,
            position_ids=self._tensor(position_ids),
            attention_mask=self._mask(index_NT, length),
            past_key_values=_RowCache(kv, view),
            use_cache=True,
            logits_to_keep=logits_to_keep,
        )
        return (output.logits if isinstance(logits_to_keep, torch.Tensor) else output.logits[:, -1]).float()

    def _mask(self, index_NT: np.ndarray, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """The additive mask [N, 1, T, L]; a mask for each layer type if the model has several."""
        keys_L = np.arange(length)
        causal_NTL = keys_L <= index_NT[:, :, None]
        masks = {}
        for layer_type in set(self._layer_types):
            visible_NTL = causal_NTL
            if layer_type == "sliding_attention":
                visible_NTL = causal_NTL & (keys_L > index_NT[:, :, None] - self._config.sliding_window)
            visible = self._tensor(visible_NTL).unsqueeze(1)
            zeros = torch.zeros(visible.shape, dtype=self._dtype, device=self._device)
            masks[layer_type] = zeros.masked_fill_(~visible, torch.finfo(self._dtype).min)
        return masks[self._layer_types[0]] if len(masks) == 1 and not self._takes_masks_by_type() else masks

    def _takes_masks_by_type(self) -> bool:
        return "sliding_attention" in (getattr(self._config, "layer_types", None) or ())

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


@dataclass(frozen=True, slots=True)
class _RowView:
    """Where one pass writes and reads in the cache. M counts the tokens of the pass without padding."""

    rows_N: torch.Tensor
    rows: slice | None
    """The rows as a slice, if they are contiguous: reading them then copies nothing."""
    write_rows_M: torch.Tensor
    write_index_M: torch.Tensor
    valid: tuple[torch.Tensor, ...]
    """Indices (n, t) of the M tokens in the padded batch."""
    length: int
    """Tokens of the longest row, new tokens included."""


class _RowLayer(CacheLayerMixin):
    """The keys and values of one layer, with the interface of transformers' cache layers."""

    def __init__(self, view: _RowView, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._view = keys, values, view
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the tensors exist."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write the new keys and values [N, K, T, D] and return those of the rows so far [N, K, L, D]."""
        return self._write_and_read(self.keys, key_states), self._write_and_read(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._view.length, 0

    def get_seq_length(self) -> int:
        return self._view.length

    def get_max_length(self) -> int:
        return -1

    def _write_and_read(self, tensor: torch.Tensor | None, states_NKTD: torch.Tensor) -> torch.Tensor:
        assert tensor is not None
        view = self._view
        states_MKD = states_NKTD.transpose(1, 2)[view.valid].to(tensor.dtype)
        tensor[0].transpose(1, 2)[view.write_rows_M, view.write_index_M] = states_MKD
        window = tensor[0, :, :, : view.length]
        return window.index_select(0, view.rows_N) if view.rows is None else window[view.rows]


class _RowCache(Cache):
    """The rows of one pass, as transformers' cache."""

    def __init__(self, kv: KVCache, view: _RowView) -> None:
        pairs = zip(kv.tensors[::2], kv.tensors[1::2], strict=True)
        super().__init__(layers=[_RowLayer(view, keys, values) for keys, values in pairs])


def _layer_types(model: PreTrainedModel) -> list[str]:
    """The attention type of each layer. Raises EngineError if a layer has no attention over keys and values."""
    config = model.config.get_text_config()
    layer_types = list(getattr(config, "layer_types", None) or [])
    if not layer_types:
        sliding = getattr(config, "sliding_window", None) is not None
        layer_types = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    unknown = sorted(set(layer_types) - set(LAYER_TYPES))
    if unknown or model.config.is_encoder_decoder:
        problem = f"layers of the type {', '.join(unknown)}" if unknown else "an encoder"
        raise _unsupported(model, f"it has {problem}, and the cache holds keys and values of decoders only")
    return layer_types


def _probe_kv_shapes(model: PreTrainedModel) -> tuple[KVShape, ...]:
    """Run three tokens to see what the model caches: the shapes of keys and of values of each layer, in turn."""
    if model.config._attn_implementation not in WITH_4D_MASK:
        raise EngineError(
            f"the model's attention is {model.config._attn_implementation}, which takes no mask of four dimensions. "
            'Load the model with attn_implementation="sdpa"'
        )
    if model.config._attn_implementation != "eager" and (ignored := ignored_by_sdpa(model)):
        raise EngineError(
            f"{type(model).__name__} uses {', '.join(ignored)} in its attention, which {model.config._attn_implementation} "
            'ignores. Load the model with attn_implementation="eager"'
        )
    ids = torch.zeros((1, 3), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=True)
    cache = output.get("past_key_values")
    if not isinstance(cache, Cache):
        raise _unsupported(model, "it returns no key-value cache (a recurrent model?)")
    shapes = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _unsupported(model, f"one of its layers caches a {type(layer).__name__}, not keys and values")
        assert layer.keys is not None
        assert layer.values is not None
        for states in (layer.keys, layer.values):
            shapes.append(KVShape(parts=1, heads=states.shape[1], head_dim=states.shape[3]))
    return tuple(shapes)


def _unsupported(model: PreTrainedModel, reason: str) -> EngineError:
    return EngineError(
        f"the embedded engine cannot run {type(model).__name__}: {reason}. Use another model, or serve this model with another "
        f"engine"
    )
