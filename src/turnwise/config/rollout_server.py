"""The section of a recipe about a rollout server."""

from __future__ import annotations

from turnwise.config.section import NonEmpty, Seconds, Section

__all__ = ["RolloutServerSection"]


class RolloutServerSection(Section):
    """A rollout server (`turnwise serve`) that runs the conversations of a training run (docs/server.md)."""

    url: NonEmpty | None = None
    """The address of the rollout server that runs the conversations, such as `http://127.0.0.1:8000`. Null: the conversations
    run in the trainer's process."""
    token_env: NonEmpty = "TURNWISE_SERVER_TOKEN"
    """The environment variable that contains the bearer token of the rollout server."""
    timeout: Seconds = 120.0
    """After this time without any data from the rollout server, in seconds, the trainer regards it as lost. Also how long the
    trainer waits for a server that was lost."""
    weights_directory: NonEmpty | None = None
    """A directory that the trainer and the rollout server share, such as `/dev/shm` on one machine. The trainer writes new
    weights there and sends the path. Null: the weights are sent in the body of a request."""
