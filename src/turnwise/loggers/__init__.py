"""Sends a run's metrics and sampled conversations to experiment trackers, and traces to tracing systems.

The record (`turnwise.record`) stays the source of truth: a tracker that fails costs a warning, never the run.
"""

from turnwise.loggers.logger import Logger, Loggers

__all__ = ["Logger", "Loggers"]
