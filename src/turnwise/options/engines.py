"""The sections of a recipe about sampling and about processes: engine, sampling, limits, rollout server and cluster.

Each engine has a class with its own options; `engine.name` chooses the class. vLLM and SGLang share the options of all engines
on servers. What an engine can do is asked of its section (`EngineSection`), never of the section's class. The section
`cluster` says which processes train and run conversations, on one or several machines.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from turnwise.errors import ConfigError
from turnwise.options.section import NonEmpty, NotNegative, PathText, Positive, Seconds, Section

# engines


class EngineSection(Section):
    """What the other parts of a run ask of any engine. An engine overrides the answers that are different for it."""

    samples_tokens: ClassVar[bool] = True
    """Whether the engine returns token ids. If not, it is an endpoint that answers messages."""
    has_weights: ClassVar[bool] = True
    """Whether the engine samples from the weights of `model.path`, and takes new weights."""
    constrains: ClassVar[bool] = False
    """Whether the engine samples under grammars (`tool_calls.constrain`, `sampling.response_format`)."""
    records_experts: ClassVar[bool] = False
    """Whether the engine can report the experts that have computed each token of a sequence."""

    @property
    def embedded(self) -> LocalEngineSection | None:
        """The options of an engine that samples in the process of turnwise, from a model that is loaded there; else None."""
        return None

    @property
    def servers(self) -> ServerEngineSection | None:
        """The options of an engine whose tokens servers sample; else None."""
        return None

    @property
    def endpoint(self) -> OpenAIEngineSection | None:
        """The options of an endpoint that answers messages; else None."""
        return None

    @property
    def script_file(self) -> str | None:
        """The file with the texts that the engine answers with; None for an engine that samples."""
        return None

    @property
    def starts_servers(self) -> bool:
        """Whether turnwise starts the servers of the engine."""
        return False


class LocalEngineSection(EngineSection):
    """The embedded engine: it samples in the trainer's process, on the trainer's own weights."""

    name: Literal["local"] = "local"
    slots: Positive = 256
    """The most conversations whose KV cache is kept. If there are more, the least recently used cache is dropped."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """The most memory that the KV cache may use, in GB. Null: 2; for training in one process on a GPU, what the run leaves free
    there while conversations run."""
    threads: Annotated[int, Field(ge=0)] = 0
    """The number of torch threads while sampling. 0: the run measures which number is fastest."""
    records_experts: ClassVar[bool] = True
    constrains: ClassVar[bool] = True

    @property
    def embedded(self) -> LocalEngineSection:
        return self


class ScriptedEngineSection(EngineSection):
    """The scripted engine: it answers with given texts, and needs no model weights. Use it to replay conversations."""

    name: Literal["scripted"]
    script: PathText
    """A jsonl file with the texts. Each line is for one conversation, in the order of the rows: a list of assistant texts, or
    with the texts of the agents that the environment opens `{"turns": [...], "agents": {"second": [...]}}`."""
    has_weights: ClassVar[bool] = False

    @property
    def script_file(self) -> str:
        return self.script


class OpenAIEngineSection(EngineSection):
    """An OpenAI-compatible endpoint, for `turnwise eval` and `turnwise rollout`: messages are sent and a message comes back. It
    reports no token ids and no log-probabilities, so nothing can be trained with it."""

    name: Literal["openai"]
    url: NonEmpty
    """The base URL of the OpenAI-compatible endpoint, such as `http://127.0.0.1:8000/v1`."""
    model: NonEmpty | None = None
    """The name of the model at the endpoint. Null: the value of `model.path`."""
    api_key_env: NonEmpty | None = None
    """The name of the environment variable that contains the API key of the endpoint. Null: no key is sent."""
    request: dict[str, Any] = {}
    """Further fields of each request to the endpoint, such as `{top_k: 20}`. A field that turnwise sends too is replaced; the
    value null removes the field (`{seed: null}`)."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The name of the request field that limits the tokens of a turn. OpenAI's reasoning models need `max_completion_tokens`."""
    timeout: Seconds = 120.0
    """The time limit of each request to the endpoint, in seconds."""
    retries: Annotated[int, Field(ge=0)] = 8
    """The number of further attempts of a request to the endpoint if there is no connection, no answer in time, or an answer with
    status 429 or 5xx. The first pause is one second and doubles with each attempt, up to a minute. If the endpoint sends
    `Retry-After`, all requests wait for that time instead."""
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    """The largest number of requests to the endpoint in a minute. Null: no limit."""
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """The largest number of tokens in a minute, in prompts and answers together. Null: no limit."""
    samples_tokens: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False

    @property
    def endpoint(self) -> OpenAIEngineSection:
        return self


# engines on servers


class ServerEngineSection(EngineSection):
    """Options of all engines whose tokens are sampled by servers (docs/engines.md)."""

    url: NonEmpty | list[NonEmpty] | None = None
    """The address of a running server of the engine, such as `http://127.0.0.1:8000`, or a list of several. All must serve the
    model of `model.path`. Null: turnwise starts the servers, and stops them at the end of the run."""
    api_key_env: NonEmpty | None = None
    """The name of the environment variable that contains the token of the servers in `engine.url`. Null: no token is sent."""
    python: PathText | None = None
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
    `tensor_parallel: 2` gives the first server the GPUs 1 and 2. Null: GPUs on which the model is not trained if
    there are enough, else also the trainer's."""
    arguments: list[str] = []
    """Further arguments for the servers that turnwise starts, such as `[--enforce-eager]`. They replace turnwise's own."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """The memory of the KV cache of each server that turnwise starts, in GB. Null: the engine's own default on a GPU; 1 GB on
    the CPU, and with vLLM more if one sequence of `limits.context` tokens needs more."""
    weight_transfer: Literal["files", "collective"] = "files"
    """How new weights reach the servers. `files`: as files in shared memory or on a disk. `collective`: by broadcasts of
    torch.distributed, with NCCL if the model is on a GPU (another GPU than the server's), with gloo on CPUs. Servers on other
    machines need `collective`, or a `weight_folder` that all machines share."""
    weight_folder: PathText | None = None
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

    records_experts: ClassVar[bool] = True

    @property
    def urls(self) -> list[str]:
        """The addresses in `url`; empty if turnwise starts the servers."""
        return [self.url] if isinstance(self.url, str) else list(self.url or [])

    @property
    def servers(self) -> ServerEngineSection:
        return self

    @property
    def starts_servers(self) -> bool:
        return self.url is None


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


AnyEngine = (
    Annotated[LocalEngineSection, Tag("local")]
    | Annotated[ScriptedEngineSection, Tag("scripted")]
    | Annotated[OpenAIEngineSection, Tag("openai")]
    | Annotated[VllmEngineSection, Tag("vllm")]
    | Annotated[SglangEngineSection, Tag("sglang")]
)
"""The section `engine`, by its name."""


# sampling and limits


class SamplingSection(Section):
    """How tokens are sampled."""

    temperature: NotNegative = 1.0
    """The sampling temperature. 1 samples from the model's own distribution; 0 takes the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: only the most likely tokens, up to this total probability, can be sampled. 1: no such filter."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Only this number of the most likely tokens can be sampled. 0: no such filter."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Only tokens with at least this share of the most likely token's probability can be sampled. 0: no such filter."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a turn, in addition to the stop tokens of the chat template."""
    response_format: dict[str, Any] | None = None
    """The form of answers, by a grammar: `{type: json_schema, json_schema: {schema: {...}}}`, `{type: json_object}` or
    `{type: regex, pattern: ...}`. Reasoning stays free, and tools may be called instead. Null: any text."""


class EvaluationSamplingSection(Section):
    """How tokens are sampled in evaluations. Null: the value of the same option in `sampling`."""

    temperature: NotNegative | None = None
    """The sampling temperature in evaluations; 0 takes the most likely token. Null: `sampling.temperature`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Nucleus sampling in evaluations: only the most likely tokens, up to this total probability, can be sampled. Null:
    `sampling.top_p`."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """In evaluations, only this number of the most likely tokens can be sampled; 0: all tokens. Null: `sampling.top_k`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """In evaluations, only tokens with at least this share of the most likely token's probability can be sampled. Null:
    `sampling.min_p`."""


class LimitsSection(Section):
    """How long a conversation may be."""

    turns: Positive = 8
    """The most turns of the model in a conversation."""
    tokens_per_turn: Positive = 256
    """The most tokens that the model samples in one turn; a longer answer is cut and ends the conversation."""
    tokens: Positive | None = None
    """The most tokens that the model samples in a conversation, all turns together. Null: no limit."""
    response_tokens: Positive | None = None
    """The most tokens after the first prompt: the tokens that the model samples, and the tokens of tools and users between the
    turns. Null: no limit."""
    context: Positive | None = None
    """The most tokens of a conversation, its prompt included. Null: the longest context of the model."""
    seconds_per_turn: Seconds | None = 120.0
    """The time limit of one turn, in seconds, for sampling the turn and for the environment's reply together. Weight updates and
    restarts of an engine's server do not count. Null: no limit."""
    seconds: Seconds | None = 600.0
    """The time limit of a conversation, in seconds. Null: no limit."""
    agents: Positive = 16
    """The most agents that an environment opens in one conversation (docs/agents_in_episodes.md). Each has a conversation of its
    own, with the limits above."""
    agent_turns: Positive | None = None
    """The most turns of all agents together that an environment has opened in one conversation. Null: no limit."""
    agent_tokens: Positive | None = None
    """The most tokens that all these agents sample together. An agent whose turn has begun finishes it. Null: no limit."""


# rollout server


class RolloutServerSection(Section):
    """A rollout server (`turnwise serve`) that runs the conversations of a training run (docs/server.md)."""

    url: NonEmpty | None = None
    """The address of the rollout server that runs the conversations, such as `http://127.0.0.1:8000`. Null: the conversations
    run in the trainer's process."""
    token_env: NonEmpty = "TURNWISE_SERVER_TOKEN"
    """The environment variable that contains the bearer token of the rollout server."""
    timeout: Seconds = 120.0
    """After this time without any data from the rollout server, in seconds, the trainer regards it as lost. Also how long the
    trainer waits for a server that was lost."""
    weights_directory: PathText | None = None
    """A directory that the trainer and the rollout server share, such as `/dev/shm` on one machine. The trainer writes new
    weights there and sends the path. Null: the weights are sent in the body of a request."""


# cluster


class FsdpSection(Section):
    """How the trained model is divided among the ranks (torch's `fully_shard`)."""

    param_dtype: Literal["bfloat16"] | None = None
    """The type in which weights are sent between ranks and passes are computed, if it is not that of the weights. `bfloat16`:
    mixed precision, with float32 weights in the optimizer (`model.dtype=float32`). Null: the type of the weights."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """The type in which the gradients of the ranks are added up."""
    reshard_after_forward: bool = True
    """Whether the gathered weights of a layer are freed after its forward pass and gathered again in the backward pass. False:
    they are kept, which needs more memory and less communication (ZeRO stage 2)."""
    gradient_sync: Literal["auto", "micro_batch", "batch"] = "auto"
    """When the ranks add up their gradients. `micro_batch`: after each micro-batch; each rank keeps only its part of the
    gradient. `batch`: once for each optimizer step; each rank keeps the complete gradient. `auto`: `batch` if the complete
    gradient takes less than 1 GiB, else `micro_batch`."""
    offload: Literal["none", "cpu"] = "none"
    """Where the parts of weights, gradients and optimizer state are. `cpu`: in the CPU's memory, from which they are copied to
    the GPUs for each pass. `none`: on the devices."""

    def adds_up_each(self, gradient_bytes: float) -> bool:
        """Whether gradients are added up after each micro-batch. `gradient_bytes` are those of all trained weights."""
        return self.gradient_sync == "micro_batch" or (self.gradient_sync == "auto" and gradient_bytes > 2**30)


class MeshSection(Section):
    """How the ranks are arranged: `replicate` groups of `shard` ranks each. Each group has one complete model, divided among its
    ranks, so that weights are gathered inside of a group only, and gradients are added up between the groups (HSDP). With several
    machines, let each machine be a group."""

    replicate: Positive | None = None
    """The number of groups. Null: the number of ranks divided by `cluster.mesh.shard`; 1 without it."""
    shard: Positive | None = None
    """The number of ranks of a group, such as the GPUs of a machine: ranks with consecutive numbers. Null: the number of ranks
    divided by `cluster.mesh.replicate`; without it, the model is divided among all ranks."""

    def shape(self, ranks: int) -> tuple[int, int]:
        """The numbers of groups and of ranks in a group. Raises ConfigError if `ranks` cannot be arranged like this."""
        groups = self.replicate or ranks // (self.shard or ranks)
        shard = self.shard or ranks // groups
        if groups * shard != ranks:
            set_options = {name: value for name, value in vars(self).items() if value is not None}
            given = " and ".join(f"cluster.mesh.{name}={value}" for name, value in set_options.items())
            need = f"{groups * shard} ranks" if len(set_options) == 2 else "a multiple of it"
            raise ConfigError(f"{given}, and there are {ranks} ranks: use {need}, or change the mesh")
        return groups, shard


class WorkersSection(Section):
    """Rollout workers on a Ray cluster (`cluster.launcher=ray`): processes in which conversations run, each with its own engine,
    environments and tools (docs/cluster.md)."""

    count: Positive = 1
    """The number of rollout workers."""
    num_cpus: NotNegative = 1.0
    """The number of CPUs that Ray reserves for each rollout worker."""
    num_gpus: NotNegative = 0.0
    """The number of GPUs that Ray reserves for each rollout worker, for its engine. 0: the worker sees no GPU."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom resources of Ray that each rollout worker needs, such as `{sandbox: 1}`. The worker runs on a machine that was
    started with these resources (`ray start --resources`)."""
    runtime_env: dict[str, Any] = {}
    """The runtime environment of Ray for the rollout workers, such as `{working_dir: ".", env_vars: {KEY: value}}`. Empty: the
    workers use the directory in which the command was started, which must exist on their machines."""
    max_concurrent: Positive = 1000
    """The number of conversations that one rollout worker runs at the same time. The option `max_concurrent` of the recipe
    limits the conversations of all workers together."""
    start_timeout: Seconds = 600.0
    """The longest time in seconds until a rollout worker is ready, and the longest time that conversations wait if no worker is
    ready."""


class RanksSection(Section):
    """Training ranks on a Ray cluster (`cluster.launcher=ray` with `cluster.trainers`): what Ray reserves for each rank
    (docs/cluster.md)."""

    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    """The number of CPUs that Ray reserves for each rank, and the number of threads with which it computes."""
    num_gpus: Annotated[int, Field(ge=0, le=1)] | None = None
    """The number of GPUs that Ray reserves for each rank: 1, or 0 for training on the CPU. Null: 1 if the Ray cluster has GPUs
    and `model.device` is not `cpu`, else 0."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Custom resources of Ray that each rank needs, such as `{trainer: 1}`."""
    runtime_env: dict[str, Any] = {}
    """The runtime environment of Ray for the ranks, such as `{env_vars: {WANDB_API_KEY: value}}`. Empty: the ranks use the
    directory in which the command was started, which must exist on their machines."""
    start_timeout: Seconds = 600.0
    """The longest time in seconds until the Ray cluster has the resources of all ranks, and their processes have started."""


class ClusterSection(Section):
    """Several processes, on one or several machines (docs/cluster.md). Instead of `{launcher: name}` you can write only the name:
    `cluster: local`."""

    launcher: Literal["none", "local", "torchrun", "ray"] = "none"
    """What starts the processes. `none`: everything runs in one process. `local`: turnwise starts several training processes,
    which are called ranks, on this machine. `torchrun`: the command is started by torchrun, on one or several machines. `ray`:
    conversations run in rollout workers on a Ray cluster. Training runs in the process of the command; with
    `cluster.trainers`, in ranks on the Ray cluster."""
    address: NonEmpty | None = None
    """The address of the Ray cluster: `ray://HOST:10001` from a machine outside of the cluster, `HOST:6379` or `auto` on a
    machine of the cluster. `cluster=ray://HOST:10001` is short for `cluster.launcher=ray` with this address. Null: the
    environment variable RAY_ADDRESS, or the Ray cluster that runs on this machine, or a new one on this machine."""
    workers: WorkersSection = WorkersSection()
    trainers: Positive | None = None
    """The number of training ranks. Null: with `cluster.launcher=local`, one for each GPU of the machine, or 2 without GPUs;
    with `ray`, the process of the command trains."""
    ranks: RanksSection = RanksSection()
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The library for the communication of the ranks. `auto`: nccl on GPUs, gloo on CPUs."""
    timeout: Seconds = 1800.0
    """The time limit of a communication between ranks in seconds. The run ends with an error if a rank does not take part in
    time."""
    heartbeat: Seconds = 60.0
    """The number of seconds after which a process that gives no sign of life is lost. A lost rank ends the run with an error. A
    lost rollout worker is started again, and its conversations run on another worker."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often `cluster.launcher=local` and `ray` start all ranks again after a rank was lost. The run then resumes from its
    newest checkpoint. 0: never."""
    fsdp: FsdpSection = FsdpSection()
    mesh: MeshSection = MeshSection()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"launcher": value}
        launcher = value.get("launcher") if isinstance(value, Mapping) else None
        if isinstance(launcher, str) and launcher.startswith("ray://"):
            if value.get("address") not in (None, launcher):
                raise PydanticCustomError(
                    "address",
                    "cluster.launcher={launcher} is an address, and cluster.address={address} is another: remove one of them",
                    {"launcher": launcher, "address": value["address"]},
                )
            value = {**value, "launcher": "ray", "address": launcher}
        return value

    @property
    def distributed(self) -> bool:
        """Whether training runs in ranks."""
        return self.launcher in ("local", "torchrun") or (self.launcher == "ray" and self.trainers is not None)


def local_ranks(cluster: ClusterSection) -> int:
    """The number of ranks that `cluster.launcher=local` starts. Counts GPUs without torch, which only the ranks import."""
    if cluster.trainers is not None:
        return cluster.trainers
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = glob.glob("/dev/nvidia[0-9]*") if visible is None else [name for name in visible.split(",") if name]
    return len(gpus) or 2
