"""How a token is drawn: one number of a counter-based stream for each token, and the inverse of the distribution.

It knows logits and options. It refuses to know requests: the number depends on (seed, index of the token) and on nothing
else, so a request draws the same numbers in whatever company it is decoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from turnwise.models.distribution import sampling_logits
from turnwise.types import Sampling

__all__ = ["Drawn", "Options", "draw", "stream", "uniforms"]

_STEP = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def _mixed(state: np.ndarray) -> np.ndarray:
    """The output function of splitmix64 on uint64; overflow is what it is about."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def stream(seed: int) -> np.uint64:
    """Where the random stream of `seed` starts: mixed once, so that neighbouring seeds have nothing in common."""
    return _mixed(np.array([seed & _WORD], dtype=np.uint64) ^ _STEP)[0]


def uniforms(streams_B: np.ndarray, indices_B: np.ndarray) -> np.ndarray:
    """The `indices_B`-th numbers of `streams_B`: float32 in [0, 1)."""
    words_B = _mixed(streams_B + (indices_B.astype(np.uint64) + np.uint64(1)) * _STEP)
    return (words_B >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


@dataclass(frozen=True, slots=True)
class Options:
    """The sampling options of the rows of a batch, as tensors [B]; made anew only when the batch changes."""

    plain: bool
    """Whether every row samples from the bare softmax."""
    greedy_B: torch.Tensor | None
    """Which rows take the most probable token; None where none does."""
    temperature_B: torch.Tensor
    """1 where the row is greedy: its draw is thrown away."""
    top_k_B: torch.Tensor
    top_p_B: torch.Tensor
    min_p_B: torch.Tensor

    @classmethod
    def of(cls, samplings: Sequence[Sampling], device: torch.device) -> Options:
        """Collect the options of these rows."""
        greedy = [sampling.temperature == 0 for sampling in samplings]
        return cls(
            plain=all(sampling.temperature == 1 and not sampling.filtered for sampling in samplings),
            greedy_B=torch.tensor(greedy, device=device) if any(greedy) else None,
            temperature_B=torch.tensor([sampling.temperature or 1.0 for sampling in samplings], device=device),
            top_k_B=torch.tensor([sampling.top_k for sampling in samplings], device=device),
            top_p_B=torch.tensor([sampling.top_p for sampling in samplings], device=device),
            min_p_B=torch.tensor([sampling.min_p for sampling in samplings], device=device),
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """One token a row."""

    tokens_B: np.ndarray
    logprobs_B: np.ndarray
    """Of the distribution sampled from."""
    raw_logprobs_B: np.ndarray
    """Of `softmax(logits)`."""


def draw(logits_BV: torch.Tensor, options: Options, uniforms_B: np.ndarray) -> Drawn:
    """Draw one token a row from float32 logits [B, V]."""
    raw_BV = logits_BV.log_softmax(dim=-1)
    if options.plain:
        tokens_B1 = _inverse(raw_BV.exp(), uniforms_B)
        raw_B = raw_BV.gather(1, tokens_B1).squeeze(1).cpu().numpy()
        return Drawn(tokens_B1.squeeze(1).cpu().numpy(), raw_B, raw_B)
    filtered_BV = sampling_logits(
        logits_BV,
        temperature_N=options.temperature_B,
        top_k_N=options.top_k_B,
        top_p_N=options.top_p_B,
        min_p_N=options.min_p_B,
    )
    logprobs_BV = filtered_BV.log_softmax(dim=-1)
    tokens_B1 = _inverse(logprobs_BV.exp(), uniforms_B)
    logprobs_B1 = logprobs_BV.gather(1, tokens_B1)
    if options.greedy_B is not None:
        greedy_B1 = options.greedy_B.unsqueeze(1)
        tokens_B1 = torch.where(greedy_B1, logits_BV.argmax(dim=-1, keepdim=True), tokens_B1)
        logprobs_B1 = logprobs_B1.masked_fill(greedy_B1, 0.0)
    raw_B1 = raw_BV.gather(1, tokens_B1)
    return Drawn(*(column.squeeze(1).cpu().numpy() for column in (tokens_B1, logprobs_B1, raw_B1)))


def _inverse(probs_BV: torch.Tensor, uniforms_B: np.ndarray) -> torch.Tensor:
    """The first token [B, 1] at which the cumulated probability passes the uniform number."""
    cumulated_BV = probs_BV.cumsum(dim=-1)
    # the sum is only about 1; and just below it, because at it there is no token left that the sum grows at
    below_B1 = cumulated_BV[:, -1:] * (1.0 - 2.0**-23)
    target_B1 = torch.from_numpy(uniforms_B).to(probs_BV.device).unsqueeze(1) * below_B1
    return torch.searchsorted(cumulated_BV, target_B1, right=True)
