"""The three functions of `liger_kernel.ops` that turnwise calls, with their arguments. `CALLS` counts their forward passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F

CALLS = Counter[str]()


class LigerRMSNormFunction(torch.autograd.Function):
    """`casting_mode` llama rounds before the weight is multiplied, gemma after it."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = True,
        row_mode: bool | None = None,
    ) -> torch.Tensor:
        CALLS[f"norm {casting_mode} {offset}"] += 1
        assert values.is_cuda or values.device.type == "cpu"
        root = torch.rsqrt(values.float().square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(values.contiguous(), weight, root.squeeze(-1))
        ctx.offset, ctx.in_place = offset, in_place
        if casting_mode == "gemma":
            return (values.float() * root * (offset + weight.float())).to(values.dtype)
        return (values.float() * root).to(values.dtype) * (offset + weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        values, weight, root = ctx.saved_tensors
        gradient, root = gradients[0].float(), root.unsqueeze(-1)
        normed = values.float() * root
        scaled = gradient * (ctx.offset + weight.float())
        result = (root * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))).to(values.dtype)
        if ctx.in_place:
            result = gradients[0].copy_(result)
        of_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        return result, of_weight, None, None, None, None, None


class LigerSiLUMulFunction(torch.autograd.Function):
    """Its backward pass overwrites both factors."""

    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0
    ) -> torch.Tensor:
        CALLS["silu_mul"] += 1
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gate, up = ctx.saved_tensors
        sigmoid = gate.sigmoid()
        of_gate = gradients[0] * up * sigmoid * (1 + gate * (1 - sigmoid))
        of_up = gradients[0] * gate * sigmoid
        return gate.detach().copy_(of_gate), up.detach().copy_(of_up), None, None


class LigerRopeFunction(torch.autograd.Function):
    """Overwrites queries and keys, and in the backward pass their gradients. Reads the first half of cosines and sines."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        unsqueeze_dim: int = 1,
        rotary_dim: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        CALLS["rope"] += 1
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _rotated(query, cos, sin), _rotated(key, cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(gradients[0], cos, -sin), _rotated(gradients[1], cos, -sin), None, None, None, None, None


def _rotated(values: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    by_tokens = values.transpose(1, 2).contiguous()
    half = values.shape[-1] // 2
    cos, sin = cos[..., None, :half], sin[..., None, :half]
    first, second = by_tokens[..., :half].clone(), by_tokens[..., half:].clone()
    by_tokens.detach().copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))
    return by_tokens.transpose(1, 2)
