"""What the rollout server counts, in the text format of Prometheus."""

from __future__ import annotations

from turnwise.errors import ConfigError
from turnwise.types import Trajectory

__all__ = ["ServerMetrics"]

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)


class ServerMetrics:
    """The metrics of one server. All methods may be called from any thread.

    Raises ConfigError if the library `prometheus_client` is not installed.
    """

    def __init__(self) -> None:
        try:
            from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
        except ImportError:
            raise ConfigError(
                "the rollout server needs the package `prometheus_client`: pip install 'turnwise[serve]'"
            ) from None
        registry = self._registry = CollectorRegistry()
        self.running = Gauge("turnwise_conversations_running", "Conversations that run now.", registry=registry)
        self.waiting = Gauge("turnwise_conversations_waiting", "Conversations in the queue.", registry=registry)
        self._finished = Counter(
            "turnwise_conversations_finished",
            "Finished conversations, by the reason why they ended.",
            ["stop"],
            registry=registry,
        )
        self.cancelled = Counter(
            "turnwise_conversations_cancelled",
            "Conversations that were cancelled because their client disconnected.",
            registry=registry,
        )
        self._turns = Counter("turnwise_turns", "Turns of the model in finished conversations.", registry=registry)
        self._tokens = Counter(
            "turnwise_sampled_tokens", "Sampled tokens in finished conversations.", registry=registry
        )
        self._seconds = Histogram(
            "turnwise_conversation_seconds",
            "The time of a finished conversation, without its time in the queue.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.version = Gauge("turnwise_weights_version", "The version of the engine's weights.", registry=registry)
        self.updates = Counter(
            "turnwise_weight_updates", "Updates of the weights, by result.", ["result"], registry=registry
        )
        self.update_seconds = Histogram(
            "turnwise_weight_update_seconds", "The time of a successful update of the weights.", buckets=_SECONDS,
            registry=registry,
        )  # fmt: skip
        self.refused = Counter(
            "turnwise_requests_refused", "Refused requests, by HTTP status.", ["status"], registry=registry
        )

    def finished(self, trajectory: Trajectory) -> None:
        """Count a finished conversation."""
        self._finished.labels(stop=str(trajectory.stop)).inc()
        self._turns.inc(len(trajectory.turns))
        self._tokens.inc(trajectory.sampled_tokens)
        self._seconds.observe(trajectory.seconds)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        from prometheus_client import generate_latest

        return generate_latest(self._registry)
