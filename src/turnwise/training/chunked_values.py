"""Values of targets, computed for a chunk of targets at a time in both passes, so that the logits of all are never in memory.

Axis suffixes: N targets, C targets of a chunk, D hidden dimension, K values of each target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["in_chunks"]

_Values = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From hidden states [C, D] and tokens [C] to values [K, C]: log-probabilities, and entropies if K is 2."""


def in_chunks(
    function: _Values, hidden_ND: torch.Tensor, token_N: torch.Tensor, parameters: Sequence[torch.Tensor], chunk: int
) -> torch.Tensor:
    """The values [K, N] of `function`, which has the trainable `parameters`, computed for `chunk` targets at a time."""
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
