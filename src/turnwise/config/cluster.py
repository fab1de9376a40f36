"""The section `cluster` of a recipe: training by several processes, on one or several machines."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from turnwise.config.section import Positive, Seconds, Section

__all__ = ["ClusterSection", "FsdpSection"]


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


class ClusterSection(Section):
    """Training by several processes, which are called ranks (docs/cluster.md). Instead of `{launcher: name}` you can write
    only the name: `cluster: local`."""

    launcher: Literal["none", "local", "torchrun"] = "none"
    """What starts the ranks. `none`: training runs in one process. `local`: turnwise starts all ranks on this machine.
    `torchrun`: the command is started by torchrun, on one or several machines."""
    trainers: Positive | None = None
    """The number of ranks that `cluster.launcher=local` starts. Null: one for each GPU of the machine; 2 without GPUs."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """The library for the communication of the ranks. `auto`: nccl on GPUs, gloo on CPUs."""
    timeout: Seconds = 1800.0
    """The time limit of a communication between ranks in seconds. The run ends with an error if a rank does not take part in
    time."""
    heartbeat: Seconds = 60.0
    """The number of seconds after which a rank that gives no sign of life is lost, and the run ends with an error. Each process
    gives one each second."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """How often `cluster.launcher=local` starts all ranks again after a rank was lost. The run then resumes from its newest
    checkpoint. 0: never."""
    fsdp: FsdpSection = FsdpSection()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: Any) -> Any:
        return {"launcher": value} if isinstance(value, str) else value

    @property
    def distributed(self) -> bool:
        """Whether training runs in several processes."""
        return self.launcher != "none"
