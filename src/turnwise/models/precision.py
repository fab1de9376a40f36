"""Mixed precision, deterministic algorithms, where values overflow, and the options of attention that `sdpa` ignores.

Mixed precision computes matrix products in bfloat16 with parameters in float32 (torch.autocast). Norms, the residual stream,
the logits and their softmax stay in float32, and gradients of parameters are float32. The logits do, because bfloat16 has steps
of 0.25 between 32 and 64: engine and trainer would round the logits of a pretrained model to log-probabilities that differ by
more than an update changes them. The products of the output layer's backward pass are in bfloat16, as those of other layers.

transformers passes the options of a layer to the attention function as keyword arguments, and `sdpa` silently drops those that
it does not support: the soft cap of Gemma 2 and VaultGemma, the attention sinks of gpt-oss, the token selection of sparse
attention. The model then computes something else than it was trained with, so trainer and embedded engine refuse it. Knows
models and their layers. Does not know the trainer or the engine, which both use this module.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from turnwise.models.allocator import long_lived

_log = logging.getLogger(__name__)

# Mixed precision


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    """The context for a forward pass with matrix products in bfloat16; without effect if not `enabled`.

    torch's cache of converted weights is off: all threads share it, and a weight that a pass without gradients has converted
    would get no gradient in the training pass of another thread.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False) if enabled else nullcontext()


def output_layer_in_float32(model: Any) -> None:
    """Let the output layer of a model compute logits in float32 also under `autocast`, in place. A second call changes nothing.

    The gradients of a plain linear layer are products in bfloat16.
    """
    head: Any = model.get_output_embeddings()
    if head is not None and not getattr(head, "turnwise_float32", False):
        head.turnwise_float32 = True
        # an attribute of the layer: a copy of the model gets layers of its own
        head.forward = _forward_in_float32(head)


def _without_autocast(forward: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    with torch.autocast(values.device.type, enabled=False):
        return forward(values.float())


def _forward_in_float32(head: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if type(head) is torch.nn.Linear and "forward" not in vars(head):
        return functools.partial(_logits_of, head)
    return functools.partial(_without_autocast, head.forward)


def _logits_of(head: torch.nn.Linear, values: torch.Tensor) -> torch.Tensor:
    return _LinearWithBfloat16Gradients.apply(values, head.weight, head.bias)


class _LinearWithBfloat16Gradients(torch.autograd.Function):
    """A linear layer that computes in float32, and its gradients as autocast does: in bfloat16, from float32 to float32."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        with torch.autocast(values.device.type, enabled=False):
            ctx.save_for_backward(values, weight)
            return torch.nn.functional.linear(values.float(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        values, weight = ctx.saved_tensors
        of_values, of_weight, of_bias = ctx.needs_input_grad
        with torch.autocast(values.device.type, enabled=False):
            gradient = gradients[0].to(torch.bfloat16)
            rows = gradient.flatten(0, -2)
            return (
                gradient.matmul(weight.to(torch.bfloat16)).to(values.dtype) if of_values else None,
                rows.mT.matmul(values.flatten(0, -2).to(torch.bfloat16)).to(weight.dtype) if of_weight else None,
                gradients[0].flatten(0, -2).sum(dim=0) if of_bias else None,
            )


def product_dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype in which a matrix product of these values is computed: that of autocast, or their own."""
    kind = values.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype


@contextmanager
def in_evaluation(*models: torch.nn.Module) -> Iterator[None]:
    """Inside, all modules of these are in evaluation mode."""
    training = [module for model in models for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


class Bfloat16Linears:
    """A second model on the same parameters, whose linear layers have bfloat16 copies of their weights, except the output layer.

    Under `autocast` it computes what the model itself computes (with `output_layer_in_float32`), and does not convert the weights
    in each pass. `refresh` makes the copies again after the model's weights have changed, or after `free`.
    """

    def __init__(self, model: Any) -> None:
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self._source = model
        self.model = copy.deepcopy(model, shared)
        """The second model. Its linear layers compute in bfloat16, except the output layer."""
        self._copies: dict[int, _ParameterCopy] = {}
        self.refresh()

    def refresh(self, *, force: bool = True) -> None:
        """Give the second model the parameters that the model has now, and copy the weights of linear layers.

        Without `force`, a weight is copied only if torch has counted a change since the last copy. Some optimizers change
        weights without torch's knowledge.
        """
        copies: dict[int, _ParameterCopy] = {}
        head: Any = self._source.get_output_embeddings()
        in_float32 = set() if head is None else {id(module) for module in head.modules()}
        # also inside an engine's inference mode: tensors of that mode could not be changed outside of it
        with torch.inference_mode(False), torch.no_grad():
            for source, own in zip(self._source.modules(), self.model.modules(), strict=True):
                own._buffers.update(source._buffers)
                if not isinstance(source, torch.nn.Linear) or id(source) in in_float32:
                    own._parameters.update(source._parameters)
                    continue
                for name, parameter in source._parameters.items():
                    if parameter is None:
                        continue
                    if (key := id(parameter)) not in copies:  # tied layers share a copy
                        copies[key] = _copied(parameter, self._copies.get(key), force=force)
                    own._parameters[name] = copies[key].values
        self._copies = copies

    def free(self) -> None:
        """Free the copies until the next `refresh`. Until then, the linear layers have the model's own weights."""
        for source, own in zip(self._source.modules(), self.model.modules(), strict=True):
            own._parameters.update(source._parameters)
        self._copies = {}

    @property
    def freed(self) -> bool:
        """Whether there are no copies."""
        return not self._copies


class _ParameterCopy:
    """A bfloat16 copy of a parameter, and the state of the parameter when it was copied."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self.source = parameter  # kept, so that its id is not given to another tensor
        with long_lived():
            self.values = torch.nn.Parameter(parameter.detach().to(torch.bfloat16), requires_grad=False)
        self.state = parameter_state(parameter)


def _copied(parameter: torch.Tensor, previous: _ParameterCopy | None, *, force: bool) -> _ParameterCopy:
    if previous is None or previous.source is not parameter or previous.values.shape != parameter.shape:
        return _ParameterCopy(parameter)
    if force or previous.state != parameter_state(parameter):
        previous.values.copy_(parameter)
        previous.state = parameter_state(parameter)
    return previous


def parameter_state(parameter: torch.Tensor) -> tuple[int, int]:
    """Changes whenever torch changes the parameter."""
    return parameter.data_ptr(), parameter._version


# Deterministic algorithms (`deterministic: true`)


def use_deterministic_algorithms() -> None:
    """Make torch deterministic in this process: deterministic algorithms, and one thread."""
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


# Overflow: where the first value that is not finite comes from


def overflowing_module(model: Any, run: Callable[[], Any]) -> str | None:
    """The first module of the model whose output has NaN or infinite values while `run` calls the model: its name and class, such
    as `model.layers.3.linear_attn (Qwen3_5GatedDeltaNet)`. None if all outputs are finite.

    A layer inside a layer is named, not the layer around it. Passes of other threads do not count.
    """
    found: list[str] = []
    thread = threading.get_ident()

    def check(name: str, module: torch.nn.Module, _: Any, output: Any) -> None:
        if not found and threading.get_ident() == thread and not _all_finite(output):
            found.append(f"{name} ({type(module).__name__})")

    handles = [module.register_forward_hook(functools.partial(check, name)) for name, module in model.named_modules()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def _all_finite(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return not output.is_floating_point() or bool(output.isfinite().all())
    if isinstance(output, Mapping):
        return all(_all_finite(value) for value in output.values())
    return not isinstance(output, tuple | list) or all(_all_finite(value) for value in output)


def log_overflow(model: Any, run: Callable[[], Any]) -> None:
    """Warn of the first module whose output is not finite while `run` calls the model; if all are, of the first such gradient."""
    where = overflowing_module(model, run)
    if where is not None:
        _log.warning("the first values that are NaN or infinite are those of %s", where)
        return
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    strange = [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]
    if strange:
        _log.warning(
            "all values of the forward pass are finite; the gradients of %d parameters are not, such as %s",
            len(strange),
            strange[-1],  # that of the last layer is computed first
        )


# Attention: options that `sdpa` ignores

_NAME = "turnwise_recorder"
"""The name of an attention that records its options."""

_ARGUMENTS = {"kwargs", "module", "query", "key", "value"}
_SUPPORTED = frozenset(inspect.signature(sdpa_attention_forward).parameters) - _ARGUMENTS
_WITHOUT_EFFECT = frozenset(
    (
        # contained in the mask
        *("sliding_window", "attention_mask"),
        # options of the sequence, the cache or the output: the attention scores do not depend on them
        *("position_ids", "position_embeddings", "cache_position", "cache", "past_key_values", "use_cache"),
        *("return_dict", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep"),
        *("token_type_ids", "mm_token_type_ids", "hidden_states", "layer_idx", "deterministic"),
        # options of packed sequences, which turnwise does not use
        *("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "max_seqlen", "seq_idx"),
    )
)

_recorded: ContextVar[set[str] | None] = ContextVar("recorded", default=None)


def unsupported(options: dict[str, Any], *, known: Collection[str] = _SUPPORTED) -> list[str]:
    """Names of the options that change attention scores and are not in `known`. An option with the value None is not set."""
    return sorted(
        name for name, value in options.items() if value is not None and name not in {*known, *_WITHOUT_EFFECT}
    )


def ignored_by_sdpa(model: Any) -> list[str]:
    """Names of the options that the model's layers pass to their attention and that `sdpa` ignores, such as `softcap`.

    Runs two tokens through the model with an attention function that records its options. Empty for a model whose attention
    cannot be replaced.
    """
    original = model.config.get_text_config()._attn_implementation
    AttentionInterface.register(_NAME, _record)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    names: set[str] = set()
    token = _recorded.set(names)
    try:
        set_text_attention(model, _NAME)
        ids = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    except (TypeError, ValueError, RuntimeError, IndexError):
        return []  # its attention cannot be replaced
    finally:
        _recorded.reset(token)
        if model.config.get_text_config()._attn_implementation != original:
            set_text_attention(model, original)
    return sorted(names)


def scales_queries(attention: Any) -> bool:
    """Whether it is an attention of Llama 4 without rotary positions, which scales the queries of late tokens."""
    return bool(getattr(attention, "attn_temperature_tuning", False)) and not attention.use_rope


def query_scale(attention: Any, position: torch.Tensor) -> torch.Tensor:
    """The scale of the queries at these positions (arXiv 2501.19399)."""
    steps = torch.floor((position.float() + 1.0) / attention.floor_scale)
    return torch.log1p(steps) * attention.attn_scale + 1.0


_ALIGNED = 8
"""The rows of a mask begin at a multiple of so many numbers on a GPU: its kernels would copy another mask in each layer."""


def additive_mask(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A summand of attention scores [..., K]: -inf where `hidden` is true, 0 elsewhere."""
    *rows, keys = hidden.shape
    width = keys if hidden.device.type == "cpu" else -(-keys // _ALIGNED) * _ALIGNED
    mask = torch.zeros((*rows, width), dtype=dtype, device=hidden.device)[..., :keys]
    return mask.masked_fill_(hidden, -torch.inf)


@contextmanager
def narrow_window(config: Any, tokens: int) -> Iterator[None]:
    """Inside, the sliding windows of a model with this text configuration have at most `tokens` tokens.

    The test of an attention on a few tokens then includes what is outside the window.
    """
    windows = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    windows = {name: window for name, window in windows.items() if window is not None}
    for name, window in windows.items():
        setattr(config, name, min(window, tokens))
    try:
        yield
    finally:
        for name, window in windows.items():
            setattr(config, name, window)


def set_text_attention(model: Any, name: str) -> None:
    """Set the attention implementation of the text part of the model; a vision part keeps its own.

    Raises ValueError if the model's attention cannot be replaced.
    """
    text = model.config.get_text_config()
    parts = [part for part in model.config.sub_configs if getattr(model.config, part, None) is text]
    model.set_attn_implementation(dict.fromkeys(parts, name) or name)


def _record(module: Any, *tensors: Any, **options: Any) -> Any:
    ignored = unsupported(options)
    if (names := _recorded.get()) is not None:
        names.update(ignored)
    # without those: since transformers 5.24, sdpa refuses some of them
    given = {name: value for name, value in options.items() if name not in ignored}
    return sdpa_attention_forward(module, *tensors, **given)
