"""A loss with all its terms: the policy loss that the recipe names, the KL divergence from a reference model, the entropy bonus.

A policy loss is a function `(logprob_N, targets) -> LossTerms` (policy_losses.py). To add one, write the function and name it in
`make_loss`. How the tokens are averaged is decided by the batch (`Targets.weight_N`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

from turnwise.training import policy_losses
from turnwise.training.kl import kl_k3
from turnwise.training.options import Cispo, Gspo, LossConfig, Nll, PpoClip, Reinforce, Sapo
from turnwise.training.targets import LossTerms, Objective, Targets

__all__ = ["Loss", "make_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An objective, plus `kl_coef` times the KL divergence from the reference model, minus `entropy_coef` times the entropy."""

    objective: Objective
    needs_behaviour_logprobs: bool
    """Whether the objective uses `Targets.behaviour_logprob_N`."""
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log-probabilities of the reference model."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the entropy of each target's distribution."""
        return self.entropy_coef != 0.0

    @property
    def needs_zero_advantages(self) -> bool:
        """Whether tokens with advantage 0 have a gradient."""
        return self.needs_reference or self.needs_entropy

    def __call__(
        self,
        logprob_N: torch.Tensor,
        targets: Targets,
        *,
        reference_logprob_N: torch.Tensor | None = None,
        entropy_N: torch.Tensor | None = None,
    ) -> LossTerms:
        terms = self.objective(logprob_N, targets)
        if reference_logprob_N is not None:
            kl_N = kl_k3(logprob_N, reference_logprob_N)
            terms = replace(terms, loss_N=terms.loss_N + self.kl_coef * kl_N, kl_N=kl_N.detach())
        if entropy_N is not None:
            terms = replace(terms, loss_N=terms.loss_N - self.entropy_coef * entropy_N)
        return terms


def make_loss(config: LossConfig) -> Loss:
    """The loss that the configuration describes."""
    return Loss(
        objective=_objective(config),
        needs_behaviour_logprobs=not isinstance(config, Nll),
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )


def _objective(config: LossConfig) -> Objective:
    """The function of the configuration's class: the one place where a configuration becomes a loss."""
    match config:
        case PpoClip(clip_low=low, clip_high=high, dual_clip=dual):
            dual = math.inf if dual is None else dual
            return functools.partial(policy_losses.ppo_clip, clip_low=low, clip_high=high, dual_clip=dual)
        case Gspo(clip_low=low, clip_high=high, level=level):
            return functools.partial(policy_losses.gspo, clip_low=low, clip_high=high, level=level)
        case Cispo(clip_low=low, clip_high=high):
            return functools.partial(policy_losses.cispo, clip_low=low, clip_high=high)
        case Sapo(tau_positive=positive, tau_negative=negative):
            return functools.partial(policy_losses.sapo, tau_positive=positive, tau_negative=negative)
        case Reinforce():
            return policy_losses.reinforce
        case Nll():
            return policy_losses.nll
        case _:
            raise TypeError(f"there is no loss for {config!r}")
