"""Weights from the trainer to servers on the same machine, through memory that both see: a buffer of a bounded size.

On GPUs the buffer is memory of the trainer's GPU, which the server opens by CUDA IPC: also on the GPU that both share, where NCCL
refuses two ranks. On CPUs it is shared memory. The trainer fills the buffer with as many weights as it holds, a part; the server
reads the part and answers; then comes the next. All parts are checked before the first one is loaded, so they are sent twice.

Checksums and finite values are computed on the device of the weights, by trainer and server with the same function. Used by the
trainer and inside the servers, where only the source of turnwise is on the path: needs torch and no other packages. Does not know
learners, requests or routes.
"""

from __future__ import annotations

import base64
import io
import pickle
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

PART_BYTES = 256 << 20
"""Bytes of a part at most, unless one weight is larger."""
_ALIGNMENT = 16
_BLOCK = 8 << 20
"""Numbers of 64 bits that are multiplied at once for a checksum."""
_ODD = 0x9E3779B97F4A7C15 - (1 << 64)
"""2 to the 64 divided by the golden ratio, as a signed number: consecutive multiples share no low or high bits."""


# Parts: which weights are in the buffer together, and where


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight is in the buffer."""

    name: str
    dtype: str
    """The name of a type of torch, such as `bfloat16`."""
    shape: Sequence[int]
    start: int
    """The first byte."""
    size: int
    """The number of bytes."""
    checksum: int
    """`checksum_of_values` of the weight."""

    def of(self, buffer: Any) -> Any:
        """The weight in a buffer, without a copy."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return buffer[self.start : self.start + self.size].view(dtype).view(tuple(self.shape))


def parts_of(tensors: Mapping[str, Any], checksums: Mapping[str, int], most: int = PART_BYTES) -> list[list[Place]]:
    """The weights in parts of at most `most` bytes. A larger weight is a part of its own."""
    parts: list[list[Place]] = []
    end = most + 1
    for name, tensor in tensors.items():
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if start + tensor.nbytes > most or not parts:
            parts.append([])
            start = 0
        dtype = str(tensor.dtype).removeprefix("torch.")
        parts[-1].append(Place(name, dtype, list(tensor.shape), start, tensor.nbytes, checksums[name]))
        end = start + tensor.nbytes
    return parts


def buffer_size(parts: Sequence[Sequence[Place]]) -> int:
    """The bytes of a buffer that holds each of the parts."""
    return max((place.start + place.size for part in parts for place in part), default=0)


# Checks: on the device of the weights


def checksum_of_values(tensor: Any) -> Any:
    """A checksum of a tensor's bytes, as a scalar tensor of int64 on its device: the sum modulo 2 to the 64 of all groups of 8
    bytes, each multiplied by an odd number that depends on its place. Any change of one group changes the sum.

    It does not depend on the order of additions, so that all devices and numbers of threads give the same.
    """
    import torch

    bytes_N = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if bytes_N.storage_offset() % 8:  # a part of another tensor
        bytes_N = bytes_N.clone()
    whole = bytes_N.numel() // 8 * 8
    rest_8 = torch.zeros(8, dtype=torch.uint8, device=bytes_N.device)
    rest_8[: bytes_N.numel() - whole] = bytes_N[whole:]
    total = rest_8.view(torch.int64)[0] * (2 * (whole // 8) + 1) * _ODD
    words_N = bytes_N[:whole].view(torch.int64)
    for start in range(0, words_N.numel(), _BLOCK):
        block_N = words_N[start : start + _BLOCK]
        odd_N = torch.arange(start, start + block_N.numel(), device=block_N.device).mul_(2).add_(1).mul_(_ODD)
        # the upper bits reach the lower ones, which a product leaves alone
        total = total + odd_N.mul_(block_N ^ ((block_N >> 29) & ((1 << 35) - 1))).sum()
    return total


def checked_values(tensors: Mapping[str, Any]) -> dict[str, int]:
    """The checksum of each tensor. Raises ValueError for values that are not finite. The host waits for the device once."""
    import torch

    found: list[Any] = []
    for tensor in tensors.values():
        finite = torch.ones((), dtype=torch.int64, device=tensor.device)
        if tensor.is_floating_point() and tensor.numel():
            # both are NaN if one value is: faster than `isfinite` of all
            finite = torch.stack(tensor.detach().aminmax()).isfinite().all().to(torch.int64)
        found.append(torch.stack([checksum_of_values(tensor), finite]))
    rows = [] if not found else torch.stack([one.to(found[0].device) for one in found]).tolist()
    for name, (_, finite) in zip(tensors, rows, strict=True):
        if not finite:
            raise ValueError(f"the weight {name} has values that are not finite")
    return {name: checksum for name, (checksum, _) in zip(tensors, rows, strict=True)}


def checksum_of_all(checksums: Mapping[str, int]) -> str:
    """One checksum of the names and checksums of all weights, in their order, as 8 hexadecimal digits."""
    value = 0
    for name, checksum in checksums.items():
        value = zlib.crc32(f"{name} {checksum};".encode(), value)
    return f"{value:08x}"


def check_part(places: Sequence[Place], tensors: Mapping[str, Any]) -> None:
    """Raise ValueError unless the weights of a part are finite and have the checksums of the trainer."""
    checksums = checked_values(tensors)
    for place in places:
        if checksums[place.name] != place.checksum:
            raise ValueError(
                f"the checksum of the weight {place.name} is {checksums[place.name]:x} here, and {place.checksum:x} where it was "
                f"sent"
            )


# Buffer: the memory that both see


class SharedBuffer:
    """The trainer's end of a buffer of `size` bytes on `device`. Raises RuntimeError if there is not so much memory."""

    def __init__(self, size: int, device: Any) -> None:
        import torch

        self.device = torch.device(device)
        self._counters: list[tuple[bytes, int]] = []
        """Where torch counts the readers of each handle: the file's name, and the place in it."""
        with _segments_to_share():
            self._bytes: Any = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        if self.device.type != "cuda":
            with _by_file_name():
                self._bytes.share_memory_()

    def close(self, *, lost: bool = False) -> None:
        """Give the memory back to the device, after the servers have closed it: a server that wakes up needs it. torch keeps it
        until each reader has counted itself out; with `lost`, for readers that have ended and cannot.

        A reader that ends after that is counted out twice, without effect: each handle has a counter of its own, which begins
        with 1 and is no other's while the memory is held, and torch frees memory whose counters are not above 0
        (`CudaIPCSentDataLimbo` in torch/csrc/CudaIPCTypes.cpp).
        """
        import torch

        if lost:
            for name, place in self._counters:  # while the memory is held: places of freed memory have other owners
                torch.UntypedStorage._release_ipc_counter(name, place, device=self.device.index)
        self._counters.clear()
        self._bytes = None
        if self.device.type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def fill(self, part: Sequence[Place], tensors: Mapping[str, Any]) -> None:
        """Write the weights of a part. When it returns, other processes can read them."""
        import torch

        for place in part:
            place.of(self._bytes).copy_(tensors[place.name], non_blocking=True)
        if self._bytes.is_cuda:
            torch.cuda.synchronize(self.device)

    def handle(self) -> dict[str, Any]:
        """By what one other process opens the buffer, once (`open_buffer`); JSON."""
        from torch.multiprocessing.reductions import reduce_tensor

        if not self._bytes.is_cuda:
            manager, name, size = self._bytes.untyped_storage()._share_filename_cpu_()
            return {"manager": _text(manager), "name": _text(name), "size": size}
        reduced: Any = reduce_tensor(self._bytes)
        _, shape, _, offset, _, _, index, handle, size, start, _, counter, counter_offset, event, waits = reduced[1]
        self._counters.append((counter, counter_offset))
        return {
            "gpu": gpu_name(index),
            "length": shape[0],
            "offset": offset,
            "handle": _text(handle),
            "size": size,
            "start": start,
            "counter": [_text(counter), counter_offset],
            "event": [_text(event), waits],
        }

    def pickled(self, part: Sequence[Place], more: Mapping[str, Any]) -> bytes:
        """The weights of a part and `more` tensors, [(name, tensor)], as `torch.multiprocessing` pickles them: the bytes have
        places in memory, and not values. For one process, which unpickles them once. `more` must live until then."""
        stream = io.BytesIO()
        with _by_file_name():
            pickler = _TensorPickler(stream)
            pickler.dump([*((place.name, place.of(self._bytes)) for place in part), *more.items()])
        self._counters += pickler.counters
        return stream.getvalue()


def open_buffer(handle: Mapping[str, Any]) -> Any:
    """The bytes of a buffer of another process on this machine: a tensor of uint8 [size]. Raises ValueError if the buffer is on a
    GPU that this process does not see, RuntimeError if it cannot be opened."""
    import torch

    if "manager" in handle:
        shared = torch.UntypedStorage._new_shared_filename_cpu(
            _bytes(handle["manager"]), _bytes(handle["name"]), handle["size"]
        )
        return torch.empty(0, dtype=torch.uint8).set_(shared)
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    names = [gpu_name(index) for index in range(torch.cuda.device_count())]
    if handle["gpu"] not in names:
        raise ValueError(
            f"the weights are on the GPU {handle['gpu']}, and this process sees {', '.join(names) or 'none'}"
        )
    return rebuild_cuda_tensor(
        torch.Tensor,
        torch.Size([handle["length"]]),
        (1,),
        handle["offset"],
        torch.storage.TypedStorage,
        torch.uint8,
        names.index(handle["gpu"]),
        _bytes(handle["handle"]),
        handle["size"],
        handle["start"],
        False,
        _bytes(handle["counter"][0]),
        handle["counter"][1],
        _bytes(handle["event"][0]),
        handle["event"][1],
    )


def gpu_name(index: int) -> str:
    """The name of a GPU that is the same in all processes, whatever number it has there."""
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(value: str) -> bytes:
    return base64.b64decode(value)


class _TensorPickler(pickle.Pickler):
    """Pickles tensors as `torch.multiprocessing` does, GPUs by their names: SGLang's scheduler, which patches torch's function,
    finds out its own number of the GPU. The number of the trainer would be that of another GPU, or of none."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.counters: list[tuple[bytes, int]] = []

    def reducer_override(self, obj: Any) -> Any:
        import torch
        from torch.multiprocessing import reductions

        if isinstance(obj, torch.Tensor):
            reduced: Any = reductions.reduce_tensor(obj)
            make, arguments = reduced
            if obj.is_cuda:
                # by the module's name: another process may have another function there
                arguments = (*arguments[:6], gpu_name(arguments[6]), *arguments[7:])
                name, place = cast("tuple[bytes, int]", arguments[11:13])
                self.counters.append((name, place))
            return make, arguments
        if isinstance(obj, torch.storage.TypedStorage):
            return reductions.reduce_typed_storage(obj)
        if isinstance(obj, torch.UntypedStorage):
            return reductions.reduce_storage(obj)
        return NotImplemented


_EXPANDABLE = "expandable_segments:True"


@contextmanager
def _segments_to_share() -> Iterator[None]:
    """A context in which torch's allocator takes memory that other processes can open. They cannot open expandable segments,
    unless they may take over this process's files, which containers forbid."""
    import torch

    settings: str = torch._C._accelerator_getAllocatorSettings()
    if _EXPANDABLE not in settings:
        yield
        return
    # all settings: those that are left out would be the defaults
    torch._C._accelerator_setAllocatorSettings(settings.replace(_EXPANDABLE, "expandable_segments:False"))
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


_strategy = threading.Lock()


@contextmanager
def _by_file_name() -> Iterator[None]:
    """A context in which torch shares the memory of CPU tensors by names of files, which unrelated processes can open."""
    from torch import multiprocessing

    with _strategy:
        before = multiprocessing.get_sharing_strategy()
        multiprocessing.set_sharing_strategy("file_system")
        try:
            yield
        finally:
            multiprocessing.set_sharing_strategy(before)
