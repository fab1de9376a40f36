"""The HTTP server of a rollout server: the socket and its token, the routes, and their OpenAPI description with a page.

HTTP runs in a thread of its own, so that the server answers while the engine or the code of an environment blocks the event
loop of the conversations; `EngineLoop` carries calls from one to the other. All routes share the bearer token, bounded bodies
and JSON errors. What the server does is the subject of `conversations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import html
import os
import re
import secrets
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ValidationError

from turnwise.errors import ConfigError
from turnwise.rollout_server.conversations import (
    HEARTBEAT,
    LEASE_SECONDS,
    ConversationQueue,
    Leases,
    ServerMetrics,
    WeightUpdates,
)
from turnwise.rollout_server.wire import MAX_BODY, LeaseBody, LeaseIdBody, RolloutBody, WeightsPathBody
from turnwise.services.http_server import (
    RequestRefused,
    body_chunks,
    json_body,
    listen,
    missing_library,
    refuse_without_token,
    refuse_wrong_token,
    uvicorn_server,
)
from turnwise.version import __version__

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response


# the description

_TRAJECTORIES = (
    "Server-sent events. Each event is a JSON object with a finished trajectory (`trajectory`, in the format of docs/record.md) "
    "and the completions of its turns (`completions`). Comments are heartbeats. The last event is `data: [DONE]`; without it "
    "the stream is incomplete."
)
_NO_LEASE = "The lease is missing, or another trainer has taken it."
_BUSY = "The queue is full: try again after the seconds in the header Retry-After."


def document() -> dict[str, Any]:
    """The description, as JSON values (OpenAPI 3.1)."""
    schemas: dict[str, Any] = {}
    for kind in (RolloutBody, LeaseBody, LeaseIdBody, WeightsPathBody):
        schemas |= _schemas(kind)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "turnwise rollout server",
            "version": __version__,
            "description": "Runs conversations near an engine, and receives the weights of a trainer. Errors have the form "
            '`{"error": "<value, rule and fix>"}`.',
        },
        "security": [{"token": []}],
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/health": {"get": {**_operation("Whether the server answers; needs no token."), "security": []}},
            "/info": {"get": _operation("The model, the version of its weights, and the options of the recipe.")},
            "/metrics": {"get": _operation("Metrics in the text format of Prometheus.", content="text/plain")},
            "/rollouts": {
                "post": {
                    **_operation(
                        "Run conversations and stream the trajectories as they finish.",
                        content="text/event-stream",
                        answer=_TRAJECTORIES,
                        body=RolloutBody,
                        refusals={"409": "The weights are older than `least_version`.", "503": _BUSY},
                    )
                }
            },
            "/lease": {
                "post": _operation(
                    "Become the trainer that may change the weights.",
                    body=LeaseBody,
                    refusals={"409": "Another trainer uses the server."},
                ),
            },
            "/lease/renew": {"post": _operation("Keep the lease.", body=LeaseIdBody, refusals={"409": _NO_LEASE})},
            "/lease/release": {
                "post": _operation("Give the lease back.", body=LeaseIdBody, refusals={"409": _NO_LEASE})
            },
            "/weights": {"post": _weights()},
        },
    }


def _weights() -> dict[str, Any]:
    operation = _operation(
        "Load weights: a safetensors file as the body, or the path of a file that the server can read.",
        body=WeightsPathBody,
        refusals={
            "409": _NO_LEASE,
            "413": "The body is larger than the model.",
            "422": "The weights cannot be loaded; the old weights stay.",
        },
    )
    operation["requestBody"]["content"]["application/octet-stream"] = {"schema": {"type": "string", "format": "binary"}}
    parameters = [
        {
            "name": name,
            "in": "query",
            "schema": {"type": kind},
            "description": f"{text}, if the body is a safetensors file.",
        }
        for name, kind, text in (
            ("version", "integer", "The version of the weights"),
            ("lease", "string", "The trainer's lease, from POST /lease"),
            ("checksum", "string", "CRC-32 of the file as 8 hexadecimal digits (optional)"),
        )
    ]
    return {**operation, "parameters": parameters}


def _operation(
    summary: str,
    *,
    content: str = "application/json",
    answer: str = "Done.",
    body: type[BaseModel] | None = None,
    refusals: dict[str, str] | None = None,
) -> dict[str, Any]:
    schema = {"type": "object"} if content == "application/json" else {"type": "string"}
    responses: dict[str, Any] = {"200": {"description": answer, "content": {content: {"schema": schema}}}}
    refusals = {"401": "The bearer token is missing or wrong.", **(refusals or {})}
    if body is not None:
        refusals["400"] = "The body is not as described."
    error = {"type": "object", "properties": {"error": {"type": "string"}}, "required": ["error"]}
    for status, reason in sorted(refusals.items()):
        responses[status] = {"description": reason, "content": {"application/json": {"schema": error}}}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        reference = {"$ref": f"#/components/schemas/{body.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    return operation


def _schemas(kind: type[BaseModel]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    return {**schema.pop("$defs", {}), kind.__name__: schema}


def page() -> str:
    """The description as an HTML page without scripts."""
    described = document()
    rows = [
        f"<tr><td><code>{method.upper()} {html.escape(path)}</code></td><td>{html.escape(operation['summary'])}</td>"
        f"<td>{_statuses(operation)}</td></tr>"
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    bodies = [
        f"<h3>{html.escape(name)}</h3><p>{html.escape(schema.get('description', ''))}</p><ul>{_fields(schema)}</ul>"
        for name, schema in described["components"]["schemas"].items()
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>turnwise rollout server</title>'
        "<style>body{font-family:sans-serif;max-width:70em;margin:2em auto}td{border-top:1px solid #ccc;padding:.4em;"
        "vertical-align:top}</style>"
        f"<h1>turnwise rollout server</h1><p>{html.escape(described['info']['description'])} The same as JSON: "
        '<a href="/openapi.json">/openapi.json</a>.</p>'
        f"<table>{''.join(rows)}</table><h2>Bodies</h2>{''.join(bodies)}</html>"
    )


def _statuses(operation: dict[str, Any]) -> str:
    return "<br>".join(
        f"{status}: {html.escape(response['description'])}" for status, response in operation["responses"].items()
    )


def _fields(schema: dict[str, Any]) -> str:
    required = schema.get("required", [])
    return "".join(
        f"<li><code>{html.escape(name)}</code>{' (required)' if name in required else ''}: "
        f"{html.escape(field.get('description', ''))}</li>"
        for name, field in schema.get("properties", {}).items()
    )


# what all routes share

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

Handler = Callable[["Request"], Awaitable["Response"]]

LONGEST_JSON = 64 << 20
"""Bytes of a JSON body without images, at most."""
_TOKEN_HINT = "send the token that the server printed when it started, or that it was given in its environment variable"


def guarded(handler: Handler, *, token: str | None, on_refused: Callable[[int], None]) -> Handler:
    """`handler` with the check of the bearer token, and with refusals as JSON. No token: everybody may call it."""
    from starlette.responses import JSONResponse

    async def checked(request: Request) -> Response:
        try:
            refuse_wrong_token(request, token, hint=_TOKEN_HINT)
            return await handler(request)
        except RequestRefused as refused:
            on_refused(refused.status)
            return JSONResponse({"error": str(refused)}, refused.status, headers=refused.headers)

    return checked


async def read_body(request: Request, kind: type[B], *, longest: int = LONGEST_JSON) -> B:
    """The JSON body of a request. Raises RequestRefused if it has more than `longest` bytes, is not JSON, or not of that form."""
    value = await json_body(request, longest=longest)
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestRefused(
            400, f"the body is not a {kind.__name__} (see /openapi.json): {_problems(error)}"
        ) from None


def _problems(error: ValidationError) -> str:
    """The first problems: the place, the rule and the value of each."""
    texts = [
        f"{'.'.join(str(part) for part in problem['loc']) or 'the body'}: {problem['msg']}; got {problem['input']!r:.80}"
        for problem in error.errors(include_url=False, include_context=False)[:3]
    ]
    more = error.error_count() - len(texts)
    return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


class EngineLoop:
    """The event loop of the engine and the conversations, called from the event loop of HTTP."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the engine's loop. If this call is cancelled, the coroutine is cancelled.

        Raises RequestRefused if the server is stopping.
        """
        if self._loop.is_closed():
            coroutine.close()
            raise RequestRefused(503, "the server is stopping", retry_after=5)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))


class Events:
    """Server-sent events that the engine's loop sends to the response of a request, with a heartbeat.

    The heartbeat is sent from the engine's loop, so it stops if that loop is blocked.
    """

    def __init__(self, *, heartbeat: bytes, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._heartbeat = heartbeat
        self._seconds = seconds

    def send(self, event: bytes) -> None:
        """Send an event. To be called in the engine's loop. Nothing is sent when the server has stopped."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, event)

    async def run(self, work: Callable[[Callable[[bytes], None]], Coroutine[Any, Any, None]]) -> None:
        """Run `work(send)` in the engine's loop, with a heartbeat."""
        task = asyncio.create_task(self._beat())
        try:
            await work(self.send)
        finally:
            task.cancel()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            self.send(self._heartbeat)

    async def first(self, task: asyncio.Future[None]) -> bytes | None:
        """The first event; None if there is none. Raises what `task` raised before it sent an event."""
        task.add_done_callback(lambda _: self._queue.put_nowait(None))
        event = await self._queue.get()
        if event is None:
            task.result()
        return event

    async def rest(self) -> AsyncIterator[bytes]:
        """The other events, until the task has ended."""
        while (event := await self._queue.get()) is not None:
            yield event


# routes

HEARTBEAT_SECONDS = 5.0
"""The time between two heartbeats in a stream of trajectories."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRun:
    """What a server serves."""

    conversations: ConversationQueue
    weights: WeightUpdates
    leases: Leases
    metrics: ServerMetrics
    instance: str
    """A random name of this start of the server: a client sees by it that the server was restarted."""
    model_path: str
    """model.path of the recipe."""
    tokenizer: str
    """The fingerprint of the tokenizer."""
    options: Mapping[str, Any]
    """The options of the recipe that must be those of the trainer."""
    processor: str | None
    """The fingerprint of the model's image processor; None for a text model."""
    base: str | None
    """The fingerprint of the weights below an adapter; None if the recipe has no adapter."""
    longest_weights: int
    """Bytes of a body with weights, at most."""
    further_routes: Sequence[tuple[str, str, Callable[[EngineLoop], Handler]]] = field(default=())
    """Routes of other systems: method, path, and a function that makes the handler."""


def application(run: ServedRun, engine_loop: EngineLoop, *, token: str | None) -> Starlette:
    """The ASGI application."""
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    routes = _Routes(run, engine_loop)

    def on_refused(status: int) -> None:
        run.metrics.refused.labels(status=str(status)).inc()

    def route(method: str, path: str, handler: Handler, *, public: bool = False) -> Route:
        return Route(path, guarded(handler, token=None if public else token, on_refused=on_refused), methods=[method])

    async def unknown(request: Request) -> Response:
        on_refused(404)
        return JSONResponse({"error": f"there is no {request.method} {request.url.path}: see /docs"}, 404)

    return Starlette(
        routes=[
            route("GET", "/health", routes.health, public=True),
            route("GET", "/info", routes.info),
            route("GET", "/metrics", routes.metrics),
            route("GET", "/openapi.json", routes.openapi),
            route("GET", "/docs", routes.docs),
            route("POST", "/rollouts", routes.rollouts),
            route("POST", "/lease", routes.take_lease),
            route("POST", "/lease/renew", routes.renew_lease),
            route("POST", "/lease/release", routes.release_lease),
            route("POST", "/weights", routes.update_weights),
            *(
                route(method, path, make(engine_loop), public=path == "/health/")
                for method, path, make in run.further_routes
            ),
            Route("/{path:path}", unknown, methods=["GET", "POST", "PUT", "DELETE"]),
        ]
    )


class _Routes:
    """The handlers."""

    def __init__(self, run: ServedRun, engine_loop: EngineLoop) -> None:
        self._run = run
        self._engine_loop = engine_loop

    async def health(self, request: Request) -> Response:
        """Answers while the engine works: it asks no other thread."""
        from starlette.responses import JSONResponse

        conversations = self._run.conversations
        return JSONResponse(
            {
                "status": "ok",
                "version": conversations.engine.version,
                "running": conversations.running,
                "waiting": conversations.admitted - conversations.running,
            }
        )

    async def info(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        run = self._run
        return JSONResponse(
            {
                "instance": run.instance,
                "model": run.model_path,
                "tokenizer": run.tokenizer,
                "version": run.conversations.engine.version,
                "max_concurrent": run.conversations.context.max_concurrent,
                "lease": run.leases.owner,
                "options": dict(run.options),
                "processor": run.processor,
                "base": run.base,
            }
        )

    async def metrics(self, request: Request) -> Response:
        from starlette.responses import Response

        return Response(self._run.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def openapi(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        return JSONResponse(document())

    async def docs(self, request: Request) -> Response:
        from starlette.responses import HTMLResponse

        return HTMLResponse(page())

    async def rollouts(self, request: Request) -> Response:
        from starlette.responses import StreamingResponse

        body = await read_body(request, RolloutBody, longest=MAX_BODY)
        events = Events(heartbeat=HEARTBEAT, seconds=HEARTBEAT_SECONDS)
        work = asyncio.ensure_future(
            self._engine_loop.call(events.run(lambda send: self._run_conversations(body, send)))
        )
        try:
            first = await events.first(work)
        except asyncio.CancelledError:
            work.cancel()
            raise

        async def stream() -> AsyncIterator[bytes]:
            try:
                yield first or HEARTBEAT
                async for event in events.rest():
                    yield event
                work.result()  # an error cuts the stream, so the client sees that it is incomplete
                yield b"data: [DONE]\n\n"
            finally:
                work.cancel()  # has an effect if the client has disconnected

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def _run_conversations(self, body: RolloutBody, send: Callable[[bytes], None]) -> None:
        self._run.leases.renew(body.lease)
        await self._run.conversations.run(body, send)

    async def take_lease(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await read_body(request, LeaseBody)

        async def take() -> dict[str, Any]:
            lease = self._run.leases.take(body.owner)
            version = self._run.conversations.engine.version
            return {"lease": lease.id, "seconds": LEASE_SECONDS, "instance": self._run.instance, "version": version}

        return JSONResponse(await self._engine_loop.call(take()))

    async def renew_lease(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await read_body(request, LeaseIdBody)
        await self._engine_loop.call(self._use(body.lease))
        return JSONResponse({"seconds": LEASE_SECONDS})

    async def release_lease(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        body = await read_body(request, LeaseIdBody)

        async def release() -> None:
            self._run.leases.release(body.lease)

        await self._engine_loop.call(release())
        return JSONResponse({"released": True})

    async def update_weights(self, request: Request) -> Response:
        from starlette.responses import JSONResponse

        content_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if content_type == "application/json":
            body = await read_body(request, WeightsPathBody)
            await self._engine_loop.call(self._use(body.lease))
            return JSONResponse(await self._load(body.version, Path(body.path), body.checksum))
        if content_type != "application/octet-stream":
            raise RequestRefused(
                415,
                f"Content-Type must be application/json for a path, or application/octet-stream for the bytes of a safetensors "
                f"file; it is {content_type or 'missing'}",
            )
        version = request.query_params.get("version", "")
        if not re.fullmatch("[0-9]{1,10}", version) or int(version) >= 1 << 31:
            raise RequestRefused(
                400, f"version={version!r:.80} must be a number, as in POST /weights?version=3&lease=..."
            )
        await self._engine_loop.call(self._use(request.query_params.get("lease")))  # before gigabytes are received
        path = await self._receive(request)
        try:
            return JSONResponse(await self._load(int(version), path, request.query_params.get("checksum")))
        finally:
            os.unlink(path)

    async def _load(self, version: int, path: Path, checksum: str | None) -> dict[str, Any]:
        # not cancelled with the request: a trainer that disconnects must not leave half of the weights
        return await asyncio.shield(
            asyncio.ensure_future(self._engine_loop.call(self._run.weights.update(version, path, checksum)))
        )

    async def _receive(self, request: Request) -> Path:
        """The body as a temporary file."""
        number, name = tempfile.mkstemp(prefix="turnwise-weights-", suffix=".safetensors")
        path = Path(name)
        try:
            with os.fdopen(number, "wb") as file:
                async for chunk in body_chunks(request, longest=self._run.longest_weights):
                    await asyncio.to_thread(file.write, chunk)
        except (RequestRefused, OSError, asyncio.CancelledError) as error:
            path.unlink()
            if isinstance(error, OSError):
                raise RequestRefused(507, f"the weights cannot be stored in {path.parent}: {error.strerror}") from error
            raise
        return path

    async def _use(self, lease: str | None) -> None:
        self._run.leases.use(lease)


# the socket

TOKEN = "TURNWISE_SERVER_TOKEN"
"""The environment variable with the token. It is not an argument, because other users can see the arguments of a process."""

_NAME = "the rollout server"


class Address:
    """A listening socket."""

    def __init__(self, listening: socket.socket) -> None:
        self.socket = listening
        self.host: str = listening.getsockname()[0]
        self.port: int = listening.getsockname()[1]

    @property
    def url(self) -> str:
        """The address of the server for clients."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


def token_for(host: str, given: str | None) -> str:
    """The token of the server: the given token, or a new random token.

    Raises ConfigError if other machines can reach the server and no token is given.
    """
    if given:
        if any(not " " < character <= "~" for character in given):
            raise ConfigError(f"{TOKEN} must consist of printable ASCII characters without blanks")
        return given
    refuse_without_token(host, variable=TOKEN)
    return secrets.token_urlsafe(24)


def open_socket(host: str, port: int) -> Address:
    """Listen on a port; 0 selects a free port. Raises ConfigError if that is not possible."""
    return Address(listen(port, server=_NAME, host=host))


@asynccontextmanager
async def serving(run: ServedRun, address: Address, *, token: str | None) -> AsyncIterator[None]:
    """Answer HTTP requests in a thread until the block ends. Conversations run in the present event loop.

    Raises ConfigError if a library is not installed.
    """
    try:
        app = application(run, EngineLoop(asyncio.get_running_loop()), token=token)
    except ImportError:
        raise missing_library("starlette", server=_NAME, extra="serve") from None
    server = uvicorn_server(app, server=_NAME, extra="serve")
    thread = threading.Thread(target=server.run, args=([address.socket],), name="http", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        while thread.is_alive():  # its requests wait for this event loop
            await asyncio.sleep(0.05)
        address.socket.close()
