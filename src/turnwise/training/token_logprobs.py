"""Log-probabilities of targets from hidden states, without the logits [N, V] of all targets in memory at once.

The output layer runs on chunks of targets. A chunk's logits are dropped after use; the backward pass computes them again. So
the largest tensor is [C, V] for a chunk of C targets, in both passes, and the values and gradients are those of one large
matrix. Knows the output layer and the distribution that is sampled from, and nothing of batches or of the model's body.

Axis suffixes: N targets, C targets of a chunk, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from turnwise.models.distribution import sampling_logits
from turnwise.training.chunked_values import in_chunks
from turnwise.types import Sampling

__all__ = ["LOGITS_BYTES", "TokenLogprobs", "logprobs_of_logits"]

LOGITS_BYTES = 128 * 2**20
"""The memory for the logits of a chunk."""
_KEPT_CHUNKS = 4
"""A trained output layer runs in one piece if all logits fit into the memory of so many chunks. They are kept for the backward
pass then, because computing them again takes time."""

_CACHED_BYTES = 4 * 2**20
"""The logits whose sum a CPU computes at a time, so that they stay in its cache between the operations."""


class TokenLogprobs:
    """Log-probabilities, and entropies, of target tokens under the distribution that `sampling` draws from.

    `head` is the model's output layer: any module from hidden states [C, D] to logits [C, V], such as a linear layer with or
    without bias, with tied weights or with an adapter. `vocabulary` is V, and `chunk_bytes` the memory for the logits of a
    chunk. The head is computed in float32, also under autocast (`models/autocast.py`).
    """

    def __init__(
        self,
        head: torch.nn.Module,
        sampling: Sampling,
        *,
        vocabulary: int,
        chunk_bytes: int = LOGITS_BYTES,
    ) -> None:
        self._head = head
        self._sampling = sampling
        # a linear layer needs its input for the backward pass, and not its output
        self._plain = type(head) is torch.nn.Linear
        self._max_chunk = max(1, chunk_bytes // (4 * vocabulary))

    def __call__(
        self, hidden_ND: torch.Tensor, token_N: torch.Tensor, *, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N]; with `entropy`, also the entropy [N] of the distribution of each target."""

        def values(hidden_CD: torch.Tensor, token_C: torch.Tensor) -> torch.Tensor:
            # the logits have no name here, so that bfloat16 logits are freed when they have been converted
            found = logprobs_of_logits(
                self._head(hidden_CD), token_C, self._sampling, entropy=entropy, overwrite=self._plain
            )
            return torch.stack([value_C for value_C in found if value_C is not None])

        parameters = [parameter for parameter in self._head.parameters() if parameter.requires_grad]
        count = -(-len(hidden_ND) // self._max_chunk)
        if parameters and torch.is_grad_enabled() and count <= _KEPT_CHUNKS:
            count = 1
        # chunks of about the same size, so that no small chunk is left at the end
        chunk = max(1, -(-len(hidden_ND) // max(count, 1)))
        in_one = len(hidden_ND) <= chunk
        values_KN = values(hidden_ND, token_N) if in_one else in_chunks(values, hidden_ND, token_N, parameters, chunk)
        return values_KN[0], values_KN[1] if entropy else None


def logprobs_of_logits(
    logits_NV: torch.Tensor, token_N: torch.Tensor, sampling: Sampling, *, entropy: bool, overwrite: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N], and with `entropy` entropies [N], from logits [N, V], which the backward pass may `overwrite`."""
    logits_NV = sampling_logits(
        logits_NV,
        temperature_N=sampling.temperature,
        top_k_N=sampling.top_k,
        top_p_N=sampling.top_p,
        min_p_N=sampling.min_p,
        keep_N=token_N,
    )
    if not entropy:
        return _TargetLogprobs.apply(logits_NV, token_N, overwrite), None
    all_NV = logits_NV.log_softmax(dim=-1)
    logprob_N = all_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1)
    # tokens that top-k, top-p or min-p removed have probability 0 and log-probability -inf: their product counts as 0
    entropy_N = -(all_NV.exp() * all_NV.masked_fill(all_NV.isinf(), 0.0)).sum(dim=-1)
    return logprob_N, entropy_N


class _TargetLogprobs(torch.autograd.Function):
    """The log-probability [N] of one token of each row of logits [N, V].

    As `F.cross_entropy`, with fewer tensors of the size of the logits: between the passes only the logits are kept, and the
    backward pass makes one more, the gradient `g * (onehot - softmax)`. With `overwrite`, it writes the gradient into the
    logits: no other function may need them, and there can be one backward pass only.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, token_N: torch.Tensor, overwrite: bool) -> torch.Tensor:
        cached = _CACHED_BYTES // (4 * logits_NV.shape[1]) if logits_NV.device.type == "cpu" else len(logits_NV)
        total_N = torch.cat([block.logsumexp(dim=-1) for block in logits_NV.split(max(1, cached))])
        ctx.save_for_backward(logits_NV, token_N, total_N)
        ctx.overwrite = overwrite
        return logits_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1) - total_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, token_N, total_N = ctx.saved_tensors
        gradient_N1 = gradients[0].unsqueeze(-1)
        result_NV = torch.sub(logits_NV, total_N.unsqueeze(-1), out=logits_NV if ctx.overwrite else None)
        return result_NV.exp_().mul_(-gradient_N1).scatter_add_(-1, token_N.unsqueeze(-1), gradient_N1), None, None
