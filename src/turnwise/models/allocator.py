"""Large models on a CPU: makes the C library return large freed blocks to the system, so that they do not add up."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["LARGE_MODEL", "freed_blocks_kept", "is_large", "return_freed_blocks"]

LARGE_MODEL = 20_000_000
"""With more parameters, a matrix product takes long enough for all torch threads, and activations fill the memory."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of the options in <malloc.h>."""
_RETURNED, _KEPT = (128 * 2**10, 2**20), (2**30, 32 * 2**20)
"""Values of both options in bytes: if blocks are returned, and while they are kept."""


def is_large(model: Any) -> bool:
    """Whether a transformers model on a CPU has more than `LARGE_MODEL` parameters."""
    return model.device.type == "cpu" and model.num_parameters() > LARGE_MODEL


def return_freed_blocks() -> None:
    """Give each block of a megabyte or more its own mapping, in this process. Without glibc, nothing changes.

    By default, glibc raises this size to 32 MB and keeps freed blocks below it. Activations have such sizes: a training step of a
    model of 135 million parameters then needs 8.5 GiB instead of 6.1 GiB.
    """
    _set(_RETURNED)


@contextlib.contextmanager
def freed_blocks_kept(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, freed blocks below 32 MB are kept and used again, in spite of `return_freed_blocks`; at the end, they are returned.

    For passes that add to the `grad` of these parameters. New mappings for temporary tensors take a third of the CPU time of a
    training step. The gradients outlive the passes, so they are allocated before: in between, they would split the free memory.
    A parameter on which the loss does not depend has no gradient afterwards, so an optimizer leaves it as it is.
    """
    changed = set[torch.Tensor]()
    hooks = [parameter.register_post_accumulate_grad_hook(changed.add) for parameter in parameters]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    _set(_KEPT)
    try:
        yield
    finally:
        _set(_RETURNED)
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
        for hook, parameter in zip(hooks, parameters, strict=True):
            hook.remove()
            if parameter not in changed:
                parameter.grad = None


def _set(values: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for option, value in zip((_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD), values, strict=True):
            library.mallopt(option, value)
