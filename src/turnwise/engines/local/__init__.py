"""The embedded engine: continuous batching over slots, on the trainer's own model and in its process."""

from turnwise.engines.local.admission import Stats
from turnwise.engines.local.engine import LocalEngine

__all__ = ["LocalEngine", "Stats"]
