"""How a SGLang server is started. Knows SGLang's command line; does not know recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.engines.remote.http import HttpLimits, HttpServer
from turnwise.engines.remote.server_process import (
    ServerCommand,
    ServerProcess,
    free_port,
    new_token,
    python_path,
    visible,
)
from turnwise.engines.remote.servers import Replica

__all__ = ["HEALTH", "SglangLaunch", "server_command", "started_replicas"]

HEALTH = "/health"
"""The route that answers when a server is ready."""
_CPU = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.2",
    "--sleep-on-idle",
)
"""Without a GPU, SGLang runs with torch's own operations. An idle server must not take a core from the trainer."""
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_RESERVED = 6
"""SGLang accepts only prompts that are so many tokens shorter than its context. The additional positions are never used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangLaunch:
    """What a server serves, and how."""

    python: str
    """The interpreter of the environment in which SGLang is installed."""
    model: str
    """The model's directory."""
    dtype: str
    """A name of torch's, such as `float32`."""
    cpu: bool
    context: int
    """The most tokens of a sequence."""
    token_bytes: int
    """Bytes of a token in the KV cache."""
    memory_gb: float | None = None
    """The size of the KV cache; None: SGLang chooses it."""
    lora_rank: int | None = None
    """The rank of the trained adapter; None without an adapter."""
    keep_seeds: bool = False
    sleep: bool = False
    tensor_parallel: int = 1
    """GPUs over which a server divides the model."""
    data_parallel: int = 1
    """Copies of the model in a server."""
    devices: Sequence[str] = ()
    """The value of CUDA_VISIBLE_DEVICES for each server; empty: that of this process."""
    arguments: Sequence[str] = ()
    logs: Path
    """The directory of the log files."""
    start_timeout: float = 600.0


def started_replicas(options: SglangLaunch, count: int, limits: HttpLimits) -> list[Replica]:
    """Servers of this machine, to be started by the engine."""
    replicas = []
    for index in range(count):
        port, token = free_port(), new_token()
        process = ServerProcess(server_command(options, index=index, port=port, token=token))
        server = HttpServer(f"http://127.0.0.1:{port}", token=token, limits=limits)
        replicas.append(Replica(server, HEALTH, process=process))
    return replicas


def server_command(options: SglangLaunch, *, index: int, port: int, token: str) -> ServerCommand:
    """The command of server number `index`, which listens on this machine only."""
    arguments = [
        options.python,
        "-m",
        "sglang.launch_server",
        f"--model-path={options.model}",
        f"--dtype={options.dtype}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--api-key={token}",
        "--incremental-streaming-output",
        "--stream-interval=16",
        f"--context-length={options.context + _RESERVED}",
    ]
    if options.cpu:
        arguments += _CPU
    if options.memory_gb is not None:
        arguments.append(f"--max-total-tokens={int(options.memory_gb * 2**30 / options.token_bytes)}")
    if options.keep_seeds:
        arguments.append("--enable-deterministic-inference")
    if options.sleep:
        arguments.append("--enable-memory-saver")
    if options.tensor_parallel > 1:
        arguments.append(f"--tp-size={options.tensor_parallel}")
    if options.data_parallel > 1:
        arguments.append(f"--dp-size={options.data_parallel}")
    if options.lora_rank is not None:
        arguments += ["--enable-lora", f"--max-lora-rank={options.lora_rank}", "--max-loras-per-batch=2"]
        arguments += ["--lora-target-modules", *_MODULES]
        if options.cpu:
            arguments.append("--lora-backend=torch_native")
    environment = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # processed images (engines/sglang/images.py); SGLang reads it for vision models only
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "turnwise.engines.sglang.processors",
        # the cache of image embeddings is not emptied when weights are updated: it would serve those of the old weights
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "PYTHONPATH": python_path(),
        **visible(options.devices, index),
    }
    if options.cpu:  # torch's operations on small tensors gain nothing from a second thread
        environment["OMP_NUM_THREADS"] = "1"
    return ServerCommand(
        name=f"SGLang server {index}",
        arguments=[*arguments, *options.arguments],
        environment=environment,
        log=options.logs / f"sglang-{index}.log",
        start_timeout=options.start_timeout,
    )
