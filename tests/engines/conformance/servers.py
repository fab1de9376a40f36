"""The engines on real servers, which turnwise starts and supervises. Needs the environments of `make test-engines`."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import engine_env

from engines.conformance.subjects import MODEL, Adapted, Claims, Subject, state_of
from turnwise import build
from turnwise.config.schema import Config
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.weights import Probe
from turnwise.models.lora import save_adapter
from turnwise.models.published_weights import token_logprobs
from turnwise.types import LogprobKind


class Server(Subject):
    """An engine of a recipe, with one server that turnwise starts."""

    lora_rank: int | None = None
    memory_gb: float = 0.1
    """The size of the server's KV cache."""
    arguments: Sequence[str] = ()
    """Further arguments of the server."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix=f"turnwise-{self.name}-")
        recipe = {
            "model": {"path": str(MODEL), "device": "cpu", "lora": {"rank": self.lora_rank}},
            "data": {"train": str(MODEL.parent / "train.jsonl")},
            "engine": {
                "name": self.name,
                "python": str(engine_env.python(self.name)),
                "memory_gb": self.memory_gb,
                "arguments": list(self.arguments),
            },
            "max_concurrent": 64,
            "output": self._folder.name,
        }
        engine = build.engine(Config.model_validate(recipe), self.renderer, self.model)
        assert isinstance(engine, RemoteEngine)
        self.engine, (replica,) = engine, engine._replicas.all
        assert replica.process is not None
        self.server, self.process = replica.server, replica.process
        self.run(engine.start())

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    async def publish(self, version: int) -> None:
        """As in training: with a probe, which compares the server's log-probabilities with the model's."""
        await self.engine.update(version, state_of(self.model), self.probe())

    def probe(self) -> Probe:
        """The server samples some tokens, and the model computes their log-probabilities."""
        return Probe(prompt=[5, 17, 300], tokens=24, logprobs=partial(token_logprobs, self.model), tolerance=1e-4)

    def kill(self) -> None:
        """Kill the server, and leave it to the engine to notice."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, signal.SIGKILL)


class Sglang(Server):
    """SGLang on the CPU: keeps no seeds, and recomputes the prefix of running requests after an update."""

    name = "sglang"
    claims = Claims(logprob_kind=LogprobKind.TEMPERED, seeded=False, recomputes=True, cache_block=1, processes=True)

    async def running(self) -> int:
        loads = (await self.server.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


class Vllm(Server):
    """vLLM on the CPU, without compilation, which would take longer than the cases."""

    name = "vllm"
    claims = Claims(logprob_kind=LogprobKind.SAMPLED, greedy_is_certain=False, cache_block=32, processes=True)
    arguments = ("--enforce-eager",)

    async def running(self) -> int:
        try:
            text = await asyncio.to_thread(self._metrics)
        except OSError:  # the server has died; the engine starts it again
            return 0
        states = ("vllm:num_requests_running{", "vllm:num_requests_waiting{")
        return sum(int(float(line.split()[-1])) for line in text.splitlines() if line.startswith(states))

    def _metrics(self) -> str:
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=30) as answer:
            return answer.read().decode()


class AdaptedServer(Adapted, Server):
    """A server whose adapter is replaced."""

    lora_rank = 8

    async def publish(self, version: int) -> None:
        await self.engine.update(version, lambda folder: save_adapter(self.model, folder), self.probe())

    async def publish_damaged(self, version: int) -> None:
        def write(folder: Path) -> None:
            save_adapter(self.model, folder)
            (folder / "adapter_config.json").write_text("{}", encoding="utf-8")

        await self.engine.update(version, write, self.probe())


class AdaptedSglang(AdaptedServer, Sglang):
    """SGLang with a LoRA adapter."""


class AdaptedVllm(AdaptedServer, Vllm):
    """vLLM with a LoRA adapter."""
