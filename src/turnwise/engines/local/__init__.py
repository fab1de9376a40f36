"""The embedded engine: continuous batching with prefix reuse, on the trainer's own model, in the trainer's process.

Read in this order: `engine` (asyncio), `scheduler` (one step: queue, prefill, running requests, sampling), `cache` (memory,
reuse and eviction), `forward` (running the model) and `fused` (the same for Llama-like models, written out).
"""

from turnwise.engines.local.engine import LocalEngine
from turnwise.engines.local.scheduler import Stats

__all__ = ["LocalEngine", "Stats"]
