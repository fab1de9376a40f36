"""Tools of MCP servers. The schemas are used unchanged; calls use connections that stay open.

The connections run in a separate event loop in a separate thread. They are opened before the first conversation, are shared
by all conversations (in any event loop), and are closed at the end of the run.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import logging
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from turnwise.environments.mcp.connection import Connection, McpServer
from turnwise.environments.threaded_environment import ThreadLoop
from turnwise.environments.tools.result import ToolResponse
from turnwise.environments.tools.tool import Tool
from turnwise.errors import ConfigError, Failed, boundary, nearest
from turnwise.json_yaml import parse_json, read_text
from turnwise.user_code.run_in_thread import run_in_thread

if TYPE_CHECKING:
    from mcp.types import ContentBlock
    from mcp.types import Tool as ServerTool

__all__ = ["McpServer", "McpServers"]

_log = logging.getLogger(__name__)

_CLOSING_SECONDS = 15.0


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
        timeout: float = 30.0,
        retries: int = 0,
        retry_timeouts: bool = False,
    ) -> list[Tool]:
        """Connect to the servers, and create a Tool for each offered tool, or only for the names in `selected`.

        `timeout` is in seconds per call. Raises ConfigError if a server cannot be reached, if no server has a selected tool,
        or if two servers have a tool of the same name.
        """
        owners: dict[str, Connection] = {}
        tools: list[Tool] = []
        offered: set[str] = set()
        for connection, listed in zip(self._connections, self._listings(), strict=True):
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
                tools.append(
                    Tool.from_schema(
                        _schema(listed_tool),
                        self._caller(connection, listed_tool.name),
                        by_name=False,
                        timeout=timeout,
                        retries=retries,
                        retry_timeouts=retry_timeouts,
                    )
                )
        for name in selected or ():
            if name not in offered:
                have = ", ".join(sorted(offered)) or "none"
                raise ConfigError(f"no MCP server has a tool {name!r}{nearest(name, offered)} (the tools are: {have})")
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
            return await asyncio.gather(
                *(connection.tools() for connection in self._connections), return_exceptions=True
            )

        listings: list[list[ServerTool]] = []
        for connection, listed in zip(self._connections, self._loop.submit(list_all()).result(), strict=True):
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
            if not self._closing.alive:
                raise ConnectionError(f"the MCP server {connection.name!r} was closed")
            result = await asyncio.wrap_future(self._loop.submit(connection.call(name, arguments)))
            if not result.content and result.structured_content is not None:
                response = ToolResponse(json.dumps(result.structured_content, ensure_ascii=False))
            else:
                response = await run_in_thread(lambda: self.parse_result(result.content), name="mcp", kind="tool")
            if result.is_error:
                raise ValueError(response.text or f"{name} failed without an error message")
            return response

        return call


def _close(loop: ThreadLoop, connections: Sequence[Connection]) -> None:
    async def close_all() -> None:
        await asyncio.gather(*(connection.close() for connection in connections))

    ended = loop.submit(close_all())
    if loop.inside:  # garbage collection in the loop's own thread: waiting would deadlock
        ended.add_done_callback(lambda _: loop.stop())
        return
    try:
        with boundary("environment"):
            ended.result(timeout=_CLOSING_SECONDS)
    except Failed as failed:
        _log.warning("the MCP servers could not be closed: %s", failed)
    loop.stop()


def _schema(tool: ServerTool) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "description": tool.description or tool.title or "",
            "parameters": tool.input_schema,
        },
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
