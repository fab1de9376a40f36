"""The embedded engine: continuous batching with prefix reuse, on the trainer's own model, in the trainer's process.

Read in this order: `engine` (asyncio), `core` (one step), `scheduler` (queue and prefill), `prefix_cache` (reuse and
eviction), `kv_cache` (memory), `batch` and `sampler` (sampling), `forward` (running the model) with its implementations
`fused`, `generic` and `vision`.
"""

from turnwise.engines.local.engine import LocalEngine
from turnwise.engines.local.scheduler import Stats

__all__ = ["LocalEngine", "Stats"]
