"""Estimates of a KL divergence from tokens that one of the two policies sampled.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

__all__ = ["kl_estimate", "kl_k3", "kl_numbers"]


def kl_k3(logprob_N: torch.Tensor, other_logprob_N: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(policy || other) from tokens that the policy sampled: `exp(d) - d - 1`, `d = other - logprob`.

    Unbiased for on-policy tokens, never negative.
    """
    difference_N = other_logprob_N - logprob_N
    return difference_N.exp() - difference_N - 1.0


def kl_estimate(
    logprob_N: torch.Tensor,
    other_logprob_N: torch.Tensor,
    estimator: Literal["k1", "k2", "k3", "k3_corrected"],
    old_logprob_N: torch.Tensor,
) -> torch.Tensor:
    """An estimate of KL(policy || other) for each token, with `d = logprob - other`:

    - `k1`: `d`. Its expected gradient is 0 for on-policy tokens, so that it only adds noise to a loss.
    - `k2`: `d^2 / 2`. Its expected gradient is that of the KL divergence.
    - `k3`: `exp(-d) + d - 1`. An unbiased value; its expected gradient is that of KL(other || policy).
    - `k3_corrected`: k3 times `exp(logprob - old)`, the ratio to the policy that sampled: value and gradient are unbiased also
      for off-policy tokens. DeepSeek-V3.2, arXiv 2512.02556.
    """
    difference_N = logprob_N - other_logprob_N
    if estimator == "k1":
        return difference_N
    if estimator == "k2":
        return difference_N.square() / 2
    k3_N = kl_k3(logprob_N, other_logprob_N)
    return k3_N if estimator == "k3" else k3_N * (logprob_N - old_logprob_N).exp()


def kl_numbers(
    logprobs: Sequence[float], other_logprobs: Sequence[float], estimator: Literal["k1", "k2", "k3"]
) -> list[float]:
    """`kl_estimate` for lists of log-probabilities, in float64."""
    logprob_N, other_logprob_N = (torch.tensor(values, dtype=torch.float64) for values in (logprobs, other_logprobs))
    return kl_estimate(logprob_N, other_logprob_N, estimator, logprob_N).tolist()
