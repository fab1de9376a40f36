"""The sections of a recipe for engines on servers: what all of them share, vLLM and SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from turnwise.config.section import NonEmpty, Positive, Seconds, Section

__all__ = ["ServerEngineSection", "SglangEngineSection", "VllmEngineSection"]


class ServerEngineSection(Section):
    """Options of all engines whose tokens are sampled by servers (docs/engines.md)."""

    url: NonEmpty | list[NonEmpty] | None = None
    """The address of a running server of the engine, such as `http://127.0.0.1:8000`, or a list of several. All must serve the
    model of `model.path`. Null: turnwise starts the servers, and stops them at the end of the run."""
    api_key_env: NonEmpty | None = None
    """The name of the environment variable that contains the token of the servers in `engine.url`. Null: no token is sent."""
    python: NonEmpty | None = None
    """The Python interpreter of the environment in which the engine is installed, for servers that turnwise starts. Null: the
    interpreter that runs turnwise."""
    replicas: Positive = 1
    """The number of servers that turnwise starts. All turns of a conversation go to the same server."""
    tensor_parallel: Positive = 1
    """The number of GPUs over which each server that turnwise starts divides the model."""
    data_parallel: Positive = 1
    """The number of copies of the model in each server that turnwise starts. Several `replicas` are usually better: there, all
    turns of a conversation go to the same copy, whose prefix cache holds the conversation."""
    devices: list[Annotated[int, Field(ge=0)]] | None = None
    """The GPUs of the servers that turnwise starts, as numbers of visible GPUs: `[1, 2, 3, 4]` with `replicas: 2` and
    `tensor_parallel: 2` gives the first server the GPUs 1 and 2. Null: the GPUs behind those of the trainer if there are enough,
    else from the first GPU on."""
    arguments: list[str] = []
    """Further arguments for the servers that turnwise starts, such as `[--enforce-eager]`. They replace turnwise's own."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """The memory of the KV cache of each server that turnwise starts, in GB. Null: the engine's own default on a GPU; 1 GB on
    the CPU, and with vLLM more if one sequence of `limits.context` tokens needs more."""
    weight_transfer: Literal["files", "collective"] = "files"
    """How new weights reach the servers. `files`: as files in shared memory or on a disk. `collective`: by broadcasts of
    torch.distributed, with NCCL if the model is on a GPU (another GPU than the server's), with gloo on CPUs. Servers on other
    machines need `collective`, or a `weight_folder` that all machines share."""
    weight_folder: NonEmpty | None = None
    """The directory in which new weights are written for the servers. It must be readable by them under the same path. Null:
    shared memory (`/dev/shm`), or the temporary directory if the weights do not fit."""
    check_weights_every: Annotated[int, Field(ge=0)] = 10
    """After each update with this number, and after the first three, a server's log-probabilities are compared with those of the
    trainer. 0: only after the first three."""
    sleep: bool = False
    """Whether the servers free their memory on the GPU while the model is trained, for a trainer on the same GPU."""
    start_timeout: Seconds = 600.0
    """The longest time in seconds until a started server is ready. For servers in `engine.url`: until they answer."""
    timeout: Seconds = 300.0
    """The time in seconds after which a server that sends no token at all is given up. A server that turnwise started is then
    restarted."""

    @property
    def urls(self) -> list[str]:
        """The addresses in `url`; empty if turnwise starts the servers."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])


class VllmEngineSection(ServerEngineSection):
    """vLLM: faster than the embedded engine for large models and on GPUs. It is installed in an environment of its own
    (docs/engines.md)."""

    name: Literal["vllm"]
    mode: Literal["server", "in_process"] = "server"
    """`server`: HTTP servers, started by turnwise or given by `engine.url`. `in_process`: vLLM's asynchronous engine in the
    process of turnwise, which must then run in vLLM's environment."""


class SglangEngineSection(ServerEngineSection):
    """SGLang: servers that turnwise starts, or running servers. It is installed in an environment of its own
    (docs/engines.md)."""

    name: Literal["sglang"]
    keep_seeds: bool = False
    """Whether SGLang servers that turnwise starts draw the same tokens for the same seed (`--enable-deterministic-inference`).
    SGLang can do so on GPUs only, and is slower then."""
    update_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests while the weights of a SGLang server change. `retract`: their prefixes are computed again
    with the new weights. `in_place`: they continue with the KV cache of the previous weights. `abort`: they are sent again, with
    the tokens that they have; LoRA adapters always use this mode."""
