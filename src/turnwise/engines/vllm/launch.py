"""How turnwise starts vLLM's servers: arguments, environment, ports and tokens."""

from __future__ import annotations

import os
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
from turnwise.engines.vllm.api import MODEL

__all__ = ["HEALTH", "VllmLaunch", "engine_arguments", "on_cpu", "started_replicas"]

HEALTH = "/health"
_LEAST_BATCH = 4096
"""Tokens that a step on the CPU computes at most."""
_EXTENSION = "turnwise.engines.vllm.worker.WeightReceiver"


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLaunch:
    """What servers that turnwise starts serve, and how."""

    python: str
    """The Python interpreter of the environment that vLLM is installed in."""
    model: str
    """A model directory, or a name on the hub."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: the precision of the trainer."""
    context: int | None
    """The most tokens of a sequence; None: what the model allows."""
    memory_gb: float | None
    """The memory of the KV cache in GB; None: vLLM's own choice, nine tenths of the device's memory."""
    max_requests: int
    """Requests that a server runs at the same time."""
    cpu: bool
    """Whether the server runs on the CPU."""
    lora_rank: int | None
    """The rank of the trained adapter; None if all weights are trained."""
    vision: bool
    """Whether the model takes images."""
    sleep: bool
    """Whether the server can free the device's memory during training."""
    tensor_parallel: int
    """GPUs over which a server divides the model."""
    data_parallel: int
    """Copies of the model in a server."""
    devices: Sequence[str]
    """The value of CUDA_VISIBLE_DEVICES for each server; empty: that of this process."""
    arguments: Sequence[str]
    """Further arguments, which come last and therefore win."""
    logs: Path
    """The directory of the log files."""
    start_timeout: float


def engine_arguments(options: VllmLaunch) -> list[str]:
    """The arguments of vLLM's engine, without those of its HTTP server."""
    arguments = [
        *("--model", options.model, "--served-model-name", MODEL, "--dtype", options.dtype),
        # log-probabilities of the sampled distribution; no defaults from the model's generation_config.json
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-num-seqs", str(options.max_requests), "--enable-prefix-caching"),
        *("--worker-extension-cls", _EXTENSION),
    ]
    if options.context is not None:
        arguments += ["--max-model-len", str(options.context)]
    if options.memory_gb is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(options.memory_gb * 2**30))]
    if options.cpu:
        # blocks of 128 tokens, the default on CPUs, find no common prefix in short prompts
        arguments += ["--block-size", "32"]
        if options.tensor_parallel == 1:
            arguments += ["--distributed-executor-backend", "uni"]
        # with parts of prompts, vLLM's engine dies on a CPU: it rewinds the seeded random numbers, which CPUs cannot do
        tokens = max(_LEAST_BATCH, options.context or 0)
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
    if options.lora_rank is not None:
        arguments += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(_supported_rank(options.lora_rank))]
    if options.vision:
        # turnwise sends pixels as the trainer has them, normalized; it sends no videos
        arguments += ["--no-mm-device-do-normalize", "--limit-mm-per-prompt", '{"video": 0}']
    if options.sleep:
        arguments += ["--enable-sleep-mode"]
    if options.tensor_parallel > 1:
        arguments += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if options.data_parallel > 1:
        arguments += ["--data-parallel-size", str(options.data_parallel)]
    return arguments


def started_replicas(options: VllmLaunch, count: int, limits: HttpLimits) -> list[Replica]:
    """Replicas whose processes turnwise starts. They listen on 127.0.0.1 and need a token that is made here."""
    replicas: list[Replica] = []
    for number in range(count):
        port, token = free_port(), new_token()
        command = ServerCommand(
            name=f"vLLM server {number}",
            arguments=[
                *(options.python, "-m", "vllm.entrypoints.openai.api_server"),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
                *engine_arguments(options),
                *options.arguments,
            ],
            environment={**server_environment(token), **visible(options.devices, number)},
            log=options.logs / f"vllm-{number}.log",
            start_timeout=options.start_timeout,
        )
        server = HttpServer(f"http://127.0.0.1:{port}", token=token, limits=limits)
        replicas.append(Replica(server, HEALTH, ServerProcess(command)))
    return replicas


def server_environment(token: str) -> dict[str, str]:
    """The environment variables of a server. The token is not an argument, which other users of the machine could read."""
    return {
        "PYTHONPATH": python_path(),
        "VLLM_API_KEY": token,
        "VLLM_SERVER_DEV_MODE": "1",  # routes for weight updates
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": os.environ.get("VLLM_NO_USAGE_STATS", "1"),
    }


def _supported_rank(rank: int) -> int:
    """The smallest maximal rank that vLLM supports for an adapter of this rank."""
    return next((size for size in (1, 8, 16, 32, 64, 128, 256, 320, 512) if size >= rank), rank)


def on_cpu(device: str) -> bool:
    """Whether servers that turnwise starts run on the CPU: where the model, on `device`, is trained on it."""
    import torch  # to find out whether there is a GPU

    return device == "cpu" or (device == "auto" and not torch.cuda.is_available())
