"""Tensors between the host and a device, many in one copy: each copy costs a GPU as much time as a small kernel, and each number
that the host reads makes it wait until all kernels before have ended.

Knows tensors, and objects that can have theirs replaced. Does not know what they mean. On a CPU nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
import torch

from turnwise.models.device import sees_gpu

Move = Callable[[torch.Tensor], torch.Tensor]

_ALIGNMENT = 16
"""Bytes: where a tensor may begin in a buffer, so that kernels read it in their largest pieces."""


class Movable(Protocol):
    """An object with tensors."""

    def moved(self, move: Move) -> Self:
        """The same with `move(tensor)` in place of each tensor, in an order that is always the same."""
        ...


T = TypeVar("T", bound=Movable)


def to_device(value: T, device: torch.device) -> T:
    """The same with all tensors on the device: those of the host are `copied`."""
    if device.type == "cpu":
        return value.moved(lambda tensor: tensor.to(device))
    of_host: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":
            of_host.append(tensor)
        return tensor

    value.moved(note)
    copies = iter(copied(of_host, device))
    return value.moved(lambda tensor: next(copies) if tensor.device.type == "cpu" else tensor.to(device))


def copied(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the host on the device, as views of one buffer: one copy from pinned memory, and the host does not wait."""
    starts: list[int] = []
    end = 0
    for tensor in tensors:
        starts.append(end)
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    host = torch.empty(end, dtype=torch.uint8, pin_memory=sees_gpu())
    for start, tensor in zip(starts, tensors, strict=True):
        _view(host, start, tensor).copy_(tensor)
    # the allocator of pinned memory keeps the buffer until the copy has ended
    there = host.to(device, non_blocking=True)
    return [_view(there, start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def from_arrays(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Arrays as tensors on the device, in one copy (`copied`); on a CPU, the memory of the arrays."""
    tensors = [torch.from_numpy(array) for array in arrays]
    return tensors if device.type == "cpu" else copied(tensors, device)


def _view(bytes_: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return bytes_[start : start + like.nbytes].view(like.dtype).view(like.shape)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on the CPU, without gradients. Those of a device, the same for all, are copied in one piece, for which the host
    waits once."""
    found = [tensor.detach() for tensor in tensors]
    # a tensor begins at a multiple of its own size if those with larger elements are before it
    there = sorted((tensor for tensor in found if tensor.device.type != "cpu"), key=lambda one: -one.element_size())
    if not there:
        return found
    host = torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in there]).cpu()
    copies: dict[int, torch.Tensor] = {}
    start = 0
    for tensor in there:
        copies[id(tensor)] = _view(host, start, tensor)
        start += tensor.nbytes
    return [copies.get(id(tensor), tensor) for tensor in found]


class HostMemory:
    """Where tensors of a device are while something else needs its memory: pinned memory of the host, which is kept for the next
    time, because it takes longer to get than to fill."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def store(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the tensors in this memory, until the next call. Raises RuntimeError if the host has not so much memory."""
        for number, tensor in enumerate(tensors):
            like = (tensor.shape, tensor.stride(), tensor.dtype)
            before = self._kept[number] if number < len(self._kept) else None
            if before is None or (before.shape, before.stride(), before.dtype) != like:
                empty = torch.empty_strided(*like[:2], dtype=tensor.dtype, pin_memory=sees_gpu())
                self._kept[number : number + 1] = [empty]
            self._kept[number].copy_(tensor.detach(), non_blocking=True)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # once, for all copies
        return self._kept[: len(tensors)]


S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Measured(Generic[S]):
    """What a pass has measured, of which the numbers may still be on a device.

    It lives until the end of a batch, so it holds neither the graph of its pass nor the buffer of which a tensor is a view.
    """

    tensors: Sequence[torch.Tensor]
    make: Callable[[Sequence[torch.Tensor]], S]
    """Called with the tensors on the host. It must not hold tensors of the pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", [_alone(tensor.detach()) for tensor in self.tensors])


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy if it is a part of a larger buffer (`copied`), which it would keep."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def read(measured: Sequence[Measured[S]]) -> list[S]:
    """What all these passes have measured. The host waits for a device once."""
    host = iter(to_host([tensor for one in measured for tensor in one.tensors]))
    return [one.make([next(host) for _ in one.tensors]) for one in measured]


def numbers(tensors: Sequence[torch.Tensor]) -> list[float]:
    """The numbers of tensors [] on the host."""
    return [float(tensor) for tensor in tensors]
