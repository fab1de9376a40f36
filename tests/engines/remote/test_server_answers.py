"""Wrong answers in the forms of vLLM and SGLang: each fails its request with a message, and the engine goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from turnwise import assembly
from turnwise.config.recipe import checked
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.errors import EngineError
from turnwise.types import Request, Sampling

MODEL = Path(__file__).resolve().parents[3] / "demo" / "model"
VOCAB = 760
Answer = dict[str, Any]


def vllm_answer(ids: list[int], logprobs: list[float] | None = None) -> Answer:
    """A complete answer, as vLLM's /inference/v1/generate sends it."""
    content = [{"logprob": value} for value in ([-0.5] * len(ids) if logprobs is None else logprobs)]
    return {"choices": [{"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}]}


def sglang_answer(ids: list[int], logprobs: list[float] | None = None) -> Answer:
    """A complete answer, as SGLang's /generate sends it."""
    entries = [[value, 7, None] for value in ([-0.5] * len(ids) if logprobs is None else logprobs)]
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": "length", "length": len(ids)}}
    return {"output_ids": ids, "meta_info": meta}


ANSWERS: dict[str, Callable[..., Answer]] = {"vllm": vllm_answer, "sglang": sglang_answer}


@dataclass
class Replies:
    """A server that has the routes of vLLM and SGLang, and sends `events` as the answer to each streamed request."""

    name: str
    events: list[Any] = field(default_factory=list)
    about: Any = None
    """The server's description of itself, in the place of the right one."""
    url: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        for path, answer in {"/health": {}, "/v1/models": self._models(), "/server_info": self._info()}.items():
            app.router.add_get(path, self._fixed(answer))
        app.router.add_post("/abort_request", self._fixed({}))
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/generate", self._generate)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    def _models(self) -> Any:
        return self.about or {"data": [{"id": "policy", "max_model_len": 64}]}

    def _info(self) -> Any:
        return self.about or {"max_req_input_len": 63, "incremental_streaming_output": True}

    def _fixed(self, answer: Any) -> Callable[[web.Request], Any]:
        async def reply(request: web.Request) -> web.Response:
            return web.json_response(answer)

        return reply

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            return web.json_response(self._probed(body))
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.events:
            text = event if isinstance(event, str) else json.dumps(event)
            await response.write(f"data: {text}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def _probed(self, body: dict[str, Any]) -> Answer:
        """The answers to the requests that find out what log-probabilities mean."""
        if self.name == "vllm":
            return vllm_answer([7] * 12, [0.0] * 12)
        prompt = body["input_ids"]
        return {
            **sglang_answer([7] * 12),
            "meta_info": {**sglang_answer([7] * 12)["meta_info"], "input_token_logprobs": [[-1.0, 7]] * len(prompt)},
        }


def engine_on(replies: Replies) -> RemoteEngine:
    config = checked(
        {
            "model": {"path": str(MODEL), "device": "cpu"},
            "data": {"train": "rows.jsonl"},
            "engine": {"name": replies.name, "url": replies.url, "start_timeout": 2},
        },
        source="test",
    )
    engine = assembly.engine(config, assembly.renderer(config), None)
    assert isinstance(engine, RemoteEngine)
    for replica in engine._replicas.all:
        replica.server.limits = replace(replica.server.limits, failing=0)
    return engine


def request() -> Request:
    return Request(conversation="c", token_ids=[5, 6], sampling=Sampling(max_tokens=3), seed=1)


def ask(replies: Replies) -> None:
    """Send a request that receives the wrong answer, and a second request that receives a right one."""

    async def main() -> None:
        async with replies.running():
            engine = engine_on(replies)
            try:
                await engine.start()
                wrong, replies.events = replies.events, [ANSWERS[replies.name]([7, 8, 9])]
                assert list((await engine.generate(request())).token_ids) == [7, 8, 9]
                right, replies.events = replies.events, wrong
                try:
                    await engine.generate(request())
                finally:
                    replies.events = right
                    assert list((await engine.generate(request())).token_ids) == [7, 8, 9]
            finally:
                await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize(
    ("ids", "logprobs", "message"),
    [
        ([7, 8, 9], [-0.5, -0.5], "returned 3 token ids and 2 log-probabilities; there must be one for each token"),
        ([7, 8, 9], [], "returned 3 token ids and 0 log-probabilities"),
        ([7, VOCAB, 9], None, f"returned the token id {VOCAB}; the model has the ids 0 to {VOCAB - 1}"),
        ([7, -1, 9], None, "returned the token id -1"),
        ([7, 8, 9, 9], None, "returned 4 tokens where 3 were allowed"),
        ([7, 8, 9], [-0.5, None, -0.5], "returned None as the log-probability"),
        ([7, 8, 9], [-0.5, -9999.0, -0.5], "returned -9999.0 as the log-probability"),
    ],
)
def test_wrong_tokens_are_refused(name: str, ids: list[int], logprobs: list[Any] | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, [ANSWERS[name](ids, logprobs)]))


@pytest.mark.parametrize(
    ("name", "event", "message"),
    [
        ("vllm", {"choices": [{"token_ids": 5}]}, r"form of vLLM's answers \(TypeError"),
        ("vllm", {"choices": {"a": 1}}, r"form of vLLM's answers \(AttributeError"),
        ("vllm", {"choices": [{"token_ids": [7], "logprobs": {"content": [-0.5]}}]}, r"\(AttributeError"),
        ("vllm", {"choices": [{"token_ids": [], "finish_reason": "error"}]}, "finish_reason='error'"),
        ("sglang", {"output_ids": [7, 8]}, r"form of SGLang's answers \(KeyError: 'meta_info'\)"),
        ("sglang", {"output_ids": 7, "meta_info": {}}, r"form of SGLang's answers \(TypeError"),
        ("sglang", {"output_ids": [7], "meta_info": {"output_token_logprobs": [-0.5]}}, r"\(TypeError"),
    ],
)
def test_an_answer_of_another_form_names_the_server_and_what_to_check(name: str, event: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, [event]))


@pytest.mark.parametrize("name", list(ANSWERS))
@pytest.mark.parametrize(
    ("event", "message"),
    [
        ("{not JSON", "must send JSON objects; it sent b'{not JSON'"),
        ([1, 2], "must send JSON objects"),
        ({"error": {"message": "CUDA out of memory"}}, "failed: CUDA out of memory"),
    ],
)
def test_a_stream_that_reports_an_error_or_no_json_fails_its_request(name: str, event: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, [event]))


@pytest.mark.parametrize("name", list(ANSWERS))
def test_a_stream_that_ends_without_a_finish_reason_is_a_lost_server(name: str) -> None:
    with pytest.raises(EngineError, match=r"lost its server 3 times without a new token: .*without a finish reason"):
        ask(Replies(name, []))


@pytest.mark.parametrize(
    ("name", "about", "message"),
    [
        ("vllm", {"models": []}, r"form of vLLM's answers \(KeyError: 'data'\)"),
        ("vllm", {"data": [{"id": "gpt"}]}, "is no vLLM server: /v1/models must name a model with its max_model_len"),
        ("sglang", {"version": 1}, "is no SGLang server: /server_info must report max_req_input_len"),
    ],
)
def test_a_server_of_another_kind_is_refused_at_the_start(name: str, about: Any, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        ask(Replies(name, about=about))
