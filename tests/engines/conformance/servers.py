"""The engines on real servers, which turnwise starts and supervises. Needs the environments of `make test-engines`."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import engine_env

from engines.conformance.subjects import MODEL, Claims, Subject, state_of
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.http import HttpServer
from turnwise.engines.remote.replicas import Replica
from turnwise.engines.remote.server_process import ServerProcess, free_port, new_token
from turnwise.engines.remote.weights import Probe, WeightFiles
from turnwise.types import LogprobKind


class Server(Subject):
    """An engine with one server of its own."""

    engine: RemoteEngine
    process: ServerProcess

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
    claims = Claims(
        logprob_kind=LogprobKind.TEMPERED, seeded=False, recomputes=True, cache_block=1, processes=True
    )

    def __init__(self) -> None:
        super().__init__()
        from turnwise.engines.sglang.api import SglangApi, model_shapes
        from turnwise.engines.sglang.launch import SglangOptions, server_command

        folder = Path(tempfile.mkdtemp(prefix="turnwise-sglang-"))
        port, token = free_port(), new_token()
        options = SglangOptions(
            python=str(engine_env.python("sglang")), model=MODEL, dtype="float32", gpu=False, kv_tokens=16384
        )
        self.process = ServerProcess(server_command(options, index=0, port=port, token=token, log=folder / "server.log"))
        self.server = HttpServer(f"http://127.0.0.1:{port}", token=token)
        api = SglangApi(vocab_size=760, labels=True, shapes=model_shapes(MODEL))
        replica = Replica(server=self.server, health_path="/health", process=self.process)
        self.engine = RemoteEngine(api, [replica], decode=self.renderer.decode, files=WeightFiles())
        self.run(self.engine.start())

    async def running(self) -> int:
        state = (await self.server.get("/v1/loads"))
        return sum(entry["num_running_reqs"] + entry["num_waiting_reqs"] for entry in state["loads"])
