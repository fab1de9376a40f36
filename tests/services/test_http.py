"""HTTP: the server that turnwise's services share, and rates at which services are asked."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
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

from support.servers import Answer, serving
from turnwise.errors import ConfigError
from turnwise.services.chat import ChatEndpoint, ContextFullError
from turnwise.services.http_server import RequestRefused, json_body, listen, uvicorn_server
from turnwise.services.json_service import RateLimit, RefusedError, ServiceError
from turnwise.types import Usage
from turnwise.user_code.calls import conversation, deadline

# What all HTTP servers share: time limits of connections, headers and bodies, and the bound on connections.


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


# Rate limits: when requests may start, by a clock that the test moves.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_start_at_even_distances() -> None:
    clock = Clock()
    limit = RateLimit(requests_per_minute=120, clock=clock)
    assert [limit.reserve() for _ in range(4)] == [0.0, 0.5, 1.0, 1.5]
    clock.now += 1.75
    assert limit.reserve() == pytest.approx(0.25)
    clock.now += 60  # unused time is not saved: a burst would exceed the limit
    assert [limit.reserve(), limit.reserve()] == [0.0, 0.5]


def test_tokens_delay_the_next_request_until_the_estimate_is_settled() -> None:
    limit = RateLimit(tokens_per_minute=6000, clock=Clock())  # 100 tokens a second
    assert limit.reserve(250) == 0.0
    assert limit.reserve(100) == pytest.approx(2.5)
    limit.settle(100, 20)
    assert limit.reserve(10) == pytest.approx(2.7)
    assert limit.reserve(10**9) == pytest.approx(2.8)
    assert limit.reserve() == pytest.approx(62.8)  # a request of any size blocks the others for a minute at most


def test_the_slower_of_both_limits_decides() -> None:
    limit = RateLimit(requests_per_minute=60, tokens_per_minute=60, clock=Clock())
    assert [limit.reserve(tokens) for tokens in (0, 3, 0)] == [0.0, 1.0, 4.0]


def test_a_pause_delays_all_requests() -> None:
    clock = Clock()
    limit = RateLimit(clock=clock)
    limit.pause(10.0)
    limit.pause(2.0)  # a shorter pause does not end a longer one
    waits = [limit.reserve() for _ in range(20)]
    assert all(10.0 <= wait <= 12.0 for wait in waits)
    assert len(set(waits)) > 1  # they do not start at the same moment
    clock.now += 10.0
    assert limit.reserve() == 0.0


@pytest.mark.parametrize("options", [{"requests_per_minute": 0}, {"tokens_per_minute": -1.0}])
def test_limits_are_above_zero(options: dict[str, float]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=f"{name} is {options[name]}; it must be above 0"):
        RateLimit(**options)


def said(text: str = "Hello", **usage: int) -> Answer:
    counts = {"usage": usage} if usage else {}
    return Answer({"choices": [{"message": {"content": text}, "finish_reason": "stop"}], **counts})


def ask(url: str, times: int = 1, **options: Any) -> list[Any]:
    """The outcomes of requests that are sent at the same time."""
    endpoint = ChatEndpoint(url, "m", **{"pause": 0.01, **options})

    async def main() -> list[Any]:
        questions = (endpoint.complete([{"role": "user", "content": "Hi"}]) for _ in range(times))
        return await asyncio.gather(*questions, return_exceptions=True)

    return asyncio.run(main())


def test_a_server_gets_no_more_requests_than_its_limit_from_all_conversations() -> None:
    with serving(lambda *_: said()) as server:
        started = time.perf_counter()
        answers = ask(server.url, 6, requests_per_minute=600)
        seconds = time.perf_counter() - started
    assert [answer.message["content"] for answer in answers] == ["Hello"] * 6
    assert seconds >= 0.5  # five distances of a tenth of a second


def test_reported_tokens_settle_the_estimate() -> None:
    """Each answer is estimated at 1,000 tokens, which would be 10 s at this limit, and has 3."""
    with serving(lambda *_: said(prompt_tokens=2, completion_tokens=1)) as server:
        options = {"tokens_per_minute": 6000, "request": {"max_tokens": 1000}}
        started = time.perf_counter()
        ask(server.url, 1, **options)
        ask(server.url, 1, **options)
        assert time.perf_counter() - started < 9
    assert len(server.asked) == 2


@pytest.mark.parametrize("form", ["seconds", "date"])
@pytest.mark.parametrize("status", [429, 503])
def test_retry_after_is_honoured_and_holds_for_all(status: int, form: str) -> None:
    times: list[float] = []

    def answer(question: dict[str, Any], number: int) -> Answer:
        times.append(time.time())
        if number:
            return said()
        date = email.utils.formatdate(time.time() + 2.0, usegmt=True)  # whole seconds
        return Answer("slow down", status, headers={"Retry-After": "0.5" if form == "seconds" else date})

    with serving(answer) as server:
        first, second = ask(server.url, 1, retries=1, pause=30.0), ask(server.url, 1)
    assert (first[0].message["content"], second[0].message["content"]) == ("Hello", "Hello")
    assert times[1] - times[0] >= (0.5 if form == "seconds" else 0.9)
    assert times[1] - times[0] < 10  # not the 30 seconds of `pause`


def test_the_pauses_double_and_have_a_random_part() -> None:
    times: list[float] = []

    def answer(question: dict[str, Any], number: int) -> Answer:
        times.append(time.perf_counter())
        return Answer("broken", 500)

    with serving(answer) as server:
        (error,) = ask(server.url, 1, retries=3, pause=0.2)
    assert isinstance(error, ServiceError)
    assert "was called 4 times: status 500" in str(error)
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    for number, pause in enumerate(pauses):
        assert pause >= 0.1 * 2**number


def test_waiting_for_the_rate_limit_does_not_count_for_the_deadline_of_a_conversation() -> None:
    with serving(lambda *_: said()) as server:
        endpoint = ChatEndpoint(server.url, "m", requests_per_minute=40, timeout=1.0, retries=0)

        async def converse(name: str) -> str:
            with conversation(name):
                async with deadline(1.0):
                    answer = await endpoint.complete([{"role": "user", "content": "Hi"}])
            return str(answer.message["content"])

        async def main() -> list[str]:
            return await asyncio.gather(*(converse(str(n)) for n in range(3)))

        started = time.perf_counter()
        assert asyncio.run(main()) == ["Hello"] * 3
        assert time.perf_counter() - started >= 3.0


@pytest.mark.parametrize(
    "error",
    [
        {"error": {"code": "context_length_exceeded", "message": "..."}},
        {"message": "This model's maximum context length is 2048 tokens. However, you requested 2100 tokens."},
        {"message": "The input (3000 tokens) is longer than the model's context length (2048 tokens)."},
    ],
)
def test_a_full_context_is_an_error_of_its_own(error: dict[str, Any]) -> None:
    with serving(lambda *_: Answer(error, 400)) as server:
        (outcome,) = ask(server.url)
    assert isinstance(outcome, ContextFullError)
    with serving(lambda *_: Answer({"error": "bad tools"}, 400)) as server:
        (outcome,) = ask(server.url)
    assert isinstance(outcome, RefusedError)
    assert (outcome.status, outcome.body) == (400, '{"error": "bad tools"}')
    assert len(server.asked) == 1  # not repeated


def test_the_bound_of_an_answer_has_the_name_that_the_server_knows() -> None:
    with serving(lambda *_: said()) as server:
        endpoint = ChatEndpoint(server.url, "m", max_tokens_field="max_completion_tokens")
        asyncio.run(endpoint.complete([{"role": "user", "content": "Hi"}], fields={"max_tokens": 9, "top_p": 0.5}))
    (asked,) = server.asked
    assert (asked["max_completion_tokens"], asked["top_p"], "max_tokens" in asked) == (9, 0.5, False)
    with pytest.raises(
        ConfigError, match=r"endpoint\.max_tokens_field='most' must be max_tokens or max_completion_tokens"
    ):
        ChatEndpoint(server.url, "m", max_tokens_field="most")


def test_fields_of_the_request_replace_and_remove_those_of_turnwise_and_usage_is_read() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    with serving(lambda *_: Answer({"choices": [{"message": {"content": "x"}}], "usage": usage})) as server:
        endpoint = ChatEndpoint(f"{server.url}/v1/", "m", request={"seed": None, "top_p": 0.5, "extra": [1]})
        tool = {"type": "function", "function": {"name": "f"}}
        question = endpoint.complete(
            [{"role": "user", "content": "Hi"}], tools=[tool], fields={"seed": 1, "top_p": 1.0, "max_tokens": 9}
        )
        answer = asyncio.run(question)
    (asked,) = server.asked
    assert asked == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [tool],
        "top_p": 0.5,
        "max_tokens": 9,
        "extra": [1],
    }
    assert server.paths == ["/v1/chat/completions"]
    assert (answer.usage, answer.finish_reason) == (Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4), "")
