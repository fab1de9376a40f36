"""What all HTTP servers share: time limits of connections, headers and bodies, and the bound on connections."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from turnwise.services.http_server import RequestRefused, json_body, listen, uvicorn_server

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


class Server:
    """An application with an answer that a test holds back, and one that needs a body."""

    def __init__(self) -> None:
        self.waiting = threading.Semaphore(0)
        """Released by each request for `/wait`."""
        self.go = threading.Event()
        self._socket = listen(0, server="the test")
        self.port: int = self._socket.getsockname()[1]
        routes = [Route("/", self._home), Route("/wait", self._wait), Route("/body", self._body, methods=["POST"])]
        self.uvicorn = uvicorn_server(Starlette(routes=routes), server="the test", extra="serve")
        self.thread = threading.Thread(target=self.uvicorn.run, args=([self._socket],))

    async def _home(self, request: Request) -> Response:
        return JSONResponse("home")

    def _wait(self, request: Request) -> Response:
        self.waiting.release()
        self.go.wait(30)
        return JSONResponse("waited")

    async def _body(self, request: Request) -> Response:
        try:
            return JSONResponse(await json_body(request, longest=1000, any_type=True))
        except RequestRefused as refused:
            return JSONResponse(str(refused), refused.status, headers=refused.headers)

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def close(self) -> None:
        self.go.set()
        self.uvicorn.should_exit = True
        self.thread.join()
        self._socket.close()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    server.thread.start()
    yield server
    server.close()


def limits(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setattr(f"turnwise.services.http_server.{name}", value)


def received(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := connection.recv(65536):
            found += data
    return found


def answer(connection: socket.socket) -> bytes:
    """The next answer, which ends in a JSON text."""
    found = b""
    while not found.endswith(b'"'):
        data = connection.recv(65536)
        assert data, found
        found += data
    return found


def test_a_connection_that_sends_nothing_is_closed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, HEADER_SECONDS=0.3)
    with server.connect() as silent:
        assert received(silent).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("before", [b"", GET])
def test_headers_that_do_not_end_close_their_connection_however_slowly_they_come(
    server: Server, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    limits(monkeypatch, HEADER_SECONDS=0.5)
    with server.connect() as slow:
        if before:  # the second request of a connection
            slow.sendall(before)
            assert b'"home"' in answer(slow)
        started = time.monotonic()
        closed = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                slow.sendall(b"GET / HTTP/1.1\r\n")
                while not closed.wait(0.05):
                    slow.sendall(b"X: y\r\n")

        dripping = threading.Thread(target=drip)
        dripping.start()
        received(slow)  # returns, because the server closes the connection
        closed.set()
        dripping.join()
        assert time.monotonic() - started >= 0.4


def test_an_answer_may_take_longer_than_the_headers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, HEADER_SECONDS=0.2)
    with server.connect() as connection:
        connection.sendall(GET.replace(b"/ ", b"/wait ", 1))
        assert server.waiting.acquire(timeout=30)
        time.sleep(0.6)
        server.go.set()
        assert b'"waited"' in answer(connection)
        connection.sendall(GET)
        assert b'"home"' in answer(connection)


def test_a_body_that_does_not_come_is_refused_and_a_slow_one_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, BODY_SECONDS=1.0)
    head = b"POST /body HTTP/1.1\r\nHost: a\r\nContent-Length: 6\r\n\r\n"
    with server.connect() as stuck, server.connect() as slow:
        stuck.sendall(head + b'"ab')
        slow.sendall(head)
        for byte in b'"abcd"':
            slow.sendall(bytes([byte]))
            time.sleep(0.3)  # 1.8 s in all
        assert b"200 OK" in answer(slow)
        refused = received(stuck)
        assert refused.startswith(b"HTTP/1.1 408 ")
        assert b"no byte of the body arrived for 1 s, and 3 bytes are no complete body" in refused


def test_connections_without_a_request_make_room_for_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    limits(monkeypatch, most_connections=lambda: 8)
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(server.connect()) for _ in range(4)]
        for connection in busy:
            connection.sendall(GET.replace(b"/ ", b"/wait ", 1))
        for _ in busy:
            assert server.waiting.acquire(timeout=30)
        silent = [stack.enter_context(server.connect()) for _ in range(40)]
        new = stack.enter_context(server.connect())
        new.sendall(GET)
        assert b'"home"' in answer(new)
        for connection in silent[:36]:
            assert received(connection) in (
                b"",
                b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
            )
        assert len(server.uvicorn.server_state.connections) <= 8
        server.go.set()
        assert all(b'"waited"' in answer(connection) for connection in busy)


def test_a_server_whose_connections_are_all_in_use_refuses_a_new_one(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(monkeypatch, most_connections=lambda: 2)
    with server.connect() as first, server.connect() as second:
        for connection in (first, second):
            connection.sendall(GET.replace(b"/ ", b"/wait ", 1))
            assert server.waiting.acquire(timeout=30)
        with server.connect() as third:
            assert received(third).startswith(b"HTTP/1.1 503 ")
        server.go.set()
        assert b'"waited"' in answer(first)
