"""Losses as pure functions of named tensors, one number for each sampled token. How they are averaged is the batch's affair."""

from __future__ import annotations

import torch

__all__ = ["kl_k3", "nll", "ppo_clip"]


def ppo_clip(
    logprob_N: torch.Tensor,
    old_logprob_N: torch.Tensor,
    advantage_N: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> torch.Tensor:
    """Clipped surrogate, to be minimised: `-min(r A, clip(r, 1 - low, 1 + high) A)` with `r = exp(logprob - old)`.

    Papers: PPO, arXiv 1707.06347; unequal bounds from DAPO, arXiv 2503.14476.
    """
    ratio_N = (logprob_N - old_logprob_N).exp()
    clipped_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_N * advantage_N, clipped_N * advantage_N)


def nll(logprob_N: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of tokens that somebody else has written: `-logprob`, cross-entropy with the token itself."""
    return -logprob_N


def kl_k3(logprob_N: torch.Tensor, other_logprob_N: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || other) from tokens that the policy sampled: `exp(d) - d - 1`, `d = other - logprob`.

    Unbiased for on-policy tokens, never negative. Schulman 2020, "Approximating KL divergence", estimator k3.
    """
    difference_N = other_logprob_N - logprob_N
    return difference_N.exp() - difference_N - 1.0
