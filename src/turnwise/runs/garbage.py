"""Keeps Python's garbage collector fast during a run."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["frozen_start_objects"]


@asynccontextmanager
async def frozen_start_objects() -> AsyncIterator[None]:
    """Inside the context, the garbage collector skips all objects that exist when the context begins.

    These are modules, classes and the model: a million objects, which a full collection visits each time, and which stay until
    the end of the run anyway.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
