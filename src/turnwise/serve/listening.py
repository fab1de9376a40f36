"""The socket of a server that is reachable from this machine only."""

from __future__ import annotations

import socket

from turnwise.errors import ConfigError

__all__ = ["listen_on_loopback"]


def listen_on_loopback(port: int, *, server: str, backlog: int) -> socket.socket:
    """A socket that listens on 127.0.0.1; port 0 selects a free port. `backlog` connections may wait to be accepted.

    Raises ConfigError, with the name of the `server`, if the port is in use or not a port.
    """
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen(backlog)
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"{server} cannot listen on port {port}: {error}; give another --port") from None
    return listening
