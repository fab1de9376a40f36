"""The connection to one MCP server. All conversations share the connection. A lost connection is opened again at the next call.

One task owns a session: the same task enters and leaves the session. Calls come from any task of the same event loop; the
number of concurrent calls is not limited here. A call whose connection is lost is not repeated, because the server may have
carried out the call already: the call raises ConnectionError, and the next call opens a new session.
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
    **dict.fromkeys(("mcp", "client", "httpx2", "httpcore2"), logging.WARNING),  # logs each call at INFO
    "mcp.client.stdio": logging.CRITICAL,  # logs a traceback for each invalid line; _Session warns once
}
"""The loggers of the SDK, and the lowest level that each of them logs."""
_log = logging.getLogger(__name__)
_CLOSING_SECONDS = 10.0  # the SDK waits 2 s for a server to exit, 2 s after SIGTERM, and then kills it
_PAGES = 100  # maximum pages of one tool listing, so that a listing always ends
_TAIL = 500  # characters kept from the end of a server's stderr


class McpServer(BaseModel):
    """One entry of an `mcpServers` file: a server to connect to (`url`) or a process to start (`command`)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = None
    auth_token: str | None = None
    """Sent as `Authorization: Bearer ...`."""
    headers: dict[str, str] = {}
    type: Literal["http", "streamable-http", "streamable_http", "sse", "stdio"] | None = None
    """The transport. Default: SSE for a url whose path ends in /sse, streamable HTTP for any other url, stdio for a command."""
    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    """Added to HOME, LOGNAME, PATH, SHELL, TERM and USER. The server receives no other variable of this process."""
    cwd: str | None = None

    @model_validator(mode="after")
    def _one_way(self) -> McpServer:
        if (self.url is None) == (self.command is None):
            raise ValueError("exactly one of url and command must be set")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"the url {self.url!r} must begin with http:// or https://")
        strangers = {"args", "env", "cwd"} if self.url is not None else {"auth_token", "headers"}
        if strange := sorted(strangers & self.model_fields_set):
            raise ValueError(
                f"{', '.join(strange)} has no effect with a {'url' if self.url is not None else 'command'}: remove it"
            )
        if self.type is not None and (self.type == "stdio") != (self.command is not None):
            raise ValueError(f"type={self.type!r} cannot be used with a {'url' if self.url is not None else 'command'}")
        return self

    @property
    def sse(self) -> bool:
        """Whether the server uses SSE, the older of the two HTTP transports."""
        if self.type is not None or self.url is None:
            return self.type == "sse"
        return self.url.partition("?")[0].rstrip("/").endswith("/sse")


class Connection:
    """One server, connected on demand. Call all methods in the same event loop."""

    def __init__(self, name: str, server: McpServer, *, start_timeout: float) -> None:
        self.name = name
        self._server = server
        self._start_timeout = start_timeout
        self._session: _Session | None = None
        self._former: list[_Session] = []
        """Lost sessions whose tasks may still be running."""
        self._starting = asyncio.Lock()

    async def tools(self) -> list[ServerTool]:
        """The tools that the server offers.

        Raises ConnectionError if the server cannot be reached or does not list the tools within `start_timeout` seconds.
        """
        await self._live()  # has its own time limit and raises a precise error
        try:
            async with asyncio.timeout(self._start_timeout):
                return await self._list()
        except TimeoutError:
            tail = "" if self._session is None else self._session.tail()
            raise ConnectionError(
                f"the MCP server {self.name!r} did not list its tools within {self._start_timeout:g} s{tail}"
            ) from None

    async def _list(self) -> list[ServerTool]:
        tools: list[ServerTool] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._use(lambda client, at=cursor: client.list_tools(cursor=at))
            tools.extend(page.tools)
            cursor = page.next_cursor
            if not cursor:
                return tools
        raise ConnectionError(f"the MCP server {self.name!r} lists its tools on more than {_PAGES} pages")

    async def call(self, tool: str, arguments: dict[str, Any]) -> CallToolResult:
        """Call a tool.

        Raises ConnectionError if the server cannot be reached or the connection is lost, ValueError if the server refuses
        the call.
        """
        return await self._use(lambda client: client.call_tool(tool, arguments))

    async def close(self) -> None:
        """Close all sessions. A server process that a session started ends."""
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
        raise ConnectionError(f"the connection to the MCP server {self.name!r} was lost: {session.problem or problem}")

    async def _live(self) -> _Session:
        """The current session, or a new session if the current session is over. Raises ConnectionError if no session starts."""
        async with self._starting:
            if self._session is not None and self._session.over.is_set():
                self._former = [*(former for former in self._former if not former.ended), self._session]
                self._session = None
            if self._session is None:
                self._session = _Session(self.name, self._server)
            session = self._session
            try:
                # The limit counts from the start of the session, even if earlier calls were cancelled while waiting.
                async with asyncio.timeout_at(session.began + self._start_timeout):
                    await asyncio.shield(session.client)
            except TimeoutError:
                problem = f"no answer within {self._start_timeout:g} s"
            except Failed as failed:
                problem = _root(failed)
            else:
                return session
            self._session = None
            await session.close()
            way = "reached" if self._server.command is None else "started"
            raise ConnectionError(f"the MCP server {self.name!r} could not be {way}: {problem}{session.tail()}")


class _Session:
    """One session of a connection, from opening to closing. A closed session is never used again."""

    def __init__(self, name: str, server: McpServer) -> None:
        self._name = name
        self._server = server
        self._warned = False
        self.problem = ""
        """Why this class ended the session; empty in all other cases."""
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        self.client: asyncio.Future[Client] = loop.create_future()
        self.over = asyncio.Event()
        """Set when the server is gone or the session is no longer needed."""
        self._stderr = _Tail()
        self._task = asyncio.create_task(self._live(), name=f"mcp-{name}")

    @property
    def ended(self) -> bool:
        """Whether the task of the session has finished."""
        return self._task.done()

    async def close(self) -> None:
        """End the session, and wait for the end of its task for at most `_CLOSING_SECONDS`."""
        self.over.set()
        if not self.client.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSING_SECONDS)

    def tail(self) -> str:
        """The end of the server's stderr, formatted as the end of an error message; empty if stderr is empty."""
        return f"; its stderr ends with: {text}" if (text := self._stderr.text()) else ""

    async def _live(self) -> None:
        from mcp import Client

        for name, level in _LOUD.items():
            logger = logging.getLogger(name)
            if logger.level == logging.NOTSET:  # keep a level that the user has set
                logger.setLevel(level)
        try:
            with boundary("mcp"):
                async with Client(self._watched()) as client:
                    self.client.set_result(client)
                    await self.over.wait()
        except Failed as failed:
            if not self.client.done():
                self.client.set_exception(failed)
                self.client.exception()  # marks the exception as retrieved; no task may be waiting
        finally:
            self.over.set()
            self._stderr.close()
            if not self.client.done():
                self.client.cancel()

    @asynccontextmanager
    async def _watched(self) -> AsyncIterator[TransportStreams]:
        """The transport. Sets `over` as soon as the transport ends, so that the loss is known before the next call."""
        import anyio

        pass_on, received = anyio.create_memory_object_stream[Any](0)

        async def watch(read: Any) -> None:
            async with pass_on:
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    async for message in read:
                        if isinstance(message, Exception):  # an invalid line
                            self._warn_once()
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
            f"it wrote more than {mcp_lines.LONGEST_LINE // 2**20} MiB to its stdout without a line break, and was stopped. Each "
            f"message must be one shorter line; other output belongs on stderr"
        )
        if not self.client.done():
            self.client.set_exception(Failed(Failure("mcp", self.problem)))
            self.client.exception()
        self.over.set()

    def _warn_once(self) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "the MCP server %r writes lines to its stdout that are not JSON-RPC. They are ignored; print them to stderr",
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
                encoding_error_handler="replace",  # otherwise an invalid byte ends the reader without an error
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
        # No read timeout here: each call has its own timeout.
        timeout = httpx2.Timeout(30.0, read=None)
        async with (
            httpx2.AsyncClient(headers=headers, timeout=timeout) as http,
            streamable_http_client(server.url, http_client=http) as streams,
        ):
            yield streams


class _Tail:
    """Reads a server's stderr in a thread and keeps the last characters. Without a reader, the server would block."""

    def __init__(self) -> None:
        self._kept = ""
        self._write: TextIO | None = None
        self._reader: threading.Thread | None = None

    def open(self) -> TextIO:
        """Create the pipe, start the reader thread, and return the write end of the pipe."""
        read, write = os.pipe()
        self._write = os.fdopen(write, "w")
        self._reader = threading.Thread(target=self._follow, args=(read,), name="mcp-stderr", daemon=True)
        self._reader.start()
        return self._write

    def close(self) -> None:
        """Close this process's copy of the write end. The reader ends when the server closes its own copy."""
        if self._write is not None:
            self._write.close()

    def text(self) -> str:
        """The last characters of the stderr (at most `_TAIL`), stripped."""
        if self._reader is not None:
            self._reader.join(timeout=0.1)  # if the server has exited, this is enough time to read the rest
        return self._kept.strip()

    def _follow(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as stream:
            while chunk := stream.read(4096):
                self._kept = (self._kept + chunk.decode("utf-8", errors="replace"))[-_TAIL:]


def _root(failed: Failed) -> str:
    """The message of the innermost exception. The exception groups around the innermost exception carry no information."""
    error = failed.__cause__
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return failed.failure.message if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
