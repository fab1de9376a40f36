"""The connection to one MCP server: opened once, used by all conversations, opened again when it is lost.

A session lives in one task, which enters it and leaves it; calls come from any other task of the same event loop, as many at
once as there are. A call whose connection is lost is not repeated here, since nobody knows whether it was carried out: it
raises ConnectionError, and the next call finds a new session.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, model_validator

import turnwise.environments.mcp.lines as mcp_lines
from turnwise.errors import Failed, boundary
from turnwise.types import Failure

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp.types import CallToolResult
    from mcp.types import Tool as ServerTool

__all__ = ["Connection", "McpServer"]

_LOUD = {
    **dict.fromkeys(("mcp", "client", "httpx2", "httpcore2"), logging.WARNING),  # a line for each call at INFO
    "mcp.client.stdio": logging.CRITICAL,  # a traceback for each line that is no message: we tell it once
}
"""The SDK's loggers, and the level from which on they are heard."""
_log = logging.getLogger(__name__)
_CLOSING_SECONDS = 10.0  # the SDK itself gives a server 2 s to leave, 2 s after SIGTERM, and then kills it
_PAGES = 100  # of a listing: a server must not keep us turning them
_TAIL = 500  # characters of what a server writes to stderr that are remembered


class McpServer(BaseModel):
    """How one server is reached, as `mcpServers` files have it: by `url`, or started by `command`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = None
    auth_token: str | None = None
    """Sent as `Authorization: Bearer ...`."""
    headers: dict[str, str] = {}
    type: Literal["http", "streamable-http", "streamable_http", "sse", "stdio"] | None = None
    """The transport; without it a url that ends in /sse is SSE, and any other one is streamable HTTP."""
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    """Beside HOME, LOGNAME, PATH, SHELL, TERM and USER, which are all that a server gets of ours."""
    cwd: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.url is None) == (self.command is None):
            raise ValueError("it needs either a url or a command")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the url {self.url!r} must begin with http:// or https://")
        strangers = {"args", "env", "cwd"} if self.url is not None else {"auth_token", "headers"}
        if strange := sorted(strangers & self.model_fields_set):
            raise ValueError(
                f"{', '.join(strange)} has no effect with a {'url' if self.url is not None else 'command'}"
            )
        if self.type is not None and (self.type == "stdio") != (self.command is not None):
            raise ValueError(f"the type {self.type!r} does not fit a {'url' if self.url is not None else 'command'}")
        return self

    @property
    def sse(self) -> bool:
        """Whether it speaks the older of the two HTTP transports."""
        if self.type is not None or self.url is None:
            return self.type == "sse"
        return self.url.partition("?")[0].rstrip("/").endswith("/sse")


class Connection:
    """One server, connected on demand. All methods belong to one event loop."""

    def __init__(self, name: str, server: McpServer, *, start_timeout: float) -> None:
        self.name = name
        self._server = server
        self._start_timeout = start_timeout
        self._session: _Session | None = None
        self._former: list[_Session] = []
        """Sessions that were lost and are perhaps still being left."""
        self._starting = asyncio.Lock()

    async def tools(self) -> list[ServerTool]:
        """The tools that the server offers.

        Raises ConnectionError if it cannot be reached, or does not list them in time.
        """
        await self._live()  # bounded in time by itself, and what it raises says what was wrong
        try:
            async with asyncio.timeout(self._start_timeout):
                return await self._list()
        except TimeoutError:
            tail = "" if self._session is None else self._session.tail()
            raise ConnectionError(
                f"the MCP server {self.name!r} did not list its tools in {self._start_timeout:g} s{tail}"
            ) from None

    async def _list(self) -> list[ServerTool]:
        found: list[ServerTool] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._use(lambda client, at=cursor: client.list_tools(cursor=at))
            found.extend(page.tools)
            cursor = page.next_cursor
            if not cursor:
                return found
        raise ConnectionError(f"the MCP server {self.name!r} lists its tools on more than {_PAGES} pages")

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises ConnectionError if the server cannot be reached or was lost, ValueError if it refused the call.
        """
        return await self._use(lambda client: client.call_tool(tool, arguments))

    async def close(self) -> None:
        """Leave the session; a server that was started for it ends."""
        sessions = [*self._former, *([] if self._session is None else [self._session])]
        self._session, self._former = None, []
        await asyncio.gather(*(session.close() for session in sessions))

    async def _use(self, ask: Callable[[Client], Any]) -> Any:
        import anyio
        import httpx2
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        session = await self._live()
        try:
            return await ask(await session.client)
        except MCPError as error:
            if error.code != CONNECTION_CLOSED:
                raise ValueError(error.message) from error
            problem = error.message
        except (anyio.ClosedResourceError, anyio.BrokenResourceError, httpx2.HTTPError, OSError) as error:
            problem = f"{type(error).__name__}: {error}".rstrip(": ")
        session.over.set()
        raise ConnectionError(f"the MCP server {self.name!r} was lost ({session.problem or problem})")

    async def _live(self) -> _Session:
        """A session that is there, as far as one can know."""
        async with self._starting:
            if self._session is not None and self._session.over.is_set():
                self._former = [*(one for one in self._former if not one.ended), self._session]
                self._session = None
            if self._session is None:
                self._session = _Session(self.name, self._server)
            session = self._session
            try:
                # counted from its beginning, however many calls were given up while they waited for it
                async with asyncio.timeout_at(session.began + self._start_timeout):
                    await asyncio.shield(session.client)
            except TimeoutError:
                problem = f"no answer in {self._start_timeout:g} s"
            except Failed as failed:
                problem = _root(failed)
            else:
                return session
            self._session = None
            await session.close()
            way = "reached" if self._server.command is None else "started"
            raise ConnectionError(f"the MCP server {self.name!r} could not be {way}: {problem}{session.tail()}")


class _Session:
    """One life of a connection."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name = name
        self._server = server
        self._told = False
        self.problem = ""
        """Why we have ended it."""
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        self.client: asyncio.Future[Client] = loop.create_future()
        self.over = asyncio.Event()
        """Set when the other side is gone, or is not needed any more."""
        self._stderr = _Tail()
        self._task = asyncio.create_task(self._live(), name=f"mcp-{name}")

    @property
    def ended(self) -> bool:
        """Whether nothing is left of it."""
        return self._task.done()

    async def close(self) -> None:
        """Leave, and wait until nothing is left of it."""
        self.over.set()
        if not self.client.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSING_SECONDS)

    def tail(self) -> str:
        """What the server has written to stderr of late, to go behind a message."""
        return f"; it wrote: {text}" if (text := self._stderr.text()) else ""

    async def _live(self) -> None:
        from mcp import Client

        for name, level in _LOUD.items():
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:  # whoever wants to hear them has said so
                logger.setLevel(level)
        try:
            with boundary("mcp"):
                async with Client(self._watched()) as client:
                    self.client.set_result(client)
                    await self.over.wait()
        except Failed as failed:
            if not self.client.done():
                self.client.set_exception(failed)
                self.client.exception()  # seen: perhaps nobody waits any more
        finally:
            self.over.set()
            self._stderr.close()
            if not self.client.done():
                self.client.cancel()

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[TransportStreams]:
        """The transport; `over` is set when nothing will come from it any more, and not only when the next call finds out."""
        import anyio

        pass_on, received = anyio.create_memory_object_stream[Any](0)

        async def watch(read: Any) -> None:
            async with pass_on:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    async for message in read:
                        if isinstance(message, Exception):  # a line that is no message
                            self._tell_once()
                        else:
                            await pass_on.send(message)
            self.over.set()

        async with pass_on, received, self._transport() as (read, write), anyio.create_task_group() as group:
            group.start_soon(watch, read)
            try:
                yield received, write
            finally:
                group.cancel_scope.cancel()

    def _line_too_long(self) -> None:
        self.problem = (
            f"it wrote more than {mcp_lines.LONGEST_LINE // 2**20} MiB to its stdout without a line break, and was ended; a "
            f"message is one line: let it print to stderr, and give shorter answers"
        )
        if not self.client.done():
            self.client.set_exception(Failed(Failure("mcp", self.problem)))
            self.client.exception()
        self.over.set()

    def _tell_once(self) -> None:
        if not self._told:
            self._told = True
            _log.warning(
                "the MCP server %r writes to its stdout what is no JSON-RPC; such lines are ignored: let it print to stderr",
                self._name,
            )

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[TransportStreams]:
        import httpx2
        from mcp import StdioServerParameters
        from mcp.client.sse import sse_client
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        server = self._server
        if server.command is not None:
            mcp_lines.listen(self._line_too_long)
            parameters = StdioServerParameters(
                command=server.command,
                args=server.args,
                env=server.env,
                cwd=server.cwd,
                encoding=mcp_lines.ENCODING,
                encoding_error_handler="replace",  # else a wrong byte would end the reading, and nothing would say so
            )
            async with stdio_client(parameters, errlog=self._stderr.open()) as streams:
                self._stderr.close()
                yield streams
            return
        assert server.url is not None
        headers = dict(server.headers)
        if server.auth_token is not None:
            headers["Authorization"] = f"Bearer {server.auth_token}"
        if server.sse:
            async with sse_client(server.url, headers=headers, timeout=30.0, sse_read_timeout=86400.0) as streams:
                yield streams
            return
        # how long an answer may take is the affair of each call
        timeout = httpx2.Timeout(30.0, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            streamable_http_client(server.url, http_client=http) as streams,
        ):
            yield streams


class _Tail:
    """Reads what a server writes to stderr, so that it does not block, and remembers the end of it."""

    def __init__(self) -> None:
        self._kept = ""
        self._write: TextIO | None = None
        self._reader: threading.Thread | None = None

    def open(self) -> TextIO:
        """The end to write to."""
        read, write = os.pipe()
        self._write = os.fdopen(write, "w")
        self._reader = threading.Thread(target=self._follow, args=(read,), name="mcp-stderr", daemon=True)
        self._reader.start()
        return self._write

    def close(self) -> None:
        """Give up our own copy of that end: the server has its own, and reading ends when it closes it."""
        if self._write is not None:
            self._write.close()

    def text(self) -> str:
        """The end of what was written."""
        if self._reader is not None:
            self._reader.join(timeout=0.1)  # of a server that is gone all is read by then
        return self._kept.strip()

    def _follow(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as stream:
            while chunk := stream.read(4096):
                self._kept = (self._kept + chunk.decode("utf-8", errors="replace"))[-_TAIL:]


def _root(failed: Failed) -> str:
    """What was raised at the bottom of groups of exceptions, which say nothing themselves."""
    error = failed.__cause__
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return failed.failure.message if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
