"""Any decoder of transformers with a key-value cache, run over the slots through its own forward.

It knows how transformers asks a cache for keys and values and what a mask of four dimensions is. It refuses models that
carry another kind of state from token to token: recurrent ones, linear attention, encoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from turnwise.engines.local.kv_cache import KVCache, PlaneShape
from turnwise.errors import EngineError
from turnwise.models.attention import ignored_by_sdpa

__all__ = ["GenericForward"]

KINDS = ("full_attention", "sliding_attention")
TAKE_MASKS = ("sdpa", "eager", "turnwise_tree")
"""Attentions that take a mask of four dimensions; the last is the trainer's, which is sdpa but inside its own trees."""


class GenericForward:
    """Keys and values of a layer are two planes: they need not have the same shape."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._config = model.config.get_text_config()
        self._kinds = _layer_kinds(model)
        self._shapes = _probe(model)
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype

    @property
    def shapes(self) -> Sequence[PlaneShape]:
        return self._shapes

    @contextmanager
    def guard(self) -> Iterator[None]:
        # no inference mode: a model may keep tables that it makes on the way, and train with them later
        training = [module for module in self._model.modules() if module.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True

    def refresh(self) -> None:
        """Nothing is looked up in advance."""

    def prefill(self, rows: KVCache, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        longest = max(len(tokens) for tokens in tokens_N)
        padded_NT = np.stack([np.pad(tokens, (0, longest - len(tokens))) for tokens in tokens_N])
        self._run(rows, rows_N, starts_N, np.array([len(tokens) for tokens in tokens_N]), padded_NT)

    def decode(
        self, rows: KVCache, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray, shared: int
    ) -> torch.Tensor:
        return self._run(rows, rows_B, positions_B, np.ones_like(rows_B), tokens_B[:, None])

    def _run(
        self,
        rows: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        lengths_N: np.ndarray,
        tokens_NT: np.ndarray,
        *,
        given: Mapping[str, Any] | None = None,
        position_3NT: np.ndarray | None = None,
        keep: int | torch.Tensor = 1,
    ) -> torch.Tensor:
        """Run padded tokens and return float32 logits [N, V] of the last column, or [N, K, V] of those in `keep`.

        `given` are arguments of the model's forward, the token ids among them; `position_3NT` where places are not positions.
        """
        steps_T = np.arange(tokens_NT.shape[1])
        positions_NT = starts_N[:, None] + steps_T
        length = int((starts_N + lengths_N).max())
        valid_NT = steps_T < lengths_N[:, None]
        cache = _SlotCache(
            rows,
            rows_N=self._tensor(rows_N),
            range_end=int(rows_N[-1]) + 1 if np.array_equal(rows_N, np.arange(len(rows_N)) + rows_N[0]) else None,
            places=tuple(self._tensor(part) for part in (rows_N[np.nonzero(valid_NT)[0]], positions_NT[valid_NT])),
            valid=tuple(self._tensor(part) for part in np.nonzero(valid_NT)),
            length=length,
        )
        output = self._model(
            **(given if given is not None else {"input_ids": self._tensor(tokens_NT.astype(np.int64))}),
            # padding is computed and thrown away, but a table of positions must have it
            position_ids=self._tensor(np.minimum(positions_NT, length - 1) if position_3NT is None else position_3NT),
            attention_mask=self._mask(positions_NT, length),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return (output.logits if isinstance(keep, torch.Tensor) else output.logits[:, -1]).float()

    def _mask(self, positions_NT: np.ndarray, length: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """What is added to the scores [N, 1, T, L], by kind of layer where the model has several."""
        keys_L = np.arange(length)
        seen_NTL = keys_L <= positions_NT[:, :, None]
        masks = {}
        for kind in set(self._kinds):
            kept_NTL = seen_NTL
            if kind == "sliding_attention":
                kept_NTL = seen_NTL & (keys_L > positions_NT[:, :, None] - self._config.sliding_window)
            kept = self._tensor(kept_NTL).unsqueeze(1)
            blank = torch.zeros(kept.shape, dtype=self._dtype, device=self._device)
            masks[kind] = blank.masked_fill_(~kept, torch.finfo(self._dtype).min)
        return masks[self._kinds[0]] if len(masks) == 1 and not self._has_layer_types() else masks

    def _has_layer_types(self) -> bool:
        return "sliding_attention" in (getattr(self._config, "layer_types", None) or ())

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


class _SlotLayer(CacheLayerMixin):
    """One layer's two planes, as transformers wants to see them."""

    def __init__(self, cache: _SlotCache, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values, self._cache = keys, values, cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The planes are there."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write the new keys and values [N, K, T, D] and give back those of the rows so far [N, K, L, D]."""
        return self._through(self.keys, key_states), self._through(self.values, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.length, 0

    def get_seq_length(self) -> int:
        return self._cache.length

    def get_max_length(self) -> int:
        return -1

    def _through(self, plane: torch.Tensor | None, states_NKTD: torch.Tensor) -> torch.Tensor:
        assert plane is not None
        cache = self._cache
        rows_M, positions_M = cache.places
        plane[0].transpose(1, 2)[rows_M, positions_M] = states_NKTD.transpose(1, 2)[cache.valid]
        window = plane[0, :, :, : cache.length]
        if cache.range_end is not None:
            return window[cache.range_end - len(cache.rows_N) : cache.range_end]
        return window.index_select(0, cache.rows_N)


class _SlotCache(Cache):
    """The slots of one pass."""

    def __init__(
        self,
        rows: KVCache,
        *,
        rows_N: torch.Tensor,
        range_end: int | None,
        places: tuple[torch.Tensor, ...],
        valid: tuple[torch.Tensor, ...],
        length: int,
    ) -> None:
        self.rows_N, self.range_end, self.places, self.valid, self.length = rows_N, range_end, places, valid, length
        planes = rows.planes
        super().__init__(layers=[_SlotLayer(self, planes[i], planes[i + 1]) for i in range(0, len(planes), 2)])


def _layer_kinds(model: PreTrainedModel) -> list[str]:
    """Which kind of attention each layer has.

    Raises EngineError where one is not over keys and values.
    """
    config = model.config.get_text_config()
    kinds = list(getattr(config, "layer_types", None) or [])
    if not kinds:
        sliding = getattr(config, "sliding_window", None) is not None
        kinds = ["sliding_attention" if sliding else "full_attention"] * config.num_hidden_layers
    strange = sorted(set(kinds) - set(KINDS))
    if strange or model.config.is_encoder_decoder:
        what = f"layers of the kind {', '.join(strange)}" if strange else "an encoder"
        raise _refusal(model, f"it has {what}, and the slots hold keys and values of decoders only")
    return kinds


def _probe(model: PreTrainedModel) -> tuple[PlaneShape, ...]:
    """Run three tokens to see what the model caches."""
    if model.config._attn_implementation not in TAKE_MASKS:
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
        raise _refusal(model, "it gives back no key-value cache (a recurrent model?)")
    shapes = []
    for layer in cache.layers:
        if not isinstance(layer, DynamicLayer) or type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise _refusal(model, f"one of its layers caches a {type(layer).__name__}, not keys and values")
        assert layer.keys is not None
        assert layer.values is not None
        for states in (layer.keys, layer.values):
            shapes.append(PlaneShape(1, states.shape[1], states.shape[3]))
    return tuple(shapes)


def _refusal(model: PreTrainedModel, why: str) -> EngineError:
    return EngineError(
        f"the embedded engine cannot run {type(model).__name__}: {why}. Take another model, or serve it with another engine"
    )
