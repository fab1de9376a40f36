"""Predicts the peak memory of a training step and of the embedded engine's KV cache, before any weights are loaded.

Activations, logits and gradients are those of a real pass of the learner over a micro-batch of tensors without contents
(torch's fake tensors): of this architecture, with these options. The rest is arithmetic: weights, optimizer, KV cache. This
module knows the recipe and the model's configuration; it needs no device and no weights.
"""

from __future__ import annotations

import contextlib
import copy
import os
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise import assembly
from turnwise.chat.media import has_media
from turnwise.chat.renderer import Renderer
from turnwise.config.train_checks import WITHOUT_REWARD, needs_critic, needs_reference
from turnwise.doctor.check import Check, override_notes
from turnwise.engines.local.engine import DEFAULT_CACHE_GB, LARGE_CACHE
from turnwise.engines.local.fused import fused_packed_bytes, unsupported_reason
from turnwise.engines.local.row_cache import bytes_kept
from turnwise.errors import ConfigError, Failed, TurnwiseError, boundary, counted
from turnwise.local_paths import refuse_other_than_model
from turnwise.models import cpu, kernels
from turnwise.models.allocator import LARGE_MODEL
from turnwise.models.cpu import with_fast_layers
from turnwise.models.device import gpu_memory, known_dtype, sees_gpu, uses_gpu
from turnwise.models.experts import expert_modules
from turnwise.models.loading import ModelSource, adapt
from turnwise.models.lora import adapter_base
from turnwise.models.model_config import RECURRENT_TYPES, context_length, key_widths
from turnwise.models.precision import autocast, output_layer_in_float32
from turnwise.models.quantization import linear_layers, stored_bytes
from turnwise.models.vision import VisionAdapter
from turnwise.options.algorithm import LoraSection, OptimizationSection, OptimizerSection
from turnwise.options.engines import SglangEngineSection
from turnwise.options.schema import Config
from turnwise.training import flash_tree
from turnwise.training.batch import default_micro_batch_tokens
from turnwise.training.forward import LOGITS_BYTES, TokenLogprobs, logits_bytes
from turnwise.training.tree import FlatRow, Tree, tree_attention, use_tree_attention
from turnwise.types import Row, Sampling

# one pass over a micro-batch without contents


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The conversations of a step."""

    conversations: int
    tokens: int
    """Tokens of the longest conversation, the prompt included."""
    prompt_tokens: int = 0
    """Tokens that are not trained on, at the start of each conversation."""
    equal: bool = False
    """Whether all conversations have exactly so many tokens. Else shorter ones fill what the longest leave of a micro-batch."""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have returned and that are still referenced.

    `weights` are in memory before: an operation that returns a view of them (such as a transposed one) makes no tensor.
    """

    def __init__(self, weights: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.viewed = 0
        """Bytes of the weights of which operations have returned views."""
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function is torch.ops.prim.device.default:  # two of three calls, from C++; fake tensors know their device
            return arguments[0].fake_device
        result = function(*arguments, **(options or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        if key in self._weights:
            self._weights.remove(key)
            self._known[key] = weakref.ref(storage)
            self.viewed += size
            return

        def freed(_: object) -> None:
            self.live -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedPass:
    """What a pass over one micro-batch keeps in memory, in bytes."""

    weights: int
    copied: int
    """The embedded engine's copies of weights: in bfloat16 with autocast, in oneDNN's layout on some CPUs without."""
    trained: int
    """Trained weights: as many bytes as their gradients in one pass."""
    trained_count: int
    largest: int
    """Parameters of the largest trained tensor."""
    lower_precision: bool
    """Whether trained weights are not float32."""
    activations: int
    """Tensors that the model's body keeps for the backward pass."""
    peak: int
    """The most bytes at once in forward and backward pass, gradients included."""
    keeps_blocks: bool
    """Whether the process keeps freed blocks (`models/allocator.py`): for a large model on a CPU."""
    mixes_adapters: bool
    """Whether the embedded engine computes several adapters on the model in one batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassOptions:
    """What a pass depends on, beside the model's configuration."""

    source: ModelSource
    workload: Workload
    micro_batch_tokens: int | None
    """None: the learner's default."""
    mixed: bool
    """With autocast."""
    on_gpu: bool
    on_ranks: bool
    """Whether the model is divided among several processes."""
    logits_bytes: int = LOGITS_BYTES
    """The memory for the logits of a chunk."""


def traced_pass(options: PassOptions, model_config: Any) -> TracedPass:
    """Run the learner's forward and backward pass on tensors without contents, once in this process for the same arguments."""
    key = (repr((options, cpu.uses_onednn())), model_config.to_json_string())
    if key not in _traced:
        _traced[key] = _trace(options, model_config)
    return _traced[key]


_traced: dict[tuple[str, str], TracedPass] = {}
"""Traced passes by their arguments: most options of a recipe, and all ranks but one, change nothing in a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """What is known of a model without a pass."""

    without_pass: TracedPass
    dequantized: int
    """Bytes of the largest quantized weight when it is dequantized for a product."""
    parameters: int
    autocast_copies: int
    """Bytes of the bfloat16 copies that autocast makes of the weights."""
    packed: int
    """Bytes of the copies of weights in oneDNN's layout."""
    kinds: tuple[Hashable, ...]
    """The kind of each layer; empty if the layers cannot be told apart."""
    first_unlike: bool
    """Whether the first layer keeps less for its backward pass than the others: its input has no gradient if the embedding is not
    trained."""
    server_weights: tuple[float, float]


_facts: dict[tuple[str, str], _Facts] = {}
"""Facts by the model's source and configuration: a model of many layers takes long to make, and most options change nothing."""


def _facts_of(source: ModelSource, model_config: Any) -> _Facts:
    """The facts of a model, computed once in this process for the same model."""
    key = (repr((source, cpu.uses_onednn())), model_config.to_json_string())
    if key not in _facts:
        model = empty_model(source, model_config)
        saved, dequantized = _quantized_bytes(model, source)
        _facts[key] = _Facts(
            without_pass=_without_pass_of(model, source, saved),
            dequantized=dequantized,
            parameters=model.num_parameters(),
            autocast_copies=2 * sum(weight.numel() for weight in _copied_weights(model)),
            kinds=_kinds_of_layers(model, model_config),
            first_unlike=not any(weight.requires_grad for weight in model.get_input_embeddings().parameters()),
            server_weights=_server_weights(model, _full_bytes(model) - saved),
            packed=_packed_bytes(model),
        )
    return _facts[key]


def _packed_bytes(model: Any) -> int:
    """See `_Facts`. The model gets tensors of a CPU: only those are packed."""
    if not cpu.uses_onednn():
        return 0
    with FakeTensorMode():
        for module, name, tensor, shared in _tensors(model):
            _replace(module, name, tensor, shared)
    return fused_packed_bytes(model)


def _trace(options: PassOptions, model_config: Any) -> TracedPass:
    facts = _facts_of(options.source, model_config)
    large = facts.parameters > LARGE_MODEL and not options.on_ranks
    activations, peak = _by_kinds(facts, options, model_config, large=large) or _traced_bytes(
        empty_model(options.source, model_config), options, large=large
    )
    return replace(
        facts.without_pass,
        copied=facts.autocast_copies if options.mixed else facts.packed,
        activations=int(activations),
        peak=int(peak) + facts.dequantized,
        keeps_blocks=large and not options.on_gpu,
    )


def _by_kinds(facts: _Facts, options: PassOptions, model_config: Any, *, large: bool) -> tuple[int, int] | None:
    """What `_traced_bytes` gives, by models of one layer of each kind: how many bytes a second layer of a kind adds is what each
    further one adds. None for a model whose layers depend on their number.

    The layers of each kind that are last come last, where a pass needs the most memory. The first layer is there too if it keeps
    less than others.
    """
    kinds, first = facts.kinds, [0] if facts.first_unlike else []
    base = [*first, *sorted({kind: number for number, kind in enumerate(kinds) if number not in first}.values())]
    further = Counter(kinds)
    further.subtract(kinds[number] for number in base)
    added = {kind: [*first, kinds.index(kind), *base[len(first) :]] for kind, count in further.items() if count}
    if not base or len(base) + 1 >= len(kinds):
        return None
    models = [_of_layers(options.source, model_config, kinds, numbers) for numbers in (base, *added.values())]
    found = [model for model in models if model is not None]
    # on a CPU, large models have other layers
    sizes = {facts.parameters > LARGE_MODEL, *(one.num_parameters() > LARGE_MODEL for one in found)}
    if len(found) < len(models) or len(sizes) > 1:
        return None
    of_base, *of_more = (np.array(_traced_bytes(model, options, large=large)) for model in found)
    each = (further[kind] * (more - of_base) for kind, more in zip(added, of_more, strict=True))
    activations, peak = sum(each, of_base).tolist()
    return activations, peak


def _kinds_of_layers(model: Any, model_config: Any, names: Iterable[str] | None = None) -> tuple[Hashable, ...]:
    """The kind of each layer: the shapes of its parameters, and what the configuration says of it, in the options of these names
    (default: all lists of that length). Empty if layers use what others have computed."""
    text = model_config.get_text_config()
    layers = [module for module in model.get_decoder().modules() if isinstance(module, GradientCheckpointingLayer)]
    if len(layers) != getattr(text, "num_hidden_layers", None) or getattr(text, "num_kv_shared_layers", 0):
        return ()
    shapes = [tuple((name, tuple(value.shape)) for name, value in layer.named_parameters()) for layer in layers]
    lists = [getattr(text, name) for name in (_of_each_layer(text, len(layers)) if names is None else names)]
    return tuple(zip(shapes, *([repr(value) for value in values] for values in lists), strict=True))


def _of_each_layer(text: Any, layers: int) -> dict[str, list[Any]]:
    """The options of a configuration that have a value for each layer."""
    return {name: value for name, value in text.to_dict().items() if isinstance(value, list) and len(value) == layers}


def _of_layers(source: ModelSource, model_config: Any, kinds: Sequence[Hashable], numbers: Sequence[int]) -> Any | None:
    """The model with these of its layers; None if that would be other layers, because their kind depends on their number."""
    changed = copy.deepcopy(model_config)
    text = changed.get_text_config()
    before, text.num_hidden_layers = text.num_hidden_layers, len(numbers)
    lists = _of_each_layer(text, before)
    for name, values in lists.items():
        setattr(text, name, [values[number] for number in numbers])
    try:
        model = empty_model(source, changed)
    except (ValueError, IndexError):  # the configuration wants another number of layers
        return None
    # of one layer, a list of length 1 need not be of layers
    return model if _kinds_of_layers(model, changed, lists) == tuple(kinds[number] for number in numbers) else None


def _traced_bytes(model: Any, options: PassOptions, *, large: bool) -> tuple[int, int]:
    """The bytes that the model's body keeps for the backward pass, and the most at once in both passes, with the gradients."""
    _distribute_evenly(model)
    tokens = options.micro_batch_tokens
    if tokens is None:
        tokens = default_tokens(options.on_gpu, large=large)
    row, places_N = _micro_batch(options.workload, tokens)
    # the values are on the CPU, and what is kept is that of the device: an accelerator keeps the gathered keys, unless its flash
    # kernel reads them where they are
    tree = replace(Tree.of(row.runs), accelerated=options.on_gpu, assumes_flash=options.on_gpu and flash_tree.on_card())
    with FakeTensorMode() as fake, tree_attention(tree):
        for module, name, tensor, shared in _tensors(model):
            _replace(module, name, tensor, shared)
        if not options.on_gpu:
            with_fast_layers(model)
        elif kernels.expects_kernels(options.source.kernels):
            kernels.replace_layers(model, kernels.of_trace())
        if options.mixed:
            output_layer_in_float32(model)  # its gradients have copies of their own
        fake.allow_non_fake_inputs = True
        live, activations = _LiveBytes(model.parameters()), 0
        with live:
            for parameter in model.parameters():
                if parameter.requires_grad:  # the gradients of earlier micro-batches
                    parameter.grad = torch.empty_like(parameter)
            before = live.live
            with autocast(torch.device("cpu"), options.mixed):
                hidden_TD = _body(model)(
                    input_ids=torch.from_numpy(row.token_ids[None]),
                    position_ids=torch.from_numpy(row.position[None]),
                    use_cache=False,
                )[0][0]
            activations = live.live - before
            _backward(model, hidden_TD[torch.from_numpy(places_N)], options.logits_bytes)
            del hidden_TD
    # measured peaks on a CPU are higher by about the weights that products read (benchmarks/memory.py)
    return activations, live.peak + (0 if options.on_gpu else live.viewed)


def default_tokens(gpu: bool, *, large: bool = False) -> int:
    """See `default_micro_batch_tokens`."""
    return default_micro_batch_tokens(torch.device("cuda" if gpu else "cpu"), large=large)


_EVEN = "turnwise_even"


def _distribute_evenly(model: Any) -> None:
    """Let each expert of a mixture of experts compute the same number of tokens: without contents, nothing says which tokens an
    expert gets, and torch's grouped products have shapes for bfloat16 only."""
    ALL_EXPERTS_FUNCTIONS.register(_EVEN, _even_experts)
    if expert_modules(model):
        with contextlib.suppress(ValueError):  # experts that are written out have no implementations to choose from
            model.set_experts_implementation(_EVEN)


def _even_experts(
    experts: Any, hidden_TD: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor
) -> torch.Tensor:
    """What transformers' `grouped_mm` keeps and computes, with tensors of the same sizes. S counts pairs of token and expert."""
    pairs, top_k = index_TK.numel(), index_TK.shape[1]
    gated = experts.has_gate
    up, down = experts.gate_up_proj if gated else experts.up_proj, experts.down_proj
    of_each = -(-pairs // len(down))
    place_S = torch.arange(of_each * len(down), device=hidden_TD.device) % pairs

    def product(values_SX: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
        weight_EXY = weight if experts.is_transposed else weight.transpose(-2, -1)
        with torch.autocast("cpu", enabled=False):  # grouped products are computed in the type of the weights
            values_EXx = values_SX.to(weight.dtype).view(len(down), of_each, -1)
            result_SY = torch.bmm(values_EXx, weight_EXY).flatten(0, 1)
        return (
            result_SY.add_(getattr(experts, name).repeat_interleave(of_each, dim=0)) if experts.has_bias else result_SY
        )

    inner_SY = product(hidden_TD[place_S // top_k], up, "gate_up_proj_bias" if gated else "up_proj_bias")
    inner_SY = experts._apply_gate(inner_SY) if gated else experts.act_fn(inner_SY)
    weighted_SD = product(inner_SY, down, "down_proj_bias") * weight_TK.reshape(-1)[place_S].unsqueeze(-1)
    return weighted_SD[place_S[:pairs]].view(*index_TK.shape, -1).sum(dim=1).to(hidden_TD.dtype)


def weight_bytes(model: Any, source: ModelSource) -> float:
    """The bytes of all weights of a model without contents."""
    return _full_bytes(model) - _quantized_bytes(model, source)[0]


def _full_bytes(model: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def _quantized_bytes(model: Any, source: ModelSource) -> tuple[float, int]:
    """The bytes that quantized weights take less than those of the model without contents, and those of the largest of them when
    it is dequantized for a product."""
    if source.quantization.bits is None:
        return 0.0, 0
    weights = {id(layer.weight): layer.weight for layer in linear_layers(model).values()}.values()
    full = [weight.numel() * weight.element_size() for weight in weights]
    return sum(full) - sum(stored_bytes(source.quantization, weight.numel()) for weight in weights), max(
        full, default=0
    )


def _without_pass_of(model: Any, source: ModelSource, saved: float | None = None) -> TracedPass:
    """What is in memory before and after each pass. `saved`: what quantized weights take less, if that is known."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    quantized = source.quantization.bits is not None
    return TracedPass(
        weights=int(_full_bytes(model) - (_quantized_bytes(model, source)[0] if saved is None else saved)),
        copied=0,
        trained=gradients,
        trained_count=sum(parameter.numel() for parameter in trained),
        largest=max(parameter.numel() for parameter in trained),
        lower_precision=any(parameter.dtype != torch.float32 for parameter in trained),
        activations=0,
        peak=gradients,
        keeps_blocks=False,
        mixes_adapters=not quantized and unsupported_reason(model) is None and VisionAdapter.of(model) is None,
    )


Part = Literal["sampling", "passes", "step"]
"""A part of a training step: conversations, then passes of the update, and its optimizer step."""


def held_bytes(config: Config, model_config: Any, section: str, during: Part = "step") -> float:
    """The bytes in memory during the whole of a part of a step, which are known without a pass: the most in an optimizer step."""
    return sum(part.bytes for part in _held(config, _without_pass(config, model_config), section, during))


def _without_pass(config: Config, model_config: Any) -> TracedPass:
    """What is known of the recipe's model without a pass."""
    return _facts_of(assembly.model_source(config), model_config).without_pass


def empty_parameters(config: Config, model_config: Any) -> tuple[int, float]:
    """The number of the model's parameters without an adapter, and their bytes in bfloat16."""
    source = assembly.model_source(config).model_copy(update={"lora": LoraSection(), "dtype": "bfloat16"})
    count = empty_model(source, model_config).num_parameters()
    return count, 2.0 * count


def empty_model(source: ModelSource, model_config: Any) -> Any:
    """The model on torch's meta device, with the adapter and the gradient checkpointing of the source."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = model_config.get_text_config() is not model_config
    family = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(model_config, dtype=getattr(torch, source.dtype))
        model.eval()
        adapt(model, source.model_copy(update={"adapter": None}))
    use_tree_attention(model)
    return model


def _micro_batch(workload: Workload, micro_batch_tokens: int) -> tuple[FlatRow, np.ndarray]:
    """Conversations with a common prompt in one flat row, as many as fit into a forward pass, and the places of the targets.

    A shorter conversation fills the rest of the row, unless all are equal. No other conversations need more: there are no more
    tokens, and what attention needs grows at least in proportion to a conversation's length.
    """
    own = workload.tokens - workload.prompt_tokens
    count, rest = divmod(max(micro_batch_tokens - workload.prompt_tokens, own), own)
    lengths = [own] * count + ([] if workload.equal or not rest else [rest])
    prompt = np.zeros(workload.prompt_tokens, dtype=np.int64)
    row = FlatRow.of([np.concatenate([prompt, np.full(length, 1 + number)]) for number, length in enumerate(lengths)])
    return row, np.concatenate([places[workload.prompt_tokens :] for places in row.places])


def _tensors(model: Any) -> Iterator[tuple[Any, str, torch.Tensor, dict[int, torch.Tensor]]]:
    """All parameters and buffers of a model by module and name, and a mapping for those that are shared."""
    shared: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                yield module, name, tensor, shared


def _replace(module: Any, name: str, tensor: torch.Tensor, shared: dict[int, torch.Tensor]) -> None:
    """Replace a tensor on the meta device by a fake tensor on the CPU."""
    if id(tensor) not in shared:
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        shared[id(tensor)] = torch.nn.Parameter(empty, requires_grad=tensor.requires_grad) if is_parameter else empty
    registry = module._parameters if name in module._parameters else module._buffers
    registry[name] = shared[id(tensor)]


def _body(model: Any) -> Any:
    return model.model if isinstance(getattr(model, "model", None), torch.nn.Module) else model.base_model


def _copied_weights(model: Any) -> list[torch.Tensor]:
    """The parameters of linear layers of which autocast makes bfloat16 copies, each once: not those of the output layer."""
    head = set(model.get_output_embeddings().modules())
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module not in head]
    return list({id(weight): weight for linear in linears for weight in linear.parameters(recurse=False)}.values())


_TRACED_CHUNKS = 6
"""More than those that are computed in one piece."""


def _backward(model: Any, hidden_ND: torch.Tensor, chunk_bytes: int) -> None:
    """Compute log-probabilities of the hidden states' targets, and their backward pass."""
    vocabulary = model.config.get_text_config().vocab_size
    if any(parameter.requires_grad for parameter in model.get_output_embeddings().parameters()):
        # the logits of a chunk are dropped with it: a few chunks need as much memory as all
        hidden_ND = hidden_ND[: _TRACED_CHUNKS * max(1, chunk_bytes // (4 * vocabulary))]
    head = TokenLogprobs(model.get_output_embeddings(), Sampling(), vocabulary=vocabulary, chunk_bytes=chunk_bytes)
    logprob_N = head(hidden_ND, torch.zeros(len(hidden_ND), dtype=torch.long)).logprob_N
    logprob_N.sum().backward()


# the KV cache


def kv_cache_bytes(config: Config, model_config: Any, *, conversations: int, tokens: int) -> float:
    """The cache of the embedded engine with these conversations, each of up to `tokens` tokens; 0 for another engine."""
    engine = config.engine.embedded
    if engine is None:
        return 0
    rows = min(engine.slots, config.max_concurrent, conversations)
    rows = 1 << (rows - 1).bit_length()  # rows and their capacity grow by doubling
    most = DEFAULT_CACHE_GB if engine.memory_gb is None else engine.memory_gb
    return min(most * 2**30, rows * kv_bytes_of_row(config, model_config, tokens))


def kv_bytes_of_row(config: Config, model_config: Any, tokens: int) -> float:
    """The bytes that the embedded engine keeps for a conversation of so many tokens."""
    return kv_bytes(config, model_config, _row_tokens(tokens), dtype=_cache_dtype(config))


def _row_tokens(tokens: int) -> int:
    """The length of a row of the embedded engine's cache for so many tokens: rows grow by doubling."""
    return max(256, 1 << (tokens - 1).bit_length())


def _cache_dtype(config: Config) -> str:
    """The type of the embedded engine's keys and values."""
    return "float32" if config.model.exact else "bfloat16"


def kv_bytes(config: Config, model_config: Any, tokens: int, *, dtype: str) -> float:
    """The bytes of keys, values and recurrent states of so many tokens of a conversation, in a data type."""
    text = model_config.get_text_config()  # reads a fact under any name that the architecture gives it
    states = 0
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    if set(types).intersection(RECURRENT_TYPES):
        token, states = bytes_kept(empty_model(assembly.model_source(config), model_config), getattr(torch, dtype))
    else:
        token = 2 * sum(key_widths(text)) * getattr(torch, dtype).itemsize
    return float(token * tokens + states)


def cache_holds(config: Config, model_config: Any, workload: Workload) -> str | None:
    """How many conversations the embedded engine's cache holds at once, what a conversation takes of it, and what becomes of the
    others; None if no such engine is in the trainer's process.

    Example: `40 of 128 conversations (of 3,328 tokens, kept as rows of 4,096; 112 KiB a token), more if they are shorter; ...`
    """
    engine = config.engine.embedded
    if engine is None or config.runs_conversations_elsewhere is not None:
        return None
    size = (DEFAULT_CACHE_GB if engine.memory_gb is None else engine.memory_gb) * 2**30
    states, one = (kv_bytes(config, model_config, tokens, dtype=_cache_dtype(config)) for tokens in (0, 1))
    token = one - states
    started = min(workload.conversations * (config.train.max_staleness + 1), config.max_concurrent)
    # all rows have one length, and a row that does not double has what there is
    kept = _row_tokens(workload.tokens)
    whole, least = (token * tokens + states for tokens in (kept, workload.tokens))
    rows = min(int(size // whole) or int(size >= least), engine.slots)
    how = f"kept as rows of {kept:,}" if kept != workload.tokens and size >= whole else ""
    return _holds(rows, started, _each(workload, how, token, states))


def _each(workload: Workload, how: str, token: float, states: float) -> str:
    """What a conversation takes of a cache; `how`: in which sizes, if in others than its tokens."""
    each = f"of {workload.tokens:,} tokens{f', {how}; ' if how else ', '}{token / 2**10:.4g} KiB a token"
    return f"{each} and {states / 2**20:.4g} MiB more" if states else each


def _holds(rows: int, started: int, each: str) -> str:
    """How many of the started conversations a cache holds, and what becomes of the others."""
    if rows >= started:
        return f"all {started} conversations ({each})"
    if not rows:
        return f"less than one conversation ({each}): a request that may become longer than the cache is refused"
    return (
        f"{rows} of {started} conversations ({each}), more if they are shorter; requests of the others wait, and a "
        f"conversation whose place they take between its turns is computed again"
    )


def server_cache_holds(config: Config, model_config: Any, workload: Workload, cache: float) -> str | None:
    """`cache_holds` of all servers that a process starts, whose cache has so many bytes on each GPU. None if arguments of the
    servers say how they keep keys and values.

    vLLM divides a cache into blocks, and does not round up further.
    """
    engine = config.engine.servers
    assert engine is not None
    if any(word.startswith(("--kv-cache-dtype", "--block-size", "--page-size")) for word in engine.arguments):
        return None
    dtype = "bfloat16" if config.model.autocast else known_dtype(config)
    states, one = (kv_bytes(config, model_config, tokens, dtype=dtype) for tokens in (0, 1))
    block = 1 if isinstance(engine, SglangEngineSection) else _BLOCK if on_gpu(config) else _BLOCK_ON_CPU
    kept = -(-workload.tokens // block) * block
    servers = engine.replicas * engine.data_parallel
    rows = servers * int(cache * engine.tensor_parallel // ((one - states) * kept + states))
    most = config.cluster.workers.max_concurrent if config.cluster.launcher == "ray" else config.max_concurrent
    how = f"in blocks of {block}" if kept != workload.tokens else ""
    each = _each(workload, how, one - states, states)
    if servers * engine.tensor_parallel > 1:
        each += f"; {counted(servers, 'server')} with {counted(engine.tensor_parallel, 'device')}"
    return _holds(rows, min(workload.conversations * (config.train.max_staleness + 1), most), each)


# a server on the trainer's GPU

_BLOCK, _BLOCK_ON_CPU = 16, 32
"""Tokens of a block of vLLM's cache: its default, and what it is started with on a CPU."""
SERVER_CACHE = "the server's KV cache"
"""The name of the part that `engine.memory_gb` sets."""
SERVER_BYTES, ASLEEP_BYTES = 2 * 2**30, 2**30
"""What a vLLM or SGLang server needs on a GPU beside its weights and its cache (CUDA's context, graphs, activations), and what it
keeps of that while it sleeps."""
_SERVER_SHARE = 0.9
"""The share of a GPU that servers take without `engine.memory_gb`."""


def server_parts(config: Config, model_config: Any, card_gib: float) -> list[MemoryPart]:
    """What each GPU of a started server holds while it samples. `card_gib` is the memory of the GPU."""
    engine = config.engine.servers
    assert engine is not None
    whole, eight = server_weights(config, model_config)
    weights = (eight if engine.eight_bits else whole) / engine.tensor_parallel
    cache = engine.memory_gb
    if cache is None:
        cache = max(0.0, _SERVER_SHARE * card_gib - (weights + SERVER_BYTES) / 2**30)
    return [
        MemoryPart("the server's weights", weights),
        MemoryPart(SERVER_CACHE, cache * 2**30),
        MemoryPart("the rest of the server", SERVER_BYTES),
    ]


def server_weights(config: Config, model_config: Any) -> tuple[float, float]:
    """The weights of a server in bytes, and where the matrices of layers have a byte for each weight. A server reads new weights
    in the type of the training, and quantizes them itself."""
    return _facts_of(assembly.model_source(config), model_config).server_weights


def _server_weights(model: Any, whole: float) -> tuple[float, float]:
    """See `server_weights`. `whole`: the bytes of all weights."""
    outside = {
        id(parameter)
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        if part is not None
        for parameter in part.parameters()
    }
    each = whole / sum(parameter.numel() for parameter in model.parameters())
    matrices = sum(
        parameter.numel() for parameter in model.parameters() if parameter.ndim >= 2 and id(parameter) not in outside
    )
    return whole, whole - matrices * (each - 1)


# the prediction

USABLE = 0.92
"""The share of a GPU's free memory that is planned with: torch's allocator keeps blocks that fit nothing else."""
PROGRAM_BYTES = 550 * 2**20
"""Bytes of Python with torch, transformers and the other libraries."""
_PEFT = 140 * 2**20
"""Bytes of peft, which also imports bitsandbytes where it is installed."""
_GAPS = 0.5
"""With autocast on a CPU: what converted values and weights leave free between the activations, in proportion to these (measured:
0.4 to 0.8)."""
_STATE_BYTES = {"adamw": 8.0, "adamw_8bit": 2.1, "adafactor": 0.05}
_MASTER_BYTES = {"float32": 4, "kahan": 2, "none": 0, "stochastic_rounding": 0}
_UNKNOWN_TOKENS = 2048
"""Tokens of a conversation if neither the recipe nor the model bounds them more."""
_UNKNOWN_PROMPT, _UNKNOWN_REPLY = 512, 256
"""Tokens of a prompt that is not known before the run, and of what an environment answers to a turn."""
_MEASURED_ROWS = 1000
"""The most rows whose prompts are measured."""


OF_ENGINE = ("KV cache", "copied weights of the engine")
"""The names of the parts that the embedded engine has for sampling."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One use of memory."""

    name: str
    bytes: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """The uses of memory at the peak of a training step. They add up to the peak."""

    parts: Sequence[MemoryPart]

    @property
    def gib(self) -> float:
        """The peak in GiB."""
        return sum(part.bytes for part in self.parts) / 2**30

    @property
    def text(self) -> str:
        """The parts in GiB, without those that are rounded to 0: `weights 3.3, gradients 0.1`."""
        shown = [(part.name, f"{part.bytes / 2**30:.1f}") for part in self.parts]
        return ", ".join(f"{name} {size}" for name, size in shown if size != "0.0")


def predict(
    config: Config,
    model_config: Any,
    workload: Workload,
    *,
    section: str = "train",
    on_ranks: bool = False,
    on_update: bool = False,
    card_gib: float | None = None,
) -> Prediction:
    """The peak of a training step of the recipe, on a model with this transformers configuration: that of the update, or that of
    sampling if it is higher and not `on_update`. `card_gib` is the memory of the GPU; None: that of the recipe's.

    `section` is `train` or `sft`; fine-tuning has no engine. `on_ranks`: the step is one of several processes, which divide the
    model. Raises ConfigError if the adapter does not fit the model.
    """
    update, sampling = phases(config, model_config, workload, section=section, on_ranks=on_ranks, card_gib=card_gib)
    return update if on_update else max(update, sampling, key=lambda phase: phase.gib)


def phases(
    config: Config,
    model_config: Any,
    workload: Workload,
    *,
    section: str = "train",
    on_ranks: bool = False,
    card_gib: float | None = None,
) -> tuple[Prediction, Prediction]:
    """The memory of an update, and that while conversations are sampled: see `predict`."""
    options: OptimizationSection = config.sft if section == "sft" else config.train
    optimizer, mixed = options.optimizer, config.model.autocast
    trace = _pass_of(config, options, model_config, workload, on_ranks=on_ranks, card_gib=card_gib)
    step = _step_bytes(trace, optimizer)
    # the largest gradient is converted before it is added to a sum of another type
    converted = 4 * trace.largest if _gradient_bytes(trace, optimizer) > trace.trained else 0
    apart = section == "train" and _steps_alone(config)
    passes = trace.peak + converted if apart else max(trace.peak + converted, trace.trained + step)
    embedded = section == "train" and config.engine.embedded is not None
    embedded = embedded and config.runs_conversations_elsewhere is None
    cache = kv_cache_bytes(config, model_config, conversations=workload.conversations, tokens=workload.tokens)
    copies = MemoryPart(
        "copied weights of the engine", trace.copied if embedded and (mixed or not on_gpu(config)) else 0
    )
    keys_values = MemoryPart("KV cache", cache if embedded else 0)
    # before an update, the engine frees its copies and a large cache, unless conversations run during the update
    stays = on_ranks or config.train.max_staleness > 0
    during = [copies, keys_values] if stays else [keys_values] if keys_values.bytes < LARGE_CACHE else []
    update = [
        MemoryPart("activations", trace.activations),
        MemoryPart("free blocks between activations", _GAPS * trace.activations if mixed and trace.keeps_blocks else 0),
        MemoryPart("logits and other temporary tensors", max(passes - trace.trained - trace.activations, 0)),
        *during,
    ]
    of_step = [MemoryPart("temporary tensors of the optimizer", step), *during] if apart else []
    sampling = [copies, keys_values]
    beside = (assembly.servers_beside_trainer(config) or 0) if section == "train" and on_gpu(config) else 0
    if beside and config.engine.servers is not None:
        parts = server_parts(config, model_config, machine_gib(config) if card_gib is None else card_gib)
        server = [replace(part, bytes=beside * part.bytes) for part in parts]
        sampling += server
        meanwhile = (
            [MemoryPart("the sleeping server", beside * ASLEEP_BYTES)] if config.engine.servers.sleep else server
        )
        update, of_step = [*update, *meanwhile], [*of_step, *meanwhile]

    def prediction(during: Part, parts: Sequence[MemoryPart]) -> Prediction:
        return Prediction([part for part in (*_held(config, trace, section, during), *parts) if part.bytes])

    of_update = prediction("passes", update)
    if apart:
        of_update = max(of_update, prediction("step", of_step), key=lambda phase: phase.gib)
    return of_update, prediction("sampling", sampling)


def _pass_of(
    config: Config,
    options: OptimizationSection,
    model_config: Any,
    workload: Workload,
    *,
    on_ranks: bool,
    card_gib: float | None,
) -> TracedPass:
    """A pass of an update of the recipe, whose optimizer has the `options`."""
    model_source = assembly.model_source(config)
    if config.cluster.distributed and config.cluster.mesh.tensor > 1:
        model_source = model_source.model_copy(update={"kernels": "none"})
    of_pass = PassOptions(
        source=model_source,
        workload=workload,
        micro_batch_tokens=options.micro_batch_tokens,
        mixed=config.model.autocast,
        on_gpu=on_gpu(config),
        on_ranks=on_ranks,
        logits_bytes=LOGITS_BYTES if on_ranks else _logits_bytes(config, card_gib),
    )
    return traced_pass(of_pass, model_config)


def _logits_bytes(config: Config, card_gib: float | None) -> int:
    if not on_gpu(config):
        return LOGITS_BYTES
    if card_gib is None:
        card_gib = machine_gib(config)
    return logits_bytes(None if card_gib == float("inf") else int(card_gib * 2**30))


def _steps_alone(config: Config) -> bool:
    """Whether what only optimizer steps need comes to the GPU after all passes of an update: for its only step."""
    several = needs_critic(config) or config.trained_policies or config.train.minibatches * config.train.ppo_epochs > 1
    return config.train.optimizer.offload == "sampling" and not several


def _held(config: Config, trace: TracedPass, section: str, during: Part) -> list[MemoryPart]:
    """What is in memory during the whole of a part of a training step."""
    optimizer = config.sft.optimizer if section == "sft" else config.train.optimizer
    in_turns = section == "train" and optimizer.offload == "sampling"
    away = in_turns and (during == "sampling" or (during == "passes" and _steps_alone(config)))
    here = 0.0 if away or optimizer.offload == "cpu" else 1.0
    # a step takes the gradients of weights with master weights, and an engine that takes turns with the trainer gets all
    sleeps = section == "train" and config.engine.servers is not None and config.engine.servers.sleep
    gradients = 0.0 if during == "sampling" and (in_turns or sleeps or trace.lower_precision) else 1.0
    lora = assembly.model_source(config).lora.rank is not None
    references = section == "train" and needs_reference(config)
    adapter_off = lora and config.reference.path is None and config.reference.source != "copy"
    optimizer_bytes = _optimizer_bytes(trace, optimizer)
    copied = config.checkpoint.background and not on_gpu(config)  # of a model on a GPU, they are in the CPU's memory
    return [
        MemoryPart("weights", trace.weights),
        MemoryPart("copies for a checkpoint", copied * (trace.trained + optimizer_bytes)),
        MemoryPart("reference model", trace.weights if references and not adapter_off else 0),
        MemoryPart("teachers", _loaded_bytes(assembly.teacher_sources(config), trace) if section == "train" else 0),
        MemoryPart("policies of agents", _policy_bytes(config, trace) if section == "train" else 0),
        MemoryPart("further adapters", _adapter_bytes(config, trace, here) if section == "train" else 0),
        MemoryPart("critic", _critic_bytes(config, trace, optimizer, here) if section == "train" else 0),
        MemoryPart("gradients", gradients * _gradient_bytes(trace, optimizer)),
        MemoryPart("optimizer", here * optimizer_bytes),
        MemoryPart("program", PROGRAM_BYTES + (_PEFT if lora else 0)),
    ]


def _policy_bytes(config: Config, trace: TracedPass) -> float:
    """The weights of local policies of agents that are loaded for them, and the most that their KV caches and copies of weights
    take. 0 where the conversations run in other processes."""
    if config.runs_conversations_elsewhere is not None:
        return 0.0
    sources = assembly.policy_sources(config)
    own = [policy for policy in config.policies if policy.name in sources and policy not in config.served_policies]
    apart = [policy for policy in own if policy.memory_gb is not None or sources[policy.name] is not None]
    if len(apart) < len(own) and config.engine.embedded is not None and trace.mixes_adapters:
        own = apart  # the others use the engine of the trained model
    caches = sum(DEFAULT_CACHE_GB if policy.memory_gb is None else policy.memory_gb for policy in own) * 2**30
    copied = trace.copied * sum(sources[policy.name] is None for policy in own)
    return _loaded_bytes(sources, trace) + caches + (copied if config.model.autocast or not on_gpu(config) else 0)


def _adapter_bytes(config: Config, trace: TracedPass, here: float) -> float:
    """Weights, gradients and optimizer of the adapters of further trained policies, which are on the policy's base weights.
    `here`: the share of the optimizer that is on the device."""
    total = 0.0
    for policy in config.trained_policies:
        of_adapter = trace
        if policy.lora not in (None, config.model.lora):
            source = assembly.model_source(config.of_policy(policy))
            try:
                with boundary("model"):
                    of_adapter = _without_pass_of(empty_model(source, read_model_config(source.path)), source)
            except Failed:
                of_adapter = trace
        # its weights and its gradients have the same size
        total += 2 * of_adapter.trained + here * _optimizer_bytes(of_adapter, config.train.optimizer)
    return total


def _loaded_bytes(sources: Mapping[str, ModelSource | None], trace: TracedPass) -> float:
    """The weights of frozen models: by their configuration, or as a model of the policy's size where that cannot be read. A
    model that shares the policy's weights (None) takes none."""
    total = 0.0
    for source in sources.values():
        if source is None:
            continue
        try:
            with boundary("model"):
                model = empty_model(source, read_model_config(source.path))
            total += sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        except Failed:
            total += trace.weights
    return total


def _critic_bytes(config: Config, trace: TracedPass, optimizer: OptimizerSection, here: float) -> float:
    """Weights, gradients and optimizer of the critic, which stay in memory while the policy is trained. `here`: the share of the
    optimizer that is on the device.

    A model in `critic.path` is counted as a model of the policy's size. Without it, adapters are on the policy's weights.
    """
    if not needs_critic(config):
        return 0
    shared = config.model.lora.rank is not None and config.critic.path is None
    weights = 0 if shared else trace.weights
    return weights + _gradient_bytes(trace, optimizer) + here * _optimizer_bytes(trace, optimizer)


def not_predicted(failed: Failed) -> Check:
    """The check `memory` of a model whose configuration is missing, or that cannot run on tensors without contents."""
    reason = " ".join(failed.failure.message.split())  # libraries write several lines
    return Check("memory", "note", f"the memory of a training step cannot be predicted: {reason}")


def peak_check(
    config: Config, model_config: Any, workload: Workload, *, section: str, limit: float, card_gib: float | None = None
) -> Check:
    """The predicted peak of a training step, compared with `limit` (GiB). `card_gib`: see `predict`."""
    update, sampling = phases(config, model_config, workload, section=section, card_gib=card_gib)
    found = max(update, sampling, key=lambda phase: phase.gib)
    both = f"sampling {sampling.gib:.1f}, update {update.gib:.1f}; " if section == "train" else ""
    text = (
        f"predicted peak of a training step: {found.gib:.1f} GiB ({both}{workload.conversations} conversations of up to "
        f"{workload.tokens:,} tokens)"
    )
    details = [("in GiB", update.text)]
    if section == "train":
        details = [("sampling, in GiB", sampling.text), ("update, in GiB", update.text)]
        holds = cache_holds(config, model_config, workload)
        if cache := sum(part.bytes for part in sampling.parts if part.name == SERVER_CACHE):
            beside = assembly.servers_beside_trainer(config) or 1
            holds = server_cache_holds(config, model_config, workload, cache / beside)
        if holds is not None:
            details.append(("the KV cache holds", holds))
    return compared(text, found.gib, limit, details, gpu=on_gpu(config))


def compared(text: str, gib: float, limit: float, details: Sequence[tuple[str, str]], *, gpu: bool) -> Check:
    """The check `memory` of a peak, whose prediction is in `text`: whether it fits, or does with so little to spare of a GPU that
    blocks which torch keeps may be too much."""
    if gib > limit:
        return Check("memory", "fail", f"{text}, and there are {limit:.1f} GiB", details=details)
    if gpu and gib > USABLE * limit:
        text += f", more than {USABLE:.0%} of {limit:.1f} GiB (torch's allocator keeps blocks that fit nothing else)"
        return Check("memory", "note", text, details=details)
    return Check("memory", "ok", text, details=details)


def certain_check(config: Config, path: str, *, section: str) -> Check:
    """The start of a run: whether what each optimizer step needs fits, which is known without a pass and in a moment.

    `peak_check` also predicts the passes, the cache and the engine, and takes as long as one.
    """
    try:
        with boundary("model"):
            without_pass = _without_pass(config, read_model_config(path))
    except Failed as failed:
        return not_predicted(failed)
    parts = [part for part in _held(config, without_pass, section, "step") if part.bytes >= 2**20]
    needed, limit = Prediction(parts).gib, machine_gib(config)
    text = ", ".join(f"{part.name} {part.bytes / 2**30:.1f}" for part in parts)
    text = f"training needs at least {needed:.1f} GiB ({text}; not counted: activations, caches, engines)"
    if needed <= limit:
        return Check("memory", "ok", text)
    return Check(
        "memory",
        "fail",
        f"{text}, and there are {limit:.1f} GiB: `turnwise doctor --recipe` finds options with which it fits; or use a smaller "
        f"model",
    )


def refuse_too_large(config: Config, path: str, *, section: str) -> list[str]:
    """Notes of `certain_check` at the start of a run. Raises ConfigError if it fails and `override_checks` does not name it."""
    check = certain_check(config, path, section=section)
    if check.status == "fail" and "memory" not in config.override_checks:
        raise ConfigError(f"{check.text}. To start all the same, set override_checks=[memory]")
    return [] if check.status == "note" else override_notes([check], config.override_checks)


def changed(part: Any, names: Sequence[str], value: Any) -> Any:
    """A copy of a section with another value of an option, by its dotted name."""
    first, *rest = names
    return part.model_copy(update={first: changed(getattr(part, first), rest, value) if rest else value})


def read_model_config(path: str) -> Any:
    """transformers' configuration of the model, or of the base model of an adapter."""
    from transformers import AutoConfig

    while (base := adapter_base(path)) is not None:
        path = base
    refuse_other_than_model(path, error=ConfigError, weights=False)
    return AutoConfig.from_pretrained(path)


def workload_of(
    config: Config, model_config: Any, section: str, *, longest: int | None = None, prompt: int | None = None
) -> Workload:
    """The conversations of a step, as long as the recipe and the model allow, and not longer than the `longest`, if it is
    known. `prompt` is the length of the longest prompt, if it is known (`longest_prompt`).

    Raises ConfigError if `limits.context` is longer than the model allows.
    """
    bounds = [assembly.limits(config, longest=context_length(model_config.to_dict())).context, longest]
    if section == "train":
        bounds.append(_longest_conversation(config, prompt))
    elif config.limits.context is None and longest is None:
        bounds.append(_UNKNOWN_TOKENS)
    conversations = config.sft.batch_size if section == "sft" else config.train.batch_size * config.train.group_size
    return Workload(conversations=conversations, tokens=min(bound for bound in bounds if bound is not None))


def longest_prompt(config: Config, rows: Sequence[Row], renderer: Renderer) -> int | None:
    """Tokens of the longest prompt of the rows, with the tools that the recipe names.

    None if a run may have other prompts: an environment that may add to them, MCP servers, images, or no messages.
    """
    measured = rows[:_MEASURED_ROWS]
    as_in_rows = config.environment.use in WITHOUT_REWARD and config.mcp.servers is None
    if not as_in_rows or not measured or any(not row.messages or has_media(row.messages) for row in measured):
        return None
    try:
        tools = assembly.tool_schemas(config)
        openings = (
            renderer.for_arguments(row.chat_template_kwargs).encode_opening(row.messages, tools) for row in measured
        )
        return max(len(opening.token_ids) for opening in openings)
    except TurnwiseError:  # another check says what is wrong
        return None


def _longest_conversation(config: Config, known: int | None) -> int:
    """Tokens of a conversation that the limits of turns and sampled tokens allow. `known` is the longest prompt."""
    limits = config.limits
    prompts = [prompt for prompt in (config.data.max_prompt_tokens, known) if prompt is not None]
    prompt = min(prompts, default=_UNKNOWN_PROMPT)
    sampled = limits.turns * limits.tokens_per_turn
    sampled = sampled if limits.tokens is None else min(sampled, limits.tokens)
    answers = sampled + (limits.turns - 1) * _UNKNOWN_REPLY
    if limits.response_tokens is not None:
        return prompt + min(answers, limits.response_tokens)
    if limits.context is None and limits.tokens is None:
        # few conversations use all their turns; but a single turn may be long
        return min(prompt + answers, max(_UNKNOWN_TOKENS, prompt + limits.tokens_per_turn))
    return prompt + answers


def on_gpu(config: Config) -> bool:
    """Whether the recipe uses a GPU on this machine."""
    return not config.deterministic and uses_gpu(config.model.device)


_CONTROL_GROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""The limits of memory of a container, in bytes, of control groups of version 2 and 1."""


def machine_gib(config: Config) -> float:
    """The memory of the GPU that the recipe uses, without what other processes use of it, or the memory of the machine; infinite
    if a GPU is named that is not here.

    In a container, that of the machine is the limit of the control group, if it is lower.
    """
    if on_gpu(config):
        return gpu_memory(config.model.device).free / 2**30 if sees_gpu() else float("inf")
    bytes_here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in _CONTROL_GROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not there, or `max`
            bytes_here = min(bytes_here, int(file.read_text()))
    return bytes_here / 2**30


def _optimizer_bytes(trace: TracedPass, optimizer: OptimizerSection) -> float:
    masters = _MASTER_BYTES[optimizer.master_weights] if trace.lower_precision else 0
    return trace.trained_count * (_STATE_BYTES[optimizer.name] + masters)


def _gradient_bytes(trace: TracedPass, optimizer: OptimizerSection) -> int:
    """The sums of gradients over the micro-batches."""
    return trace.trained if optimizer.grad_accum_dtype is None else 4 * trace.trained_count


def _step_bytes(trace: TracedPass, optimizer: OptimizerSection) -> int:
    """Temporary tensors of the optimizer step: those of the largest parameter, in float32."""
    copies = (1 + (optimizer.master_weights != "float32")) if trace.lower_precision else 0
    return 4 * trace.largest * (2 + copies)
