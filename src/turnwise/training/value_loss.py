"""The loss of a critic: a pure function of values and returns."""

from __future__ import annotations

import torch

__all__ = ["value_loss"]


def value_loss(
    value_N: torch.Tensor, old_value_N: torch.Tensor, return_N: torch.Tensor, *, clip: float | None = None
) -> torch.Tensor:
    """`(V - R)^2 / 2` for each token or turn; with `clip`, the larger of it and of the same with V clipped to `old +- clip`.

    `old_value_N` are the values before the update. Value clipping: PPO's reference implementation; arXiv 2006.05990 compares it.
    """
    loss_N = (value_N - return_N).square() / 2
    if clip is None:
        return loss_N
    clipped_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
    return torch.maximum(loss_N, (clipped_N - return_N).square() / 2)
