"""RMSNorm, rotary embeddings and SwiGLU of a model by the Triton kernels of liger-kernel (arXiv 2410.10989), on CUDA.

Written out in torch, these layers are a dozen operations each, which read and write the hidden states in the GPU's memory and
keep copies in float32 for the backward pass. Liger's own `apply_liger_kernel_to_...` replace classes and functions of
transformers for all models of the process. Here one model gets the kernels, as an attribute of its layers: types, weights and
their names stay the same, and so do all other models, such as those of reward functions. No list of families is needed: a layer
gets a kernel if its code is, instruction by instruction, that of the installed transformers' Llama (or Gemma, whose norms have
the factor 1 + weight). Before, each kernel is compared with what it replaces, on a few numbers: it is compiled then, for which
Triton needs a C compiler.

Every model that the trainer loads gets them: trained model, reference, teachers, critic. So both sides of a KL divergence are
rounded alike. The embedded engine's generic pass runs the same layers; its fused pass has functions of its own. Knows layers and
one device. Does not know batches, losses or ranks.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.llama import modeling_llama as llama

from turnwise.errors import ConfigError, Failed, boundary

_log = logging.getLogger(__name__)

Kernels = Literal["auto", "liger", "none"]
"""See `ModelSection.kernels`."""

_INSTALL = "pip install 'turnwise[liger]'"
_ROTARY = "apply_rotary_pos_emb"
"""The name by which the attention of a model calls the rotary embedding."""


# Which models get them


def use_kernels(model: Any, kernels: Kernels, device: torch.device) -> None:
    """Let a model whose passes run on `device` compute with the kernels that `model.kernels` asks for, in place.

    Says which, and with `auto` why none.

    Raises ConfigError with `liger`, if the kernels cannot be used there, or if the model has no layer for them.
    """
    if kernels == "none" or (kernels == "auto" and device.type != "cuda"):
        return
    problem = _unusable(device)
    if problem is None:
        replaced = replace_layers(model, of_library())
        if replaced:
            counts = ", ".join(f"{number} {name}" for name, number in replaced.items())
            version = importlib.metadata.version("liger-kernel")
            _log.info(
                "model.kernels=%s: liger-kernel %s computes %s of %s", kernels, version, counts, type(model).__name__
            )
            return
        problem = (
            f"{type(model).__name__} has no layer that liger-kernel computes: its norms, feed-forward layers and rotary "
            f"embeddings have other code than those of Llama. Set model.kernels=none"
        )
    if kernels == "liger":
        raise ConfigError(f"model.kernels=liger: {problem}")
    _log.info("model.kernels=auto: without fused kernels, because %s", problem)


def expects_kernels(kernels: Kernels) -> bool:
    """Whether a model on a GPU is expected to get the kernels: what can be known without one."""
    return kernels == "liger" or (kernels == "auto" and is_installed())


def is_installed() -> bool:
    """Whether the library is there."""
    return importlib.util.find_spec("liger_kernel") is not None


def _unusable(device: torch.device) -> str | None:
    """Why the library cannot compute on a device, and what to do; None if it can."""
    if device.type != "cuda":
        return (
            f"its kernels run on CUDA only, and the model is on the device {device.type}. Set model.kernels=auto, or "
            f"model.device=cuda without deterministic=true"
        )
    if not is_installed():
        return f"liger-kernel is not installed: {_INSTALL}, or set model.kernels=none"
    return _wrong(str(device))


@functools.cache
def _wrong(device: str) -> str | None:
    """Why the installed kernels do not compute on a GPU what they replace; None if they do."""
    try:
        with boundary("model"):  # a missing compiler, a Triton of another version, a card that is too old
            different = _different(of_library(), torch.device(device))
    except Failed as failed:
        return (
            f"liger-kernel does not run here: {failed.failure.message}. Triton needs a C compiler and the version that belongs "
            f"to torch; or set model.kernels=none"
        )
    if not different:
        return None
    return (
        f"liger-kernel computes another {' and '.join(different)} than transformers on this GPU: {_INSTALL} --upgrade, or set "
        f"model.kernels=none"
    )


_TOLERANCE = 1e-3
"""Relative, in float32: products of Triton may be rounded as TF32 is."""


def _different(functions: Functions, device: torch.device) -> list[str]:
    """The names of the functions whose values or gradients are not those of torch, on a few numbers."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device).requires_grad_()

    angle_1LD = torch.linspace(0.0, 3.0, 12).reshape(1, 3, 4).repeat(1, 1, 2).to(device)
    turns = (angle_1LD.cos(), angle_1LD.sin())
    pairs: dict[str, tuple[list[torch.Tensor], Callable[..., Any], Callable[..., Any]]] = {
        "RMSNorm": (
            [numbers(2, 3, 8), numbers(8)],
            lambda values, weight: functions.rms_norm(values, weight, 1e-6, False),
            lambda values, weight: F.rms_norm(values, (8,), weight, 1e-6),
        ),
        "SwiGLU": (
            [numbers(2, 3, 8), numbers(2, 3, 8)],
            lambda gate, up: functions.silu_mul(gate * 1.0, up * 1.0),  # the backward pass overwrites its arguments
            lambda gate, up: F.silu(gate) * up,
        ),
        "rotary embedding": (
            [numbers(2, 4, 3, 8), numbers(2, 2, 3, 8)],
            lambda query, key: torch.cat(functions.rotate(query * 1.0, key * 1.0, *turns), dim=1),
            lambda query, key: torch.cat(inspect.unwrap(llama.apply_rotary_pos_emb)(query, key, *turns), dim=1),
        ),
    }
    return [
        name
        for name, (arguments, fused, plain) in pairs.items()
        if not all(
            torch.allclose(found, expected, rtol=_TOLERANCE, atol=_TOLERANCE)
            for found, expected in zip(
                _with_gradients(fused, arguments), _with_gradients(plain, arguments), strict=True
            )
        )
    ]


def _with_gradients(function: Callable[..., torch.Tensor], arguments: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        result = function(*arguments)
        weights = torch.linspace(-1.0, 1.0, result.numel(), device=result.device).reshape(result.shape)
        return [result.detach(), *torch.autograd.grad((result * weights).sum(), arguments)]


# The library


@dataclass(frozen=True, slots=True)
class Functions:
    """What computes the layers."""

    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
    """Of values [..., D], weight [D], epsilon, and whether the factor is 1 + weight (Gemma), computed in float32."""
    silu_mul: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """`silu(gate) * up`. Its backward pass may overwrite both."""
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """Queries [B, H, L, D] and keys [B, K, L, D], rotated by cosines and sines [1 or B, L, D], whose halves are equal. May
    overwrite queries and keys."""


def of_library() -> Functions:
    """The kernels of liger-kernel. Raises ImportError without it."""
    ops = importlib.import_module("liger_kernel.ops")

    def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float, from_one: bool) -> torch.Tensor:
        # not in place: of a norm whose result is added to the hidden states, the gradient belongs to both summands
        offset, casting = (1.0, "gemma") if from_one else (0.0, "llama")
        return ops.LigerRMSNormFunction.apply(values, weight, eps, offset, casting, False, None)

    def rotate(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.cuda.device_of(query):  # the other two do that themselves
            return ops.LigerRopeFunction.apply(query, key, cos, sin)

    return Functions(rms_norm, ops.LigerSiLUMulFunction.apply, rotate)


def of_trace() -> Functions:
    """What keeps and makes the tensors that the kernels keep and make, without values: for passes on tensors without contents."""
    return Functions(
        lambda values, weight, eps, from_one: _TracedNorm.apply(values, weight),
        _TracedProduct.apply,
        _TracedRotation.apply,
    )


class _TracedNorm(torch.autograd.Function):
    """Keeps its input, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(values.contiguous(), weight, torch.empty(values.shape[:-1], device=values.device))
        return torch.empty_like(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight, _ = ctx.saved_tensors
        return torch.empty_like(values), torch.empty_like(weight) if ctx.needs_input_grad[1] else None


class _TracedProduct(torch.autograd.Function):
    """Keeps both factors, and overwrites them with their gradients."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate.contiguous(), up.contiguous())
        return torch.empty_like(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return ctx.saved_tensors


class _TracedRotation(torch.autograd.Function):
    """Keeps cosines and sines. Overwrites its input in both passes, if the heads of a token are beside each other."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos.contiguous(), sin.contiguous())
        return _TracedRotation._by_tokens(query, key)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_TracedRotation._by_tokens(*gradients), None, None

    @staticmethod
    def _by_tokens(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors)


# The layers of a model


def replace_layers(model: Any, functions: Functions) -> dict[str, int]:
    """Let the layers of a model that have the known code compute with `functions`, in place. Returns how many of each kind."""
    found = Counter[str]()
    for module in model.modules():
        kind, forward = _replacement(module, functions)
        if forward is not None:
            # an attribute of the layer: its type stays, and a copy of the model gets layers of its own
            module.forward = functools.partial(forward, module)
            found[kind] += 1
    return dict(found)


def _replacement(module: Any, functions: Functions) -> tuple[str, Callable[..., Any] | None]:
    plain = type(module).forward
    if (code := _code(plain)) is None:
        return "", None
    if code == _code(llama.LlamaRMSNorm.forward):
        return "RMSNorm", functools.partial(_norm, functions)
    if code == _code(gemma.GemmaRMSNorm.forward) and _code(type(module)._norm) == _code(gemma.GemmaRMSNorm._norm):
        return "RMSNorm", functools.partial(_norm_from_one, functions)
    if code == _code(llama.LlamaMLP.forward) and type(module.act_fn) in _SILU:
        return "SwiGLU", functools.partial(_feed_forward, functions)
    # a decorated forward calls the rotary embedding somewhere inside
    if _ROTARY in getattr(getattr(plain, "__code__", None), "co_names", ()):
        rotary = _code(plain.__globals__.get(_ROTARY))
        if rotary is not None and rotary == _code(llama.apply_rotary_pos_emb):
            return "rotary embeddings", _with_rotary(plain, functions)
    return "", None


_SILU = (torch.nn.SiLU, type(ACT2FN["silu"]))


@functools.cache
def _code(function: Any) -> tuple[Any, ...] | None:
    """What a function does, without its name and its documentation; None if it is not written in Python."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(value for value in code.co_consts if not isinstance(value, str))


def _norm(functions: Functions, module: Any, values: torch.Tensor) -> torch.Tensor:
    if values.dtype != module.weight.dtype:  # with autocast: the result has the type of the weight
        return type(module).forward(module, values)
    return functions.rms_norm(values, module.weight, module.variance_epsilon, False)


def _norm_from_one(functions: Functions, module: Any, values: torch.Tensor) -> torch.Tensor:
    return functions.rms_norm(values, module.weight, module.eps, True)


def _feed_forward(functions: Functions, module: Any, values: torch.Tensor) -> torch.Tensor:
    gate, up = module.gate_proj(values), module.up_proj(values)
    product = functions.silu_mul(gate, up) if gate.dtype == up.dtype else module.act_fn(gate) * up
    return module.down_proj(product)


@functools.lru_cache(maxsize=64)
def _with_rotary(forward: Any, functions: Functions) -> Callable[..., Any]:
    """The forward of an attention that calls another rotary embedding, which it finds among the names of its module."""
    rotary = functools.partial(_rotate, functions, forward.__globals__[_ROTARY])
    names = {**forward.__globals__, _ROTARY: rotary}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _rotate(
    functions: Functions,
    plain: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    query: torch.Tensor,
    key: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    usual = unsqueeze_dim == 1 and query.ndim == key.ndim == 4 and cos.ndim == 3 and cos.shape[-1] == query.shape[-1]
    if not usual or query.shape[2] != key.shape[2]:
        return plain(query, key, cos, sin, unsqueeze_dim)
    dtype = torch.promote_types(query.dtype, cos.dtype)  # with autocast, cosines are float32
    return functions.rotate(query.to(dtype), key.to(dtype), cos, sin)
