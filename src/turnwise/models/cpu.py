"""Fast layers, packed weights and the number of threads on a CPU, for the trainer and the embedded engine.

Matrix products in float32 use the library that is fastest: torch computes them with MKL, which does not use AVX-512 on
processors of AMD; oneDNN, which is also part of torch, is up to twice as fast there with large weights. oneDNN compiles a
kernel for each shape (milliseconds), so small numbers of rows are rounded up. Invariant: which library computes a product
depends only on the machine and on the shape, never on a measurement, so runs stay repeatable. With autocast, the products are
torch's own, and the backward pass converts values and weights again instead of keeping copies.

Autograd keeps each intermediate result for the backward pass, and the first use of new memory costs as much as several reads.
So the feed-forward layers (SwiGLU) and RMSNorm of large models are one function of autograd each, which keeps its input and
little more. Small models spend their time in calls instead, and are computed by transformers. The scan of Mamba 2 gets
chunks of a length that suits its plain form.

The number of torch threads is chosen by the clock alone: 1 is fastest beside busy processes, all threads are fastest on an idle
machine. A small model starts with one thread, a large model with all: its first steps are long, and a run may have few of them,
so it also tries the other number later. The previous number is restored after every step, so the trainer in the same process is
not affected. Knows layers, weights and shapes. Does not know requests, batches or losses.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from turnwise.models.allocator import is_large, long_lived
from turnwise.models.precision import parameter_state, product_dtype

# Linear layers: which library computes a product

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
_CHUNK = 64
"""Tokens of a chunk of Mamba 2 (its scan, Dao and Gu, 2024, gives the same with each length). Checkpoints say 256, for kernels of
GPUs; the plain form pads each sequence to whole chunks, and computes all pairs of tokens in a chunk. On a CPU, 64 take a sixth of
the time for 17 tokens, a third for 1,500 (measured)."""
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
        grad_values = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            shape, dtype = ctx.values
            grad_values = linear(gradient_MO, used_OI.t(), None).view(shape).to(dtype)
        if ctx.needs_input_grad[1]:
            values_MI = ctx.function(*sources).reshape(-1, inputs).to(ctx.dtype)
            grad_weight = weight_gradient(gradient_MO, values_MI, used_OI).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            grad_bias = gradient_MO.sum(dim=0, dtype=weight.dtype)
        return grad_values, grad_weight, grad_bias, None, None


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


# Feed-forward layers and norms with fewer tensors between the passes

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""The packages and prefixes of the classes whose layers are known."""


def with_fast_layers(model: Any) -> Any:
    """Let a model compute with `fast_linear`, and a large model on a CPU (`is_large`) with the functions of this module, in
    place. The types of its layers, its weights and their names stay the same. Mamba 2 on a CPU gets short chunks."""
    for module in model.modules():
        if isinstance(chunk := getattr(module, "chunk_size", None), int) and hasattr(module, "A_log"):
            module.chunk_size = chunk if module.A_log.is_cuda else min(chunk, _CHUNK)
    if is_large(model):
        for module in model.modules():
            fast = _FORWARDS.get(f"{type(module).__module__}.{type(module).__qualname__}")
            if fast is not None:
                # an attribute of the layer: its type stays, and a copy of the model gets layers of its own
                module.forward = functools.partial(fast, module)
    return with_fast_linears(model)


def without_fast_layers(part: torch.nn.Module) -> None:
    """Let the modules of a part of a model compute with their own functions again, in place: where weights are divided among
    ranks. What others have put in place of their forward pass stays, such as the recomputation of layers."""
    own = (_forward, *_FORWARDS.values())
    for module in part.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, functools.partial) and forward.func in own:
            del module.forward


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
        grad_values: torch.Tensor | None = None
        grad_weights: list[torch.Tensor | None] = [None, None, None]
        grad_up_MF = F.silu(gate_MF)
        if ctx.needs_input_grad[3]:
            grad_weights[2] = weight_gradient(gradient_MD, grad_up_MF * up_MF, down).to(weights[2].dtype)
        grad_gate_MF = linear(gradient_MD, down.t(), None)  # so far, the gradient of the product
        grad_up_MF.mul_(grad_gate_MF)
        grad_gate_MF.mul_(up_MF)
        torch.ops.aten.silu_backward.grad_input(grad_gate_MF, gate_MF, grad_input=grad_gate_MF)
        if ctx.needs_input_grad[0]:
            grad_values = linear(grad_gate_MF, gate.t(), None).add_(linear(grad_up_MF, up.t(), None))
            grad_values = grad_values.view(gradients[0].shape).to(weights[0].dtype)
        if any(ctx.needs_input_grad[1:3]):
            values_MD = ctx.function(*sources).reshape(gradient_MD.shape).to(ctx.dtype)
            for place, (gradient_MF, weight) in enumerate(((grad_gate_MF, gate), (grad_up_MF, up))):
                if ctx.needs_input_grad[1 + place]:
                    grad_weights[place] = weight_gradient(gradient_MF, values_MD, weight).to(weights[place].dtype)
        return grad_values, *grad_weights, None, None, None


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
        grad_values = grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = product.flatten(0, -2).sum(dim=0)
        if ctx.needs_input_grad[0]:
            mean = (product @ weight).unsqueeze(-1).div_(values.shape[-1])
            grad_values = torch.mul(gradients[0], weight, out=product).addcmul_(normed, mean, value=-1).mul_(scale)
        return grad_values, grad_weight, None


# Packed weights: copies in the layout in which oneDNN computes

MOST_BYTES = 2**30
"""The weights of larger models are not packed: the memory is worth more than the time."""
_PACKED_ROWS = 32
"""The number of rows for which a weight is packed. oneDNN uses the same layout for all others but 1."""


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A copy of a weight [O, I] in the layout in which oneDNN computes, for `onednn_linear` only.

    With 32 rows, a product takes 0.75 to 0.85 times as long; with hundreds of rows, there is no difference.
    """
    with torch.no_grad(), long_lived():
        return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_ROWS)


def packed_bytes(model: Any, without: Collection[torch.nn.Module] = ()) -> int:
    """The memory for the packed weights of a model, of which the fused pass runs all but the modules `without`: 0 if they are not
    packed."""
    groups: dict[str, dict[int, torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".lora_" not in name and module not in without:
            layer, _, kind = name.rpartition(".")
            groups.setdefault(f"{layer}.{_TOGETHER.get(kind, kind)}", {})[id(module.weight)] = module.weight
    total = sum(
        4 * weight.numel() for group in groups.values() if is_packed(*group.values()) for weight in group.values()
    )
    return total if total <= MOST_BYTES else 0


_TOGETHER = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "gate_up"),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), "in"),
}
"""Linear layers that the fused pass computes as one, unless they have an adapter."""


def is_packed(*weights: torch.Tensor) -> bool:
    """Whether a copy in oneDNN's layout makes the product with a weight, or with several weights as one, faster for some number
    of rows."""
    return fewest_rows(*weights, packed=True) < NEVER


class PackedLayers:
    """The packed weights of a model, made when they are first asked for.

    A decoding step reads each weight for a few rows only. Bringing it into oneDNN's layout in each call takes up to a third of
    the time of the product.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[int, ...], _PackedCopy] = {}

    def of(self, *weights: torch.Tensor) -> torch.Tensor:
        """The packed weight with the present values, as far as torch knows of changes. Several weights [O, I] of the same inputs
        are packed as one [sum of O, I]."""
        key = tuple(map(id, weights))
        copy = self._copies.get(key)
        if copy is None or copy.states != [parameter_state(weight) for weight in weights]:
            copy = self._copies[key] = _PackedCopy(weights)
        return copy.values

    def clear(self) -> None:
        """The weights have changed, possibly without torch's knowledge."""
        self._copies.clear()


class _PackedCopy:
    """A packed copy of weights, and the states of the weights when they were copied."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.sources = weights  # kept, so that their ids are not given to other tensors
        self.states = [parameter_state(weight) for weight in weights]
        self.values = packed(weights[0] if len(weights) == 1 else torch.cat([weight.detach() for weight in weights]))


# Threads: how many torch uses for a step

TRIAL_STEPS = 3
"""Consecutive steps with the other number of threads, compared with as many steps before them."""
FIRST_PAUSE, PAUSE, MAX_PAUSE = 2, 32, 2048
"""Steps between two trials: few before the first trial of a small model, then twice as many after each lost trial, because a
lost trial costs time."""


@dataclass(slots=True)
class _Trial:
    """For work of about the same size: the best number of threads so far, and the state of the current trial."""

    best: int
    pause: int
    steps: int = 0
    fastest: float = float("inf")
    """Seconds for each row or token: the fastest of the last steps with the best number."""
    fastest_other: float = float("inf")
    """The same with the other number."""


class TorchThreads:
    """Sets torch's number of threads for a step. `number` is fixed; 0 starts with 1 thread, or with all if the model is `large`,
    and tries the other number regularly."""

    def __init__(self, number: int, *, large: bool) -> None:
        self._max_threads = torch.get_num_threads()
        self._number = number
        self._first = (self._max_threads, PAUSE) if large else (1, FIRST_PAUSE)
        self._trials: dict[tuple[str, int], _Trial] = {}

    @contextmanager
    def during(self, work: str, size: int) -> Iterator[None]:
        """A step of the kind `work` over `size` rows or tokens. Only steps of about the same size are compared."""
        before = torch.get_num_threads()
        trial = self._trials.setdefault((work, size.bit_length()), _Trial(*self._first))
        in_trial = not self._number and self._max_threads > 1 and trial.steps >= trial.pause
        torch.set_num_threads(self._number or (self._other(trial) if in_trial else trial.best))
        start = time.perf_counter()
        try:
            yield
        finally:
            torch.set_num_threads(before)
            self._record(trial, in_trial, (time.perf_counter() - start) / max(size, 1))

    def _other(self, trial: _Trial) -> int:
        return self._max_threads if trial.best == 1 else 1

    def _record(self, trial: _Trial, in_trial: bool, seconds: float) -> None:
        """Record the seconds for each row or token, and decide the trial if it is over."""
        trial.steps += 1
        if not in_trial:
            # only the last steps before the trial count: the machine may have been less busy before
            trial.fastest = seconds if trial.steps <= trial.pause - TRIAL_STEPS else min(trial.fastest, seconds)
            return
        trial.fastest_other = min(trial.fastest_other, seconds)
        lost = trial.fastest_other > 1.5 * trial.fastest
        if lost or trial.steps >= trial.pause + TRIAL_STEPS:
            won = trial.fastest_other < 0.95 * trial.fastest
            trial.best = self._other(trial) if won else trial.best
            trial.pause = PAUSE if won else min(max(PAUSE, 2 * trial.pause), MAX_PAUSE)
            trial.steps, trial.fastest, trial.fastest_other = 0, float("inf"), float("inf")
