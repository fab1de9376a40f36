"""The process that updates the weights of servers, as the servers know it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

__all__ = ["Owner"]


@dataclass(frozen=True, slots=True)
class Owner:
    """A process that updates the weights of servers."""

    name: str = field(default_factory=lambda: secrets.token_hex(4))
    """The name in the claim of a server, without `#`. A process that replaces a killed process has the same name, so the server
    accepts it at once. Two processes that run at the same time must have different names."""
    process: str = field(default_factory=lambda: secrets.token_hex(4))
    """Different in each process. A killed process may have used other weights under the same version, so versions and cached
    prefixes are labelled with this text."""
