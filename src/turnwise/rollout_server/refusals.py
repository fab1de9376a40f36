"""How the rollout server refuses a request: a status and a text with the value, the rule and the fix."""

from __future__ import annotations

__all__ = ["RequestRefused"]


class RequestRefused(Exception):
    """A request is refused. The answer is `{"error": <the text>}` with this status."""

    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds after which the client may try again; None if another attempt will fail in the same way."""
