"""How a SGLang server is started. Knows SGLang's command line; does not know recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.engines.remote.server_process import ServerCommand

__all__ = ["SglangOptions", "server_command"]

_CPU = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--cuda-graph-backend-decode=disabled",
    "--cuda-graph-backend-prefill=disabled",
    "--disable-overlap-schedule",
    "--mem-fraction-static=0.2",
)
"""Without a GPU, SGLang runs with torch's own operations."""
_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangOptions:
    """What a server serves, and how."""

    python: str
    """The interpreter of the environment in which SGLang is installed."""
    model: Path
    dtype: str
    """A name of torch's, such as `float32`."""
    gpu: bool
    context: int | None = None
    kv_tokens: int | None = None
    memory_share: float | None = None
    lora_rank: int | None = None
    """The rank of the trained adapter; None without one."""
    deterministic: bool = False
    arguments: Sequence[str] = ()
    start_timeout: float = 600.0


def server_command(options: SglangOptions, *, index: int, port: int, token: str, log: Path) -> ServerCommand:
    """The command of server number `index`, which listens on this machine only."""
    arguments = [
        options.python,
        "-m",
        "sglang.launch_server",
        f"--model-path={options.model.absolute()}",
        f"--dtype={options.dtype}",
        "--host=127.0.0.1",
        f"--port={port}",
        f"--api-key={token}",
        "--incremental-streaming-output",
        "--stream-interval=16",
        f"--base-gpu-id={index}",
    ]
    if not options.gpu:
        arguments += _CPU
    if options.context is not None:
        arguments.append(f"--context-length={options.context}")
    if options.kv_tokens is not None:
        arguments.append(f"--max-total-tokens={options.kv_tokens}")
    if options.memory_share is not None:
        arguments.append(f"--mem-fraction-static={options.memory_share}")
    if options.deterministic:
        arguments.append("--enable-deterministic-inference")
    if options.lora_rank is not None:
        arguments += ["--enable-lora", f"--max-lora-rank={options.lora_rank}", "--max-loras-per-batch=2"]
        arguments += ["--lora-target-modules", *_MODULES]
        if not options.gpu:
            arguments.append("--lora-backend=torch_native")
    return ServerCommand(
        name=f"SGLang server {index}",
        arguments=[*arguments, *options.arguments],
        # torch's operations on small tensors gain nothing from a second thread
        environment={} if options.gpu else {"OMP_NUM_THREADS": "1"},
        log=log,
        start_timeout=options.start_timeout,
    )
