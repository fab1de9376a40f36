"""What the servers of an engine serve, and how turnwise reaches them: servers of `engine.url`, or servers that it starts.

An engine on servers takes its own section of the recipe, and a `ServedModel`: what the rest of the recipe says. It adds the
requests of its kind of server (`ServerApi`) and the command that starts one. Does not know recipes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from turnwise.engines.remote.experts import ExpertLayers
from turnwise.engines.remote.http import HttpLimits, HttpServer
from turnwise.engines.remote.server_process import HeldPort, ServerCommand, ServerProcess, new_token
from turnwise.engines.remote.servers import Owner, Replica, ServerApi
from turnwise.engines.remote.weights import BY_GLOO, Sending
from turnwise.errors import ConfigError
from turnwise.models.device import uses_gpu
from turnwise.options.engines import ServerEngineSection

Commands = Callable[[int, int, str], ServerCommand]
"""The command of a server, from its number, its port and its token. It listens on 127.0.0.1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the servers of an engine serve, and what the recipe says about it outside the section of the engine."""

    path: str
    """The model's directory."""
    facts: Mapping[str, Any]
    """The contents of its config.json."""
    dtype: str
    """`float32`, `bfloat16` or `float16`: the precision of the trainer."""
    cpu: bool
    """Whether servers that turnwise starts run on the CPU."""
    vocab_size: int
    """The number of token ids."""
    context: int | None
    """The most tokens of a sequence; None: what the model allows."""
    memory_gb: float | None
    """The memory of the KV cache on each GPU of a server, in GiB; None: the server chooses it."""
    max_requests: int
    """Requests that a server runs at the same time."""
    trained: bool
    """Whether the weights change during the run."""
    lora_rank: int | None
    """The rank of the trained adapter, or the largest of several; None if all weights are trained, or none."""
    devices: Callable[[], Sequence[str]]
    """The value of CUDA_VISIBLE_DEVICES for each server that turnwise starts; empty: that of this process. Raises ConfigError if
    there are too few."""
    logs: Path
    """The directory of the log files."""
    owner: Owner
    """This process, as the servers know it."""
    adapters: int = 1
    """The number of trained adapters: that of the model, and those of further policies."""
    experts: ExpertLayers | None = None
    """The layers with experts, if the experts of each token are recorded."""
    trainer_gpu: int = 0
    """The number of the GPU from which the trainer broadcasts weights: that of the model, on rank 0."""

    shares: bool = False
    """Whether servers read new weights in memory of the trainer's device."""

    @property
    def sending(self) -> Sending:
        """How weights are broadcast: with NCCL if the servers that turnwise would start are on GPUs. Or where they are shared."""
        sending = BY_GLOO if self.cpu else Sending("nccl", f"cuda:{self.trainer_gpu}")
        return replace(sending, shared=self.shares)

    @property
    def adapter(self) -> bool:
        """Whether an adapter is trained."""
        return self.lora_rank is not None


MakeServers = Callable[[Any, ServedModel], tuple[ServerApi, list[Replica]]]
"""Makes the requests of one kind of server, and the servers, from the section of the engine and a model."""


def on_cpu(device: str) -> bool:
    """Whether servers that turnwise starts run on the CPU: where the model, on `device`, is trained on it."""
    return not uses_gpu(device)


def interpreter(options: ServerEngineSection) -> str:
    """The Python interpreter that runs the servers."""
    return sys.executable if options.python is None else os.path.expanduser(options.python)


def server_name(engine: str, number: int) -> str:
    """The name of a server of an engine in messages, such as `vLLM server 0`."""
    return f"{_NAMES.get(engine, engine)} server {number}"


_NAMES = {"vllm": "vLLM", "sglang": "SGLang"}


def replicas_of(options: ServerEngineSection, health_path: str, commands: Commands) -> list[Replica]:
    """The servers of `engine.url`, or those that the engine starts with `commands`, which need a token that is made here.

    Raises ConfigError if the variable in engine.api_key_env is not set.
    """
    limits = HttpLimits(answer=options.timeout, idle=options.timeout)
    if options.url is not None:
        token = given_token(options.api_key_env)
        return [Replica(HttpServer(url, token=token, limits=limits), health_path) for url in options.urls]

    def make(number: int) -> tuple[HttpServer, ServerProcess]:
        port, token = HeldPort(), new_token()
        server = HttpServer(f"http://127.0.0.1:{port.number}", token=token, limits=limits)
        return server, ServerProcess(commands(number, port.number, token), port)

    return [
        Replica(server, health_path, process, elsewhere=partial(make, number))
        for number, (server, process) in enumerate(map(make, range(options.replicas)))
    ]


def given_token(variable: str | None) -> str | None:
    """The token of servers that run already. Raises ConfigError."""
    if variable is None:
        return None
    token = os.environ.get(variable)
    if not token:
        raise ConfigError(
            f"engine.api_key_env={variable}: there is no such environment variable. Set it to the token of the "
            f"servers in engine.url, or remove engine.api_key_env"
        )
    return token
