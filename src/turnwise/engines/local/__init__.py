"""The embedded engine: continuous batching over slots, on the trainer's own model and in its process."""

from turnwise.engines.local.engine import LocalEngine
from turnwise.engines.local.scheduler import Stats

__all__ = ["LocalEngine", "Stats"]
