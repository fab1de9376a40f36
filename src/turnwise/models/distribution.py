"""The distribution that tokens are sampled from: a single definition for the sampler and the trainer.

With two definitions, the probability ratio before the first optimizer step would not be 1 as soon as a filter is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The tokens that a grammar allows at each of N places, as bits: places with equal sets share a row."""

    words_MW: torch.Tensor
    """int32 [M, W]: token `t` is allowed if bit `t % 32` of word `t // 32` is set."""
    index_N: torch.Tensor
    """The row of each place, int64; -1: every token is allowed."""

    def at(self, place_C: torch.Tensor) -> AllowedTokens:
        """Those of some places."""
        return AllowedTokens(self.words_MW, self.index_N[place_C])

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> AllowedTokens:
        """The same with `move(tensor)` in place of each tensor."""
        return AllowedTokens(move(self.words_MW), move(self.index_N))

    def mask(self, vocabulary: int) -> torch.Tensor:
        """Which of the first `vocabulary` tokens are allowed, bool [N, V]. Tokens without a bit are not."""
        bit_32 = torch.arange(32, device=self.words_MW.device, dtype=torch.int32)
        bits_NV = ((self.words_MW[self.index_N.clamp_min(0)].unsqueeze(-1) >> bit_32) & 1).flatten(1)[:, :vocabulary]
        allowed_NV = torch.nn.functional.pad(bits_NV.bool(), (0, vocabulary - bits_NV.shape[1]))
        return allowed_NV | (self.index_N < 0).unsqueeze(-1)


def sampling_logits(
    logits_NV: torch.Tensor,
    *,
    temperature_N: torch.Tensor | float = 1.0,
    top_k_N: torch.Tensor | int = 0,
    top_p_N: torch.Tensor | float = 1.0,
    min_p_N: torch.Tensor | float = 0.0,
    keep_N: torch.Tensor | None = None,
    allowed: AllowedTokens | None = None,
) -> torch.Tensor:
    """Logits [N, V] after the mask of a grammar, temperature, top-k, top-p and min-p, in that order; removed tokens are -inf.

    Every option is a number for all rows or a tensor [N]. Temperatures must be positive: greedy sampling has no distribution.
    Top-p (Holtzman et al., 2020) keeps the smallest set of tokens whose probability reaches it, and at least one token. Min-p
    (Nguyen et al., 2024) keeps tokens with at least this fraction of the largest probability. `keep_N` is a token of each row
    that no filter removes: the trainer passes the sampled token, so that a rounding difference at the edge of a filter does not
    give it probability 0.
    """
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    if allowed is not None:
        logits_NV = logits_NV.masked_fill(~allowed.mask(logits_NV.shape[1]), -torch.inf)
    # numbers are compared here, not as tensors: the host would wait for a GPU
    if _differ(temperature_N, 1.0):
        logits_NV = logits_NV / _column(temperature_N, logits_NV.device).float()
    use_k, use_p, use_m = _differ(top_k_N, 0), _differ(top_p_N, 1.0), _differ(min_p_N, 0.0)
    if not (use_k or use_p or use_m):
        return logits_NV
    top_k_N1, top_p_N1, min_p_N1 = (_column(option, logits_NV.device) for option in (top_k_N, top_p_N, min_p_N))
    with torch.no_grad():
        removed_NV = torch.zeros_like(logits_NV, dtype=torch.bool)
        if use_k or use_p:
            sorted_NV, order_NV = logits_NV.detach().sort(dim=-1, descending=True)
            rank_V = torch.arange(sorted_NV.shape[-1], device=logits_NV.device)
            cut_NV = torch.zeros_like(removed_NV)
            if use_k:
                cut_NV |= (top_k_N1 > 0) & (rank_V >= top_k_N1)
            if use_p:
                probs_NV = sorted_NV.masked_fill(cut_NV, -torch.inf).softmax(dim=-1)
                before_NV = cumulative(probs_NV) - probs_NV
                cut_NV |= (top_p_N1 < 1.0) & (before_NV >= top_p_N1) & (rank_V > 0)
            removed_NV.scatter_(-1, order_NV, cut_NV)
        if use_m:
            # the ratio to the largest probability does not depend on the normalization
            gap_NV = logits_NV.detach() - logits_NV.detach().amax(dim=-1, keepdim=True)
            removed_NV |= gap_NV < min_p_N1.clamp_min(0.0).log()
        if keep_N is not None:
            removed_NV.scatter_(-1, keep_N.unsqueeze(-1), False)
    return logits_NV.masked_fill(removed_NV, -torch.inf)


def cumulative(probs_NV: torch.Tensor) -> torch.Tensor:
    """The cumulative sums of each row, which never fall.

    A single row gets a second one beside it on a GPU: torch gives a row alone to another kernel there, whose sums need not rise
    and differ from run to run (pytorch issues 21780 and 75240), so that a token of probability 0 could be drawn.
    """
    alone = len(probs_NV) == 1 and probs_NV.is_cuda
    return (probs_NV.expand(2, -1) if alone else probs_NV).cumsum(dim=-1)[: len(probs_NV)]


def _differ(option_N: torch.Tensor | float, without: float) -> bool:
    """Whether an option has an effect on a row. `without` is its value without effect."""
    return bool((option_N != without).any()) if isinstance(option_N, torch.Tensor) else option_N != without


def _column(option_N: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """An option as a tensor [N, 1], or [1, 1]."""
    return torch.as_tensor(option_N, device=device).reshape(-1, 1)
