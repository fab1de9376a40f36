"""The rollout server as a context: a socket, and a thread that answers HTTP requests."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from turnwise.errors import ConfigError
from turnwise.rollout_server.application import ServedRun, application
from turnwise.rollout_server.http import EngineLoop
from turnwise.serve.http import listen, missing_library, refuse_without_token, uvicorn_server

__all__ = ["TOKEN", "Address", "open_socket", "serving", "token_for"]

TOKEN = "TURNWISE_SERVER_TOKEN"
"""The environment variable with the token. It is not an argument, because other users can see the arguments of a process."""

_NAME = "the rollout server"


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
    refuse_without_token(host, variable=TOKEN)
    return secrets.token_urlsafe(24)


def open_socket(host: str, port: int) -> Address:
    """Listen on a port; 0 selects a free port. Raises ConfigError if that is not possible."""
    return Address(listen(port, server=_NAME, host=host))


@asynccontextmanager
async def serving(run: ServedRun, address: Address, *, token: str | None) -> AsyncIterator[None]:
    """Answer HTTP requests in a thread until the block ends. Conversations run in the present event loop.

    Raises ConfigError if a library is not installed.
    """
    try:
        app = application(run, EngineLoop(asyncio.get_running_loop()), token=token)
    except ImportError:
        raise missing_library("starlette", server=_NAME, extra="serve") from None
    server = uvicorn_server(app, server=_NAME, extra="serve")
    thread = threading.Thread(target=server.run, args=([address.socket],), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        while thread.is_alive():  # its requests wait for this event loop
            await asyncio.sleep(0.05)
        address.socket.close()
