"""Makes the C library return large freed blocks to the system, so that they do not add up during training."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

__all__ = ["freed_blocks_kept", "return_freed_blocks", "returns_freed_blocks"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's numbers of the options in <malloc.h>."""
_RETURNED, _KEPT = (128 * 2**10, 2**20), (2**30, 32 * 2**20)
"""Values of both options in bytes: if blocks are returned, and while they are kept."""

_returns = False


def return_freed_blocks() -> None:
    """Give each block of a megabyte or more its own mapping, in this process. Without glibc, nothing changes.

    By default, glibc raises this size to 32 MB and keeps freed blocks below it. Activations have such sizes: a training step of a
    model of 135 million parameters then needs 8.5 GiB instead of 6.1 GiB.
    """
    global _returns
    _returns = True
    _set(_RETURNED)


def returns_freed_blocks() -> bool:
    """Whether `return_freed_blocks` was called in this process."""
    return _returns


@contextlib.contextmanager
def freed_blocks_kept() -> Iterator[None]:
    """Inside, freed blocks below 32 MB are kept and used again, in spite of `return_freed_blocks`; at the end, they are returned.

    For passes of a model: new mappings for their temporary tensors take a third of the CPU time of a training step. Allocate
    before what outlives the passes (gradients): it would stay between the blocks of the next passes.
    """
    _set(_KEPT)
    try:
        yield
    finally:
        _set(_RETURNED)
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)


def _set(values: tuple[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        for option, value in zip((_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD), values, strict=True):
            library.mallopt(option, value)
