"""SGLang as an engine: its requests, and how its servers are started. Knows SGLang's command line; does not know recipes."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from turnwise.engines.remote.launch import ServedModel, interpreter, replicas_of, server_name
from turnwise.engines.remote.server_process import ServerCommand, python_path, visible
from turnwise.engines.remote.servers import Replica, ServerApi
from turnwise.engines.sglang.api import SglangApi, model_shapes
from turnwise.engines.sglang.loader import LOADER
from turnwise.errors import ConfigError
from turnwise.models.model_config import kv_heads, kv_token_bytes
from turnwise.options.engines import SglangEngineSection

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


def servers(options: SglangEngineSection, served: ServedModel) -> tuple[ServerApi, list[Replica]]:
    """The requests of SGLang, and the servers. Raises ConfigError."""
    if served.context is None:
        raise ConfigError(
            f"the config.json of {served.path} names no longest context, which engine.name=sglang needs: set limits.context"
        )
    api = SglangApi(
        vocab_size=served.vocab_size,
        context=served.context,
        labels=served.trained,
        adapter=served.adapter,
        pause=options.update_mode,
        shapes=model_shapes(Path(served.path)) if served.trained and not served.adapter else None,
        sending=served.sending,
        owner=served.owner,
        experts=served.experts,
    )
    return api, replicas_of(options, HEALTH, partial(server_command, options, served, served.context))


def server_command(
    options: SglangEngineSection, served: ServedModel, context: int, number: int, port: int, token: str
) -> ServerCommand:
    """The command of a server whose sequences have at most `context` tokens."""
    arguments = [
        interpreter(options),
        *("-m", "sglang.launch_server"),
        f"--model-path={served.path}",
        f"--dtype={served.dtype}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--api-key={token}",
        "--incremental-streaming-output",
        "--stream-interval=16",
        f"--context-length={context + _RESERVED}",
    ]
    if served.cpu:
        arguments += _CPU
    if served.memory_gb is not None:
        arguments.append(f"--max-total-tokens={_cached_tokens(served, served.memory_gb, options.tensor_parallel)}")
    arguments += [f"--custom-weight-loader={LOADER}"] if served.sending.shared else []
    if options.keep_seeds:
        arguments.append("--enable-deterministic-inference")
    if served.experts is not None:
        arguments.append("--enable-return-routed-experts")
    if options.constrains:
        arguments.append("--grammar-backend=llguidance")
    if options.sleep:
        # without the copy on the CPU, the server has no weights after it has slept, and an adapter does not bring them back
        arguments += ["--enable-memory-saver", "--enable-weights-cpu-backup"]
    if options.tensor_parallel > 1:
        arguments.append(f"--tp-size={options.tensor_parallel}")
    if options.data_parallel > 1:
        arguments.append(f"--dp-size={options.data_parallel}")
    if served.lora_rank is not None:
        arguments += ["--enable-lora", f"--max-lora-rank={served.lora_rank}"]
        # one more: a new adapter arrives before the one that it replaces is removed
        arguments += [f"--max-loras-per-batch={served.adapters + 1}"]
        arguments += ["--lora-target-modules", *_MODULES]
        if served.cpu:
            arguments.append("--lora-backend=torch_native")
    environment = {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        # processed images (engines/sglang/images.py); SGLang reads it for vision models only
        "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": "turnwise.engines.sglang.processors",
        # the cache of image embeddings is not emptied when weights are updated: it would serve those of the old weights
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "PYTHONPATH": python_path(),
        **visible(served.devices(), number),
    }
    if served.cpu:  # torch's operations on small tensors gain nothing from a second thread
        environment["OMP_NUM_THREADS"] = "1"
    return ServerCommand(
        name=server_name(options.name, number),
        arguments=[*arguments, *options.arguments],
        environment=environment,
        log=served.logs / f"sglang-{number}.log",
        start_timeout=options.start_timeout,
        given=options.arguments,
    )


def _cached_tokens(served: ServedModel, gib: float, gpus: int) -> int:
    """The tokens of a cache of `gib` on each GPU of a server: their heads are divided among the GPUs, which have at least one."""
    of_gpu = kv_token_bytes(served.facts, served.dtype) / min(gpus, kv_heads(served.facts))
    return int(gib * 2**30 / of_gpu)
