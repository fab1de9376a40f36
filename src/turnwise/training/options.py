"""Which loss is minimised and how: values that a recipe is translated into. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = [
    "Cispo",
    "CorrectionConfig",
    "Gspo",
    "LossConfig",
    "Nll",
    "Normalization",
    "Normalizer",
    "OptimizerConfig",
    "PpoClip",
    "ReferenceConfig",
    "Reinforce",
    "Rejection",
    "Sapo",
    "Schedule",
    "lr_at",
]

Schedule = Literal["constant", "linear", "cosine"]


Normalizer = Literal["token", "sequence", "trajectory", "constant"]


@dataclass(frozen=True, slots=True)
class Normalization:
    """How the loss of a batch is averaged over its tokens (`normalizer.token_shares`)."""

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
    """Options of all losses; a class below for each loss (`loss.make_loss` builds it, policy_losses.py has the formulas)."""

    kl_coef: float = 0.0
    """Coefficient of the KL divergence from the reference model. Above 0, the learner holds a reference model."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3"
    """Estimator of the KL divergence in the loss (kl.py)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""
    correction: CorrectionConfig | None = None
    off_policy_sequence_mask_delta: float | None = None
    """Nats (`loss.off_policy_sequence_mask`)."""


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
