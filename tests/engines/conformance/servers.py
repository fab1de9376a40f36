"""The engines on real servers, which turnwise starts and supervises. Needs the environments of `make test-engines`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import engine_env
import pytest

from engines.conformance.subjects import MODEL, Adapted, Claims, Subject, state_of
from turnwise import assembly
from turnwise.engines.remote import guard
from turnwise.engines.remote.engine import RemoteEngine
from turnwise.engines.remote.servers import Probe
from turnwise.models.loading import token_logprobs
from turnwise.models.lora import save_adapter
from turnwise.options.schema import Config
from turnwise.types import LogprobKind

SLOW = "while kill -STOP $0; do sleep 0.1; kill -CONT $0; sleep 0.01; done"
"""Stops a process and lets it run by turns, until it ends. In a pause vLLM's HTTP process, which needs longer for a token than
the model, answers the requests that wait."""


class Server(Subject):
    """An engine of a recipe, with one server that turnwise starts."""

    worker: str
    """How the title of the process with the model begins."""
    lora_rank: int | None = None
    memory_gb: float = 0.1
    """The size of the server's KV cache."""
    arguments: Sequence[str] = ()
    """Further arguments of the server."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix=f"turnwise-{self.name}-")
        started = {
            "python": str(engine_env.python(self.name)),
            "memory_gb": self.memory_gb,
            "grammars": "train",
            "arguments": list(self.arguments),
        }
        self.engine = self._build(started)
        (replica,) = self.engine._replicas.all
        assert replica.process is not None
        self.server, self.process = replica.server, replica.process
        try:
            self.run(self.engine.start())
        except BaseException:
            self.close()
            raise
        self._give_way()

    def _build(self, options: Mapping[str, object], output: str = "run") -> RemoteEngine:
        recipe = {
            "model": {"path": str(MODEL), "device": "cpu", "lora": {"rank": self.lora_rank}},
            "data": {"train": str(MODEL.parent / "train.jsonl")},
            "engine": {"name": self.name, **options},
            "max_concurrent": 64,
            "output": f"{self._folder.name}/{output}",
        }
        engine = assembly.engine(Config.model_validate(recipe), self.renderer, self.model)
        assert isinstance(engine, RemoteEngine)
        return engine

    def other_trainer(self, token: str | None = None) -> RemoteEngine:
        """The engine of another run that uses this server, with the server's token unless another is given."""
        with pytest.MonkeyPatch.context() as environment:
            right = self.server._headers["Authorization"].removeprefix("Bearer ")
            environment.setenv("TURNWISE_TEST_TOKEN", token or right)
            options = {"url": self.server.url, "api_key_env": "TURNWISE_TEST_TOKEN", "start_timeout": 30}
            return self._build(options, output="other")

    def _give_way(self) -> None:
        """Let this process go first: processes of servers that compute have taken two cores for seconds (Linux 6.18), in which no
        test could do anything to the requests that ran."""
        with suppress(OSError):  # no automatic groups of processes, or not Linux
            Path(f"/proc/{self.process.pid}/autogroup").write_text("10", encoding="ascii")

    def close(self) -> None:
        super().close()
        self._folder.cleanup()

    async def publish(self, version: int) -> None:
        """As in training: with a probe, which compares the server's log-probabilities with the model's."""
        await self.engine.update(version, state_of(self.model), self.probe())

    def probe(self) -> Probe:
        """The server samples some tokens, and the model computes their log-probabilities."""
        return Probe(prompt=[5, 17, 300], tokens=24, logprobs=partial(token_logprobs, self.model), tolerance=1e-4)

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """Let the model run for a tenth of the time. The process that answers HTTP requests is as fast as before."""
        pid = str(self._worker_pid())
        # a process, and not a thread: the answers that this process reads would delay it
        slow = subprocess.Popen(["sh", "-c", SLOW, pid], stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            slow.kill()
            slow.wait()
            with suppress(ProcessLookupError):  # a case may have killed it
                os.kill(int(pid), signal.SIGCONT)

    def _worker_pid(self) -> int:
        assert self.process.pid is not None
        (pid,) = [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit()
            and _group(int(folder.name)) == self.process.pid
            and (folder / "cmdline").read_text(errors="replace").startswith(self.worker)
        ]
        return pid

    def kill(self) -> None:
        """Kill the server, and leave it to the engine to notice."""
        assert self.process.pid is not None
        guard.kill_group(self.process.pid)  # not Python's resource tracker, which removes the server's shared memory


def _group(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


class Sglang(Server):
    """SGLang on the CPU: keeps no seeds, and recomputes the prefix of running requests after an update."""

    name = "sglang"
    worker = "sglang::scheduler"
    claims = Claims(logprob_kind=LogprobKind.TEMPERED, seeded=False, recomputes=True, cache_block=1, processes=True)

    async def running(self) -> int:
        loads = (await self.server.get("/v1/loads"))["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


class Vllm(Server):
    """vLLM on the CPU, without compilation, which would take longer than the cases."""

    name = "vllm"
    worker = "VLLM::EngineCore"
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
