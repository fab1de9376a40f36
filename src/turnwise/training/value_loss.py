"""The loss of the critic, a pure function of values and returns, and figures that say how good the values are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from turnwise.training.value_batch import ValueBatch

__all__ = ["explained_variance", "mean_value", "value_loss"]


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


def explained_variance(batches: Sequence[ValueBatch]) -> float | None:
    """The share of the variance of the returns that the old estimates explain: `1 - Var(R - v_old) / Var(R)`.

    1: the estimates are exact up to a constant. 0: they are as good as a constant. Below 0: they are worse. None if all returns
    are equal.
    """
    targets = [micro.targets for batch in batches for micro in batch.micro_batches]
    if not targets:
        return None
    return_S = torch.cat([target.return_N for target in targets]).double()
    error_S = return_S - torch.cat([target.old_value_N for target in targets]).double()
    variance = float(return_S.var(correction=0))
    return 1.0 - float(error_S.var(correction=0)) / variance if variance > 0 else None


def mean_value(batches: Sequence[ValueBatch]) -> float | None:
    """The mean of the old estimates; None without states."""
    values = [micro.targets.old_value_N for batch in batches for micro in batch.micro_batches]
    return float(torch.cat(values).double().mean()) if values else None
