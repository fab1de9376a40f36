"""The routes of the rollout server."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnwise.rollout_server.conversations import HEARTBEAT, ConversationQueue
from turnwise.rollout_server.http import EngineLoop, Events, Handler, guarded, read_body
from turnwise.rollout_server.images import MAX_BODY
from turnwise.rollout_server.metrics import ServerMetrics
from turnwise.rollout_server.openapi import document, page
from turnwise.rollout_server.weights import LEASE_SECONDS, Leases, WeightUpdates
from turnwise.rollout_server.wire import LeaseBody, LeaseIdBody, RolloutBody, WeightsPathBody
from turnwise.serve.http import RequestRefused, body_chunks

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

__all__ = ["HEARTBEAT_SECONDS", "ServedRun", "application"]

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
