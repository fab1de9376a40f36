"""The interface between the engine and the model's forward pass, and the choice of an implementation.

The engine passes tokens, positions and KV rows, and receives logits. Implementations: the fused pass reads the parameters
of Llama-like models, the generic pass runs any decoder of transformers, and the vision pass runs models with images.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from turnwise.engines.local.kv_cache import KVCache, KVShape
from turnwise.engines.local.prefix_index import NOTHING_SHARED, SharedPrefix
from turnwise.errors import EngineError, Failed, boundary
from turnwise.models.attention import narrow_window
from turnwise.models.autocast import autocast as bfloat16_autocast
from turnwise.models.autocast import output_layer_in_float32
from turnwise.models.vision import VisionAdapter

__all__ = ["CachedForward", "choose_forward", "logit_difference"]

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

    def prefill(self, kv: KVCache, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        """Compute keys and values of the tokens `tokens_N[n]`, whose first index in the sequence is `starts_N[n]`, and write
        them to row `rows_N[n]`."""
        ...

    def decode(
        self, kv: KVCache, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray, shared: SharedPrefix
    ) -> torch.Tensor:
        """Run one token of each row, in ascending order of rows, and return float32 logits [B, V].

        `shared` is a prefix that some or all of these rows have in common.
        """
        ...


def choose_forward(model: PreTrainedModel, *, autocast: bool = False) -> CachedForward:
    """The fused pass if it supports the model and agrees with the model's own forward; otherwise the generic pass.

    With `autocast`, matrix products are computed in bfloat16 (except the output layer), and the model's parameters are float32.

    Raises EngineError for a model that cannot be run over a KV cache.
    """
    from turnwise.engines.local.fused import FusedForward
    from turnwise.engines.local.fused_support import unsupported_reason
    from turnwise.engines.local.generic import GenericForward
    from turnwise.engines.local.vision import VisionForward

    reason = unsupported_reason(model)
    if autocast:
        output_layer_in_float32(model)
    if reason is None:
        fused = FusedForward(model, autocast=autocast)
        difference, limit = logit_difference(fused, model, autocast=autocast)
        if difference <= limit:
            return fused
        reason = f"its logits differ from the model's own by {difference:.3g}, more than {limit:.3g}"
        logger.warning("the fused pass of the embedded engine is off for %s: %s", type(model).__name__, reason)
    else:
        logger.info("the embedded engine runs %s through the model's own forward: %s", type(model).__name__, reason)
    sees = VisionAdapter.of(model) is not None
    generic = VisionForward(model, autocast=autocast) if sees else GenericForward(model, autocast=autocast)
    problem = "it does not take a mask of four dimensions as other decoders do"
    try:
        with boundary("engine"):  # a model with other masks may raise any exception
            difference, limit = logit_difference(generic, model, autocast=autocast)
        if difference <= limit:
            return generic
        problem = f"its logits differ by {difference:.3g}, more than {limit:.3g}: {problem}"
    except Failed as failed:
        if isinstance(failed.__cause__, EngineError):
            raise failed.__cause__ from None
        problem = f"{problem} ({failed.failure.message})"
    raise EngineError(
        f"{type(model).__name__} cannot be run by the embedded engine: {problem}. Use another model, or serve this model with "
        f"another engine"
    )


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
    kv = KVCache(forward.kv_shapes, dtype=forward.kv_dtype, device=parameter.device, budget_bytes=1 << 40)
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
        raise EngineError(
            f"{type(model).__name__} gives logits that are NaN or infinite: its weights are damaged, or its dtype "
            f"({str(parameter.dtype).removeprefix('torch.')}) is too narrow for it. Use another checkpoint or another model.dtype"
        )
    difference = (logits_NV - own_NV).abs().max().item()
    scale = max(1.0, own_NV.abs().max().item())
    limit = scale * (1e-3 if forward.kv_dtype == torch.float32 else 1e-1)
    return (difference if difference == difference else float("inf")), limit  # NaN counts as infinite


def _last_logits(model: PreTrainedModel, tokens_T: np.ndarray, device: torch.device) -> torch.Tensor:
    ids_1T = torch.from_numpy(tokens_T).to(device).unsqueeze(0)
    return model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False).logits[0, -1].float()
