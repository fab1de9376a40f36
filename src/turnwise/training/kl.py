"""Estimates of a KL divergence from tokens that one of the two policies sampled.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import torch

__all__ = ["kl_k3"]


def kl_k3(logprob_N: torch.Tensor, other_logprob_N: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || other) from tokens that the policy sampled: `exp(d) - d - 1`, `d = other - logprob`.

    Unbiased for on-policy tokens, never negative.
    """
    difference_N = other_logprob_N - logprob_N
    return difference_N.exp() - difference_N - 1.0
