"""What a rank needs to build its part of the learner and of the critic, and how the ranks communicate.

Knows sections of a recipe and numbers. Does not know complete recipes or models, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turnwise.options.algorithm import CorrectionSection, LossSection, OptimizationSection, ReferenceSection
from turnwise.types import Sampling

if TYPE_CHECKING:
    from turnwise.models.loading import ModelOptions


SMALL_GRADIENTS = 2**30
"""Bytes: with at most as many for the gradients of all trained weights, `gradient_sync: auto` adds them up once for a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How the ranks communicate."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """`auto`: nccl on GPUs, gloo on CPUs."""
    device: str = "auto"
    """`auto`, `cpu` or `cuda`: the kind of device of each rank."""
    timeout: float = 1800.0
    """Seconds after which a collective operation that does not end is an error."""
    heartbeat: float = 60.0
    """Seconds without a sign of life after which a rank counts as lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingOptions:
    """How the model is divided among the ranks (torch's `fully_shard`)."""

    param_dtype: str | None = None
    """The name of the torch dtype in which weights are gathered and passes are computed; None: that of the parameters."""
    reduce_dtype: str = "float32"
    """The torch dtype in which gradients are added up."""
    reshard_after_forward: bool = True
    """Whether the gathered weights of a layer are freed between the forward and the backward pass."""
    gradient_sync: Literal["auto", "micro_batch", "batch"] = "auto"
    """When the ranks add up their gradients: after each micro-batch, or once for each batch. `auto`: once, if the gradients of
    all trained weights are small."""
    offload: bool = False
    """Whether the shards of parameters, gradients and optimizer state are in the CPU's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOptions:
    """Everything that a rank needs to build its part of the learner. Rank 0 sends it to the other ranks."""

    model: ModelOptions
    sampling: Sampling
    loss: LossSection
    correction: CorrectionSection = CorrectionSection()
    optimizer: OptimizationSection
    sharding: ShardingOptions
    reference: ReferenceSection | None = None
    share_prompts: str = "auto"
    autocast: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions:
    """Everything that a rank needs to build its part of the critic."""

    model: ModelOptions
    optimizer: OptimizationSection
    sharding: ShardingOptions
    clip: float | None = None
    """The bound of value clipping."""
    head: Path | None = None
    """The directory of a saved value head. None: the head starts with zeros."""
    share_prompts: str = "auto"
    autocast: bool = False
