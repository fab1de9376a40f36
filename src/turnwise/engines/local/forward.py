"""What a forward pass is to the engine, and which one a model gets.

The engine hands over tokens, positions and rows of the cache, and takes logits. It refuses to know the model's family: the
fused pass reads the parameters of Llama-like models, the generic one runs any decoder of transformers, and the one with
vision those whose prompts may hold images.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from turnwise.engines.local.kv_cache import KVCache, PlaneShape
from turnwise.errors import EngineError, Failed, boundary
from turnwise.models.vision import VisionAdapter

__all__ = ["Forward", "choose_forward", "disagreement"]

logger = logging.getLogger(__name__)

_PROBE_WINDOW = 8
"""Tokens of a sliding window while the model is tried out."""


class Forward(Protocol):
    """Runs the model over rows of the cache."""

    @property
    def shapes(self) -> Sequence[PlaneShape]:
        """The planes that the cache must have."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """The context in which all tensor work of a step is done: no gradients, evaluation mode."""
        ...

    def refresh(self) -> None:
        """Look up the model's parameters again: somebody may have replaced them."""
        ...

    def prefill(self, rows: KVCache, rows_N: np.ndarray, starts_N: np.ndarray, tokens_N: Sequence[np.ndarray]) -> None:
        """Compute what the cache keeps of `tokens_N[n]`, which stand at `starts_N[n]` and after in row `rows_N[n]`."""
        ...

    def decode(
        self, rows: KVCache, rows_B: np.ndarray, positions_B: np.ndarray, tokens_B: np.ndarray, shared: int
    ) -> torch.Tensor:
        """Run one token a row, in ascending order of rows, and return float32 logits [B, V].

        The first `shared` tokens are the same in all these rows.
        """
        ...


def choose_forward(model: PreTrainedModel) -> Forward:
    """The fused pass where the model's family has one and it agrees with the model itself; else the generic one.

    Raises EngineError for a model that cannot be run over a key-value cache.
    """
    from turnwise.engines.local.fused import FusedForward, unfit
    from turnwise.engines.local.generic import GenericForward
    from turnwise.engines.local.vision import VisionForward

    reason = unfit(model)
    if reason is None:
        fused = FusedForward(model)
        gap, limit = disagreement(fused, model)
        if gap <= limit:
            return fused
        reason = f"its logits differ from the model's own by {gap:.3g}, more than {limit:.3g}"
        logger.warning("the fused pass of the embedded engine is off for %s: %s", type(model).__name__, reason)
    else:
        logger.info("the embedded engine runs %s through its own forward: %s", type(model).__name__, reason)
    eyes = VisionAdapter.of(model)
    generic = GenericForward(model) if eyes is None else VisionForward(model, eyes)
    problem = "it does not take a mask of four dimensions as other decoders do"
    try:
        with boundary("engine"):  # a model that takes other masks raises whatever comes of it
            gap, limit = disagreement(generic, model)
        if gap <= limit:
            return generic
        problem = f"its logits differ by {gap:.3g}, more than {limit:.3g}: {problem}"
    except Failed as failed:
        if isinstance(failed.__cause__, EngineError):
            raise failed.__cause__ from None
        problem = f"{problem} ({failed.failure.message})"
    raise EngineError(
        f"{type(model).__name__} cannot be run over the slots of the embedded engine: {problem}. Take another model, or "
        f"serve it with another engine"
    )


def disagreement(forward: Forward, model: PreTrainedModel) -> tuple[float, float]:
    """The largest difference to the logits of the model's own forward on a few tokens, and what rounding may explain.

    A sliding window is made narrow meanwhile, so that these few tokens reach beyond it. Raises EngineError if the model's
    own logits are no numbers.
    """
    parameter = next(model.parameters())
    config = model.config.get_text_config()
    longest = 12 + _PROBE_WINDOW
    lengths = (longest, longest - 5)
    texts = [(np.arange(length) * 7 + 3 + offset) % config.vocab_size for offset, length in enumerate(lengths)]
    rows = KVCache(forward.shapes, dtype=parameter.dtype, device=parameter.device, budget=1 << 40)
    rows.resize(3, longest)
    rows_N, cut = np.array([0, 2]), 2
    with _narrow_window(config), forward.guard():
        forward.refresh()
        zeros_N = np.zeros(2, dtype=np.int64)
        forward.prefill(rows, rows_N, zeros_N, [text[:cut] for text in texts])
        forward.prefill(rows, rows_N, zeros_N + cut, [text[cut:-1] for text in texts])
        last_N = np.array([text[-1] for text in texts])
        logits_NV = forward.decode(rows, rows_N, np.array(lengths) - 1, last_N, 0)
        own_NV = torch.stack([_last_logits(model, text, parameter.device) for text in texts])
    if not bool(torch.isfinite(own_NV).all()):
        raise EngineError(
            f"{type(model).__name__} gives logits that are NaN or infinite: its weights are damaged, or its dtype "
            f"({str(parameter.dtype).removeprefix('torch.')}) is too narrow for it. Use another checkpoint or another model.dtype"
        )
    gap = (logits_NV - own_NV).abs().max().item()
    scale = max(1.0, own_NV.abs().max().item())
    return (gap if gap == gap else float("inf")), scale * (1e-3 if parameter.dtype == torch.float32 else 1e-1)


@contextmanager
def _narrow_window(config: Any) -> Iterator[None]:
    """Inside, a model with a sliding window has one of a few tokens."""
    window = getattr(config, "sliding_window", None)
    if window is None:
        yield
        return
    config.sliding_window = min(window, _PROBE_WINDOW)
    try:
        yield
    finally:
        config.sliding_window = window


def _last_logits(model: PreTrainedModel, tokens_T: np.ndarray, device: torch.device) -> torch.Tensor:
    ids_1T = torch.from_numpy(tokens_T).to(device).unsqueeze(0)
    return model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False).logits[0, -1].float()
