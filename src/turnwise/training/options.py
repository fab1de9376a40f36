"""Which loss is minimised and how: values that a recipe is translated into. This module imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["LossConfig", "OptimizerConfig", "Schedule", "lr_at"]

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """Which loss is minimised (`loss.make_loss` builds it)."""

    name: Literal["ppo_clip", "nll"] = "ppo_clip"
    """`ppo_clip`: the clipped surrogate of the advantages. `nll`: the negative log-likelihood; advantages are not used."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    """Coefficient of the KL divergence from the reference model. Above 0, the learner holds a reference model."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and gradient clipping. The learning rate is an argument of each update."""

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
