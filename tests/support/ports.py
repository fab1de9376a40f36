"""Ports for programs that must be told one before they listen."""

from __future__ import annotations

import random
import socket

_PORTS = range(20_000, 32_000)
"""Below those that systems give to connections and to servers without a port: these cannot take it in the meantime."""
_random = random.SystemRandom()


def free_port() -> int:
    """A TCP port of this machine that is free now."""
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", _random.choice(_PORTS)))
            except OSError:
                continue
            return listener.getsockname()[1]
