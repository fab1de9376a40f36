"""The HTTP server that agents talk to: OpenAI's chat completions and responses, and Anthropic's messages.

A process has one server, in a thread of its own: on 127.0.0.1, or where `Listening` says, for agents on other machines. It starts
with the first conversation of an agent and ends when no environment source uses it any more. The API key of a request says which
conversation it belongs to.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import ssl
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from turnwise.environments.agents.anthropic_messages import AnthropicMessages
from turnwise.environments.agents.chat_completions import ChatCompletions, openai_error
from turnwise.environments.agents.completions import Completions
from turnwise.environments.agents.requests import AgentAnswer, AgentConversation, ChatRequest, Refused, bare_id
from turnwise.environments.agents.responses import Responses
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.json_yaml import lone_surrogate
from turnwise.services.http_server import (
    RequestRefused,
    bearer_token,
    is_loopback,
    json_value,
    listen,
    missing_library,
    uvicorn_server,
    whole_body,
)
from turnwise.user_code.thread_loops import ThreadLoop
from turnwise.user_code.threads import off_loop

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
_LONGEST_BODY = 32 << 20  # bytes
_SHORT_BODY = 1 << 16  # bytes of a body that is read between two other requests
_MOST_VALUES = 1_000_000  # in a body: the interpreter is not free while JSON is parsed
_NAME = "the server of agents"
_REMEMBERED = 10_000  # keys of conversations that have ended
_STOP_SECONDS = 5.0
_MODEL = {"created": 0, "created_at": "1970-01-01T00:00:00Z", "owned_by": "turnwise"}
"""What is told of the model."""
_ENDED = "the conversation has ended, and its key is not valid any more"


class Dialect(Protocol):
    """One API: reads its requests and writes its answers."""

    def read(self, body: Mapping[str, Any]) -> ChatRequest:
        """Raises Refused."""
        ...

    def answer(self, request: ChatRequest, answer: AgentAnswer) -> dict[str, Any]:
        """The body of an answer."""
        ...

    def events(self, request: ChatRequest, answer: AgentAnswer) -> Iterator[tuple[str | None, Any]]:
        """The events of a stream: name and data."""
        ...

    def error(self, refused: Refused) -> dict[str, Any]:
        """The body of an error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where the server listens, and under which address agents reach it."""

    host: str = "127.0.0.1"
    port: int = 0
    """0: a free port."""
    certificate: tuple[str, str] | None = None
    """The files of the TLS certificate and its key, in PEM form."""
    public_url: str | None = None
    """The base URL for agents, without a path such as `/v1`; None: that of `host` and the port."""

    @classmethod
    def of(cls, server: Mapping[str, Any]) -> Listening:
        """From the argument `server` of an agent, which may have these keys:

        - `listen`: `HOST:PORT`; a free port of 127.0.0.1 unless given.
        - `tls_cert`, `tls_key`: the files of the server's TLS certificate and of its key, in PEM form.
        - `public_url`: the base URL under which agents reach the server, such as that of an ingress.
        - `insecure`: whether the server may listen without TLS at an address that other machines reach.

        Raises ConfigError, such as for an address that others reach, without TLS.
        """
        names = ("listen", "tls_cert", "tls_key", "public_url", "insecure")
        if unknown := [name for name in server if name not in names]:
            raise ConfigError(f"server: {unknown[0]!r} is unknown; the keys are {', '.join(names)}")
        listen, tls_cert, tls_key, public_url, insecure = (server.get(name) for name in names)
        # YAML reads `listen: 8443` as a number
        host, _, port = ("127.0.0.1:0" if listen is None else str(listen)).rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        secure = tls_cert is not None or is_loopback(host)
        everywhere = public_url is None and host in ("0.0.0.0", "::")
        address = None if public_url is None else urlsplit(public_url)
        problems = [
            (
                not host or not (port.isascii() and port.isdigit()) or int(port) > 65535,
                f"listen={listen!r} must be HOST:PORT, such as 0.0.0.0:8443 or [::]:8443",
            ),
            ((tls_cert is None) is not (tls_key is None), "tls_cert and tls_key belong together: set both, or none"),
            *(
                (path is not None and not os.path.isfile(path), f"{name}={path!r}: there is no such file")
                for name, path in (("tls_cert", tls_cert), ("tls_key", tls_key))
            ),
            (
                not secure and not insecure,
                f"listen={listen} can be reached from other machines, and without TLS their requests and keys can be read on the "
                f"way: set tls_cert and tls_key; or insecure=true, if an ingress in front has TLS or the network is private",
            ),
            (
                insecure and secure,
                f"insecure=true has no effect with {'TLS' if tls_cert else 'a local address'}: remove it",
            ),
            (
                address is not None and not (address.scheme in ("http", "https") and address.netloc),
                f"public_url={public_url!r} must be a URL such as https://agents.example.org",
            ),
            (
                everywhere,
                f"listen={listen} is all addresses of this machine: set public_url to the one that agents use",
            ),
        ]
        for holds, message in problems:
            if holds:
                raise ConfigError(message)
        certificate = None if tls_cert is None or tls_key is None else (tls_cert, tls_key)
        _check_certificate(certificate)
        return cls(host=host, port=int(port), certificate=certificate, public_url=public_url)

    def url(self, port: int) -> str:
        """The base URL for agents, of a server that got this port."""
        if self.public_url is not None:
            return self.public_url.rstrip("/").removesuffix("/v1")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{port}"


def _check_certificate(certificate: tuple[str, str] | None) -> None:
    """Raises ConfigError if the files cannot be used, which a server would only find out in its thread."""
    if certificate is None:
        return
    try:
        # an encrypted key is refused: without a password, ssl would ask at the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*certificate, password="")
    except OSError as error:  # also SSLError
        raise ConfigError(
            f"tls_cert={certificate[0]!r} and tls_key={certificate[1]!r} cannot be used ({error}): they must be a certificate "
            f"and its key in PEM form, and the key must not be encrypted"
        ) from None


LOCAL = Listening()
"""A free port of 127.0.0.1."""

_DIALECTS: Mapping[str, Dialect] = {
    "chat/completions": ChatCompletions(),
    "responses": Responses(),
    "messages": AnthropicMessages(),
    "completions": Completions(),
}


_RETRIEVED = ("responses", "chat/completions")
"""The APIs whose answers can be asked for again, by their id."""
_COUNTS: Mapping[str, Mapping[str, Any]] = {
    "messages/count_tokens": {},
    "responses/input_tokens": {"object": "response.input_tokens"},
}
"""The paths that count the tokens of a prompt, with what else is in their answers."""


class Proxy:
    """The server. `add` and `remove` may be called from any thread.

    Raises ConfigError if starlette or uvicorn is not installed, or the address or the certificate cannot be used.
    """

    def __init__(self, listening: Listening = LOCAL) -> None:
        _check_certificate(listening.certificate)  # the files may have changed since the recipe was read
        self.listening = listening
        self._conversations: dict[str, AgentConversation] = {}
        self._ended: collections.OrderedDict[str, None] = collections.OrderedDict()
        """The keys of the last conversations that have ended."""
        self._server = uvicorn_server(
            _application(self), server=_NAME, extra="serve", seconds_to_finish=1, certificate=listening.certificate
        )
        # a request may arrive before the thread accepts connections
        self._socket = listen(listening.port, server=_NAME, host=listening.host)
        self.url = listening.url(self._socket.getsockname()[1])
        """The address without a path: the base URL of Anthropic's clients."""
        self._thread = ThreadLoop("turnwise-agents")
        self._serving = self._thread.submit(self._server.serve(sockets=[self._socket]))

    def add(self, conversation: AgentConversation) -> None:
        """Accept requests with the conversation's key."""
        self._conversations[conversation.key] = conversation

    def remove(self, conversation: AgentConversation) -> None:
        """Refuse requests with the conversation's key."""
        if self._conversations.pop(conversation.key, None) is not None:
            self._ended[conversation.key] = None
            while len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)

    def find(self, key: str) -> AgentConversation:
        """The conversation of a key. Raises Refused."""
        conversation = self._conversations.get(key)
        if conversation is not None:
            return conversation
        if key in self._ended:
            raise Refused(410, _ENDED)
        if key.startswith("tw-"):
            raise Refused(404, "there is no conversation with this API key; it may belong to an earlier run")
        raise Refused(
            401, "the API key is missing or wrong; it is in the variables OPENAI_API_KEY and ANTHROPIC_API_KEY"
        )

    def close(self) -> None:
        """Stop the server and its thread. Raises what the server failed with."""
        self._server.should_exit = True
        try:
            self._serving.result(timeout=_STOP_SECONDS)
        except TimeoutError:
            self._serving.cancel()
        finally:
            self._thread.stop()
            self._socket.close()


class ProxyLease:
    """A share in the process's server. The server is started for the first share and stopped with the last one."""

    _lock = threading.Lock()
    _proxy: Proxy | None = None
    _shares = 0

    def __init__(self, listening: Listening = LOCAL) -> None:
        self._active = False
        self._listening = listening

    def proxy(self) -> Proxy:
        """The server, started if necessary. Raises ConfigError if a library is not installed, the address cannot be used, or the
        server of this process listens elsewhere."""
        with ProxyLease._lock:
            if not self._active:
                if ProxyLease._proxy is None:
                    ProxyLease._proxy = Proxy(self._listening)
                elif ProxyLease._proxy.listening != self._listening:
                    raise ConfigError(
                        f"two environments ask for servers of agents at {ProxyLease._proxy.url} and at {self._listening.host}:"
                        f"{self._listening.port}, and a process has one: give them the same listen, tls_cert, tls_key and "
                        f"public_url"
                    )
                self._active = True
                ProxyLease._shares += 1
            assert ProxyLease._proxy is not None
            return ProxyLease._proxy

    def release(self) -> None:
        """Give the share back."""
        with ProxyLease._lock:
            if not self._active:
                return
            self._active = False
            ProxyLease._shares -= 1
            if ProxyLease._shares:
                return
            proxy, ProxyLease._proxy = ProxyLease._proxy, None
        assert proxy is not None
        proxy.close()


def _application(proxy: Proxy) -> Starlette:
    try:
        from starlette.applications import Starlette
        from starlette.routing import Route
    except ImportError:
        raise missing_library("starlette", server=_NAME, extra="serve") from None
    handlers = _Handlers(proxy)
    posts = {path: handlers.chat(dialect) for path, dialect in _DIALECTS.items()} | {"reward": handlers.reward}
    posts |= {path: handlers.count(_DIALECTS[path.split("/")[0]], head) for path, head in _COUNTS.items()}
    gets = {f"{path}/{{id}}": handlers.answered(_DIALECTS[path]) for path in _RETRIEVED}
    gets |= {"row": handlers.row, "models": handlers.models, "models/{name:path}": handlers.model}
    # clients append their path to a base URL with or without /v1
    prefixes = ("/v1", "", "/v1/v1")
    return Starlette(
        routes=[
            *(Route(f"{prefix}/{path}", post, methods=["POST"]) for prefix in prefixes for path, post in posts.items()),
            *(Route(f"{prefix}/{path}", get, methods=["GET"]) for prefix in prefixes for path, get in gets.items()),
            Route("/{path:path}", handlers.not_found, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
        ]
    )


class _Handlers:
    """What the server does with each request."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    def chat(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """The handler of an API's requests for an answer of the model."""

        async def handle(request: Request) -> Response:
            from starlette.responses import JSONResponse, Response, StreamingResponse

            try:
                conversation = self._proxy.find(_key(request))
                chat = await _read(dialect, request)
                answer = await _ask(request, conversation, chat)
            except Refused as refused:
                return _refusal(refused, dialect.error(refused))
            if answer is None:
                return Response(status_code=499)  # the client is gone
            if not chat.stream:
                return JSONResponse(dialect.answer(chat, answer))
            events = (_server_sent(*event) for event in dialect.events(chat, answer))
            return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

        return handle

    def count(self, dialect: Dialect, head: Mapping[str, Any]) -> Callable[[Request], Awaitable[Response]]:
        """The handler of an API's requests for the number of tokens of a prompt."""

        async def handle(request: Request) -> Response:
            from starlette.responses import JSONResponse

            try:
                conversation = self._proxy.find(_key(request))
                counted = conversation.count_tokens(await _read(dialect, request))
                return JSONResponse({**head, "input_tokens": await _in_loop(conversation, counted)})
            except Refused as refused:
                return _refusal(refused, dialect.error(refused))

        return handle

    def answered(self, dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        """The handler of an API's requests for an earlier answer, by its id."""

        async def handle(request: Request) -> Response:
            from starlette.responses import JSONResponse

            try:
                chat, answer = self._proxy.find(_key(request)).answered(bare_id(request.path_params["id"]))
            except Refused as refused:
                return _refusal(refused, dialect.error(refused))
            return JSONResponse(dialect.answer(chat, answer))

        return handle

    async def reward(self, request: Request) -> Response:
        """Take a reward from the agent."""
        from starlette.responses import JSONResponse

        try:
            conversation = self._proxy.find(_key(request))
            body = _object(await _body(request))
            if unknown := body.keys() - {"reward", "id", "final", "key"}:
                name = min(unknown)
                raise Refused(
                    400, f"{name!r:.80} is unknown: a reward has `reward`, `id`, `final` and `key`", parameter=name[:80]
                )
            key = body.get("key", request.headers.get("Idempotency-Key"))
            report = conversation.report_reward(body.get("reward"), body.get("id"), body.get("final", False), key)
            await _in_loop(conversation, report)
        except Refused as refused:
            return _refusal(refused, openai_error(refused))
        return JSONResponse({"status": "ok"})

    async def row(self, request: Request) -> Response:
        """The row of the conversation."""
        from starlette.responses import Response

        try:
            return Response(self._proxy.find(_key(request)).row, media_type="application/json")
        except Refused as refused:
            return _refusal(refused, openai_error(refused))

    async def models(self, request: Request) -> Response:
        """A list of one model: the model that is trained."""
        return self._about_model(request, {"object": "list", "data": [{"id": "model", "object": "model", **_MODEL}]})

    async def model(self, request: Request) -> Response:
        """The model that is trained, under whatever name a client asks for it."""
        name = request.path_params["name"]
        return self._about_model(
            request, {"id": name, "object": "model", "type": "model", "display_name": name, **_MODEL}
        )

    def _about_model(self, request: Request, told: Mapping[str, Any]) -> Response:
        """What is told of the model to the agent of a conversation: clients try their key with such a request."""
        from starlette.responses import JSONResponse

        try:
            self._proxy.find(_key(request))
        except Refused as refused:
            return _refusal(refused, openai_error(refused))
        return JSONResponse(told)

    async def not_found(self, request: Request) -> Response:
        """All other paths."""
        known = ", ".join(f"/v1/{path}" for path in (*_DIALECTS, *_COUNTS, "models", "reward", "row"))
        refused = Refused(404, f"{request.method} {request.url.path:.100} does not exist; the paths are {known}")
        return _refusal(refused, openai_error(refused))


def _refusal(refused: Refused, body: Mapping[str, Any]) -> Response:
    from starlette.responses import JSONResponse

    # the connection is closed, because the body of the request may be unread
    return JSONResponse(body, refused.status, headers={"Connection": "close"})


def _key(request: Request) -> str:
    """The API key of a request, in the header of Anthropic's or of OpenAI's clients."""
    return request.headers.get("x-api-key") or bearer_token(request)


async def _body(request: Request) -> bytes:
    """The body of a request. Raises Refused if it is too long."""
    try:
        return await whole_body(request, longest=_LONGEST_BODY)
    except RequestRefused as refused:
        raise Refused(refused.status, str(refused)) from None


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises Refused if it is none, or has too many values."""
    if (
        values := sum(map(body.count, (b",", b":", b"[", b"{")))
    ) > _MOST_VALUES:  # nothing else is read while it is parsed
        raise Refused(413, f"the body may have {_MOST_VALUES} commas, colons and brackets, and has {values}")
    try:
        value = json_value(body)
    except RequestRefused as refused:
        raise Refused(refused.status, str(refused)) from None
    if not isinstance(value, dict):
        raise Refused(400, f"the body of the request must be a JSON object; it is a {type(value).__name__}")
    if (text := lone_surrogate(value)) is not None:
        raise Refused(
            400,
            f"the text {text[:60]!r} contains half of a surrogate pair, which is no character: send the complete character, or "
            f"remove it",
        )
    return value


async def _read(dialect: Dialect, request: Request) -> ChatRequest:
    """Raises Refused."""
    body = await _body(request)

    def read() -> ChatRequest:
        return or_refused(lambda: dialect.read(_object(body)))

    return read() if len(body) <= _SHORT_BODY else await off_loop(read, long=True)


def or_refused(read: Callable[[], ChatRequest]) -> ChatRequest:
    """The request that a function reads. Raises Refused, also if a part of the request has an unexpected type."""
    try:
        with boundary("request"):
            return read()
    except Failed as failed:
        if isinstance(failed.__cause__, Refused):
            raise failed.__cause__ from None
        raise Refused(400, f"the request cannot be read: {failed.failure.message:.300}") from None


async def _ask(request: Request, conversation: AgentConversation, chat: ChatRequest) -> AgentAnswer | None:
    """The answer to a request; None if the client closes its connection before. Raises Refused."""
    try:
        asked = asyncio.run_coroutine_threadsafe(conversation.ask(chat), conversation.loop)
    except RuntimeError:  # the loop of the conversation is closed
        raise Refused(410, _ENDED) from None
    answering = asyncio.wrap_future(asked)
    leaving = asyncio.create_task(_until_disconnected(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return answering.result() if answering.done() else None
    finally:
        leaving.cancel()
        answering.cancel()


async def _in_loop(conversation: AgentConversation, asked: Coroutine[Any, Any, T]) -> T:
    """What the conversation answers in its event loop. Raises Refused."""
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, conversation.loop))
    except RuntimeError:  # the loop of the conversation is closed
        asked.close()
        raise Refused(410, _ENDED) from None


async def _until_disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _server_sent(name: str | None, data: Any) -> str:
    """An event of a stream."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return f"data: {text}\n\n" if name is None else f"event: {name}\ndata: {text}\n\n"
