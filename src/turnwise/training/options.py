"""Which loss is minimised and how, and how several processes train a model together.

These are the values that a recipe is translated into: loss, correction, reference model, optimizer, ranks and critic. Knows
numbers and names. Does not know recipes or models, and imports no torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from turnwise.types import Sampling

if TYPE_CHECKING:
    from turnwise.models.loading import ModelOptions


# Loss, optimizer and reference model

Schedule = Literal["constant", "linear", "cosine"]


Normalizer = Literal["token", "sequence", "trajectory", "constant"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """How the loss of a batch is averaged over its tokens (`batch.token_shares`)."""

    normalizer: Normalizer = "token"
    constant_length: int | None = None
    """Tokens; for `constant`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """Removes tokens or sequences whose divergence is outside the bounds."""

    level: Literal["token", "sequence", "geometric", "max"] = "sequence"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    low: float | None = None
    """For k1, a ratio."""
    high: float = 2.0
    """For k1, a ratio; for k2 and k3, a divergence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionConfig:
    """Rollout correction (`correction.correct`). The bounds are ratios at `level`."""

    level: Literal["token", "sequence", "geometric"] = "token"
    action: Literal["truncate", "mask", "icepop", "reject", "measure"] = "truncate"
    weight_level: Literal["token", "sequence", "geometric"] | None = None
    """The level of the weight where `mask` and `icepop` keep it; None: `level`."""
    low: float | None = None
    high: float | None = 2.0
    reject: Rejection | None = None
    """A second rule, beside `action`."""
    normalize_weights: bool = False
    """Whether the weights are divided by their mean."""
    decoupled: bool = True
    """Whether the ratios of the loss are those to the weights before the update; else to the policy that sampled."""
    rescale: bool = True
    """Whether the other tokens count more if tokens are rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Options of all losses; a class below for each loss (`losses.make_loss` builds it; losses.py has the formulas)."""

    kl_coef: float = 0.0
    """Coefficient of the KL divergence from the reference model. Above 0, the learner holds a reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3"
    """Estimator of the KL divergence in the loss (losses.py)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    correction: CorrectionConfig | None = None
    off_policy_sequence_mask_delta: float | None = None
    """Nats (`losses.off_policy_sequence_mask`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoClip(LossConfig):
    """The clipped surrogate of PPO."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo(LossConfig):
    """The clipped surrogate with one ratio for each sequence or turn."""

    clip_low: float = 3e-4
    clip_high: float = 4e-4
    level: Literal["sequence", "turn"] = "sequence"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo(LossConfig):
    """REINFORCE with clipped importance weights."""

    clip_low: float = 1.0
    clip_high: float = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sapo(LossConfig):
    """A soft gate on the probability ratio."""

    tau_positive: float = 1.0
    tau_negative: float = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Reinforce(LossConfig):
    """The log-probability times the advantage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nll(LossConfig):
    """The negative log-likelihood, for fine-tuning; advantages are not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceConfig:
    """The reference model of a KL divergence."""

    path: str | Path | None = None
    """The path of the reference model. None: the model before training."""
    separate: bool = False
    """Whether the reference model of a model with an adapter has weights of its own, instead of the model's own weights without
    the adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and gradient clipping. The learning rate is an argument of each update."""

    name: Literal["adamw", "adamw_8bit", "adafactor"] = "adamw"
    """`adamw`: AdamW. `adamw_8bit`: AdamW with moving averages of 8 bits, by bitsandbytes. `adafactor`: Adafactor (Shazeer and
    Stern, 2018, arXiv 1804.04235), which keeps a row and a column for each weight matrix, and has no `betas`."""
    master_weights: Literal["float32", "none", "kahan", "stochastic_rounding"] = "float32"
    """How parameters of lower precision keep small steps. `float32`: by a float32 copy. `kahan`: by a second bfloat16 number with
    the rounding error. `stochastic_rounding`: by rounding up or down at random. `none`: not at all."""
    offload: Literal["none", "cpu"] = "none"
    """`cpu`: the optimizer's state and the master weights of a model on a GPU are in the CPU's memory."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0


def lr_at(step: int, *, lr: float, schedule: Schedule, warmup_steps: int, steps: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then constant, or decay to 0 (linear or cosine)."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(steps - warmup_steps, 1)
    if schedule == "linear":
        return lr * (1.0 - progress)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * progress))
    return lr


# Several ranks, and the critic

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
    loss: LossConfig
    optimizer: OptimizerConfig
    sharding: ShardingOptions
    reference: ReferenceConfig | None = None
    share_prompts: str = "auto"
    autocast: bool = False
    deterministic: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticOptions:
    """Everything that a rank needs to build its part of the critic."""

    model: ModelOptions
    optimizer: OptimizerConfig
    sharding: ShardingOptions
    clip: float | None = None
    """The bound of value clipping."""
    head: Path | None = None
    """The directory of a saved value head. None: the head starts with zeros."""
    share_prompts: str = "auto"
    autocast: bool = False
