"""Connections that a server closes because they were not used for some seconds."""

from __future__ import annotations

import asyncio
import time

from turnwise.engines.remote.http import HttpServer

IDLE = 2.4
"""Seconds after which the server of this test closes a connection. uvicorn: 5."""


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers requests. A request that arrives too late on its connection is not answered: the connection is closed, as if the
    request had crossed the closing of the connection on the way."""
    last = time.monotonic()
    try:
        while (head := await reader.readuntil(b"\r\n\r\n")) and time.monotonic() - last < IDLE:
            length = next(int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:"))
            await reader.readexactly(length)
            body = b'{"ok": true}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
            await writer.drain()
            last = time.monotonic()
    except asyncio.IncompleteReadError:
        pass
    finally:
        writer.close()


def test_a_request_never_uses_a_connection_that_the_server_may_be_closing() -> None:
    connections = 0

    async def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await answer(reader, writer)

    async def run() -> None:
        listening = await asyncio.start_server(count, "127.0.0.1", 0)
        port = listening.sockets[0].getsockname()[1]
        server = HttpServer(f"http://127.0.0.1:{port}")
        assert await server.post("/generate", {}) == {"ok": True}
        assert await server.post("/generate", {}) == {"ok": True}
        assert connections == 1
        time.sleep(IDLE + 0.2)  # training may block the event loop, so that no timer runs
        assert await server.post("/generate", {}) == {"ok": True}
        assert connections == 2
        await server.close()
        listening.close()

    asyncio.run(run())
