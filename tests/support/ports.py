"""Ports for programs that must be told one before they listen."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
