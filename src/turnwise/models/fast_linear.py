"""Matrix products of linear layers in float32 with the library that is fastest on this CPU.

torch computes them with MKL. On processors of AMD, MKL does not use AVX-512, and oneDNN, which is also part of torch, is up to
twice as fast with large weights. oneDNN compiles a kernel for each shape (milliseconds), so small numbers of rows are rounded up.
Which library computes a product depends only on the machine and on the shape, never on a measurement: runs stay repeatable.
With autocast, the products are torch's own, and the backward pass converts values and weights again instead of keeping copies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from turnwise.models.autocast import product_dtype

__all__ = [
    "Sources",
    "fewest_rows",
    "linear",
    "onednn_linear",
    "sources_of",
    "uses_onednn",
    "weight_gradient",
    "with_fast_linears",
    "with_sources",
]

NEVER = 1 << 62
"""More rows than any tensor has."""
_FEWEST_PRODUCTS = 1_500_000
"""Multiplications below which a call of oneDNN costs more than it saves."""
_SMALL_WEIGHT, _WIDE = 100_000, 256
"""Elements of a weight below which oneDNN gains less than rounding the number of rows costs. A copy in oneDNN's own layout is
faster even then, if it has so many outputs."""
_LARGE_WEIGHT = 250_000
"""Elements of a weight from which on oneDNN is faster for each number of rows: it reads a weight from memory faster than MKL."""
_SMALLEST_SIDE = 64
"""A weight with a smaller side (a LoRA adapter, the head of a critic) is left to torch."""
_FEW_ROWS, _SMALL_STEP, _LARGE_STEP = 256, 16, 64
"""Up to so many rows, their number is rounded up to a multiple of the small step; beyond, of the large step. A number below the
small step stays."""
_LARGE_PRODUCT = 100_000_000
"""Multiplications from which on a new kernel, which all layers use, costs less than rounding, which copies the values."""


@functools.cache
def uses_onednn() -> bool:
    """Whether oneDNN is faster than torch's own choice on this machine: on processors of AMD with AVX-512."""
    if not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        _onednn(torch.zeros(_SMALL_STEP, _SMALLEST_SIDE), torch.zeros(_SMALLEST_SIDE, _SMALLEST_SIDE), None)
    except (OSError, RuntimeError, AttributeError, TypeError):  # the operator is not part of torch's public interface
        return False
    return "AuthenticAMD" in cpu


def with_fast_linears(model: Any) -> Any:
    """Let the linear layers of a model compute with `linear`, in place. Weights and their names stay the same."""
    if model.device.type == "cpu" and uses_onednn():
        linears: list[Any] = [module for module in model.modules() if type(module) is torch.nn.Linear]
        for module in linears:
            # an attribute of the layer: its type stays, and a copy of the model gets layers of its own
            module.forward = functools.partial(_forward, module)
    return model


def _forward(module: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
    return linear(values, module.weight, module.bias)


def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `F.linear`, up to rounding: values [..., I], weight [O, I], bias [O]; the result is [..., O]."""
    mixed = torch.is_autocast_enabled("cpu")
    if values.numel() < fewest_rows(weight) * weight.shape[1] or not (mixed or values.dtype == torch.float32):
        return F.linear(values, weight, bias)
    if torch.is_grad_enabled() and (values.requires_grad or weight.requires_grad):
        return _Linear.apply(values, weight, bias, sources_of(values), product_dtype(values))
    return F.linear(values, weight, bias) if mixed else onednn_linear(values, weight, bias)


def fewest_rows(*weights: torch.Tensor, packed: bool = False) -> int:
    """The number of rows of float32 values from which on `onednn_linear` is faster for this weight, or for several weights of the
    same inputs as one; `NEVER` if it never is. `packed`: for a copy in oneDNN's own layout."""
    if any(weight.dtype != torch.float32 or weight.device.type != "cpu" for weight in weights) or not uses_onednn():
        return NEVER
    outputs, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
    small = outputs * inputs < _SMALL_WEIGHT and not (packed and outputs >= _WIDE)
    if small or min(outputs, inputs) < _SMALLEST_SIDE:
        return NEVER
    return 1 if outputs * inputs >= _LARGE_WEIGHT else -(-_FEWEST_PRODUCTS // (outputs * inputs))


class Sources(NamedTuple):
    """From what the input of linear layers is computed again in the backward pass, instead of keeping it."""

    function: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    version: int = 0
    """Of the input when it was computed."""


def with_sources(values: torch.Tensor, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """Let linear layers keep `tensors` for the backward pass, and not `values`, which are the `function` of these."""
    if values.requires_grad:
        values.turnwise_sources = Sources(function, tensors, values._version)  # type: ignore[attr-defined]
    return values


def sources_of(values: torch.Tensor) -> Sources:
    """What the backward pass of a linear layer needs of its input: the input itself, unless it has sources and has not been
    changed in place."""
    sources = getattr(values, "turnwise_sources", None)
    return Sources(_itself, (values,)) if sources is None or sources.version != values._version else sources


def _itself(values: torch.Tensor) -> torch.Tensor:
    return values


class _Linear(torch.autograd.Function):
    """The product with its gradients, each of which is a product of the same kind. With another dtype than that of the weight, no
    converted copies are kept: they are made again."""

    @staticmethod
    def forward(
        ctx: Any,
        values: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sources: Sources,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        ctx.values, ctx.function, ctx.dtype = (values.shape, values.dtype), sources.function, dtype
        ctx.save_for_backward(weight, *(sources.tensors if ctx.needs_input_grad[1] else ()))
        return linear(values.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, *sources = ctx.saved_tensors
        outputs, inputs = weight.shape
        gradient_MO, used_OI = gradients[0].reshape(-1, outputs), weight.to(ctx.dtype)
        of_values = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            shape, dtype = ctx.values
            of_values = linear(gradient_MO, used_OI.t(), None).view(shape).to(dtype)
        if ctx.needs_input_grad[1]:
            values_MI = ctx.function(*sources).reshape(-1, inputs).to(ctx.dtype)
            of_weight = weight_gradient(gradient_MO, values_MI, used_OI).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = gradient_MO.sum(dim=0, dtype=weight.dtype)
        return of_values, of_weight, of_bias, None, None


def weight_gradient(gradient_MO: torch.Tensor, values_MI: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The gradient [O, I] of the weight of a linear layer, from the gradient of its result and its input."""
    rows, (outputs, inputs) = len(values_MI), weight.shape
    if rows < fewest_rows(weight):
        return gradient_MO.t() @ values_MI
    # the rows are added up here; those beyond a multiple of the step are a small product of their own
    even = rows - rows % _step(rows, weight)
    # oneDNN copies the first factor, so the smaller one comes first
    first, second = gradient_MO[:even].t(), values_MI[:even].t()
    # `data`, and not a view: to the gradient of a tied weight, autograd then adds that of the embedding in place
    result_OI = _onednn(first, second, None) if outputs <= inputs else _onednn(second, first, None).t().data
    return result_OI if even == rows else result_OI.addmm_(gradient_MO[even:].t(), values_MI[even:])


def onednn_linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As `F.linear`, up to rounding, without gradients: with oneDNN, for a rounded number of rows. A weight may be packed."""
    outputs, inputs = weight.shape
    rows = values.numel() // inputs
    missing = -rows % _step(rows, weight)
    if not missing:
        return _onednn(values, weight, bias)
    padded_MI = F.pad(values.reshape(rows, inputs), (0, 0, 0, missing))
    return _onednn(padded_MI, weight, bias)[:rows].view(*values.shape[:-1], outputs)


def _step(rows: int, weight: torch.Tensor) -> int:
    """The multiple to which a number of rows is rounded."""
    if rows <= _SMALL_STEP or (rows > _FEW_ROWS and rows * weight.numel() >= _LARGE_PRODUCT):
        return 1
    return _SMALL_STEP if rows <= _FEW_ROWS else _LARGE_STEP


def _onednn(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(values, weight, bias, "none", [], "")
