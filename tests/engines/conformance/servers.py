"""The engines on real servers, which turnwise starts and supervises. Needs the environments of `make test-engines`."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from abc import abstractmethod
from pathlib import Path

import engine_env

from engines.conformance.subjects import MODEL, Adapted, Claims, Subject, state_of
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpLimits
from turnwise.engines.remote.replicas import Replica
from turnwise.engines.remote.server_api import ServerApi
from turnwise.engines.remote.weights import Probe, WeightFiles
from turnwise.engines.sglang.api import SglangApi, model_shapes
from turnwise.engines.sglang.launch import LaunchOptions, kv_token_bytes, started_replicas
from turnwise.models.lora import save_adapter
from turnwise.types import LogprobKind


class Server(Subject):
    """An engine with one server, started by turnwise."""

    lora_rank: int | None = None

    @abstractmethod
    def make(self, logs: Path) -> tuple[list[Replica], ServerApi]:
        """One server, not started yet, and its requests."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix=f"turnwise-{self.name}-")
        (replica,), api = self.make(Path(self._folder.name))
        assert replica.process is not None
        self.server, self.process = replica.server, replica.process
        self.engine = RemoteEngine(api, [replica], decode=self.renderer.decode, files=WeightFiles())
        self.run(self.engine.start())

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    async def publish(self, version: int) -> None:
        """As in training: with a probe, which compares the server's log-probabilities with the model's."""
        await self.engine.update(version, state_of(self.model), self.probe())

    def probe(self) -> Probe:
        """Tokens and the model's log-probabilities of them."""
        from turnwise.training.published_weights import token_logprobs

        token_ids = [(7919 * index + 11) % 700 for index in range(24)]
        return Probe(token_ids=token_ids, logprobs=token_logprobs(self.model, token_ids), tolerance=1e-4)

    def kill(self) -> None:
        """Kill the server, and leave it to the engine to notice."""
        assert self.process.pid is not None
        os.killpg(self.process.pid, signal.SIGKILL)


class Sglang(Server):
    """SGLang on the CPU: keeps no seeds, and recomputes the prefix of running requests after an update."""

    name = "sglang"
    claims = Claims(logprob_kind=LogprobKind.TEMPERED, seeded=False, recomputes=True, cache_block=1, processes=True)

    def make(self, logs: Path) -> tuple[list[Replica], ServerApi]:
        config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
        options = LaunchOptions(
            python=str(engine_env.python("sglang")),
            model=str(MODEL),
            dtype="float32",
            cpu=True,
            context=2048,
            token_bytes=kv_token_bytes(config, "float32"),
            memory_gb=0.05,
            lora_rank=self.lora_rank,
            logs=logs,
        )
        shapes = model_shapes(MODEL) if self.lora_rank is None else None
        api = SglangApi(vocab_size=760, context=2048, labels=True, adapter=shapes is None, shapes=shapes)
        return started_replicas(options, 1, HttpLimits()), api

    async def running(self) -> int:
        loads = (await self.server.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


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
