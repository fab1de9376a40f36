"""The section `cluster` of a recipe: training and conversations in several processes, on one or several machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from turnwise.config.section import NonEmpty, NotNegative, Positive, Seconds, Section

__all__ = ["ClusterSection", "FsdpSection", "RanksSection", "WorkersSection"]


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
