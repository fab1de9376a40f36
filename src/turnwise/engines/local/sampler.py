"""Samples tokens: one number of a counter-based random stream for each token, and the inverse of the distribution.

Knows logits and sampling options. Does not know requests: the random number of a token depends only on (seed, index of the
token in the completion), so a request samples the same tokens whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.models.distribution import sampling_logits
from turnwise.types import Sampling

__all__ = ["SampledTokens", "SamplingTensors", "random_stream", "sample_tokens", "uniforms"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def _splitmix64(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 (Steele et al., 2014) on uint64; the multiplications overflow on purpose."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def random_stream(seed: int) -> np.uint64:
    """The start of the random stream of `seed`; hashed, so that neighbouring seeds are unrelated."""
    return _splitmix64(np.array([seed & _WORD], dtype=np.uint64) ^ _STEP)[0]


def uniforms(streams_B: np.ndarray, indices_B: np.ndarray) -> np.ndarray:
    """The `indices_B`-th numbers of `streams_B`: float32 in [0, 1)."""
    words_B = _splitmix64(streams_B + (indices_B.astype(np.uint64) + np.uint64(1)) * _STEP)
    return (words_B >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """The sampling options of a batch, as tensors [B]."""

    unfiltered: bool
    """Whether every request samples from softmax(logits): temperature 1 and no filter."""
    greedy_B: torch.Tensor | None
    """Which requests take the most probable token; None if none does."""
    temperature_B: torch.Tensor
    """1 for greedy requests, whose sampled token is not used."""
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> SamplingTensors:
        """Collect the options of a batch."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        return cls(
            unfiltered=all(sampling.temperature == 1 and not sampling.filtered for sampling in samplings),
            greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature_B=torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=device),
            top_k_B=torch.tensor([sampling.top_k for sampling in samplings], device=device),
            top_p_B=torch.tensor([sampling.top_p for sampling in samplings], device=device),
            min_p_B=torch.tensor([sampling.min_p for sampling in samplings], device=device),
        )


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One token for each request."""

    tokens_B: np.ndarray
    logprobs_B: np.ndarray
    """Under the distribution that was sampled from; 0 for greedy requests."""
    raw_logprobs_B: np.ndarray
    """Under softmax(logits)."""


def sample_tokens(logits_BV: torch.Tensor, options: SamplingTensors, uniforms_B: np.ndarray) -> SampledTokens:
    """Sample one token for each row of float32 logits [B, V], with one uniform random number each."""
    raw_BV = logits_BV.log_softmax(dim=-1)
    if options.unfiltered:
        tokens_B1 = _inverse_cdf(raw_BV.exp(), uniforms_B)
        raw_B = raw_BV.gather(1, tokens_B1).squeeze(1).cpu().numpy()
        return SampledTokens(tokens_B1.squeeze(1).cpu().numpy(), raw_B, raw_B)
    filtered_BV = sampling_logits(
        logits_BV,
        temperature_N=options.temperature_B,
        top_k_N=options.top_k_B,
        top_p_N=options.top_p_B,
        min_p_N=options.min_p_B,
    )
    logprobs_BV = filtered_BV.log_softmax(dim=-1)
    tokens_B1 = _inverse_cdf(logprobs_BV.exp(), uniforms_B)
    logprobs_B1 = logprobs_BV.gather(1, tokens_B1)
    if options.greedy_B is not None:
        greedy_B1 = options.greedy_B.unsqueeze(1)
        tokens_B1 = torch.where(greedy_B1, logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
        logprobs_B1 = logprobs_B1.masked_fill(greedy_B1, 0.0)
    raw_B1 = raw_BV.gather(1, tokens_B1)
    return SampledTokens(*(column.squeeze(1).cpu().numpy() for column in (tokens_B1, logprobs_B1, raw_B1)))


def _inverse_cdf(probs_BV: torch.Tensor, uniforms_B: np.ndarray) -> torch.Tensor:
    """The first token [B, 1] at which the cumulative probability exceeds the uniform number."""
    cumulative_BV = probs_BV.cumsum(dim=-1)
    # scale the uniform number to the actual sum, which is only about 1 after rounding, and stay just below the sum: at the
    # sum, searchsorted would return V, or a token of probability 0
    below_total_B1 = cumulative_BV[:, -1:] * (1.0 - 2.0**-23)
    target_B1 = torch.from_numpy(uniforms_B).to(probs_BV.device).unsqueeze(1) * below_total_B1
    return torch.searchsorted(cumulative_BV, target_B1, right=True)
