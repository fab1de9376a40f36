"""A fingerprint of a model's weights: equal for two models whose parameters and buffers are the same, bit by bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

__all__ = ["of_model", "of_tensors"]


def of_model(model: Any) -> str:
    """SHA-256 over the names, shapes, types and values of the model's parameters and buffers, on any device."""
    state = model.state_dict()
    with ThreadPoolExecutor(4) as workers:
        parts = workers.map(lambda name: _of_tensor(name, state[name]), sorted(state))
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def of_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """A line for each tensor, as in `of_model`, for tensors that cannot be in memory together."""
    return [_of_tensor(name, tensor) for name, tensor in tensors]


def _of_tensor(name: str, tensor: torch.Tensor) -> str:
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{name} {tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(values.numpy().data).hexdigest()}"
