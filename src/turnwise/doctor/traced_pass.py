"""One pass of the learner over a micro-batch, on tensors without contents (torch's fake tensors): which bytes it keeps in memory.

So activations, logits and gradients are those of this architecture with these options, before any weights are loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turnwise.engines.local.fused_support import unsupported_reason
from turnwise.models.allocator import LARGE_MODEL
from turnwise.models.autocast import autocast
from turnwise.models.fast_layers import with_fast_layers
from turnwise.models.loading import ModelOptions, adapt
from turnwise.models.packed_weights import packed_bytes
from turnwise.training.packing import default_micro_batch_tokens
from turnwise.training.token_logprobs import TokenLogprobs
from turnwise.training.tree import FlatRow, Tree, tree_attention, use_tree_attention
from turnwise.types import Sampling

__all__ = ["TracedPass", "Workload", "empty_model", "traced_pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The conversations of a step."""

    conversations: int
    tokens: int
    """Tokens of each conversation, the prompt included."""
    prompt_tokens: int = 0
    """Tokens that are not trained on, at the start of each conversation."""


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that operations have returned and that are still referenced."""

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
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
    """Trained weights: as many bytes as their gradients."""
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


def traced_pass(
    options: ModelOptions,
    model_config: Any,
    workload: Workload,
    micro_batch_tokens: int | None,
    *,
    mixed: bool,
    on_gpu: bool,
    on_ranks: bool,
) -> TracedPass:
    """Run the learner's forward and backward pass on tensors without contents.

    `micro_batch_tokens`: None is the learner's default. `mixed`: with autocast. `on_ranks`: the model is divided among several
    processes.
    """
    model = empty_model(options, model_config)
    large = model.num_parameters() > LARGE_MODEL and not on_ranks
    if micro_batch_tokens is None:
        micro_batch_tokens = default_micro_batch_tokens(torch.device("cuda" if on_gpu else "cpu"), large=large)
    row, places_N = _micro_batch(workload, micro_batch_tokens)
    with FakeTensorMode() as fake, tree_attention(Tree.of(row.runs)):
        for module, name, tensor, shared in _tensors(model):
            _replace(module, name, tensor, shared)
        if not on_gpu:
            with_fast_layers(model)
        fake.allow_non_fake_inputs = True
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        live, activations = _LiveBytes(), 0
        with live:
            for _ in range(2):  # in the second micro-batch, the gradients of the first are in memory
                before = live.live
                with autocast(torch.device("cpu"), mixed):
                    hidden_TD = _body(model)(
                        input_ids=torch.from_numpy(row.token_ids[None]),
                        position_ids=torch.from_numpy(row.position[None]),
                        use_cache=False,
                    )[0][0]
                activations = live.live - before
                _backward(model, hidden_TD[torch.from_numpy(places_N)])
                del hidden_TD
    return TracedPass(
        weights=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
        copied=2 * sum(weight.numel() for weight in _copied_weights(model)) if mixed else _packed(model),
        trained=sum(parameter.numel() * parameter.element_size() for parameter in trained),
        trained_count=sum(parameter.numel() for parameter in trained),
        largest=max(parameter.numel() for parameter in trained),
        lower_precision=any(parameter.dtype != torch.float32 for parameter in trained),
        activations=activations,
        peak=live.peak,
        keeps_blocks=large and not on_gpu,
    )


def empty_model(options: ModelOptions, model_config: Any) -> Any:
    """The model on torch's meta device, with the adapter and the gradient checkpointing of the options."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = model_config.get_text_config() is not model_config
    family = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with torch.device("meta"):
        model = family.from_config(model_config, dtype=getattr(torch, options.dtype))
        model.eval()
        adapt(model, replace(options, adapter=None))
    use_tree_attention(model)
    return model


def _micro_batch(workload: Workload, micro_batch_tokens: int) -> tuple[FlatRow, np.ndarray]:
    """Conversations with a common prompt in one flat row, as many as fit into a forward pass, and the places of the targets."""
    own = workload.tokens - workload.prompt_tokens
    count = max(1, (micro_batch_tokens - workload.prompt_tokens) // own)
    prompt = np.zeros(workload.prompt_tokens, dtype=np.int64)
    row = FlatRow.of([np.concatenate([prompt, np.full(own, 1 + number)]) for number in range(count)])
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


def _packed(model: Any) -> int:
    return packed_bytes(model) if unsupported_reason(model) is None else 0


def _copied_weights(model: Any) -> list[torch.Tensor]:
    """The parameters of linear layers of which autocast makes bfloat16 copies, each once: not those of the output layer."""
    head = set(model.get_output_embeddings().modules())
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and module not in head]
    return list({id(weight): weight for linear in linears for weight in linear.parameters(recurse=False)}.values())


def _backward(model: Any, hidden_ND: torch.Tensor) -> None:
    """Compute log-probabilities of the hidden states' targets, and their backward pass."""
    vocabulary = model.config.get_text_config().vocab_size
    head = TokenLogprobs(model.get_output_embeddings(), Sampling(), vocabulary=vocabulary)
    logprob_N, _ = head(hidden_ND, torch.zeros(len(hidden_ND), dtype=torch.long))
    logprob_N.sum().backward()
