"""The input and the output of a loss: columns with one entry for each of the N target tokens of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch

__all__ = ["LossTerms", "Objective", "Targets"]


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
    copies_N: torch.Tensor | None = None
    """The number of segments that the token's sequence stands for, because their tokens and advantages are equal. None: 1.
    `weight_N` is already the sum over them."""
    behaviour_logprob_N: torch.Tensor
    """Log-probability of the token under the policy that sampled it, as the engine reported it; 0 where `known_N` is false."""
    known_N: torch.Tensor
    """Whether the engine reported `behaviour_logprob_N` of the distribution sampled from. Where it did not, the learner
    computes it before the first optimizer step."""
    proximal_logprob_N: torch.Tensor | None = None
    """Log-probability of the token under the weights before the first optimizer step. None if nothing needs it."""
    correction_N: torch.Tensor | None = None
    """Factor of the token's policy loss (rollout correction). None: 1."""
    decoupled: bool = False
    """Whether the ratios of the loss are those to `proximal_logprob_N`, and not to `behaviour_logprob_N`."""
    first_step: bool = False
    """Whether the pass is that before the first optimizer step, without rollout correction: where the present weights have
    sampled (`policy_losses.fresh_tokens`), the ratios of the loss are then 1, however engine and trainer round."""
    version: int | None = None
    """Version of the weights that are trained; None where the targets have no versions."""
    advantage_N: torch.Tensor
    weight_N: torch.Tensor
    """Factor of the token in the loss, above 0. The weights add up to one over the batch, unless the normalizer is `constant`."""

    @property
    def old_logprobs(self) -> torch.Tensor:
        """The log-probabilities in the denominator of the loss's probability ratios."""
        return (
            self.proximal_logprob_N
            if self.decoupled and self.proximal_logprob_N is not None
            else self.behaviour_logprob_N
        )

    @property
    def counts(self) -> torch.Tensor:
        """How often each token counts in metrics and means over all segments of the batch. Float32, shape [N]."""
        return torch.ones_like(self.weight_N) if self.copies_N is None else self.copies_N.to(self.weight_N.dtype)

    def with_correction(self, correction_N: torch.Tensor, factor: float) -> Targets:
        """With importance weights, and the weights of the average multiplied by `factor`."""
        return replace(self, correction_N=correction_N, weight_N=self.weight_N * factor)

    def select(self, keep_N: torch.Tensor) -> Targets:
        """The targets for which `keep_N` is true."""
        return replace(self, **{name: column[keep_N] for name, column in self._columns().items()})

    def _columns(self) -> dict[str, torch.Tensor]:
        values = {column.name: getattr(self, column.name) for column in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}

    def to(self, device: torch.device) -> Targets:
        """The same on another device."""
        return replace(self, **{name: column.to(device) for name, column in self._columns().items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What a loss returns. Only `loss_N` has a gradient; the others are metrics."""

    loss_N: torch.Tensor
    """To be minimised, averaged by `Targets.weight_N`."""
    kl_N: torch.Tensor
    """Estimate of the KL divergence that is reported: from the reference model, or from the policy that sampled."""
    clipped: torch.Tensor
    """How many tokens have a probability ratio outside the bounds of the loss, by `Targets.counts`. Shape []."""
    max_deviation: torch.Tensor
    """Largest `|ratio - 1|` of the tokens with a reported log-probability. Shape []."""


Objective = Callable[[torch.Tensor, Targets], LossTerms]
"""`(logprob_N, targets) -> terms`: a loss without the terms for reference model and entropy."""
