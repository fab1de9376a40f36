"""What an engine asks of a server, whatever kind of server it is. vLLM and SGLang have an implementation each."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.partial import Part
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.types import LogprobKind, Request

__all__ = ["ServerApi", "ServerInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """What a server serves."""

    vocab_size: int
    context: int
    """The most tokens of a sequence, prompt and completion together."""
    logprob_kind: LogprobKind


class ServerApi(Protocol):
    """The requests of one kind of server, such as vLLM. All methods raise EngineError; ServerLost if the server is gone."""

    @property
    def name(self) -> str:
        """The name in messages, such as `vLLM`."""
        ...

    async def identify(self, server: HttpServer) -> None:
        """Refuse a server of another kind, and a wrong token. Asked before `claim`, also of a server that is paused."""
        ...

    async def info(self, server: HttpServer) -> ServerInfo:
        """What the server serves. Asked once, when the server is ready. Refuses a server that cannot be used."""
        ...

    def sample(self, server: HttpServer, request: Request, version: int) -> AsyncGenerator[Part]:
        """Sample a completion. The last part has `finish`. Closing the iterator cancels the request at the server.

        `version` is the version of the weights when the request is sent: prefixes that were cached with other weights must not
        be used.
        """
        ...

    async def claim(self, server: HttpServer) -> None:
        """Before the first weight update: become the only trainer of this server. Raises EngineError if there is another."""
        ...

    async def pause(self, server: HttpServer, *, abort: bool = False) -> None:
        """Stop sampling. Requests wait, and go on after `resume`; with `abort`, they end with `aborted`."""
        ...

    async def load(self, server: HttpServer, update: WeightUpdate) -> None:
        """Replace the weights of a paused server, drop its prefix cache, and label the weights with the update's version.

        If it raises, the server has the previous weights, or it raises ServerLost.
        """
        ...

    async def label(self, server: HttpServer, version: int) -> None:
        """Label the weights that the server has with a version."""
        ...

    async def resume(self, server: HttpServer) -> None:
        """Go on sampling."""
        ...

    async def sleep(self, server: HttpServer) -> None:
        """Free the memory of the device until `wake`. The weights stay with the server."""
        ...

    async def wake(self, server: HttpServer) -> None:
        """Take the memory of the device again."""
        ...

    async def release(self, server: HttpServer) -> None:
        """After the last request: give up what `claim` took."""
        ...

    def close(self) -> None:
        """After all servers: free what is left in this process."""
        ...
