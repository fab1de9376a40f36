"""A real MCP server for the tests: `python tests/support/mcp_server.py stdio`, or `http <port>`, or `sse <port>`."""

# ruff: noqa: E402

from __future__ import annotations

import gc

gc.disable()  # the imports take a sixth longer with it, and each test that starts a server waits for them

import asyncio
import os
import sys
from typing import Annotated, Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult
from PIL import Image as Picture
from pydantic import BaseModel, Field


class Place(BaseModel):
    """A place."""

    city: str
    zip: str | None = None


server = MCPServer("tests")
GIVEN_UP: list[float] = []
ARRIVED: list[int] = []


@server.tool()
def add(a: int, b: Annotated[int, Field(description="The second one.")] = 1) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def visit(place: Place, tags: list[str], how: Literal["foot", "train"] = "foot") -> str:
    """Go somewhere."""
    return f"{place.city} {tags} {how}"


@server.tool()
async def slow(seconds: float) -> str:
    """Take a while."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        GIVEN_UP.append(seconds)
        raise
    return "slept"


@server.tool()
async def meet(count: int) -> str:
    """Wait until so many calls are here."""
    ARRIVED.append(count)
    while len(ARRIVED) < count:
        await asyncio.sleep(0.01)
    return "met"


HEARD: list[str] = []


@server.tool()
def remember(word: str) -> str:
    """Remember a word. Returns the process, and all words so far."""
    HEARD.append(word)
    return f"{os.getpid()} {' '.join(HEARD)}"


@server.tool()
def given_up() -> int:
    """Count the calls of `slow` that were cancelled."""
    return len(GIVEN_UP)


@server.tool()
def image(count: int = 1) -> list[str | Image]:
    """Show images."""
    import io

    buffer = io.BytesIO()
    Picture.new("RGB", (3, 2), "red").save(buffer, format="PNG")
    return ["here", *(Image(data=buffer.getvalue(), format="png") for _ in range(count))]


@server.tool()
def fail() -> str:
    """Fail."""
    raise ToolError("the pump is broken")


@server.tool()
def refuse() -> CallToolResult:
    """Fail in figures."""
    return CallToolResult(content=[], structured_content={"code": 17}, is_error=True)


@server.tool()
def die() -> str:
    """Die."""
    os._exit(3)


@server.tool()
def env() -> dict[str, str]:
    """Show the environment."""
    return dict(os.environ)


@server.tool()
def pid() -> int:
    """Tell who is there."""
    return os.getpid()


@server.tool()
def large(characters: int) -> str:
    """Talk."""
    print("and chatter on stderr", file=sys.stderr)
    return "x" * characters


@server.resource("notes://garden", mime_type="text/plain")
def garden() -> str:
    """A note."""
    return "Water the roses."


@server.resource("notes://of/{name}")
def note_of(name: str) -> str:
    """A note of somebody."""
    return f"note of {name}"


@server.prompt()
def greet(name: str) -> str:
    """How to greet."""
    return f"Greet {name}."


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["stdio"]:
            server.run("stdio")
        case ["http", port]:
            server.run("streamable-http", host="127.0.0.1", port=int(port))
        case ["sse", port]:
            server.run("sse", host="127.0.0.1", port=int(port))
        case _:
            sys.exit(__doc__)
