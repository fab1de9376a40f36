"""vLLM as an engine: its requests, and how its servers are started (arguments and environment), or the engine in this process."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from turnwise.engines.remote.launch import ServedModel, interpreter, replicas_of, server_name
from turnwise.engines.remote.server_process import ServerCommand, python_path, visible
from turnwise.engines.remote.servers import Replica, ServerApi
from turnwise.engines.vllm.api import MODEL, VllmApi
from turnwise.options.engines import VllmEngineSection

HEALTH = "/health"
_LEAST_BATCH = 4096
"""Tokens that a step on the CPU computes at most."""
_MODEL_IN_ENGINE = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""By its name `uni`, vLLM takes another one on a CPU: a third process, which imports vLLM again for 12 seconds of CPU time, and
for which the second waits busily with each token."""
_EXTENSION = "turnwise.engines.vllm.worker.WeightReceiver"


def servers(options: VllmEngineSection, served: ServedModel) -> tuple[ServerApi, list[Replica]]:
    """The requests of vLLM, and the servers, or the engine in this process. Raises ConfigError."""
    known: dict[str, Any] = {
        "vocab_size": served.vocab_size,
        "labels": served.trained,
        "adapter": served.adapter,
        "sending": served.sending,
        "owner": served.owner,
        "experts": served.experts,
    }
    if options.mode == "in_process":
        from turnwise.engines.vllm.in_process import InProcessApi, InProcessServer

        arguments = [*engine_arguments(options, served), *options.arguments]
        server = InProcessServer(arguments, visible(served.devices(), 0), given=options.arguments)
        return InProcessApi(**known), [Replica(server, "")]
    return VllmApi(**known), replicas_of(options, HEALTH, partial(server_command, options, served))


def engine_arguments(options: VllmEngineSection, served: ServedModel) -> list[str]:
    """The arguments of vLLM's engine, without those of its HTTP server."""
    arguments = [
        *("--model", served.path, "--served-model-name", MODEL, "--dtype", served.dtype),
        # log-probabilities of the sampled distribution; no defaults from the model's generation_config.json
        *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-num-seqs", str(served.max_requests), "--enable-prefix-caching"),
        *("--worker-extension-cls", _EXTENSION),
    ]
    if served.context is not None:
        arguments += ["--max-model-len", str(served.context)]
    if served.memory_gb is not None:
        arguments += ["--kv-cache-memory-bytes", str(int(served.memory_gb * 2**30))]
        if not served.cpu:
            # the share only decides whether vLLM starts then: by default not, unless 92 % of the GPU are free
            arguments += ["--gpu-memory-utilization", "0.01"]
    if served.cpu:
        # blocks of 128 tokens, the default on CPUs, find no common prefix in short prompts
        arguments += ["--block-size", "32"]
        if options.tensor_parallel == 1:
            arguments += ["--distributed-executor-backend", _MODEL_IN_ENGINE]
        # with parts of prompts, vLLM's engine dies on a CPU: it rewinds the seeded random numbers, which CPUs cannot do
        tokens = max(_LEAST_BATCH, served.context or 0)
        arguments += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(tokens)]
    if served.lora_rank is not None:
        count = served.adapters
        arguments += [
            "--enable-lora",
            "--max-loras",
            str(count),
            "--max-lora-rank",
            str(_supported_rank(served.lora_rank)),
        ]
        if count > 1:  # a new adapter arrives before the one that it replaces is removed, and must not displace a third
            arguments += ["--max-cpu-loras", str(count + 1)]
    if "vision_config" in served.facts:
        # turnwise sends pixels as the trainer has them, normalized; it sends no videos
        arguments += ["--no-mm-device-do-normalize", "--limit-mm-per-prompt", '{"video": 0}']
    if served.experts is not None:
        arguments += ["--enable-return-routed-experts"]
    if options.constrains:
        arguments += ["--structured-outputs-config.backend", "guidance"]
    if options.sleep:
        arguments += ["--enable-sleep-mode"]
    if options.tensor_parallel > 1:
        arguments += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if options.data_parallel > 1:
        arguments += ["--data-parallel-size", str(options.data_parallel)]
    return arguments


def server_command(
    options: VllmEngineSection, served: ServedModel, number: int, port: int, token: str
) -> ServerCommand:
    """The command of a server."""
    return ServerCommand(
        name=server_name(options.name, number),
        arguments=[
            *(interpreter(options), "-m", "vllm.entrypoints.openai.api_server"),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--enable-scale-out", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"),
            *engine_arguments(options, served),
            *options.arguments,
        ],
        environment={**server_environment(token), **visible(served.devices(), number)},
        log=served.logs / f"vllm-{number}.log",
        start_timeout=options.start_timeout,
        given=options.arguments,
    )


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
