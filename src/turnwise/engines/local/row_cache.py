"""The rows of one pass as transformers' cache: what a layer keeps from token to token, and where in our cache it lies.

A probe of three tokens shows what each layer of a model keeps: keys and values (which grow with the sequence), recurrent states
and windows of convolutions (which do not), both, or nothing. For each pass, the layers of transformers' cache are made anew over
the tensors of `KVCache`. Attention writes its new keys at their places and reads the rows. A recurrent layer gets the current
states of its rows, which it changes in place, or replaces; `RowCache.write_back` stores what is not in our tensors already.

The fused pass has the keys and values of a layer in one tensor, and the taps of a window before its channels (`joined`): the pass
of a vision model reads and writes there what the fused pass goes on from.

Knows transformers' cache classes. Does not know masks, tokens, or the model's arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from turnwise.engines.local.cache import KVCache, KVShape, StateShape, bytes_of_states
from turnwise.errors import EngineError
from turnwise.models.experts import RouterPass

_ATTENTION = (DynamicLayer, DynamicSlidingWindowLayer)
_RECURRENT = (
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)
_NOTHING = "DummyLayer"
"""The class of layers that keep nothing, since transformers 5.24."""


@dataclass(frozen=True, slots=True)
class KeptByLayer:
    """What one layer keeps for a sequence. All fields may be empty: a layer of experts keeps nothing."""

    keys_and_values: tuple[KVShape, ...] = ()
    """The shapes of keys and of values."""
    states: tuple[tuple[str, int, StateShape], ...] = ()
    """(`conv_states` or `recurrent_states`, number of the state in the layer, shape)."""
    num_states: int = 1


def probe_layers(model: PreTrainedModel) -> tuple[KeptByLayer, ...]:
    """Run three tokens to see what the layers of the model keep. Raises EngineError if it is of an unknown kind."""
    ids = torch.zeros((1, 3), dtype=torch.long, device=next(model.parameters()).device)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=True)
    # `cache` since transformers 5.24; before it, `cache_params` of models without attention
    found = (output.get(name) for name in ("cache", "past_key_values", "cache_params"))
    cache = next((one for one in found if isinstance(one, Cache)), None)
    if cache is None:
        raise unsupported(model, "it returns no cache of keys, values or states")
    return tuple(_kept_by(layer, index, model) for index, layer in enumerate(cache.layers))


def bytes_kept(model: PreTrainedModel, dtype: torch.dtype) -> tuple[int, int]:
    """What the cache holds for a token, in bytes, and for a conversation besides, of a model on torch's meta device."""
    model.set_experts_implementation("batched_mm")  # grouped products take bfloat16 only on the meta device
    layers = probe_layers(model)
    token = sum(shape.numbers_per_token for layer in layers for shape in layer.keys_and_values) * dtype.itemsize
    return token, bytes_of_states([shape for layer in layers for _, _, shape in layer.states])


def unsupported(model: PreTrainedModel, reason: str) -> EngineError:
    """The refusal of a model."""
    return EngineError(
        f"the embedded engine cannot run {type(model).__name__}: {reason}. Use a model that works: docs/models.md lists the "
        f"families that were tried. No other engine was tried with this one"
    )


def _kept_by(layer: object, index: int, model: PreTrainedModel) -> KeptByLayer:
    if type(layer).__name__ == _NOTHING:
        return KeptByLayer()
    if type(layer) not in (*_ATTENTION, *_RECURRENT):
        kept = {name: tuple(value.shape) for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        needed = ", ".join(f"{name} {list(shape)}" for name, shape in kept.items() if name not in ("keys", "values"))
        raise unsupported(
            model,
            f"layer {index} caches a {type(layer).__name__}. The cache holds keys and values (all of them, or a sliding window), "
            f"recurrent states, and windows of convolutions"
            + (f"; this layer would need a place for {needed} too (sizes after three tokens)" if needed else ""),
        )
    shapes: tuple[KVShape, ...] = ()
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        assert layer.keys is not None
        assert layer.values is not None
        shapes = tuple(KVShape(1, tensor.shape[1], tensor.shape[3]) for tensor in (layer.keys, layer.values))
    if not isinstance(layer, LinearAttentionLayer):
        return KeptByLayer(shapes)
    states = tuple(
        (kind, index, StateShape(tuple(tensor.shape[1:]), tensor.dtype))
        for kind in ("conv_states", "recurrent_states")
        for index, tensor in getattr(layer, kind).items()
        if tensor is not None
    )
    return KeptByLayer(shapes, states, layer.number_of_states)


@dataclass(frozen=True, slots=True)
class RowView:
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

    def __init__(self, view: RowView, keys: torch.Tensor, values: torch.Tensor) -> None:
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
        # all new keys are written before any is read: the tokens of a pass attend to each other through the cache
        states_MKD = states_NKTD.transpose(1, 2)[view.valid].to(tensor.dtype)
        tensor[0].transpose(1, 2)[view.write_rows_M, view.write_index_M] = states_MKD
        window = tensor[0, :, :, : view.length]
        return window.index_select(0, view.rows_N) if view.rows is None else window[view.rows]


class _StateLayer(LinearAttentionLayer):
    """The states of one layer. They exist from the first token on, as zeros, which is what a layer begins with."""

    def __init__(self, view: RowView, kept: KeptByLayer, states: Sequence[torch.Tensor]) -> None:
        """`states` have the axes of transformers: views, if our own have others."""
        LinearAttentionLayer.__init__(self, number_of_states=kept.num_states)
        self._own = states
        self._kept = kept
        for (kind, index, _), tensor in zip(kept.states, states, strict=True):
            current = tensor[0]
            rows = current.index_select(0, view.rows_N) if view.rows is None else current[view.rows]
            getattr(self, kind)[index] = rows
            self.has_previous_state[index] = True
            self.dtype, self.device = rows.dtype, rows.device
            if kind == "conv_states":
                self.is_conv_states_initialized[index] = True
                self.conv_kernel_size[index] = rows.shape[-1]
            else:
                self.is_recurrent_states_initialized[index] = True

    def write_back(self, view: RowView) -> None:
        """Store the states that the layer has now, except those that it has changed in our own tensors."""
        for (kind, index, _), tensor in zip(self._kept.states, self._own, strict=True):
            values, current = getattr(self, kind)[index], tensor[0]
            if view.rows is None:
                current[view.rows_N] = values.to(current.dtype)
            elif values.data_ptr() != current[view.rows].data_ptr():
                current[view.rows] = values


class _StateAndRowLayer(_StateLayer, _RowLayer):
    """A layer that keeps both."""

    def __init__(
        self,
        view: RowView,
        kept: KeptByLayer,
        states: Sequence[torch.Tensor],
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        _RowLayer.__init__(self, view, keys, values)
        _StateLayer.__init__(self, view, kept, states)

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do: the tensors exist."""


class RowCache(Cache):
    """The rows of one pass, as transformers' cache."""

    def __init__(
        self, kv: KVCache, kept_by_layers: Sequence[KeptByLayer], view: RowView, *, joined: bool = False
    ) -> None:
        """`joined`: our tensors are those of the fused pass."""
        parts = [part for tensor in kv.tensors for part in tensor.split(1)] if joined else kv.tensors
        tensors, states = iter(parts), iter(kv.states)
        self._view = view
        super().__init__(layers=[_layer(kept, view, tensors, states, joined) for kept in kept_by_layers])

    def write_back(self) -> None:
        """Store the recurrent states after the pass. Keys and values are stored already."""
        for layer in self.layers:
            if isinstance(layer, _StateLayer):
                layer.write_back(self._view)


def _layer(
    kept: KeptByLayer, view: RowView, tensors: Iterator[torch.Tensor], states: Iterator[torch.Tensor], joined: bool
) -> _RowLayer | _StateLayer:
    own = [next(states) for _ in kept.states]
    if joined:
        kinds = [kind for kind, _, _ in kept.states]
        own = [state.mT if kind == "conv_states" else state for kind, state in zip(kinds, own, strict=True)]
    if not kept.keys_and_values:
        return _StateLayer(view, kept, own)
    keys, values = next(tensors), next(tensors)
    return _StateAndRowLayer(view, kept, own, keys, values) if own else _RowLayer(view, keys, values)


# The experts of a pass


@contextmanager
def routed(
    kv: KVCache, rows_M: torch.Tensor, index_M: torch.Tensor, tokens: int, places_M: torch.Tensor | None = None
) -> Iterator[None]:
    """Inside, a pass uses the experts that are prescribed for tokens in the cache; afterwards, the cache has those that it used.

    Token m has the index `index_M[m]` in row `rows_M[m]`, and is number `places_M[m]` of the `tokens` tokens of the pass, padding
    included (None: there is none).
    """
    if kv.routes is None or kv.route_shape is None:
        yield
        return
    shape = kv.route_shape
    prescribed_MW = kv.routes[0, rows_M, 0, index_M]
    replay_TLK = None
    if bool((prescribed_MW != shape.none).any()):
        replay_TLK = torch.full((tokens, shape.layers, shape.top_k), -1, device=kv.routes.device)
        known_MW = prescribed_MW.long()
        known_MW[known_MW == shape.none] = -1
        replay_TLK[slice(None) if places_M is None else places_M] = known_MW.view(-1, shape.layers, shape.top_k)
    used: list[torch.Tensor] = []
    with RouterPass(lambda choice: used.append(choice.index_TK), replay_TLK).active():
        yield
    used_TW = torch.stack(used, dim=1).flatten(1)
    kv.routes[0, rows_M, 0, index_M] = (used_TW if places_M is None else used_TW[places_M]).to(kv.routes.dtype)
