"""A loss with all its terms: the policy loss that the recipe names, the KL divergence from a reference model, the entropy bonus.

A policy loss is a function `(logprob_N, targets) -> LossTerms` (policy_losses.py). To add one, write the function and name it in
`make_loss`. How the tokens are averaged is decided by the batch (`Targets.weight_N`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from turnwise.training import policy_losses
from turnwise.training.kl import kl_estimate
from turnwise.training.options import Cispo, CorrectionConfig, Gspo, LossConfig, Nll, PpoClip, Reinforce, Sapo
from turnwise.training.targets import LossTerms, Objective, Targets

__all__ = ["Loss", "make_loss", "off_policy_sequence_mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """An objective, plus `kl_coef` times the KL divergence from the reference model, minus `entropy_coef` times the entropy."""

    objective: Objective
    needs_behaviour_logprobs: bool
    """Whether the objective uses `Targets.behaviour_logprob_N`."""
    kl_coef: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3", "k3_corrected"] = "k3"
    entropy_coef: float = 0.0
    correction: CorrectionConfig | None = None
    off_policy_sequence_mask_delta: float | None = None

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
        if targets.correction_N is not None:
            terms = replace(terms, loss_N=terms.loss_N * targets.correction_N)
        delta = self.off_policy_sequence_mask_delta
        if delta is not None:
            terms = replace(terms, loss_N=terms.loss_N * off_policy_sequence_mask(logprob_N, targets, delta))
        if reference_logprob_N is not None:
            kl_N = kl_estimate(logprob_N, reference_logprob_N, self.kl_estimator, targets.old_logprobs)
            terms = replace(terms, loss_N=terms.loss_N + self.kl_coef * kl_N, kl_N=kl_N.detach())
        if entropy_N is not None:
            terms = replace(terms, loss_N=terms.loss_N - self.entropy_coef * entropy_N)
        return terms


@torch.no_grad()
def off_policy_sequence_mask(logprob_N: torch.Tensor, targets: Targets, delta: float) -> torch.Tensor:
    """0 for tokens with a negative advantage in sequences that the present policy finds unlikely, else 1. Shape [N].

    A sequence is unlikely if the mean of `behaviour_logprob - logprob` over its tokens is above `delta`. DeepSeek-V3.2, arXiv
    2512.02556. The denominators of the average do not change.
    """
    divergence_N = policy_losses.mean_of_groups(
        targets.behaviour_logprob_N - logprob_N, policy_losses.groups_of(targets, "sequence")
    )
    return torch.where((targets.advantage_N < 0) & (divergence_N > delta), 0.0, 1.0)


def make_loss(config: LossConfig) -> Loss:
    """The loss that the configuration describes."""
    return Loss(
        objective=_objective(config),
        needs_behaviour_logprobs=not isinstance(config, Nll),
        kl_coef=config.kl_coef,
        kl_estimator=config.kl_estimator,
        entropy_coef=config.entropy_coef,
        correction=config.correction,
        off_policy_sequence_mask_delta=config.off_policy_sequence_mask_delta,
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
