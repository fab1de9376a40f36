"""Log-probabilities of targets from hidden states, without the logits [N, V] of all targets in memory at once.

The output layer runs on chunks of targets. A chunk's logits are dropped after use; the backward pass computes them again. So
the largest tensor is [C, V] for a chunk of C targets, in both passes, and the values and gradients are those of one large
matrix. Knows the output layer and the distribution that is sampled from, and nothing of batches or of the model's body.

Axis suffixes: N targets, C targets of a chunk, D hidden dimension, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from turnwise.models.autocast import autocast
from turnwise.models.distribution import sampling_logits
from turnwise.types import Sampling

__all__ = ["LOGITS_BYTES", "TokenLogprobs", "logprobs_of_logits"]

LOGITS_BYTES = 128 * 2**20
"""The memory for the float32 logits of a chunk."""
_KEPT_CHUNKS = 4
"""A trained output layer runs in one piece if all logits fit into the memory of so many chunks. They are kept for the backward
pass then, because computing them again takes time."""

_CACHED_BYTES = 4 * 2**20
"""The logits that a CPU computes at a time in the operations on each logit."""

_Values = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states [C, D] and tokens [C] to values [K, C]: log-probabilities, and entropies if K is 2."""


class TokenLogprobs:
    """Log-probabilities, and entropies, of target tokens under the distribution that `sampling` draws from.

    `head` is the model's output layer: any module from hidden states [C, D] to logits [C, V], such as a linear layer with or
    without bias, with tied weights or with an adapter. `vocabulary` is V, and `chunk_bytes` the memory for the float32 logits
    of a chunk. With `autocast`, the matrix product of the head is computed in bfloat16, also when the backward pass computes a
    chunk again.
    """

    def __init__(
        self,
        head: torch.nn.Module,
        sampling: Sampling,
        *,
        vocabulary: int,
        chunk_bytes: int = LOGITS_BYTES,
        autocast: bool = False,
    ) -> None:
        self._head = head
        self._autocast = autocast
        self._sampling = sampling
        self._max_chunk = max(1, chunk_bytes // (4 * vocabulary))

    def __call__(
        self, hidden_ND: torch.Tensor, token_N: torch.Tensor, *, entropy: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities [N]; with `entropy`, also the entropy [N] of the distribution of each target."""

        def values(hidden_CD: torch.Tensor, token_C: torch.Tensor) -> torch.Tensor:
            with autocast(hidden_CD.device, self._autocast):
                logits_CV = self._head(hidden_CD)
            # a linear layer needs its input for the backward pass, and not its output
            overwrite = type(self._head) is torch.nn.Linear
            logprob_C, entropy_C = logprobs_of_logits(
                logits_CV, token_C, self._sampling, entropy=entropy, overwrite=overwrite
            )
            return torch.stack([logprob_C] if entropy_C is None else [logprob_C, entropy_C])

        parameters = [parameter for parameter in self._head.parameters() if parameter.requires_grad]
        count = -(-len(hidden_ND) // self._max_chunk)
        if parameters and torch.is_grad_enabled() and count <= _KEPT_CHUNKS:
            count = 1
        # chunks of about the same size, so that no small chunk is left at the end
        chunk = max(1, -(-len(hidden_ND) // max(count, 1)))
        values_KN = _in_chunks(values, hidden_ND, token_N, parameters, chunk)
        return values_KN[0], values_KN[1] if entropy else None


def logprobs_of_logits(
    logits_NV: torch.Tensor, token_N: torch.Tensor, sampling: Sampling, *, entropy: bool, overwrite: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities [N] of tokens, and with `entropy` the entropies [N], from logits [N, V].

    With `overwrite`, the backward pass may write into the logits.
    """
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
        total_N = torch.cat([block.logsumexp(dim=-1) for block in logits_NV.split(_block_rows(logits_NV))])
        ctx.save_for_backward(logits_NV, token_N, total_N)
        ctx.overwrite = overwrite
        return logits_NV.gather(-1, token_N.unsqueeze(-1)).squeeze(-1) - total_N

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_NV, token_N, total_N = ctx.saved_tensors
        gradient_N1 = gradients[0].unsqueeze(-1)
        result_NV = logits_NV if ctx.overwrite else torch.empty_like(logits_NV)
        whole = (logits_NV, total_N.unsqueeze(-1), gradient_N1, result_NV)
        for block, total_B1, gradient_B1, result in zip(
            *(tensor.split(_block_rows(logits_NV)) for tensor in whole), strict=True
        ):
            torch.sub(block, total_B1, out=result).exp_().mul_(-gradient_B1)
        return result_NV.scatter_add_(-1, token_N.unsqueeze(-1), gradient_N1), None, None


def _block_rows(logits_NV: torch.Tensor) -> int:
    """Rows of logits to compute at a time: on a CPU, so many that they stay in its cache between two operations."""
    rows, vocabulary = logits_NV.shape
    if logits_NV.device.type != "cpu":
        return max(1, rows)
    return max(1, _CACHED_BYTES // (logits_NV.element_size() * vocabulary))


def _in_chunks(
    function: _Values, hidden_ND: torch.Tensor, token_N: torch.Tensor, parameters: Sequence[torch.Tensor], chunk: int
) -> torch.Tensor:
    """The values [K, N] of `function`, which has the trainable `parameters`, computed for `chunk` targets at a time."""
    if len(hidden_ND) <= chunk:
        return function(hidden_ND, token_N)
    if not torch.is_grad_enabled() or not (parameters or hidden_ND.requires_grad):
        pairs = zip(hidden_ND.split(chunk), token_N.split(chunk), strict=True)
        return torch.cat([function(hidden_CD, token_C) for hidden_CD, token_C in pairs], dim=1)
    if parameters:
        return _Recomputed.apply(function, chunk, hidden_ND, token_N, *parameters)
    return _WithSlopes.apply(function, chunk, hidden_ND, token_N)


class _Recomputed(torch.autograd.Function):
    """The backward pass computes each chunk again, and adds up the gradients of the head's parameters over the chunks."""

    @staticmethod
    def forward(
        ctx: Any,
        function: _Values,
        chunk: int,
        hidden_ND: torch.Tensor,
        token_N: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        ctx.function, ctx.chunk = function, chunk
        ctx.save_for_backward(hidden_ND, token_N, *parameters)
        pairs = zip(hidden_ND.split(chunk), token_N.split(chunk), strict=True)
        return torch.cat([function(hidden_CD, token_C) for hidden_CD, token_C in pairs], dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        hidden_ND, token_N, *parameters = ctx.saved_tensors
        pieces = zip(
            hidden_ND.split(ctx.chunk), token_N.split(ctx.chunk), gradients[0].split(ctx.chunk, dim=1), strict=True
        )
        of_hidden: list[torch.Tensor] = []
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        for hidden_CD, token_C, gradient_KC in pieces:
            with torch.enable_grad():
                own_CD = hidden_CD.detach().requires_grad_()
                values_KC = ctx.function(own_CD, token_C)
            of_own_CD, *others = torch.autograd.grad(values_KC, [own_CD, *parameters], gradient_KC, allow_unused=True)
            of_hidden.append(of_own_CD)
            for place, gradient in enumerate(others):
                if gradient is not None:
                    total = sums[place]
                    sums[place] = gradient if total is None else total.add_(gradient)
            del values_KC, others  # before the next chunk is computed
        return None, None, torch.cat(of_hidden), None, *sums


class _WithSlopes(torch.autograd.Function):
    """For a head without trainable parameters, as with LoRA on the body only.

    A value depends on the hidden state of its own target only, so its gradient is known up to a factor that comes from the
    loss. The forward pass computes these gradients with each chunk, and nothing is computed twice.
    """

    @staticmethod
    def forward(
        ctx: Any, function: _Values, chunk: int, hidden_ND: torch.Tensor, token_N: torch.Tensor
    ) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        slopes: list[torch.Tensor] = []
        for hidden_CD, token_C in zip(hidden_ND.split(chunk), token_N.split(chunk), strict=True):
            with torch.enable_grad():
                own_CD = hidden_CD.detach().requires_grad_()
                rows = function(own_CD, token_C).unbind()
            ones_C = torch.ones_like(rows[0])
            slopes_KCD = [
                torch.autograd.grad(row_C, own_CD, ones_C, retain_graph=row_C is not rows[-1])[0] for row_C in rows
            ]
            slopes.append(torch.stack(slopes_KCD))
            parts.append(torch.stack([row_C.detach() for row_C in rows]))
            del rows  # and with it the chunk's logits
        ctx.save_for_backward(torch.cat(slopes, dim=1))
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (slopes_KND,) = ctx.saved_tensors
        weighted_KND = slopes_KND * gradients[0].unsqueeze(-1).to(slopes_KND.dtype)
        return None, None, weighted_KND.sum(dim=0), None
