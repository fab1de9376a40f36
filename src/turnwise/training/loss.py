"""Losses: pure functions from log-probabilities and targets to one number for each target token.

A loss is a function `(logprob_N, targets) -> LossTerms`. To add a loss, write the function and name it in `make_loss`. How the
tokens are averaged is decided by the batch (`Targets.weight_N`). N counts the target tokens of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

from turnwise.training.options import LossConfig

__all__ = ["Loss", "LossTerms", "Objective", "Targets", "kl_k3", "make_loss", "nll", "ppo_clip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The target tokens of a micro-batch: all columns have one entry for each of N tokens.

    All target tokens of a sequence are in the same micro-batch, in their order, so a loss may combine them.

    Example: two completions `a b` and `c` of one turn each, `c` from an older version of the weights::

        token_N = a b c    sequence_N = 0 0 1    turn_N = 0 0 0    version_N = 7 7 6
    """

    token_N: torch.Tensor
    """The sampled token."""
    sequence_N: torch.Tensor
    """Number of the sequence (segment) that the token is in; unique in the batch, over all its micro-batches."""
    turn_N: torch.Tensor
    """Index of the turn that sampled the token, in its trajectory."""
    version_N: torch.Tensor
    """Version of the weights that sampled the token."""
    behaviour_logprob_N: torch.Tensor
    """Log-probability of the token under the policy that sampled it, as the engine reported it; 0 where `known_N` is false."""
    known_N: torch.Tensor
    """Whether the engine reported `behaviour_logprob_N` of the distribution sampled from. Where it did not, the learner
    computes it before the first optimizer step."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    """Share of the token in the batch's average, above 0. The weights add up to one over the batch."""

    def to(self, device: torch.device) -> Targets:
        """The same on another device."""
        return Targets(**{column.name: getattr(self, column.name).to(device) for column in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss returns. Only `loss_N` has a gradient; the others are metrics."""

    loss_N: torch.Tensor
    """To be minimised, averaged by `Targets.weight_N`."""
    kl_N: torch.Tensor
    """Estimate of the KL divergence that is reported: from the reference model, or from the policy that sampled."""
    clipped: torch.Tensor
    """How many tokens have a probability ratio outside the clip bounds. Shape []."""
    max_deviation: torch.Tensor
    """Largest `|ratio - 1|` of the tokens with a reported log-probability. Shape []."""


Objective = Callable[[torch.Tensor, Targets], LossTerms]
"""`(logprob_N, targets) -> terms`: a loss without the terms for reference model and entropy."""


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
    """The loss that the configuration names: the one place where a name becomes a loss."""
    if config.name == "nll":
        return Loss(
            objective=nll,
            needs_behaviour_logprobs=False,
            kl_coef=config.kl_coef,
            entropy_coef=config.entropy_coef,
        )
    return Loss(
        objective=functools.partial(ppo_clip, clip_low=config.clip_low, clip_high=config.clip_high),
        needs_behaviour_logprobs=True,
        kl_coef=config.kl_coef,
        entropy_coef=config.entropy_coef,
    )


def ppo_clip(logprob_N: torch.Tensor, targets: Targets, *, clip_low: float = 0.2, clip_high: float = 0.2) -> LossTerms:
    """Clipped surrogate: `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(logprob - behaviour_logprob)`.

    Papers: PPO, arXiv 1707.06347; unequal bounds from DAPO, arXiv 2503.14476.
    """
    ratio_N = (logprob_N - targets.behaviour_logprob_N).exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss_N = -torch.minimum(ratio_N * targets.advantage_N, clipped_N * targets.advantage_N)
    with torch.no_grad():
        return LossTerms(
            loss_N=loss_N,
            kl_N=kl_k3(logprob_N, targets.behaviour_logprob_N),
            clipped=((ratio_N < 1.0 - clip_low) | (ratio_N > 1.0 + clip_high)).sum(),
            max_deviation=_max_deviation(ratio_N, targets.known_N),
        )


def nll(logprob_N: torch.Tensor, targets: Targets) -> LossTerms:
    """Negative log-likelihood of tokens that were written by others: `-logprob`, the cross-entropy with the token itself."""
    nothing = logprob_N.new_zeros(())
    return LossTerms(loss_N=-logprob_N, kl_N=torch.zeros_like(targets.weight_N), clipped=nothing, max_deviation=nothing)


def kl_k3(logprob_N: torch.Tensor, other_logprob_N: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || other) from tokens that the policy sampled: `exp(d) - d - 1`, `d = other - logprob`.

    Unbiased for on-policy tokens, never negative. Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    difference_N = other_logprob_N - logprob_N
    return difference_N.exp() - difference_N - 1.0


def _max_deviation(ratio_N: torch.Tensor, known_N: torch.Tensor) -> torch.Tensor:
    # a NaN would be lost when Python's `max` compares micro-batches, so it counts as infinite
    deviation_N = (ratio_N - 1.0).abs().nan_to_num(nan=torch.inf)
    return torch.where(known_N, deviation_N, 0.0).amax()
