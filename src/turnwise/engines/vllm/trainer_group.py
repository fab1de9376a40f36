"""Receives tensors from a trainer that sends them by NCCL through vLLM's communicator, as ms-swift's and TRL's trainers do.

The trainer and this process form a group of two. The trainer broadcasts bytes; who asked for them, and what becomes of them, is
not known here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["JoinGroup", "SwiftTrainerGroup", "TensorPlace", "join_by_nccl", "split_tensors"]


class SwiftTrainerGroup(Protocol):
    """The trainer and this process, as the two members of a group."""

    def receive(self, count: int, dtype: str) -> Any:
        """The tensor of `count` numbers that the trainer broadcasts next, as uint8 on the CPU: [count * bytes of a number]."""
        ...


JoinGroup = Callable[[str, int], SwiftTrainerGroup]
"""Joins a trainer's group at an address and a port of this machine. Waits for the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor is in the bytes of a broadcast."""

    name: str
    dtype: str
    """The name of a type of torch, such as `bfloat16`."""
    shape: Sequence[int]
    start: int
    """The first byte."""
    end: int
    """The byte after the last."""


def split_tensors(bytes_N: Any, places: Sequence[TensorPlace]) -> dict[str, Any]:
    """Copies of the tensors in the bytes of a broadcast, by their names."""
    import torch

    return {
        place.name: bytes_N[place.start : place.end]
        .clone()
        .view(getattr(torch, place.dtype))
        .reshape(tuple(place.shape))
        for place in places
    }


def join_by_nccl() -> JoinGroup | None:
    """How this process joins a trainer's group; None if the package vllm is not installed here, or there is no GPU."""
    if importlib.util.find_spec("vllm") is None:
        return None
    import torch

    return _NcclGroup if torch.cuda.is_available() else None


class _NcclGroup:
    """A group on GPUs: this process has rank 0, and the trainer has rank 1."""

    def __init__(self, host: str, port: int) -> None:
        import torch
        from vllm.distributed.device_communicators.pynccl import (  # pyright: ignore[reportMissingImports]
            PyNcclCommunicator,
        )
        from vllm.distributed.utils import StatelessProcessGroup  # pyright: ignore[reportMissingImports]

        self._device = torch.device("cuda", torch.cuda.current_device())
        group = StatelessProcessGroup.create(host=host, port=port, rank=0, world_size=2)
        self._communicator: Any = PyNcclCommunicator(group, device=self._device)
        if self._communicator.disabled:
            raise RuntimeError("vLLM's communicator found no NCCL library on this machine")

    def receive(self, count: int, dtype: str) -> Any:
        """See `SwiftTrainerGroup.receive`."""
        import torch

        numbers_N = torch.empty(count, dtype=getattr(torch, dtype), device=self._device)
        self._communicator.broadcast(numbers_N, src=1, stream=torch.cuda.current_stream(self._device))
        torch.cuda.synchronize(self._device)
        self._communicator.group.barrier()  # the trainer waits for it after each broadcast
        return numbers_N.view(torch.uint8).cpu()
