"""Weights in the form in which Ray's object store keeps them: bytes in numpy arrays, which workers on a machine read without a
copy.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["PackedTensor", "PackedWeights", "pack", "unpack_tensors"]


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor as bytes: numpy has no bfloat16."""

    data: np.ndarray
    """uint8, one dimension."""
    dtype: str
    """The name of torch's type, such as `bfloat16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeights:
    """All weights, or an adapter."""

    version: int
    tensors: Mapping[str, PackedTensor] | None = None
    """All weights by the names of the state dict, without tied copies; None for an adapter."""
    adapter: Mapping[str, bytes] = field(default_factory=dict)
    """The files of an adapter in peft's format, by their names; empty for all weights."""


def pack(version: int, weights: Mapping[str, Any] | Callable[[Path], None]) -> PackedWeights:
    """Pack a state dict, or an adapter (a function that writes its files into a directory). Tensors on the CPU are not copied."""
    if not callable(weights):
        return PackedWeights(version=version, tensors={name: _packed(tensor) for name, tensor in weights.items()})
    with tempfile.TemporaryDirectory(prefix="turnwise-adapter-") as name:
        folder = Path(name)
        weights(folder)
        return PackedWeights(
            version=version,
            adapter={file.name: file.read_bytes() for file in sorted(folder.iterdir()) if file.is_file()},
        )


def _packed(tensor: Any) -> PackedTensor:
    import torch

    data = tensor.detach().cpu().contiguous()
    flat = data.reshape(-1).view(torch.uint8).numpy() if data.numel() else np.zeros(0, np.uint8)
    return PackedTensor(flat, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def unpack_tensors(packed: Mapping[str, PackedTensor]) -> dict[str, Any]:
    """The tensors of a state dict. They share the memory of the packed tensors, and must not be changed."""
    import torch

    tensors: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name, tensor in packed.items():
            flat = torch.from_numpy(tensor.data).view(getattr(torch, tensor.dtype))
            tensors[name] = flat.reshape(tensor.shape)
    return tensors
