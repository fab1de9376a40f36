"""Feed-forward layers (SwiGLU) and RMSNorm of large transformers models on a CPU, with fewer tensors between the passes.

Autograd keeps each intermediate result for the backward pass, and the first use of new memory costs as much as several reads.
Here, each layer is one function of autograd, which keeps its input and little more. Small models spend their time in calls
instead, and are computed by transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from turnwise.models.allocator import is_large, long_lived
from turnwise.models.autocast import product_dtype
from turnwise.models.fast_linear import (
    Sources,
    linear,
    sources_of,
    weight_gradient,
    with_fast_linears,
    with_sources,
)

__all__ = ["with_fast_layers"]

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""The packages and prefixes of the classes whose layers are known."""


def with_fast_layers(model: Any) -> Any:
    """Let a model compute with `fast_linear`, and a large model on a CPU (`is_large`) with the functions of this module, in
    place. The types of its layers, its weights and their names stay the same."""
    if is_large(model):
        for module in model.modules():
            fast = _FORWARDS.get(f"{type(module).__module__}.{type(module).__qualname__}")
            if fast is not None:
                # an attribute of the layer: its type stays, and a copy of the model gets layers of its own
                module.forward = functools.partial(fast, module)
    return with_fast_linears(model)


def _feed_forward(module: Any, values: torch.Tensor) -> torch.Tensor:
    layers = (module.gate_proj, module.up_proj, module.down_proj)
    if all(type(layer) is torch.nn.Linear and layer.bias is None for layer in layers):
        weights = [layer.weight for layer in layers]
        if _same_dtype(values, *weights) and module.config.hidden_act in ("silu", "swish"):
            around = long_lived() if torch.is_grad_enabled() else nullcontext()
            return _TrainedSwiGLU.apply(values, *weights, sources_of(values), product_dtype(values), around)
    return type(module).forward(module, values)  # such as layers with an adapter


def _norm(module: Any, values: torch.Tensor) -> torch.Tensor:
    if values.dtype == torch.float32 and _same_dtype(values, module.weight):
        normed, scale = _TrainedNorm.apply(values, module.weight, module.variance_epsilon)
        return with_sources(normed, _normed, values, module.weight, scale)
    return type(module).forward(module, values)


def _same_dtype(*tensors: torch.Tensor) -> bool:
    return len({tensor.dtype for tensor in tensors}) == 1


_FORWARDS: dict[str, Callable[..., torch.Tensor]] = {
    f"transformers.models.{package}.modeling_{package}.{prefix}{name}": forward
    for package, prefix in FAMILIES.items()
    for name, forward in (("MLP", _feed_forward), ("RMSNorm", _norm))
}


class _TrainedSwiGLU(torch.autograd.Function):
    """`down(silu(gate(x)) * up(x))` (Shazeer, 2020). Keeps the sources of x and the results of `gate` and `up`; the rest is
    computed again. With autocast, `dtype` is that of the products, and no converted weights are kept. What is kept is allocated
    `around`."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        sources: Sources,
        dtype: torch.dtype,
        around: AbstractContextManager[None],
    ) -> torch.Tensor:
        ctx.function, ctx.dtype = sources.function, dtype
        values_MD = values.reshape(-1, values.shape[-1]).to(dtype)
        with around:
            gate_MF, up_MF = (linear(values_MD, weight.to(dtype), None) for weight in (gate, up))
        ctx.save_for_backward(gate_MF, up_MF, gate, up, down, *sources.tensors)
        product_MF = F.silu(gate_MF).mul_(up_MF)
        return linear(product_MF, down.to(dtype), None).view(*values.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate_MF, up_MF, *others = ctx.saved_tensors
        weights, sources = others[:3], others[3:]
        gradient_MD = gradients[0].reshape(-1, gradients[0].shape[-1])
        gate, up, down = (weight.to(ctx.dtype) for weight in weights)
        of_values: torch.Tensor | None = None
        of_weights: list[torch.Tensor | None] = [None, None, None]
        of_up_MF = F.silu(gate_MF)
        if ctx.needs_input_grad[3]:
            of_weights[2] = weight_gradient(gradient_MD, of_up_MF * up_MF, down).to(weights[2].dtype)
        of_gate_MF = linear(gradient_MD, down.t(), None)  # so far, the gradient of the product
        of_up_MF.mul_(of_gate_MF)
        of_gate_MF.mul_(up_MF)
        torch.ops.aten.silu_backward.grad_input(of_gate_MF, gate_MF, grad_input=of_gate_MF)
        if ctx.needs_input_grad[0]:
            of_values = linear(of_gate_MF, gate.t(), None).add_(linear(of_up_MF, up.t(), None))
            of_values = of_values.view(gradients[0].shape).to(weights[0].dtype)
        if any(ctx.needs_input_grad[1:3]):
            values_MD = ctx.function(*sources).reshape(gradient_MD.shape).to(ctx.dtype)
            for place, (gradient_MF, weight) in enumerate(((of_gate_MF, gate), (of_up_MF, up))):
                if ctx.needs_input_grad[1 + place]:
                    of_weights[place] = weight_gradient(gradient_MF, values_MD, weight).to(weights[place].dtype)
        return of_values, *of_weights, None, None, None


def _normed(values: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (values * scale).mul_(weight)


class _TrainedNorm(torch.autograd.Function):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis (Zhang and Sennrich, 2019), and the factor of each row. Keeps x and
    the factors."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        width = values.shape[-1]
        norm = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        scale = norm.square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(values, weight, scale)
        ctx.mark_non_differentiable(scale)
        return _normed(values, weight, scale), scale

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, scale = ctx.saved_tensors
        normed = values * scale
        product = normed * gradients[0]
        of_values = of_weight = None
        if ctx.needs_input_grad[1]:
            of_weight = product.flatten(0, -2).sum(dim=0)
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).unsqueeze(-1).div_(values.shape[-1])
            of_values = torch.mul(gradients[0], weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return of_values, of_weight, None
