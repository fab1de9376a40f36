"""Large models: which freed blocks of memory the C library keeps on a CPU, and when torch returns those that it keeps on a GPU.

New memory costs as much as several reads, so freed blocks are kept for the next operations. Tensors that live longer (gradients,
optimizer state, packed weights, the KV cache) are allocated apart from them, so that they do not divide the free memory. Knows
sizes of blocks. Does not know what is in them. Without glibc, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

LARGE_MODEL = 20_000_000
"""With more parameters, a matrix product takes long enough for all torch threads, and activations fill the memory."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""glibc's numbers of the options in <malloc.h>."""
_RETURNED = {_M_TRIM_THRESHOLD: 128 * 2**10, _M_MMAP_THRESHOLD: 2**20}
# later threads share the free memory of the others: a pool of their own has pieces of 64 MB
_KEPT = {_M_TRIM_THRESHOLD: -1, _M_MMAP_THRESHOLD: 32 * 2**20, _M_ARENA_MAX: 1}
_APART = {_M_MMAP_THRESHOLD: 2**20}
_keeps = False
"""Whether this process keeps freed blocks."""


def is_large(model: Any) -> bool:
    """Whether a transformers model on a CPU has more than `LARGE_MODEL` parameters."""
    return model.device.type == "cpu" and model.num_parameters() > LARGE_MODEL


def return_freed_blocks() -> None:
    """Return each freed block of a megabyte or more to the system, in this process. Without glibc, nothing changes."""
    global _keeps
    _keeps = False
    _set(_RETURNED)


def keep_freed_blocks() -> None:
    """Keep all freed blocks below 32 MB and use them again, in this process. Without glibc, nothing changes. New memory costs a
    third of the CPU time of a training step, and a sixth of that of a decoding step."""
    global _keeps
    _keeps = True
    _set(_KEPT)


@contextlib.contextmanager
def long_lived() -> Iterator[None]:
    """Allocate blocks of a megabyte or more apart from the memory that `keep_freed_blocks` keeps, unless a free block there is
    large enough. For tensors that outlive the operations around them: they would divide the free memory, and later operations
    would need new memory."""
    if not _keeps:
        yield
        return
    _set(_APART)
    try:
        yield
    finally:
        _set(_KEPT)


def trim_kept() -> None:
    """Return the free memory that `keep_freed_blocks` keeps: before large blocks, which it cannot hold, and after an update."""
    if _keeps:
        trim()


def trim() -> None:
    """Return all free memory to the system, kept or not. Without glibc, nothing changes."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_device_blocks() -> None:
    """Return the freed blocks that torch keeps on GPUs, for another process on the same GPU. Nothing changes without one."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def no_gradient(parameter: torch.Tensor) -> torch.Tensor:
    """A gradient of zeros, in the type in which gradients of this parameter are added up."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


@contextlib.contextmanager
def gradients_first(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Allocate the gradients of these parameters before passes that add to them.

    They outlive the passes: in between, they would split the free memory. A parameter on which the loss does not depend has no
    gradient afterwards, so an optimizer leaves it as it is.
    """
    changed = set[torch.Tensor]()
    hooks = [parameter.register_post_accumulate_grad_hook(changed.add) for parameter in parameters]
    with long_lived():
        for parameter in parameters:
            parameter.grad = no_gradient(parameter)
    try:
        yield
    finally:
        for hook, parameter in zip(hooks, parameters, strict=True):
            hook.remove()
            if parameter not in changed:
                parameter.grad = None


def _set(values: Mapping[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        for option, value in values.items():
            ctypes.CDLL(None).mallopt(option, value)
