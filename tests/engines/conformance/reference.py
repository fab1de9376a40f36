"""What the transformers model says about sampled tokens: an own formula in float64, independent of the engines' code."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from turnwise.types import LogprobKind, Sampling


def logits_of(model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
    """The model's logits [tokens, vocabulary] in float64 for each of the tokens after the prompt."""
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([[*prompt, *token_ids]])).logits[0]
    return logits_TV[len(prompt) - 1 : -1].double()


def reference_logprobs(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], sampling: Sampling, kind: LogprobKind
) -> list[float]:
    """The log-probabilities of the tokens, of the given kind.

    In greedy decoding the sampled distribution has one token, with log-probability 0, and there is no temperature.
    """
    logits_TV = logits_of(model, prompt, token_ids)
    greedy = sampling.temperature == 0
    if kind is LogprobKind.SAMPLED and greedy:
        return [0.0] * len(token_ids)
    if kind is not LogprobKind.RAW and not greedy:
        logits_TV = logits_TV / sampling.temperature
    if kind is LogprobKind.SAMPLED:
        allowed_TV = torch.stack([allowed(row_V, sampling) for row_V in logits_TV])
        # a token at the edge of a filter may be on the other side of it in float32
        allowed_TV.scatter_(1, torch.tensor(token_ids)[:, None], True)
        logits_TV = logits_TV.masked_fill(~allowed_TV, -torch.inf)
    logprobs_TV = logits_TV.log_softmax(-1)
    return logprobs_TV.gather(1, torch.tensor(token_ids)[:, None])[:, 0].tolist()


def allowed(logits_V: torch.Tensor, sampling: Sampling, *, slack: float = 0.0) -> torch.Tensor:
    """Which tokens the filters allow, for logits after the temperature. `slack` widens the filters, for rounding."""
    probs_V = logits_V.softmax(-1)
    allowed_V = torch.ones_like(probs_V, dtype=torch.bool)
    order_V = probs_V.argsort(descending=True)
    if sampling.top_k:
        allowed_V &= probs_V >= probs_V[order_V[sampling.top_k - 1]] - slack
    if sampling.top_p < 1:
        before_V = torch.zeros_like(probs_V)
        before_V[order_V] = probs_V[order_V].cumsum(0) - probs_V[order_V]
        allowed_V &= before_V < sampling.top_p + slack
    if sampling.min_p:
        allowed_V &= probs_V >= sampling.min_p * probs_V.max() - slack
    return allowed_V


def assert_could_be_sampled(
    model: PreTrainedModel, prompt: Sequence[int], token_ids: Sequence[int], sampling: Sampling
) -> None:
    """Assert that the filters allow each of the tokens; in greedy decoding, that no token is more probable."""
    for position, (row_V, token) in enumerate(zip(logits_of(model, prompt, token_ids), token_ids, strict=True)):
        if sampling.temperature == 0:
            assert row_V[token] >= row_V.max() - 1e-4, (
                f"token {position} is {token}, and {row_V.argmax()} is more probable"
            )
        else:
            assert allowed(row_V / sampling.temperature, sampling, slack=1e-5)[token], f"token {position} is filtered"
