"""A small HTTP server that samples from a rule instead of a model, and fails on demand: for tests of the shared engine layer.

The rule: the next token is `(last token + 1 + version) % VOCAB`, with the log-probability `-0.5 - version / 10`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from turnwise.engines.remote.http import HttpServer, ServerLost
from turnwise.engines.remote.servers import Part, ServerInfo, WakePart, check_grammar_probe
from turnwise.engines.remote.weights import WeightUpdate
from turnwise.errors import EngineError
from turnwise.models.grammar import PROBE
from turnwise.types import LogprobKind, Request

VOCAB, CONTEXT, STOP = 97, 64, 0


def rule(last: int, version: int) -> int:
    """The next token."""
    return (last + 1 + version) % VOCAB


@dataclass
class FakeServer:
    """The state of one server, which a test changes to make it fail."""

    token: str | None = None
    version: int = 0
    label: str = "0"
    adapters: dict[str, int] = field(default_factory=dict)
    """The versions of the weights of further policies, by name."""
    owner: str | None = None
    claiming: asyncio.Event | None = None
    """Set when the server has been claimed; the answer is not sent then."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    cancelled: int = 0
    events: list[str] = field(default_factory=list)
    """Calls besides those for tokens, in order."""
    delay: float = 0.0
    """Seconds for each token."""
    break_after: list[int] = field(default_factory=list)
    """For each of the next requests: after how many tokens the connection breaks off."""
    abort_after: list[int] = field(default_factory=list)
    hang: bool = False
    bad: dict[str, Any] = field(default_factory=dict)
    """Fields of the events that are replaced."""
    bad_first: int | None = None
    """Only in the answers to requests that begin with this token; None: in all."""
    status: int = 200
    failing: float = 0.0
    """For how many seconds from now on every route but the health check answers with `failing_status`; counts itself down."""
    failing_status: int = 500
    context: int = CONTEXT
    fail_info: bool = False
    fail_load: bool = False
    """The next update fails."""
    hanging_loads: int = 0
    """How many of the next updates get no answer."""
    loading: asyncio.Barrier | None = None
    """An update is answered when this many servers have got it."""
    wrong_weights: bool = False
    failures: int = 0
    """How many requests were answered with `failing_status`."""
    _failing_since: float = 0.0
    url: str = ""
    runner: web.AppRunner | None = None
    running: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/control", self._control)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.running.set()

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self.failing and request.path != "/health":
            if not self._failing_since:
                self._failing_since = time.monotonic()
            if time.monotonic() - self._failing_since < self.failing:
                self.failures += 1
                return web.json_response({"error": "bad gateway"}, status=self.failing_status)
            self.failing = self._failing_since = 0.0
        if self.token is not None and request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        return None

    async def _health(self, request: web.Request) -> web.Response:
        return self._refusal(request) or web.Response()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        self.requests.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "out of memory"}}, status=self.status)
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            await self._sample(response, body)
        except (asyncio.CancelledError, ConnectionResetError):
            self.cancelled += 1
            raise
        return response

    async def _sample(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        last, ids, finish, policy = body["ids"][-1], [], None, body["policy"]
        broken = self.break_after.pop(0) if self.break_after else None
        aborted = self.abort_after.pop(0) if self.abort_after else None
        while finish is None:
            while self.hang:
                await asyncio.sleep(0.02)
            await self.running.wait()
            if broken is not None and len(ids) >= broken:
                assert response._req is not None
                response._req.transport.abort()
                await asyncio.sleep(0)
                return
            if aborted is not None and len(ids) >= aborted:
                finish = "aborted"
                token = []
            else:
                token = [rule(last, self.adapters.get(policy, 0) if policy else self.version)]
                last = token[0]
                ids += token
                finish = "stop" if last in body["stop"] else "length" if len(ids) >= body["max"] else None
            event = {
                "ids": token,
                "logprobs": [-9.0 if self.wrong_weights else -0.5 - self.version / 10] * len(token),
                "labels": [str(self.adapters.get(policy, 0)) if policy else self.label] * len(token),
                "finish": finish,
                "cached": len(body["ids"]) // 2,
                **(self.bad if self.bad_first in (None, body["ids"][0]) else {}),
            }
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(self.delay)
        await response.write(b"data: [DONE]\n\n")

    async def _control(self, request: web.Request) -> web.Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        body = await request.json()
        if body["call"] == "info":
            return web.json_response({"context": self.context}, status=404 if self.fail_info else 200)
        self.events.append(body["call"])
        match body["call"]:
            case "claim":
                if self.owner not in (None, body["owner"]):
                    return web.json_response({"error": f"the server belongs to {self.owner}"}, status=409)
                self.owner = body["owner"]
                if self.claiming is not None:
                    self.claiming.set()
                    await asyncio.sleep(60)
            case "release":
                self.owner = None if self.owner == body["owner"] else self.owner
            case "pause":
                self.running.clear()
            case "resume":
                self.running.set()
            case "load":
                if self.loading is not None:
                    await self.loading.wait()
                if self.hanging_loads:
                    self.hanging_loads -= 1
                    await asyncio.sleep(60)
                if self.fail_load:
                    self.fail_load = False
                    return web.json_response({"error": "half of the weights are missing"}, status=500)
                if body["policy"]:
                    self.adapters[body["policy"]] = body["version"]
                else:
                    self.version, self.label = body["version"], str(body["version"])
            case "label":
                self.label = str(body["version"])
        return web.json_response({})


class FakeApi:
    """The `ServerApi` of `FakeServer`."""

    name = "fake"

    def __init__(self, owner: str = "a") -> None:
        self.owner = owner

    def close(self) -> None:
        pass

    async def identify(self, server: HttpServer) -> None:
        pass

    async def info(self, server: HttpServer) -> ServerInfo:
        answer = await self._call(server, "info")
        return ServerInfo(vocab_size=VOCAB, context=answer["context"], logprob_kind=LogprobKind.SAMPLED)

    async def check_grammar(self, server: HttpServer) -> None:
        check_grammar_probe(
            server.url, PROBE, [0.0, -0.5], "start it otherwise"
        )  # its log-probabilities are always these

    async def sample(self, server: HttpServer, request: Request, version: int) -> AsyncGenerator[Part]:
        body = {
            "ids": list(request.token_ids),
            "max": request.sampling.max_tokens,
            "stop": list(request.sampling.stop_token_ids),
            "seed": request.seed,
            "policy": request.policy,
        }
        async for event in server.events("/generate", body):
            labels = event["labels"]
            if any(int(label) < 0 for label in labels):
                raise ServerLost("the server was restarted")
            yield Part(
                token_ids=event["ids"],
                logprobs=event["logprobs"],
                versions=[int(label) for label in labels],
                finish=event["finish"],
                cached_tokens=event["cached"],
            )

    async def _call(self, server: HttpServer, call: str, **fields: Any) -> Any:
        return await server.post("/control", {"call": call, **fields})

    async def claim(self, server: HttpServer) -> None:
        await self._call(server, "claim", owner=self.owner)

    async def pause(self, server: HttpServer, *, abort: bool = False) -> None:
        await self._call(server, "pause")

    async def load(self, server: HttpServer, update: WeightUpdate) -> None:
        if update.path is not None and not update.path.exists():
            raise EngineError(f"{update.path} is gone")
        await self._call(server, "load", version=update.version, policy=update.policy)

    async def label(self, server: HttpServer, version: int) -> None:
        await self._call(server, "label", version=version)

    async def resume(self, server: HttpServer) -> None:
        await self._call(server, "resume")

    async def sleep(self, server: HttpServer) -> None:
        await self._call(server, "sleep")

    async def wake(self, server: HttpServer, part: WakePart) -> None:
        await self._call(server, f"wake {part}")

    async def release(self, server: HttpServer) -> None:
        await self._call(server, "release", owner=self.owner)


@asynccontextmanager
async def fake_servers(count: int = 1) -> AsyncGenerator[list[FakeServer]]:
    """Running fake servers."""
    servers = [FakeServer() for _ in range(count)]
    for server in servers:
        await server.start()
    try:
        yield servers
    finally:
        for server in servers:
            await server.stop()
