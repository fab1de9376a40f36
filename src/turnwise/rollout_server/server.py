"""The rollout server as a context: a socket, and a thread that answers HTTP requests."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from turnwise.errors import ConfigError
from turnwise.rollout_server.application import ServedRun, application
from turnwise.rollout_server.http import EngineLoop, missing_library

__all__ = ["TOKEN", "Address", "open_socket", "serving", "token_for"]

TOKEN = "TURNWISE_SERVER_TOKEN"
"""The environment variable with the token. It is not an argument, because other users can see the arguments of a process."""

_BACKLOG = 2048
"""Connections that wait to be accepted."""
_IDLE_SECONDS = 60
"""An idle connection is closed after this time."""


class Address:
    """A listening socket."""

    def __init__(self, listening: socket.socket) -> None:
        self.socket = listening
        self.host: str = listening.getsockname()[0]
        self.port: int = listening.getsockname()[1]

    @property
    def url(self) -> str:
        """The address of the server for clients."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def token_for(host: str, given: str | None) -> str:
    """The token of the server: the given token, or a new random token.

    Raises ConfigError if other machines can reach the server and no token is given.
    """
    if given:
        if any(not " " < character <= "~" for character in given):
            raise ConfigError(f"{TOKEN} must consist of printable ASCII characters without blanks")
        return given
    if not _loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines, and no token is set: set the environment variable {TOKEN}, or "
            f"use --host 127.0.0.1"
        )
    return secrets.token_urlsafe(24)


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def open_socket(host: str, port: int) -> Address:
    """Listen on a port; 0 selects a free port. Raises ConfigError if that is not possible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"the rollout server cannot use --host {host} --port {port}: {error}") from None
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"the rollout server cannot listen on port {port} of {host}: {error}; give another --port"
        ) from None
    return Address(listening)


@asynccontextmanager
async def serving(run: ServedRun, address: Address, *, token: str | None) -> AsyncIterator[None]:
    """Answer HTTP requests in a thread until the block ends. Conversations run in the present event loop.

    Raises ConfigError if a library is not installed.
    """
    try:
        import uvicorn
    except ImportError:
        raise missing_library("uvicorn") from None
    try:
        app = application(run, EngineLoop(asyncio.get_running_loop()), token=token)
    except ImportError:
        raise missing_library("starlette") from None
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            backlog=_BACKLOG,
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_IDLE_SECONDS,
            timeout_graceful_shutdown=2,
        )
    )
    thread = threading.Thread(target=server.run, args=([address.socket],), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        while thread.is_alive():  # its requests wait for this event loop
            await asyncio.sleep(0.05)
        address.socket.close()
