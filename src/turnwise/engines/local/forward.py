"""The model's forward pass over the rows of the KV cache: the interface, the choice, and the generic pass with images.

The engine passes tokens, positions and rows, and receives logits. The fused pass (`fused.py`) reads the parameters of
Llama-like models and of some hybrids; the generic pass runs any decoder of transformers through the model's own forward. The
vision pass is for models with images: the tokens of images go through the model's own forward, those of text through the fused
pass, if it has the text part; both use the same cache. The generic pass is the reference of the fused one. Invariant: before a
pass is used, its logits are compared with those of the model's own forward without a cache, and a pass that differs is refused.

The generic pass knows masks of four dimensions, and leaves what a layer keeps to `row_cache.py`. It refuses models that keep
something else from token to token, and encoder-decoder models. Does not know requests, sampling, or which sequence lies in which
row.

Recurrent layers (linear attention, Mamba, short convolutions) of transformers take no padding on the right: a padded token would
change the state. So the generic pass runs prompts of different lengths in several passes, each with as many tokens of all its
rows. Some models do not continue from a state with more than one token at a time; they are found by comparison, and continued
token by token.

The prefix cache compares tokens only. So each placeholder of an image is replaced by a negative key, computed from the contents
of the image: two conversations share a prefix only where both tokens and images are the same. The model's own forward computes
an entire image in the pass that prefills its placeholders; no later pass needs the image.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel

from turnwise.engines.local.cache import NOTHING_SHARED, KVCache, KVShape, SharedPrefix, StateShape
from turnwise.engines.local.fused import FusedForward
from turnwise.engines.local.linears import ModelRows
from turnwise.engines.local.row_cache import RowCache, RowView, probe_layers, routed, unsupported
from turnwise.errors import EngineError, Failed, boundary
from turnwise.models.model_config import RECURRENT_TYPES, TYPES_BY_TOKEN
from turnwise.models.precision import (
    Bfloat16Linears,
    autocast,
    ignored_by_sdpa,
    in_evaluation,
    narrow_window,
    output_layer_in_float32,
    overflowing_module,
    query_scale,
    scales_queries,
)
from turnwise.models.precision import autocast as bfloat16_autocast
from turnwise.models.selective_scan import continue_selective_scans
from turnwise.models.transfer import from_arrays
from turnwise.models.vision import VisionAdapter
from turnwise.types import Media

# Interface, and the choice of the pass

logger = logging.getLogger(__name__)

_PROBE_WINDOW = 8
"""Tokens of a sliding window while the model is compared with itself."""


class CachedForward(Protocol):
    """Runs the model over rows of the KV cache. N: sequences of a prefill; B: requests of a decode step."""

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        """The shapes of the tensors that the cache must have."""
        ...

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        """The states that the cache must have for each row; none without recurrent layers."""
        ...

    @property
    def kv_dtype(self) -> torch.dtype:
        """The dtype of keys and values."""
        ...

    def inference(self) -> AbstractContextManager[None]:
        """The context for all tensor work of a step: no gradients, evaluation mode."""
        ...

    def reload_parameters(self, *, changed: bool = True) -> None:
        """Read the model's parameters again, because they may have been replaced by other tensors.

        With `changed`, their values have changed too, possibly without torch's knowledge: copies are made again.
        """
        ...

    def free_copies(self) -> None:
        """Free copies of weights that `reload_parameters` would make again after a change."""
        ...

    def add_model(self, model: PreTrainedModel) -> bool:
        """Compute another model in the same passes, which has the same base weights and an adapter of its own, or none. Returns
        whether that is possible."""
        ...

    def of_models(self, models_M: np.ndarray) -> ModelRows | None:
        """For `decode`: the model of each row, by its number, 0 for the first; None if there is only one model."""
        ...

    def prefill(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        models_N: np.ndarray | None = None,
    ) -> None:
        """Compute keys and values of the tokens `tokens_N[n]`, whose first index in the sequence is `starts_N[n]`, and write
        them to row `rows_N[n]`. `models_N`: the models of the sequences; None: the first."""
        ...

    def decode(
        self,
        kv: KVCache,
        rows_B: np.ndarray,
        positions_B: np.ndarray,
        tokens_B: np.ndarray,
        shared: SharedPrefix,
        models: ModelRows | None = None,
    ) -> torch.Tensor:
        """Run one token of each row, in ascending order of rows, and return float32 logits [B, V].

        `shared` is a prefix that some or all of these rows have in common. `models`: those of the rows; None: the first.
        """
        ...


def choose_forward(model: PreTrainedModel, *, autocast: bool = False) -> CachedForward:
    """The fused pass if it supports the model and agrees with the model's own forward; otherwise the generic pass.

    With `autocast`, matrix products are computed in bfloat16 (except the output layer), and the model's parameters are float32.

    Raises EngineError for a model that cannot be run over a KV cache.
    """
    from turnwise.engines.local.fused import unsupported_reason  # tests replace it

    reason = unsupported_reason(model)
    sees = VisionAdapter.of(model) is not None
    if autocast:
        output_layer_in_float32(model)
    if reason is None:
        fused = FusedForward(model, autocast=autocast)
        difference, limit = logit_difference(fused, model, autocast=autocast)
        if difference <= limit:
            return VisionForward(model, fused=fused) if sees else fused
        reason = f"its logits differ from the model's own by {difference:.3g}, more than {limit:.3g}"
        logger.warning("the fused pass of the embedded engine is off for %s: %s", type(model).__name__, reason)
    else:
        logger.info("the embedded engine runs %s through the model's own forward: %s", type(model).__name__, reason)
    try:
        with boundary("engine"):  # a model with a cache or masks of its own may raise any exception
            generic = VisionForward(model, autocast=autocast) if sees else GenericForward(model, autocast=autocast)
            difference, limit = logit_difference(generic, model, autocast=autocast)
            if difference > limit and generic.state_shapes:
                generic.token_by_token = True
                difference, limit = logit_difference(generic, model, autocast=autocast)
        if difference <= limit:
            return generic
        problem = (
            f"over our cache, its logits differ by {difference:.3g} from those of its own pass, more than {limit:.3g}"
        )
    except Failed as failed:
        if isinstance(failed.__cause__, EngineError):
            raise failed.__cause__ from None
        problem = f"it does not take our cache and masks as other decoders do ({failed.failure.message})"
    raise unsupported(model, problem)


def logit_difference(forward: CachedForward, model: PreTrainedModel, *, autocast: bool = False) -> tuple[float, float]:
    """The largest difference from the logits of the model's own forward on a few tokens, and the limit that rounding explains.

    A sliding window is narrowed meanwhile, so that these few tokens extend beyond it. Raises EngineError if the model's own
    logits are NaN or infinite.
    """
    parameter = next(model.parameters())
    config = model.config.get_text_config()
    longest = 12 + _PROBE_WINDOW
    lengths = (longest, longest - 5)
    sequences = [(np.arange(length) * 7 + 3 + offset) % config.vocab_size for offset, length in enumerate(lengths)]
    kv = KVCache(
        forward.kv_shapes,
        forward.state_shapes,
        dtype=forward.kv_dtype,
        device=parameter.device,
        budget_bytes=1 << 40,
    )
    kv.resize(3, longest)
    # two prefills and a decode step, over rows with a gap between them
    rows_N, split = np.array([0, 2]), 2
    with narrow_window(config, _PROBE_WINDOW), forward.inference():
        forward.reload_parameters()
        zeros_N = np.zeros(2, dtype=np.int64)
        forward.prefill(kv, rows_N, zeros_N, [sequence[:split] for sequence in sequences])
        forward.prefill(kv, rows_N, zeros_N + split, [sequence[split:-1] for sequence in sequences])
        last_N = np.array([sequence[-1] for sequence in sequences])
        logits_NV = forward.decode(kv, rows_N, np.array(lengths) - 1, last_N, NOTHING_SHARED)
        with bfloat16_autocast(parameter.device, autocast):
            own_NV = torch.stack([_last_logits(model, sequence, parameter.device) for sequence in sequences])
    if not bool(torch.isfinite(own_NV).all()):
        where = overflowing_module(model, lambda: [_last_logits(model, ids, parameter.device) for ids in sequences])
        raise EngineError(
            f"{type(model).__name__} gives logits that are NaN or infinite"
            f"{'' if where is None else f', first in {where}'}: its weights are damaged, or its dtype "
            f"({str(parameter.dtype).removeprefix('torch.')}) is too narrow for it. Use another checkpoint or another model.dtype"
        )
    difference = (logits_NV - own_NV).abs().max().item()
    scale = max(1.0, own_NV.abs().max().item())
    limit = scale * (1e-3 if forward.kv_dtype == torch.float32 else 1e-1)
    return (difference if difference == difference else float("inf")), limit  # NaN counts as infinite


def _last_logits(model: PreTrainedModel, tokens_T: np.ndarray, device: torch.device) -> torch.Tensor:
    ids_1T = torch.from_numpy(tokens_T).to(device).unsqueeze(0)
    return model(input_ids=ids_1T, use_cache=False).logits[0, -1].float()


# Generic pass: any decoder of transformers

ATTENTION_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
_ATTENDS = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The attention of layers that have a state besides."""
OTHER_TYPES = (*RECURRENT_TYPES, *TYPES_BY_TOKEN)
"""Layers without a mask. Nothing else is known of other types,
so they are refused: an attention that selects tokens may agree on the few tokens of the comparison."""
WITH_4D_MASK = ("sdpa", "eager", "turnwise_tree")
"""Attention implementations that take a mask of four dimensions; turnwise_tree is the trainer's, and is sdpa here."""
_BEYOND_SDPA = {"turnwise_tree": {"s_aux", "softcap"}}
"""What an implementation computes and sdpa ignores: attention sinks, soft caps."""


class GenericForward:
    """Keys and values of a layer are two cache tensors, because their shapes may differ."""

    token_by_token = False
    """Whether sequences are continued by one token at a time, because the model does not continue from a state with more."""
    joined = False
    """Whether the cache has the axes of the fused pass."""

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False, copy: Bfloat16Linears | None = None) -> None:
        """`copy`: the copies of weights for autocast, if there are some already."""
        self.copy = Bfloat16Linears(model) if autocast and copy is None else copy
        """What has bfloat16 copies of weights, with autocast."""
        self._model: PreTrainedModel = model if self.copy is None else self.copy.model
        self._config = model.config.get_text_config()
        self._attention_types = _attention_types(model)
        self._device = next(model.parameters()).device
        self._dtype = next(model.parameters()).dtype if self.copy is None else torch.bfloat16
        _check_masks(model)
        self._tuned = [module for module in self._model.modules() if scales_queries(module)]
        continue_selective_scans(self._model)
        with self.inference():
            self._layers = probe_layers(self._model)
        self._arguments = inspect.signature(model.forward).parameters

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        return [shape for layer in self._layers for shape in layer.keys_and_values]

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        return [shape for layer in self._layers for _, _, shape in layer.states]

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._dtype

    @contextmanager
    def inference(self) -> Iterator[None]:
        if self.copy is not None and self.copy.freed:
            self.copy.refresh()
        # not torch.inference_mode: a model may create tables here (rotary embeddings) that it also trains with later
        with in_evaluation(self._model), torch.no_grad(), autocast(self._device, self.copy is not None):
            yield

    def reload_parameters(self, *, changed: bool = True) -> None:
        # the model's own forward reads its parameters: only copies have to be made again
        if self.copy is not None:
            self.copy.refresh(force=changed)

    def free_copies(self) -> None:
        if self.copy is not None:
            self.copy.free()

    def add_model(self, model: PreTrainedModel) -> bool:
        return False  # the model's own forward has one adapter

    def of_models(self, models_M: np.ndarray) -> ModelRows | None:
        return None

    def prefill(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        models_N: np.ndarray | None = None,
    ) -> None:
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        padded_NT = np.stack([np.pad(tokens, (0, int(lengths_N.max()) - len(tokens))) for tokens in tokens_N])
        if not kv.states:
            self._run(kv, rows_N, starts_N, lengths_N, padded_NT)
            return
        for rows, columns in self._without_padding(starts_N, lengths_N):
            tokens_NT = padded_NT[rows, columns]
            self._run(
                kv, rows_N[rows], starts_N[rows] + columns.start, np.full(len(tokens_NT), tokens_NT.shape[1]), tokens_NT
            )

    def _without_padding(self, starts_N: np.ndarray, lengths_N: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
        """The passes that compute sequences of different lengths without padding: (sequences, columns of the tokens).

        Lengths 5, 2 and 5: columns 0 and 1 of all three, then columns 2 to 4 of the first and the last.
        """
        done_N = np.zeros_like(lengths_N)
        while (left := np.flatnonzero(done_N < lengths_N)).size:
            start = int(done_N[left].min())
            rows = left[done_N[left] == start]
            stop = int(lengths_N[rows].min())
            if self.token_by_token:
                fresh = rows[starts_N[rows] + start == 0]
                rows = fresh if fresh.size else rows
                stop = int(lengths_N[rows].min()) if fresh.size else start + 1
            yield rows, slice(start, stop)
            done_N[rows] = stop

    def decode(
        self,
        kv: KVCache,
        rows_B: np.ndarray,
        positions_B: np.ndarray,
        tokens_B: np.ndarray,
        shared: SharedPrefix,
        models: ModelRows | None = None,
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
        # Sequences have different lengths, and begin at different indices. Rows 0 and 2 with 4 and 0 tokens in the cache, and new
        # tokens [7 8] and [9 9 9], where . is padding:
        #     tokens_NT   7 8 .    9 9 9        write_rows_M    0 0 2 2 2
        #     index_NT    4 5 6    0 1 2        write_index_M   4 5 0 1 2       length = 6
        # Invariant: padding is never written. Each row is read up to `length`, also where it holds nothing or an evicted
        # sequence: the mask shows a token only the keys up to its own index, which all belong to its sequence.
        steps_T = np.arange(tokens_NT.shape[1])
        index_NT = starts_N[:, None] + steps_T
        length = int((starts_N + lengths_N).max())
        valid_NT = steps_T < lengths_N[:, None]
        # padding is computed and not used, but its position must be within the model's tables
        positions = np.minimum(index_NT, length - 1) if position_3NT is None else position_3NT
        others = [np.flatnonzero(valid_NT), positions, index_NT, tokens_NT.astype(np.int64)]
        view, masks, (places_M, position_ids, index, tokens) = self._sent(rows_N, index_NT, valid_NT, length, others)
        if model_inputs is None:
            model_inputs = {"input_ids": tokens}
        cache = RowCache(kv, self._layers, view, joined=self.joined)
        arguments: dict[str, Any] = {
            "position_ids": position_ids,
            "attention_mask": self._masks(masks) if masks else None,
            # models have one of these names: `cache` since transformers 5.24, before it the last without attention
            "cache": cache,
            "past_key_values": cache,
            "cache_params": cache,
        }
        arguments = {name: value for name, value in arguments.items() if name in self._arguments}
        tuned = _tuned_by_index(self._tuned, index)
        with routed(kv, view.write_rows_M, view.write_index_M, tokens_NT.size, places_M), tuned:
            output = self._model(**model_inputs, **arguments, use_cache=True, logits_to_keep=logits_to_keep)
        cache.write_back()
        return (output.logits if isinstance(logits_to_keep, torch.Tensor) else output.logits[:, -1]).float()

    def _sent(
        self, rows_N: np.ndarray, index_NT: np.ndarray, valid_NT: np.ndarray, length: int, others: Sequence[np.ndarray]
    ) -> tuple[RowView, dict[str, torch.Tensor], list[torch.Tensor]]:
        """Where a pass writes and reads, what its tokens see (`_visible`), and other arrays: all in one copy to the device."""
        valid = np.nonzero(valid_NT)
        visible = self._visible(index_NT, length) if self.kv_shapes else {}
        arrays = [rows_N, rows_N[valid[0]], index_NT[valid_NT], *valid, *visible.values(), *others]
        rows, write_rows_M, write_index_M, *rest = from_arrays(arrays, self._device)
        masks_at = len(valid)
        contiguous = np.array_equal(rows_N, np.arange(len(rows_N)) + rows_N[0])
        view = RowView(
            rows_N=rows,
            rows=slice(int(rows_N[0]), int(rows_N[-1]) + 1) if contiguous else None,
            write_rows_M=write_rows_M,
            write_index_M=write_index_M,
            valid=tuple(rest[:masks_at]),
            length=length,
        )
        others_at = masks_at + len(visible)
        return view, dict(zip(visible, rest[masks_at:others_at], strict=True)), rest[others_at:]

    def _visible(self, index_NT: np.ndarray, length: int) -> dict[str, np.ndarray]:
        """Which of L keys each token sees [N, T, L], for each kind of attention in the model."""
        keys_L = np.arange(length)
        causal_NTL = keys_L <= index_NT[:, :, None]
        visible = dict.fromkeys(self._attention_types, causal_NTL)
        if "sliding_attention" in visible:
            visible["sliding_attention"] = causal_NTL & (keys_L > index_NT[:, :, None] - self._config.sliding_window)
        if "chunked_attention" in visible:
            chunk = self._config.attention_chunk_size
            visible["chunked_attention"] = causal_NTL & (keys_L // chunk == index_NT[:, :, None] // chunk)
        return visible

    def _masks(self, visible: Mapping[str, torch.Tensor]) -> torch.Tensor | dict[str, torch.Tensor | None]:
        """The additive mask [N, 1, T, L]; a mask for each layer type if the model has several."""
        masks: dict[str, torch.Tensor] = {}
        for name, visible_NTL in visible.items():
            # the lowest number and not -inf: padding may see no key in its window, and a softmax over -inf alone is NaN
            zeros = torch.zeros(visible_NTL.shape, dtype=self._dtype, device=self._device)
            masks[name] = zeros.masked_fill_(~visible_NTL, torch.finfo(self._dtype).min).unsqueeze(1)
        by_type = set(getattr(self._config, "layer_types", None) or ())
        if not {_ATTENDS.get(name, name) for name in by_type} & {"sliding_attention", "chunked_attention"}:
            return masks[self._attention_types[0]]
        both = {name: masks[attention] for name, attention in _ATTENDS.items() if attention in masks}
        return {**dict.fromkeys(by_type | {"linear_attention"}), **both, **masks}

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)


@contextmanager
def _tuned_by_index(attentions: Sequence[Any], index_NT: torch.Tensor) -> Iterator[None]:
    """Inside, the attentions of Llama 4 scale each query by the index of its token in its row (arXiv 2501.19399).

    Their own code counts on from one length of the cache, the same for all rows, and rows have different lengths.
    """
    hooks: list[Any] = []
    try:
        for attention in attentions:
            scale_NT1 = query_scale(attention, index_NT).unsqueeze(-1)

            def scaled(module: Any, given: Any, query: torch.Tensor, by: torch.Tensor = scale_NT1) -> torch.Tensor:
                return (query * by).to(query.dtype)

            attention.attn_temperature_tuning = False
            hooks.append(attention.q_proj.register_forward_hook(scaled))
        yield
    finally:
        for attention in attentions:
            attention.attn_temperature_tuning = True
        for hook in hooks:
            hook.remove()


def _attention_types(model: PreTrainedModel) -> list[str]:
    """The kinds of attention in the model. Raises EngineError if a layer is of an unknown kind."""
    config = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise unsupported(model, "it has an encoder, and the cache holds what decoders keep only")
    layer_types = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(layer_types - {*ATTENTION_TYPES, *OTHER_TYPES}):
        known = ", ".join((*ATTENTION_TYPES, *OTHER_TYPES))
        raise unsupported(model, f"it has layers of the type {', '.join(unknown)}; known types are {known}")
    if not layer_types:
        return ["sliding_attention" if getattr(config, "sliding_window", None) is not None else "full_attention"]
    attention = {_ATTENDS.get(name, name) for name in layer_types}
    return [name for name in ATTENTION_TYPES if name in attention] or ["full_attention"]


def _check_masks(model: PreTrainedModel) -> None:
    """Raise EngineError if the model's attention does not take our masks, or ignores something of the model."""
    if model.config._attn_implementation not in WITH_4D_MASK:
        raise EngineError(
            f"the model's attention is {model.config._attn_implementation}, which takes no mask of four dimensions. "
            'Load the model with attn_implementation="sdpa"'
        )
    computed = _BEYOND_SDPA.get(model.config._attn_implementation, set())
    ignored = [name for name in ignored_by_sdpa(model) if name not in computed]
    if model.config._attn_implementation != "eager" and ignored:
        raise EngineError(
            f"{type(model).__name__} uses {', '.join(ignored)} in its attention, which {model.config._attn_implementation} "
            'ignores. Load the model with attn_implementation="eager"'
        )


# Vision pass: prompts that hold images, and the positions of the tokens after them


@dataclass(frozen=True, slots=True)
class VisionPrompt:
    """A prompt with images."""

    token_ids_N: np.ndarray
    """Token ids as the model knows them."""
    keys_N: np.ndarray
    """The same, with a negative key in place of each placeholder: a function of the image and of the index in the image."""
    media: Sequence[Media]
    position_3N: np.ndarray
    position_offset: int
    """Position of a token after the prompt, less its index in the sequence."""

    def snap_to_image_edge(self, stop: int, start: int = -1) -> int:
        """The last index up to `stop` that is not inside an image; the end of the image if that is not after `start`."""
        for image in self.media:
            if image.start < stop < image.start + image.length:
                return image.start if image.start > start else image.start + image.length
        return stop

    def media_between(self, start: int, stop: int) -> list[Media]:
        """The images that begin from index `start` to before `stop`."""
        return [image for image in self.media if start <= image.start < stop]


class VisionForward(GenericForward):
    """The forward for models whose prompts may hold images: the generic one, and `fused` for passes of text, if that is given."""

    def __init__(self, model: PreTrainedModel, *, autocast: bool = False, fused: FusedForward | None = None) -> None:
        self.fused, self.joined = fused, fused is not None
        super().__init__(model, autocast=autocast, copy=None if fused is None else fused.copy)
        adapter = VisionAdapter.of(self._model)
        assert adapter is not None, "the model has no images"
        self._adapter = adapter
        self._image_keys = WeakTensorKeyDictionary()
        self._verified = False

    @property
    def kv_shapes(self) -> Sequence[KVShape]:
        return super().kv_shapes if self.fused is None else self.fused.kv_shapes

    @property
    def state_shapes(self) -> Sequence[StateShape]:
        return super().state_shapes if self.fused is None else self.fused.state_shapes

    @contextmanager
    def inference(self) -> Iterator[None]:
        if self.fused is not None:
            self.fused.restore_copies()
        with super().inference():
            yield

    def reload_parameters(self, *, changed: bool = True) -> None:
        if self.fused is None:
            super().reload_parameters(changed=changed)
        else:
            self.fused.reload_parameters(changed=changed)

    def free_copies(self) -> None:
        if self.fused is None:
            super().free_copies()
        else:
            self.fused.free_copies()

    def prefill(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        models_N: np.ndarray | None = None,
    ) -> None:
        if self.fused is None:
            super().prefill(kv, rows_N, starts_N, tokens_N)
            return
        with autocast(self._device, False):  # the fused pass converts by itself
            self.fused.prefill(kv, rows_N, starts_N, tokens_N)

    def decode(
        self,
        kv: KVCache,
        rows_B: np.ndarray,
        positions_B: np.ndarray,
        tokens_B: np.ndarray,
        shared: SharedPrefix,
        models: ModelRows | None = None,
    ) -> torch.Tensor:
        if self.fused is None:
            return super().decode(kv, rows_B, positions_B, tokens_B, shared)
        with autocast(self._device, False):
            return self.fused.decode(kv, rows_B, positions_B, tokens_B, shared)

    def make_prompt(self, token_ids_N: np.ndarray, media: Sequence[Media]) -> VisionPrompt:
        """Compute keys and positions of a prompt with images.

        Raises EngineError if the prompt ends with an image, or an image is not where its placeholders are.
        """
        keys_N, token_types_N = token_ids_N.astype(np.int32), self._adapter.token_types(token_ids_N, media)
        for image in media:
            span = np.arange(image.start, image.start + image.length)
            if image.start < 0 or image.start + image.length >= len(token_ids_N) or not token_types_N[span[0]]:
                raise EngineError(
                    f"the request has an {image.kind} at tokens {image.start} to {image.start + image.length - 1} of "
                    f"{len(token_ids_N)}; its placeholders must be there, followed by at least one more token"
                )
            placeholders = span[token_types_N[span] > 0]
            keys_N[placeholders] = self._keys_of(image, len(placeholders))
        position_3N = self._adapter.position_ids(token_ids_N, media)
        return VisionPrompt(
            token_ids_N, keys_N, tuple(media), position_3N, int(position_3N.max()) + 1 - len(token_ids_N)
        )

    def prefill_with_images(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        prompts_N: Sequence[VisionPrompt | None],
    ) -> None:
        """`prefill` for sequences of which some have images; the tokens of those are keys.

        Raises EngineError if, with images, the model computes other logits over the cache than in a single pass.
        """
        if not self._verified:
            self._verify(next(prompt for prompt in prompts_N if prompt is not None))
            self._verified = True
        position_N = [
            _positions(prompt, int(start), len(tokens))
            for prompt, start, tokens in zip(prompts_N, starts_N, tokens_N, strict=True)
        ]
        with_images = [
            prompt is not None and bool(prompt.media_between(int(start), int(start) + len(tokens)))
            for prompt, start, tokens in zip(prompts_N, starts_N, tokens_N, strict=True)
        ]
        if self.fused is not None and not all(with_images):
            text = [n for n, sees in enumerate(with_images) if not sees]
            angles_M = np.concatenate([position_N[n][0] for n in text])
            with autocast(self._device, False):
                self.fused.prefill(kv, rows_N[text], starts_N[text], [tokens_N[n] for n in text], angles_M=angles_M)
        else:
            with_images = [True] * len(tokens_N)
        left = [n for n, sees in enumerate(with_images) if sees]
        same_length = len({len(tokens_N[n]) for n in left}) == 1
        # recurrent layers take no padding: one sequence after the other
        for part in [left] if same_length or not kv.states else [[n] for n in left]:
            given = [tokens_N[n] for n in part], [prompts_N[n] for n in part], [position_N[n] for n in part]
            if part:
                self._prefill_images(kv, rows_N[part], starts_N[part], *given)

    def _prefill_images(
        self,
        kv: KVCache,
        rows_N: np.ndarray,
        starts_N: np.ndarray,
        tokens_N: Sequence[np.ndarray],
        prompts_N: Sequence[VisionPrompt | None],
        position_N: Sequence[np.ndarray],
    ) -> None:
        """Prefill through the model's own forward."""
        lengths_N = np.array([len(tokens) for tokens in tokens_N])
        token_NT = np.zeros((len(tokens_N), int(lengths_N.max())), dtype=np.int64)
        token_types_NT = np.zeros_like(token_NT)
        position_3NT = np.zeros((3, *token_NT.shape), dtype=np.int64)
        media: list[Media] = []
        for row, (tokens, start, prompt) in enumerate(zip(tokens_N, starts_N, prompts_N, strict=True)):
            stop, new = int(start) + len(tokens), slice(len(tokens))
            token_NT[row, new] = tokens
            position_3NT[:, row, new] = position_N[row]
            if prompt is None:
                continue
            # after the prompt, there may be tokens that were sampled before the request was preempted
            prompt_ids = prompt.token_ids_N[start:stop]
            in_prompt = slice(len(prompt_ids))
            token_NT[row, in_prompt] = prompt_ids
            token_types_NT[row, in_prompt] = self._adapter.token_types(prompt.token_ids_N, prompt.media)[start:stop]
            media += prompt.media_between(int(start), stop)
        with self._adapter.forward_inputs(self._tensor(token_NT), self._tensor(token_types_NT), media) as model_inputs:
            axes = self._axes(position_3NT)
            self._run(kv, rows_N, starts_N, lengths_N, token_NT, model_inputs=model_inputs, position_3NT=axes)

    def decode_after_images(
        self,
        kv: KVCache,
        rows_B: np.ndarray,
        index_B: np.ndarray,
        tokens_B: np.ndarray,
        offsets_B: np.ndarray,
        shared: SharedPrefix = NOTHING_SHARED,
    ) -> torch.Tensor:
        """`decode` for requests with images before: positions are the index in the sequence plus `offsets_B`."""
        if self.fused is not None:
            with autocast(self._device, False):
                return self.fused.decode(kv, rows_B, index_B, tokens_B, shared, angles_B=index_B + offsets_B)
        position_3BT = np.tile((index_B + offsets_B)[:, None], (3, 1, 1))
        ones_B = np.ones_like(rows_B)
        return self._run(kv, rows_B, index_B, ones_B, tokens_B[:, None], position_3NT=position_3BT)

    def _axes(self, position_3NT: np.ndarray) -> np.ndarray | None:
        """None for a model whose position is the index in the sequence."""
        return position_3NT if self._adapter.uses_mrope else None

    def _keys_of(self, image: Media, count: int) -> np.ndarray:
        """A negative key for each of the image's placeholders: a hash of all outputs of the processor for the image."""
        tensors = [value for value in image.inputs.values() if isinstance(value, torch.Tensor)]
        if (keys := self._image_keys.get(tensors[0])) is None or len(keys) != count:
            content = hashlib.shake_128()
            for name, value in sorted(image.inputs.items()):
                content.update(name.encode())
                if isinstance(value, torch.Tensor):
                    content.update(value.contiguous().view(torch.uint8).numpy().tobytes())
                else:
                    content.update(repr(value).encode())
            words = np.frombuffer(content.digest(4 * count), dtype=np.uint32)
            keys = self._image_keys[tensors[0]] = -2 - (words >> 2).astype(np.int32)
        return keys

    def _verify(self, prompt: VisionPrompt) -> None:
        """Compare logits over the cache with the model's own pass, on a prompt with images.

        They differ if the model uses another mask for images, for example bidirectional attention. The last token is decoded.
        """
        token_1T, media = prompt.token_ids_N[None].astype(np.int64), prompt.media
        token_types_1T = self._adapter.token_types(prompt.token_ids_N, media)[None]
        kv = KVCache(self.kv_shapes, self.state_shapes, dtype=self._dtype, device=self._device, budget_bytes=1 << 40)
        kv.resize(1, token_1T.shape[1])
        zero, last = np.zeros(1, dtype=np.int64), np.array([token_1T.shape[1] - 1])
        # the first token of an image: its logits show whether it attends to the tokens after it
        starts = [image.start for image in media[:8]]
        ids, types = self._tensor(token_1T), self._tensor(token_types_1T)
        with self._adapter.forward_inputs(ids[:, :-1], types[:, :-1], media) as model_inputs:
            images_KV = self._run(
                kv,
                zero,
                zero,
                last,
                token_1T[:, :-1],
                model_inputs=model_inputs,
                position_3NT=self._axes(prompt.position_3N[:, None, :-1]),
                logits_to_keep=self._tensor(np.array(starts)),
            )[0]
        keep = self._tensor(np.array([*starts, int(last[0])]))
        with self._adapter.forward_inputs(ids, types, media) as model_inputs:
            # in a pass of its own, the model computes the positions too, and may need further inputs for that
            others = {
                name: value for name, value in self._adapter.merge_inputs(media).items() if name not in model_inputs
            }
            own_KV = self._model(**model_inputs, **others, use_cache=False, logits_to_keep=keep).logits[0].float()
        self._refuse_other_logits(images_KV, own_KV[:-1])  # before decoding, which such a model may not even do
        offsets = np.array([prompt.position_offset])
        self._refuse_other_logits(self.decode_after_images(kv, zero, last, token_1T[:, -1], offsets), own_KV[-1:])

    def _refuse_other_logits(self, cache_KV: torch.Tensor, own_KV: torch.Tensor) -> None:
        """Raise EngineError if logits over the cache differ from those of the model's own pass by more than rounding."""
        difference, scale = (cache_KV - own_KV).abs().max().item(), max(1.0, own_KV.abs().max().item())
        limit = scale * (1e-3 if self._dtype == torch.float32 else 1e-1)
        if not difference <= limit:  # also if the difference is NaN
            raise EngineError(
                f"{type(self._model).__name__} computes other logits over the cache of the embedded engine when the prompt "
                f"holds an image (they differ by {difference:.3g}, more than {limit:.3g}): its images do not attend as text "
                f"does. Use messages of text, or another model (docs/multimodal.md lists those that were tried)"
            )


def _positions(prompt: VisionPrompt | None, start: int, length: int) -> np.ndarray:
    """Positions [3, T] of the tokens from index `start` of a sequence that begins with this prompt."""
    position_3T = np.tile(np.arange(start, start + length), (3, 1))
    if prompt is not None:
        in_prompt = prompt.position_3N[:, start : start + length]
        position_3T += prompt.position_offset
        position_3T[:, : in_prompt.shape[1]] = in_prompt
    return position_3T
