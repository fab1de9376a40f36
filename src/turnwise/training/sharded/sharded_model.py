"""A transformers model whose parameters are divided among ranks, by torch's FSDP2 (`fully_shard`), and its loading.

Each layer of the model is a unit: its parameters are gathered before its passes and freed after them. All other parameters
(embedding, output layer, vision part) belong to the root. Hooks of modules gather the weights. Therefore each pass must run
inside `ShardedModel.run`, which calls the root: the learner's forward pass calls the model's body and its output layer
separately. While a model is loaded, each rank keeps only its part of each layer.

Gradients are added up over the ranks, and not averaged: the weights of all targets of a batch have the sum 1, whichever ranks
compute them. Knows modules and ranks. Does not know batches, losses or commands.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.errors import ConfigError
from turnwise.models.allocator import LARGE_MODEL, return_freed_blocks
from turnwise.models.loading import ModelSource, load_model, of_model, of_tensors, use_complete_attention
from turnwise.models.lora import without_adapter
from turnwise.models.staged_loading import IncompleteWeights, StagedModel, open_staged
from turnwise.options.engines import FsdpSection

T = TypeVar("T")


class _Root(torch.nn.Module):
    """Runs a computation with the root's parameters gathered."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedModel:
    """Divides `model` among the ranks of the last dimension of `mesh`, in place; a dimension before it has copies.

    All ranks must have the same model, on the CPU or on their device. `fill` is called with each part of the model (a layer, or
    at the end the model) before the part is divided; it may read the part's weights. `head` is a layer beside the model, in
    float32, that is divided too.

    Raises ConfigError if the model does not name its layers.
    """

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        options: FsdpSection,
        *,
        fill: Callable[[Any], object] = lambda part: None,
        head: torch.nn.Module | None = None,
    ) -> None:
        self.model = model
        self._root: Any = _Root(model, head)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._rounds = options.reduce_dtype == "bfloat16"
        self._sync_always = options.adds_up_each(4 * trained)
        arguments: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if options.param_dtype is None else getattr(torch, options.param_dtype),
                reduce_dtype=getattr(torch, options.reduce_dtype),
                output_dtype=torch.float32,
            )
            if options.param_dtype is not None
            else MixedPrecisionPolicy(reduce_dtype=getattr(torch, options.reduce_dtype)),
            "offload_policy": CPUOffloadPolicy() if options.offload == "cpu" else OffloadPolicy(),
        }
        layers = _layers(model)
        inside = {**arguments, "mp_policy": _without_output_dtype(arguments["mp_policy"])}
        for layer in layers:
            fill(layer)
            fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **inside)
        fill(model)
        if head is not None:
            fully_shard(head, **{**arguments, "mp_policy": MixedPrecisionPolicy()})
        fully_shard(self._root, **arguments)
        for module in self._root.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        # a rank without images computes no gradient of the vision part
        self._root.set_reduce_scatter_unused_params(True)

    def run(self, compute: Callable[[], T]) -> T:
        """Run a pass with the root's parameters gathered. All ranks must run the same pass, on tensors of any size."""
        result = self._root(compute)
        if not torch.is_grad_enabled():
            self.free()
        return result

    def probe(self, compute: Callable[[], T]) -> T:
        """Run passes without gradients, that find out something about the model. May change options of the model.

        Inside, the root's parameters are complete and on the rank's device, also if their parts are on the CPU
        (`cluster.fsdp.offload`): `model.device`, which is that of the embedding, is where inputs belong.
        """
        with torch.no_grad():
            return self.run(compute)

    def free(self) -> None:
        """Free gathered weights after passes without gradients: the weights may change before the next pass."""
        self._root.reset_iter_state()

    def sync_gradients(self, *, last: bool) -> None:
        """Whether the next backward pass adds its gradients up over the ranks. `last`: it is the last of a batch."""
        self._root.set_requires_gradient_sync(last or self._sync_always)
        # between the groups of a mesh, which may be machines, parts of gradients are added up once. Until then, torch keeps their
        # sum in the type in which they are sent: in bfloat16, small parts would be lost
        self._root.set_requires_all_reduce(last or self._rounds)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers by their names in the state dict, divided."""
        yield from self.model.state_dict().items()


def complete(tensor: torch.Tensor) -> torch.Tensor:
    """The complete tensor of a divided tensor, on all ranks; any other tensor unchanged. A collective operation."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(full: torch.Tensor, divided: torch.Tensor) -> torch.Tensor:
    """A complete tensor, which all ranks have, divided as `divided`."""
    if not isinstance(divided, DTensor):
        return full.to(divided.device)
    local = full.to(divided.device)
    return distribute_tensor(local, divided.device_mesh, divided.placements, src_data_rank=None)


def _layers(model: Any) -> list[Any]:
    """The decoder's layers. The layers of a vision part are not units: a rank without images does not call them."""
    decoder = model.get_decoder()
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} cannot be divided among ranks: it does not name its layers. Train it in one process: remove "
            f"the section cluster"
        )
    return layers


def _without_output_dtype(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)


# Loading: each rank keeps only its part of each layer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is divided among the ranks."""

    sharded: ShardedModel
    base_fingerprint: str | None
    """SHA-256 of its weights without the adapter; None if it has no adapter, or if the fingerprint was not asked for."""


def load_sharded(
    source: ModelSource,
    mesh: DeviceMesh,
    sharding: FsdpSection,
    *,
    prepare: Callable[[Any], torch.nn.Module | None] = lambda model: None,
    fingerprint: bool = False,
) -> LoadedModel:
    """Load a model and divide it. Each rank reads the layers one after the other, and keeps its part of each.

    `prepare` receives the model before it is divided, perhaps without weights yet; it may freeze weights, and may return a layer
    beside the model (`head` of `ShardedModel`). `fingerprint` asks for the fingerprint of the weights without the adapter. The
    device of the source is not used: it is that of `mesh`.

    A model that cannot be read layer by layer is first loaded completely, into the CPU's memory of each rank. Raises ConfigError
    as `load_model`.
    """
    source = source.model_copy(update={"device": "cpu"})
    fingerprint = fingerprint and source.lora.rank is not None
    staged = open_staged(source)
    if staged is None or staged.model.num_parameters() > LARGE_MODEL:
        return_freed_blocks()  # buffers of gathered weights; gloo has them in the CPU's memory
    if staged is not None:
        try:
            return _layer_by_layer(staged, mesh, sharding, prepare, fingerprint=fingerprint)
        except IncompleteWeights:
            pass  # what is wrong with the weights is found and reported by `load_model`
    model = load_model(source)
    _log.warning("%s cannot be loaded layer by layer: each rank has loaded the complete model", source.path)
    base = of_model(without_adapter(model)) if fingerprint else None
    return LoadedModel(ShardedModel(model, mesh, sharding, head=prepare(model)), base)


def _layer_by_layer(
    staged: StagedModel,
    mesh: DeviceMesh,
    sharding: FsdpSection,
    prepare: Callable[[Any], torch.nn.Module | None],
    *,
    fingerprint: bool,
) -> LoadedModel:
    lines: dict[str, str] = {}
    head = prepare(staged.model)

    def fill(part: Any) -> None:
        tensors = staged.fill(part)
        if fingerprint:
            lines.update(zip(tensors, of_tensors(tensors.items()), strict=True))

    sharded = ShardedModel(staged.model, mesh, sharding, fill=fill, head=head)
    staged.check()
    sharded.probe(lambda: use_complete_attention(staged.model))
    text = "\n".join(lines[name] for name in sorted(lines))
    return LoadedModel(sharded, hashlib.sha256(text.encode()).hexdigest() if fingerprint else None)
