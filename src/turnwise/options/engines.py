"""The sections of a recipe about sampling and about processes: engine, sampling, limits, rollout server and cluster.

Each engine has a class with its own options; `engine.name` chooses the class. vLLM and SGLang share the options of all engines
on servers. What an engine can do is asked of its section (`EngineSection`), never of the section's class. The section
`cluster` says which processes train and run conversations, on one or several machines.
"""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from turnwise.errors import ConfigError
from turnwise.options.section import NonEmpty, NotNegative, PathText, Positive, Seconds, Section, changed_options

# engines


class EngineSection(Section):
    """What the other parts of a run ask of any engine. An engine overrides the answers that are different for it."""

    samples_tokens: ClassVar[bool] = True
    """Whether the engine returns token ids. If not, it is an endpoint that answers messages."""
    has_weights: ClassVar[bool] = True
    """Whether the engine samples from the weights of `model.path`, and takes new weights."""
    records_experts: ClassVar[bool] = False
    """Whether the engine can report the experts that have computed each token of a sequence."""

    @property
    def constrains(self) -> bool:
        """Whether the engine samples under grammars (`tool_calls.constrain`, `sampling.response_format`)."""
        return False

    @property
    def trains_constrained(self) -> bool:
        """Whether turns that were sampled under a grammar are trained on."""
        return True

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
    def quantization(self) -> str | None:
        """The options by which the engine computes with fewer bits than `model.dtype`; None without any."""
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
    """The embedded engine, in the trainer's process, on its weights."""

    name: Literal["local"] = "local"
    slots: Positive = 256
    """Conversations whose KV cache is kept."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """Most memory of the KV cache, in GiB. Null: 2, or what training leaves free on a GPU."""
    threads: Annotated[int, Field(ge=0)] = 0
    """Torch threads while sampling. 0: measured."""
    records_experts: ClassVar[bool] = True

    @property
    def constrains(self) -> bool:
        return True

    @property
    def embedded(self) -> LocalEngineSection:
        return self


class ScriptedEngineSection(EngineSection):
    """Given texts, without model weights."""

    name: Literal["scripted"]
    script: PathText
    """A jsonl file: per row a list of assistant texts, or with agents `{"turns": [...], "agents": {"second": [...]}}`."""
    has_weights: ClassVar[bool] = False

    @property
    def script_file(self) -> str:
        return self.script


class OpenAIEngineSection(EngineSection):
    """An OpenAI-compatible endpoint, for `turnwise eval` and `turnwise rollout`. It reports no tokens, so nothing can be
    trained with it."""

    name: Literal["openai"]
    url: NonEmpty
    """Base URL, such as `http://127.0.0.1:8000/v1`."""
    model: NonEmpty | None = None
    """The model's name there. Null: `model.path`."""
    api_key_env: NonEmpty | None = None
    """Environment variable with the API key."""
    request: dict[str, Any] = {}
    """More fields of a request, such as `{top_k: 20}`; null removes one (`{seed: null}`)."""
    max_tokens_field: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    """The field that limits a turn's tokens; OpenAI's reasoning models need `max_completion_tokens`."""
    timeout: Seconds = 120.0
    """Seconds of a request."""
    retries: Annotated[int, Field(ge=0)] = 8
    """Further attempts without an answer or after status 429 or 5xx."""
    requests_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Most requests in a minute."""
    tokens_per_minute: Annotated[float, Field(gt=0)] | None = None
    """Most tokens in a minute, with prompts."""
    samples_tokens: ClassVar[bool] = False
    has_weights: ClassVar[bool] = False

    @property
    def endpoint(self) -> OpenAIEngineSection:
        return self


# engines on servers

_QUANTIZING = ("--quantization", "-q", "--kv-cache-dtype", "--torchao-config")
"""Arguments of vLLM and SGLang by which they compute with fewer bits."""
_EIGHT_BITS = ("fp8", "w8a8_fp8", "w8a8_int8", "fbgemm_fp8", "ptpc_fp8", "fp8wo", "int8wo", "int8dq")
"""Their values with which the weights of all matrices inside of layers take one byte."""
_NOT_QUANTIZED = ("auto", "none", "bfloat16", "bf16", "float16", "half", "float32", "float")


class ServerEngineSection(EngineSection):
    """Options of all engines whose tokens are sampled by servers (docs/engines.md)."""

    url: NonEmpty | list[NonEmpty] | None = None
    """Running servers of `model.path`: an address or a list. Null: turnwise starts servers."""
    api_key_env: NonEmpty | None = None
    """Environment variable with their token."""
    python: PathText | None = None
    """The interpreter of the engine's environment. Null: turnwise's own."""
    replicas: Positive = 1
    """Servers to start."""
    tensor_parallel: Positive = 1
    """GPUs over which each started server divides the model."""
    data_parallel: Positive = 1
    """Copies of the model in a server; `replicas` are usually better."""
    devices: list[Annotated[int, Field(ge=0)]] | None = None
    """GPUs of started servers, in turn: `[1, 2, 3, 4]`. Null: those without the trained model, or if too few also the
    trainer's."""
    arguments: list[str] = []
    """More arguments of started servers, such as `[--enforce-eager]`."""
    memory_gb: Annotated[float, Field(gt=0)] | None = None
    """KV cache on each GPU of a started server, in GiB, beside its weights. Null: what the engine takes, 90 % of a GPU with its
    weights; at least 1 on a CPU."""
    weight_transfer: Literal["files", "collective", "ipc"] | None = None
    """How new weights arrive: `files`, `collective` (broadcast), `ipc` (read in the trainer's GPU; docs/engines.md). Null:
    `ipc` on one GPU, if all weights are trained; else `files`."""
    weight_folder: PathText | None = None
    """Directory for new weights, also of the servers. Null: `/dev/shm`, or the temporary directory."""
    check_weights_every: Annotated[int, Field(ge=0)] = 10
    """After the first three updates and every so many (0: none), log-probabilities are compared with the trainer's."""
    sleep: bool = False
    """Servers on the trainer's GPU free their memory during training."""
    start_timeout: Seconds = 600.0
    """Seconds until a server is ready."""
    timeout: Seconds = 300.0
    """Seconds without a token, after which a server is given up, or restarted."""

    grammars: Literal["train", "skip"] | None = None
    """Turns under grammars: `train` with the same masks, or `skip` them in training (docs/tool_calls.md). Null: refused."""

    records_experts: ClassVar[bool] = True

    @property
    def constrains(self) -> bool:
        return self.grammars is not None

    @property
    def trains_constrained(self) -> bool:
        return self.grammars != "skip"

    @property
    def quantization(self) -> str | None:
        found = [f"{name} {value}" for name, value in self._quantizing()]
        return f"engine.arguments={', '.join(found)}" if found else None

    @property
    def eight_bits(self) -> bool | None:
        """Whether the servers keep the weights in 8 bits; None where `arguments` quantize them in another way."""
        values = [value.lower() for name, value in self._quantizing() if "kv" not in name]
        return None if any(value not in _EIGHT_BITS for value in values) else bool(values)

    def _quantizing(self) -> list[tuple[str, str]]:
        words = [part for word in self.arguments for part in (word.split("=", 1) if word.startswith("-") else [word])]
        return [
            (name, value)
            for name, value in itertools.pairwise(words)
            if name.replace("_", "-") in _QUANTIZING and value.lower() not in _NOT_QUANTIZED
        ]

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
    """vLLM, installed in an environment of its own (docs/engines.md)."""

    name: Literal["vllm"]
    mode: Literal["server", "in_process"] = "server"
    """HTTP servers (`server`), or vLLM in turnwise's process (`in_process`)."""


class SglangEngineSection(ServerEngineSection):
    """SGLang, installed in an environment of its own (docs/engines.md)."""

    name: Literal["sglang"]
    keep_seeds: bool = False
    """The same seed gives the same tokens: GPUs only, slower."""
    update_mode: Literal["retract", "in_place", "abort"] = "retract"
    """Requests that run when weights change: compute the prefix again (`retract`), keep the old KV cache (`in_place`), or are
    sent again (`abort`; always with LoRA)."""


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
    """1: the model's own distribution. 0: the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens up to this total probability. 1: all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from so many of the most likely tokens."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens with at least this share of the most likely one's probability."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end a turn, besides the template's stop tokens."""
    response_format: dict[str, Any] | None = None
    """A grammar for answers (docs/tool_calls.md): `{type: json_schema, json_schema: {schema: {...}}}`, `{type: json_object}`
    or `{type: regex, pattern: ...}`."""


class EvaluationSamplingSection(Section):
    """How tokens are sampled in evaluations. Null: the value of the same option in `sampling`."""

    temperature: NotNegative | None = None
    """In evaluations. Null: as `sampling`."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """In evaluations. Null: as `sampling`."""
    top_k: Annotated[int, Field(ge=0)] | None = None
    """In evaluations. Null: as `sampling`."""
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    """In evaluations. Null: as `sampling`."""


class LimitsSection(Section):
    """How long a conversation may be."""

    turns: Positive = 8
    """Most turns of the model."""
    tokens_per_turn: Positive = 256
    """Most tokens of a turn; a longer answer ends the conversation."""
    tokens: Positive | None = None
    """Most tokens sampled in a conversation."""
    response_tokens: Positive | None = None
    """Most tokens after the first prompt, those of tools and users included."""
    context: Positive | None = None
    """Most tokens with the prompt. Null: the model's longest context."""
    seconds_per_turn: Seconds | None = 120.0
    """Seconds of a turn and the environment's reply."""
    seconds: Seconds | None = 600.0
    """Seconds of a conversation."""
    agents: Positive = 16
    """Most agents opened in a conversation; each has the limits above."""
    agent_turns: Positive | None = None
    """Most turns of all opened agents together."""
    agent_tokens: Positive | None = None
    """Most tokens that they sample together."""


# rollout server


class RolloutServerSection(Section):
    """A rollout server (`turnwise serve`) that runs the conversations of a training run (docs/server.md)."""

    url: NonEmpty | None = None
    """Its address, such as `http://127.0.0.1:8000`."""
    token_env: NonEmpty = "TURNWISE_SERVER_TOKEN"
    """Environment variable with its bearer token."""
    timeout: Seconds = 120.0
    """Seconds without data after which the server is lost, and for which a lost one is awaited."""
    weights_directory: PathText | None = None
    """A shared directory for new weights, such as `/dev/shm`. Null: sent in requests."""


# cluster


class FsdpSection(Section):
    """How the trained model is divided among the ranks (torch's `fully_shard`)."""

    param_dtype: Literal["bfloat16"] | None = None
    """Type of sent weights and passes: `bfloat16` with `model.dtype=float32` is mixed precision. Null: that of the weights."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients of ranks are added up."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass. False (ZeRO stage 2): more memory, less communication."""
    gradient_sync: Literal["auto", "micro_batch", "batch"] = "auto"
    """Add gradients up after each `micro_batch`, or once per optimizer step (`batch`). `auto`: `batch` below 1 GiB."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu`: weights, gradients and optimizer state are in the CPU's memory."""

    def adds_up_each(self, gradient_bytes: float) -> bool:
        """Whether gradients are added up after each micro-batch. `gradient_bytes` are those of all trained weights."""
        return self.gradient_sync == "micro_batch" or (self.gradient_sync == "auto" and gradient_bytes > 2**30)


class MeshSection(Section):
    """How the ranks are arranged: `replicate` groups of `shard` times `context` times `tensor` ranks each. Each group has one
    complete model, divided among its ranks, so that weights are gathered inside of a group only, and gradients are added up
    between the groups (HSDP). With several machines, let each machine be a group."""

    replicate: Positive | None = None
    """Number of groups. Null: ranks / (`shard` x `context` x `tensor`), or 1 without `shard`."""
    shard: Positive | None = None
    """Ranks of a group, such as a machine's GPUs. Null: ranks / (`replicate` x `context` x `tensor`)."""
    context: Positive = 1
    """Context parallelism: ranks that divide the tokens."""
    tensor: Positive = 1
    """Tensor parallelism: ranks that divide each layer."""
    expert: Positive = 1
    """Neighbouring ranks that divide the experts. Not with `tensor`."""

    @property
    def together(self) -> int:
        """How many ranks compute a micro-batch together."""
        return self.context * self.tensor

    def shape(self, ranks: int) -> tuple[int, int, int, int]:
        """`replicate`, `shard`, `context` and `tensor` for so many ranks. Raises ConfigError if `ranks` cannot be arranged like
        this."""
        sets = ranks // self.together
        groups = self.replicate or sets // (self.shard or max(sets, 1))
        shard = self.shard or sets // max(groups, 1)
        if groups * shard * self.together != ranks:
            set_options = {name: getattr(self, name) for name in changed_options(self)}
            given = " and ".join(f"cluster.mesh.{name}={value}" for name, value in set_options.items())
            fixed = (self.replicate or 1) * (self.shard or 1) * self.together
            need = f"{fixed} ranks" if self.replicate and self.shard else f"a multiple of {fixed}"
            raise ConfigError(f"{given}, and there are {ranks} ranks: use {need}, or change the mesh")
        if self.expert > 1 and self.tensor > 1:
            raise ConfigError(
                f"cluster.mesh.expert={self.expert} and cluster.mesh.tensor={self.tensor}: each rank of `tensor` has some of the "
                f"experts already; remove one of them"
            )
        if (shard * self.context) % self.expert:
            raise ConfigError(
                f"cluster.mesh.expert={self.expert}: a group has {shard * self.context} ranks (`shard` x `context`), which must "
                f"be a multiple of it"
            )
        return groups, shard, self.context, self.tensor

    def sets(self, ranks: int) -> int:
        """How many of so many ranks, or sets of `together` ranks, have micro-batches of their own."""
        groups, shard, *_ = self.shape(ranks)
        return groups * shard

    @property
    def of_sets(self) -> str:
        """For messages after a number of `sets`."""
        given = [
            f"cluster.mesh.{name}={getattr(self, name)}" for name in ("context", "tensor") if getattr(self, name) > 1
        ]
        return f" (each of {' x '.join(given)} together)" if given else ""


class WorkersSection(Section):
    """Rollout workers on a Ray cluster (`cluster.launcher=ray`): processes in which conversations run, each with its own engine,
    environments and tools (docs/cluster.md)."""

    count: Positive = 1
    """Rollout workers."""
    num_cpus: NotNegative = 1.0
    """CPUs that Ray reserves for each."""
    num_gpus: NotNegative = 0.0
    """GPUs for each, for its engine. 0: it sees none."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray's custom resources for each, such as `{sandbox: 1}`."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment, such as `{working_dir: ".", env_vars: {KEY: value}}`. Empty: the command's directory."""
    max_concurrent: Positive = 1000
    """Conversations at a time in one worker."""
    start_timeout: Seconds = 600.0
    """Seconds until a worker is ready."""


class RanksSection(Section):
    """Training ranks on a Ray cluster (`cluster.launcher=ray` with `cluster.trainers`): what Ray reserves for each rank
    (docs/cluster.md)."""

    num_cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs that Ray reserves for each rank: its threads."""
    num_gpus: Annotated[int, Field(ge=0, le=1)] | None = None
    """GPUs for each: 1 or 0. Null: 1 if the cluster has GPUs and `model.device` is not `cpu`."""
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Ray's custom resources for each, such as `{trainer: 1}`."""
    runtime_env: dict[str, Any] = {}
    """Ray's runtime environment, such as `{env_vars: {WANDB_API_KEY: value}}`."""
    start_timeout: Seconds = 600.0
    """Seconds until all ranks run."""


class ClusterSection(Section):
    """Several processes (docs/cluster.md)."""

    launcher: Literal["none", "local", "torchrun", "ray"] = "none"
    """`none`: one process. `local`: ranks on this machine. `torchrun`: it starts the command on each machine. `ray`:
    conversations, and with `cluster.trainers` ranks, on a Ray cluster."""
    address: NonEmpty | None = None
    """`ray://HOST:10001` from outside of Ray's cluster (`cluster=ray://HOST:10001` is short), `HOST:6379` or `auto` inside.
    Null: RAY_ADDRESS, else a cluster on this machine, else a new one, as `local`."""
    workers: WorkersSection = WorkersSection()
    trainers: Positive | None = None
    """Training ranks. Null: `local`: one per GPU, or 2 without; `ray`: the command's process trains."""
    ranks: RanksSection = RanksSection()
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """How ranks communicate. `auto`: nccl on GPUs, gloo on CPUs."""
    timeout: Seconds = 1800.0
    """Most seconds of a communication."""
    heartbeat: Seconds = 60.0
    """Seconds without a sign of life after which a rank or worker is lost."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often `local` and `ray` start all ranks again after a loss."""
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
    visible = named_gpus()
    gpus = glob.glob("/dev/nvidia[0-9]*") if visible is None else visible
    return len(gpus) or 2


def named_gpus() -> list[str] | None:
    """The GPUs that `CUDA_VISIBLE_DEVICES` names, up to one such as -1, which hides it and all that follow; None: it is not
    set."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    names = (name.strip() for name in given.split(","))
    return list(itertools.takewhile(lambda name: name and not name.startswith("-"), names))
