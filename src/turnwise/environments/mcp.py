"""Tools of MCP servers: the connections, and the tools with the schemas of the servers, unchanged.

The connections run in an event loop of one thread. They are opened before the first conversation, are shared by all
conversations (in any event loop), and are closed at the end of the run. For servers with state (`McpServers.toolbox`), each
conversation has connections of its own, which its calls open and its end closes. One task owns a session: the same task enters
and leaves it. Calls come from any task of the same event loop; their number is not limited here. A call whose connection is lost
is not repeated, because the server may have carried out the call already: the call raises ConnectionError, and the next call
opens a new session. A conversation's own session is not replaced: the state is lost with it, and each further call says so.

The SDK buffers a line from a server's stdout without a length limit, but lets the caller choose the encoding of the pipe. The
encoding that is registered here is UTF-8 with a decoder that counts the characters since the last line break. Above the limit
the decoder drops all further text and calls its listener, which ends the server.
"""

from __future__ import annotations

import asyncio
import base64
import codecs
import io
import itertools
import json
import logging
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from turnwise.environments.tools.result import ToolResponse
from turnwise.environments.tools.tool import Tool, Toolbox
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.json_yaml import parse_json, read_text
from turnwise.types import Failure
from turnwise.user_code.thread_loops import ThreadLoop
from turnwise.user_code.threads import run_in_thread

if TYPE_CHECKING:
    from mcp import Client
    from mcp.client._transport import TransportStreams
    from mcp.types import CallToolResult, ContentBlock
    from mcp.types import Tool as ServerTool


# one connection

_LOUD = {
    **dict.fromkeys(("mcp", "client", "httpx2", "httpcore2"), logging.WARNING),  # logs each call at INFO
    "mcp.client.stdio": logging.CRITICAL,  # logs a traceback for each invalid line; _Session warns once
}
"""The loggers of the SDK, and the lowest level that each of them logs."""
_log = logging.getLogger(__name__)
_CLOSING_SECONDS = 10.0  # the SDK waits 2 s for a server to exit, 2 s after SIGTERM, and then kills it
_PAGES = 100  # maximum pages of one tool listing, so that a listing always ends
_TAIL = 500  # characters told of the end of a server's stderr
_KEPT = 20_000  # characters kept of it: a traceback in frames, as `rich` prints it, has 12,000
_FRAME = ("│", "╭", "╰")  # how the lines of such a traceback begin
_RAISED = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)")
_CHAINED = ("The above exception was", "During handling of the above")


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

    def __init__(self, name: str, server: McpServer, *, start_timeout: float, has_state: bool = False) -> None:
        """`has_state`: a session that was lost is not replaced."""
        self.name = name
        self._server = server
        self._has_state = has_state
        self._start_timeout = start_timeout
        self._session: _Session | None = None
        self._former: list[_Session] = []
        """Lost sessions whose tasks may still be running."""
        self.also: dict[str, _Also] = {}
        """Tools that are made of other things than the server's tools, by their names."""
        self._starting = asyncio.Lock()
        self._told: set[str] = set()
        """The first tool that failed without a word of why; the further connections to the server share it."""

    def with_state(self) -> Connection:
        """A further connection to the same server, with a state that a new session would not have."""
        copy = Connection(self.name, self._server, start_timeout=self._start_timeout, has_state=True)
        copy.also, copy._told = self.also, self._told
        return copy

    async def has(self, kind: AlsoOffered) -> bool:
        """Whether the server has resources, or prompts. Raises ConnectionError."""
        client = await (await self._live()).client
        return getattr(client.server_capabilities, kind) is not None

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
        the call, or if an earlier call has lost the session and its state.
        """
        if (also := self.also.get(tool)) is not None:
            return await self._use(lambda client: also.call(client, arguments))
        result = await self._use(lambda client: client.call_tool(tool, arguments))
        if result.is_error and not _words_of_error(result, tool):
            self._tell_hidden_error(tool)
        return result

    def _tell_hidden_error(self, tool: str) -> None:
        """Warn, once, of a server that says of a failed call only that it failed."""
        if not self._told:
            self._told.add(tool)
            tail = "" if self._session is None else self._session.tail()
            _log.warning(
                "the MCP server %r does not say why %s failed, and so the model is not told%s. Raise ToolError in the server: of "
                "other exceptions, the official SDK prints a traceback, which takes a second, in which no other call is answered "
                "(unless the server has log_level='CRITICAL'; docs/tools.md)",
                self.name,
                tool,
                tail,
            )

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
        """The current session, or a new session if the current session is over. Raises ConnectionError if no session starts,
        ValueError if a state is lost."""
        async with self._starting:
            if self._session is not None and self._session.over.is_set():
                if self._has_state and self._session.opened:
                    # not a ConnectionError, which would be a reason for further attempts
                    raise ValueError(
                        f"the session of this conversation with the MCP server {self.name!r} was lost, and with it all that "
                        f"earlier calls did there; the server cannot be called any more in this conversation"
                    )
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


AlsoOffered = Literal["resources", "prompts"]
"""What servers have besides tools."""


@dataclass(frozen=True, slots=True)
class _Also:
    """A tool that reads what a server has besides tools."""

    name: str
    description: str
    parameters: Mapping[str, str]
    """The parameters and their descriptions. All are texts, and required, but `arguments`."""
    ask: Callable[[Client, dict[str, Any]], Awaitable[list[ContentBlock]]]

    async def call(self, client: Client, arguments: dict[str, Any]) -> CallToolResult:
        from mcp.types import CallToolResult

        return CallToolResult(content=await self.ask(client, arguments))

    def schema(self, name: str) -> dict[str, Any]:
        """The schema of the tool under this name."""
        values = {"type": "object", "additionalProperties": {"type": "string"}}
        properties = {
            key: {**(values if key == "arguments" else {"type": "string"}), "description": text}
            for key, text in self.parameters.items()
        }
        required = [key for key in properties if key != "arguments"]
        parameters = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": name, "description": self.description, "parameters": parameters},
        }


async def _pages(page: Callable[..., Awaitable[Any]], of: str) -> list[dict[str, Any]]:
    """All entries of a list that a server gives in pages."""
    entries: list[dict[str, Any]] = []
    cursor: str | None = None
    for _ in range(_PAGES):
        found = await page(cursor=cursor)
        for entry in getattr(found, of):
            shown = entry.model_dump(mode="json", by_alias=True, exclude_none=True)
            entries.append({name: value for name, value in shown.items() if name not in ("icons", "_meta")})
        cursor = found.next_cursor
        if not cursor:
            break
    return entries


def _as_text(value: Any) -> list[ContentBlock]:
    from mcp.types import TextContent

    return [TextContent(text=json.dumps(value, ensure_ascii=False))]


async def _list_resources(client: Client, arguments: dict[str, Any]) -> list[ContentBlock]:
    templates = await _pages(client.list_resource_templates, "resource_templates")
    return _as_text([*await _pages(client.list_resources, "resources"), *templates])


async def _read_resource(client: Client, arguments: dict[str, Any]) -> list[ContentBlock]:
    from mcp.types import EmbeddedResource, ImageContent

    blocks: list[ContentBlock] = []
    for part in (await client.read_resource(arguments["uri"])).contents:
        kind = part.mime_type or ""
        data = getattr(part, "blob", None)
        if data is not None and kind.startswith("image/"):
            blocks.append(ImageContent(data=data, mime_type=kind))
        else:
            blocks.append(EmbeddedResource(resource=part))
    return blocks


async def _list_prompts(client: Client, arguments: dict[str, Any]) -> list[ContentBlock]:
    return _as_text(await _pages(client.list_prompts, "prompts"))


async def _get_prompt(client: Client, arguments: dict[str, Any]) -> list[ContentBlock]:
    from mcp.types import TextContent

    blocks: list[ContentBlock] = []
    for message in (await client.get_prompt(arguments["name"], arguments.get("arguments"))).messages:
        of = message.content
        blocks.append(TextContent(text=f"{message.role}: {of.text}") if of.type == "text" else of)
    return blocks


_ALSO: Mapping[AlsoOffered, Sequence[_Also]] = {
    "resources": (
        _Also("list_resources", "List the resources: documents and data that can be read.", {}, _list_resources),
        _Also("read_resource", "Read a resource.", {"uri": "The URI of the resource."}, _read_resource),
    ),
    "prompts": (
        _Also("list_prompts", "List the prompts: prepared instructions for tasks.", {}, _list_prompts),
        _Also(
            "get_prompt",
            "Get a prompt.",
            {"name": "The name of the prompt.", "arguments": "The arguments of the prompt."},
            _get_prompt,
        ),
    ),
}
"""The tools that each kind becomes."""


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

    @property
    def opened(self) -> bool:
        """Whether the session has ever answered."""
        return self.client.done() and not self.client.cancelled() and self.client.exception() is None

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
            f"it wrote more than {LONGEST_LINE // 2**20} MiB to its stdout without a line break, and was stopped. Each "
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
            _listener.set(self._line_too_long)
            parameters = StdioServerParameters(
                command=server.command,
                args=server.args,
                env=server.env,
                cwd=server.cwd,
                encoding=ENCODING,
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
        """What the end of the stderr says (at most `_TAIL` characters): of exceptions that caused each other, the first."""
        if self._reader is not None:
            self._reader.join(timeout=0.1)  # if the server has exited, this is enough time to read the rest
        return _end_of(self._kept)

    def _follow(self, read: int) -> None:
        with os.fdopen(read, "rb", buffering=0) as stream:
            while chunk := stream.read(4096):
                self._kept = (self._kept + chunk.decode("utf-8", errors="replace"))[-_KEPT:]


def _end_of(written: str) -> str:
    """The end of what a server has written, without frames of tracebacks. Of exceptions that caused each other, the message of
    the first: those after it say that a tool failed.

    >>> _end_of("ValueError: no station\\n\\nThe above exception was the direct\\ncause of this one:\\n\\nToolError: temperature")
    'ValueError: no station'
    """
    lines = [line for line in map(str.strip, written.splitlines()) if not line.startswith(_FRAME)]
    starts = [number for number, line in enumerate(lines) if _RAISED.match(line)]
    last = len(starts) - 1
    while last > 0 and any(line.startswith(_CHAINED) for line in lines[starts[last - 1] : starts[last]]):
        last -= 1
    if last == len(starts) - 1:
        text = "\n".join(lines).strip()
        return text if len(text) <= _TAIL else text[-_TAIL:].partition("\n")[2] or text[-_TAIL:]  # whole lines
    message = itertools.takewhile(bool, lines[starts[last] :])  # to an empty line
    return " ".join(message)[:_TAIL]


def _root(failed: Failed) -> str:
    """The message of the innermost exception. The exception groups around the innermost exception carry no information."""
    error = failed.__cause__
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return failed.failure.message if error is None else f"{type(error).__name__}: {error}".rstrip(": ")


# all servers of a recipe

_CLOSING_ALL_SECONDS = 15.0


class McpServers:
    """The MCP servers of a run.

    Example::

        servers = McpServers.from_file("mcp.json")
        make_environment = lambda: Tools(servers.tools(), then=...)    # list the tools once, outside
        ...
        await servers.aclose()

    A subclass may override `parse_result`.
    """

    def __init__(self, servers: Mapping[str, McpServer], *, start_timeout: float = 30.0) -> None:
        """`start_timeout`: maximum seconds until the first answer. Raises ConfigError without the SDK or without servers."""
        try:
            import mcp  # noqa: F401
        except ImportError:
            raise ConfigError("MCP servers need the official SDK: pip install 'turnwise[mcp]'") from None
        if not servers:
            raise ConfigError("there are no MCP servers: `mcpServers` must have at least one")
        self._loop = ThreadLoop("mcp")
        self._connections = [Connection(name, server, start_timeout=start_timeout) for name, server in servers.items()]
        """Those that are open or may be: those of the run, or those of conversations."""
        self._listed = list(self._connections)
        self.offered: dict[str, list[str]] = {name: [] for name in servers}
        """The names of the tools that each server has given, once `tools` or `toolbox` have asked."""
        # Also runs if close() is never called: server processes must not outlive the run.
        self._closing = weakref.finalize(self, _close, self._loop, self._connections)

    @classmethod
    def from_file(cls, path: str | Path, *, start_timeout: float = 30.0) -> McpServers:
        """The servers of an `mcpServers` file.

        Example::

            {"mcpServers": {"search": {"url": "https://example.org/mcp", "auth_token": "..."},
                            "files": {"command": "npx", "args": ["-y", "server"], "env": {"KEY": "..."}}}}

        Raises ConfigError if the file cannot be read, is not valid, or names no server.
        """
        return cls(_read(Path(path)), start_timeout=start_timeout)

    def tools(
        self,
        selected: Sequence[str] | None = None,
        *,
        titles: bool = True,
        also: Sequence[AlsoOffered] = (),
        timeout: float = 30.0,
        retries: int = 0,
        retry_timeouts: bool = False,
    ) -> list[Tool]:
        """Connect to the servers, and create a Tool for each offered tool, or only for the names in `selected`.

        `titles`: whether the schemas keep their titles, which the SDK makes of names. `also`: what becomes tools, too. `timeout`
        is in seconds per call. Raises ConfigError if a server cannot be reached, if no server has a selected tool, or what `also`
        names, or if two servers have a tool of the same name.
        """
        calls = {"timeout": timeout, "retries": retries, "retry_timeouts": retry_timeouts}
        return [tool for tool, _ in self._offer(selected, titles, also, calls)]

    def toolbox(
        self,
        selected: Sequence[str] | None = None,
        *,
        titles: bool = True,
        also: Sequence[AlsoOffered] = (),
        timeout: float = 30.0,
        retries: int = 0,
        retry_timeouts: bool = False,
        most: int | None = None,
    ) -> Toolbox:
        """The tools of servers with state: each conversation has a session of its own with each server, and a process of its own
        for a server with a `command`.

        A session begins with the first call of one of its server's tools, and ends with the conversation. At most `most`
        conversations have sessions at the same time; a call of a further one waits, within its `timeout`. The other arguments are
        those of `tools`. Raises ConfigError.
        """
        calls = {"timeout": timeout, "retries": retries, "retry_timeouts": retry_timeouts}
        offered = self._offer(selected, titles, also, calls)
        self._loop.submit(_close_each(self._listed)).result(timeout=_CLOSING_ALL_SECONDS)  # they have listed the tools
        self._connections.clear()
        owners = {tool.name: connection for tool, connection in offered}
        free = None if most is None else asyncio.Semaphore(most)
        return Toolbox(
            make=lambda: _Sessions(self, owners, free),
            name="mcp",
            tools=tuple(tool for tool, _ in offered),
            closes=True,
            method=_Sessions.caller,
        )

    def _offer(
        self, selected: Sequence[str] | None, titles: bool, also: Sequence[AlsoOffered], calls: Mapping[str, Any]
    ) -> list[tuple[Tool, Connection]]:
        """The tools and their servers, which `offered` names from then on. Raises ConfigError."""
        pairs = self._selected(selected, titles, calls)
        pairs += self._offered_also(also, {tool.name for tool, _ in pairs}, calls)
        self.offered = {
            one.name: [tool.name for tool, connection in pairs if connection is one] for one in self._listed
        }
        return pairs

    def _selected(
        self, selected: Sequence[str] | None, titles: bool, calls: Mapping[str, Any]
    ) -> list[tuple[Tool, Connection]]:
        """The servers' tools, or those with the names in `selected`. Raises ConfigError."""
        owners: dict[str, Connection] = {}
        tools: list[tuple[Tool, Connection]] = []
        offered: set[str] = set()
        for connection, listed in zip(self._listed, self._listings(), strict=True):
            for listed_tool in listed:
                offered.add(listed_tool.name)
                if selected is not None and listed_tool.name not in selected:
                    continue
                if listed_tool.name in owners:
                    raise ConfigError(
                        f"the MCP servers {owners[listed_tool.name].name!r} and {connection.name!r} both have a "
                        f"tool {listed_tool.name!r}, and the names of tools must differ: select other tools, or "
                        f"remove one of the servers"
                    )
                owners[listed_tool.name] = connection
                tool = Tool.from_schema(
                    _schema(listed_tool, titles=titles),
                    self._caller(connection, listed_tool.name),
                    by_name=False,
                    **calls,
                )
                tools.append((tool, connection))
        for name in selected or ():
            if name not in offered:
                have = ", ".join(sorted(offered)) or "none"
                raise ConfigError(f"no MCP server has a tool {name!r}{nearest(name, offered)} (the tools are: {have})")
        return tools

    def _offered_also(
        self, also: Sequence[AlsoOffered], taken: Collection[str], calls: Mapping[str, Any]
    ) -> list[tuple[Tool, Connection]]:
        """The tools that read what servers have besides tools. If several servers have it, the names begin with theirs."""
        tools: list[tuple[Tool, Connection]] = []
        for kind in also:
            having = [one for one in self._listed if self._loop.submit(one.has(kind)).result()]
            if not having:
                raise ConfigError(f"no MCP server has {kind}: remove {kind} from mcp.also")
            for connection in having:
                for one in _ALSO[kind]:
                    name = one.name if len(having) == 1 else f"{connection.name}_{one.name}"
                    if name in taken:
                        raise ConfigError(
                            f"an MCP server has a tool {name!r} already: remove {kind} from mcp.also, or select other tools"
                        )
                    connection.also[name] = one
                    call = self._caller(connection, name)
                    tools.append((Tool.from_schema(one.schema(name), call, by_name=False, **calls), connection))
        return tools

    def parse_result(self, content: list[ContentBlock]) -> ToolResponse:
        """Convert a result for the model: texts joined by line breaks, images as images. Override to change the conversion."""
        texts: list[str] = []
        images: list[Any] = []
        for block in content:
            match block.type:
                case "text":
                    texts.append(block.text)
                case "image":
                    images.append(_image(block.data))
                case "audio":
                    texts.append(f"[audio of the type {block.mime_type}, which is not supported]")
                case "resource_link":
                    texts.append(f"{block.title or block.name}: {block.uri}")
                case "resource":
                    text = getattr(block.resource, "text", None)
                    texts.append(text if text is not None else f"[{block.resource.uri}, which is not text]")
        return ToolResponse(text="\n".join(texts) if texts or not images else None, image=images or None)

    def close(self) -> None:
        """Close all connections, and wait for the end of the server processes. A second call does nothing."""
        self._closing()

    async def aclose(self) -> None:
        """Same as close(), without blocking the event loop."""
        await run_in_thread(self.close, name="mcp", kind="environment")

    def _listings(self) -> list[list[ServerTool]]:
        if not self._closing.alive:
            raise ConfigError("these MCP servers are closed: create a new McpServers")

        async def list_all() -> list[list[ServerTool] | BaseException]:
            return await asyncio.gather(*(connection.tools() for connection in self._listed), return_exceptions=True)

        listings: list[list[ServerTool]] = []
        for connection, listed in zip(self._listed, self._loop.submit(list_all()).result(), strict=True):
            if isinstance(listed, BaseException):
                text = str(listed) or type(listed).__name__
                raise ConfigError(
                    text
                    if isinstance(listed, ConnectionError)
                    else f"the MCP server {connection.name!r} lists no tools: {text}"
                )
            listings.append(listed)
        return listings

    def _caller(self, connection: Connection, name: str) -> Callable[[dict[str, Any]], Awaitable[ToolResponse]]:
        async def call(arguments: dict[str, Any]) -> ToolResponse:
            return await self.ask(connection.call(name, arguments), connection.name, name)

        return call

    async def ask(self, calling: Coroutine[Any, Any, CallToolResult], server: str, name: str) -> ToolResponse:
        """Await a call of the tool `name` in the event loop of the connections. Raises what the connection raises, and ValueError
        with the message of a tool that failed."""
        if not self._closing.alive:
            calling.close()
            raise ConnectionError(f"the MCP server {server!r} was closed")
        result = await asyncio.wrap_future(self._loop.submit(calling))
        if not result.content and result.structured_content is not None:
            response = ToolResponse(json.dumps(result.structured_content, ensure_ascii=False))
        else:
            response = await run_in_thread(lambda: self.parse_result(result.content), name="mcp", kind="tool")
        if result.is_error:
            raise ValueError(_own_words(response.text or "", name) or f"{name} failed without an error message")
        return response

    def open_like(self, connection: Connection) -> Connection:
        """A further connection to the same server, which is closed with the others at the latest."""
        opened = connection.with_state()
        self._connections.append(opened)
        return opened

    async def close_opened(self, opened: Sequence[Connection]) -> None:
        """Close connections of `open_like`. Call it in the event loop of the connections."""
        try:
            await _close_each(opened)
        finally:
            for connection in opened:
                self._connections.remove(connection)

    async def end(self, ending: Coroutine[Any, Any, None]) -> None:
        """Await the end of sessions in the event loop of the connections. It goes on if the caller is cancelled."""
        if not self._closing.alive:  # all are closed
            ending.close()
            return
        await asyncio.shield(asyncio.wrap_future(self._loop.submit(ending)))


class _Sessions:
    """The sessions of one conversation. `close` ends them.

    All else happens in the event loop of the connections: a call that is given up and the end of the conversation see one state.
    """

    def __init__(self, servers: McpServers, owners: Mapping[str, Connection], free: asyncio.Semaphore | None) -> None:
        self._servers = servers
        self._owners = owners
        self._free = free
        self._opened: dict[str, Connection] = {}
        """By the name of the server."""
        self._entering = asyncio.Lock()
        """A call waits for a place, which the calls after it then have too."""
        self._holds = False
        """Whether this conversation has one of the places of `free`."""
        self._closed = False

    def caller(self, name: str) -> Callable[[dict[str, Any]], Awaitable[ToolResponse]]:
        """The function of a tool."""
        owner = self._owners[name]

        async def use(arguments: dict[str, Any]) -> CallToolResult:
            await self._enter()
            if owner.name not in self._opened:
                self._opened[owner.name] = self._servers.open_like(owner)
            return await self._opened[owner.name].call(name, arguments)

        async def call(arguments: dict[str, Any]) -> ToolResponse:
            return await self._servers.ask(use(arguments), owner.name, name)

        return call

    async def close(self) -> None:
        """End the sessions."""
        await self._servers.end(self._end())

    async def _enter(self) -> None:
        """Wait for a place, if there are places and the conversation has none. Raises ConnectionError after its end."""
        async with self._entering:
            if self._free is not None and not self._holds and not self._closed:
                await self._free.acquire()
                self._holds = True
            if self._closed:
                self._leave()
                raise ConnectionError("the conversation has ended")

    async def _end(self) -> None:
        self._closed = True
        try:
            await self._servers.close_opened(list(self._opened.values()))
        finally:
            self._leave()

    def _leave(self) -> None:
        if self._free is not None and self._holds:
            self._holds = False
            self._free.release()


def _words_of_error(result: CallToolResult, tool: str) -> str:
    """What a server says of a failed call."""
    text = "".join(block.text for block in result.content if block.type == "text")
    return _own_words(text, tool)


def _own_words(text: str, tool: str) -> str:
    """The text of a tool's error without what servers' libraries put in front of it: the SDK for Python (`Error executing tool
    add: `), fastmcp (`Error calling tool 'add': `) and the SDK for TypeScript (`MCP error -32602: `)."""
    return re.sub(rf"^(?:Error (?:executing|calling) tool '?{re.escape(tool)}'?(?:: |$)|MCP error -?\d+: )", "", text)


async def _close_each(connections: Sequence[Connection]) -> None:
    await asyncio.gather(*(connection.close() for connection in connections))


def _close(loop: ThreadLoop, connections: Sequence[Connection]) -> None:
    ended = loop.submit(_close_each(list(connections)))
    if loop.inside:  # garbage collection in the loop's own thread: waiting would deadlock
        ended.add_done_callback(lambda _: loop.stop())
        return
    try:
        with boundary("environment"):
            ended.result(timeout=_CLOSING_ALL_SECONDS)
    except Failed as failed:
        _log.warning("the MCP servers could not be closed: %s", failed)
    loop.stop()


def _schema(tool: ServerTool, *, titles: bool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or tool.title or "",
            "parameters": tool.input_schema if titles else _without_titles(tool.input_schema),
        },
    }


def _without_titles(schema: Any, *, names: bool = False) -> Any:
    """A JSON schema without its titles. `names`: the keys are names of parameters or definitions; one of them may be `title`."""
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value
        if key in ("enum", "const", "default", "examples") and not names
        else _without_titles(
            value, names=not names and key in ("properties", "$defs", "definitions", "patternProperties")
        )
        for key, value in schema.items()
        if names or key != "title" or not isinstance(value, str)
    }


def _image(data: str) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(base64.b64decode(data)))
    image.load()  # decode now, so that an invalid image is an error of this tool call
    return image


def _read(path: Path) -> dict[str, McpServer]:
    data = parse_json(read_text(path, error=ConfigError), where=str(path), error=ConfigError)
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict):
        raise ConfigError(f'{path} must contain {{"mcpServers": {{"<name>": {{"url": ...}} or {{"command": ...}}}}}}')
    read: dict[str, McpServer] = {}
    for name, server in servers.items():
        try:
            read[name] = McpServer.model_validate(server)
        except ValidationError as problem:
            known = list(McpServer.model_fields)
            lines = [
                f"there is no option {where!r}{nearest(where, known)} (the options are: {', '.join(known)})"
                if error["type"] == "extra_forbidden"
                else f"{where}: {error['msg']}".removeprefix(": ").removeprefix("Value error, ")
                for error in problem.errors(include_url=False)
                for where in [".".join(str(part) for part in error["loc"])]
            ]
            raise ConfigError(f"{path}: mcpServers.{name}: {'; '.join(lines)}") from None
    return read


# the length of lines

ENCODING = "turnwise_bounded_utf_8"
LONGEST_LINE = 16 * 2**20
"""In characters. An image in a result is one line. The time that the SDK needs for a line is quadratic in its length."""

_listener: ContextVar[Callable[[], None] | None] = ContextVar("turnwise_mcp_line_too_long", default=None)
"""What decoders that are created in this task and its child tasks call when a line is too long."""


class _Decoder(codecs.IncrementalDecoder):
    def __init__(self, errors: str = "strict") -> None:
        super().__init__(errors)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors)
        self._on_long_line = _listener.get()
        self._length = 0
        """Characters in the current line so far."""

    def decode(self, input: bytes, final: bool = False) -> str:  # type: ignore[override]
        if self._length > LONGEST_LINE:
            return ""
        text = self._utf8.decode(input, final)
        before, line_break, rest = text.rpartition("\n")
        self._length = len(rest) + (0 if line_break else self._length)
        if self._length <= LONGEST_LINE:
            return text
        if self._on_long_line is not None:
            self._on_long_line()
        return before + line_break


def _search(name: str) -> codecs.CodecInfo | None:
    if name != ENCODING:
        return None
    return codecs.CodecInfo(
        codecs.utf_8_encode, codecs.utf_8_decode, incrementaldecoder=_Decoder, name=ENCODING
    )  # encoding is plain UTF-8


codecs.register(_search)
