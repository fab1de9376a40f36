"""A transformers model whose parameters are divided among ranks, by torch's FSDP2 (`fully_shard`), and its loading.

Each layer of the model is a unit: its parameters are gathered before its passes and freed after them. All other parameters
(embedding, output layer, vision part) belong to the root. Hooks of modules gather the weights. Therefore each pass must run
inside `ShardedModel.run`, which calls the root: the learner's forward pass calls the model's body and its output layer
separately. A model is divided before it has weights; then each rank reads its part.

Gradients are added up over the ranks, and not averaged: the weights of all targets of a batch have the sum 1, whichever ranks
compute them. Knows modules and ranks. Does not know batches, losses or commands.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from turnwise.errors import ConfigError
from turnwise.local_paths import WEIGHTS_IN_PARTS
from turnwise.models.allocator import LARGE_MODEL, return_freed_blocks
from turnwise.models.kernels import use_kernels
from turnwise.models.loading import ModelSource, load_model, of_model, of_tensors, use_complete_attention
from turnwise.models.lora import initialize_magnitudes, without_adapter
from turnwise.models.model_config import refuse_uncut
from turnwise.models.staged_loading import IncompleteWeights, StagedModel, open_staged
from turnwise.options.engines import FsdpSection
from turnwise.training.optimizer import norms_of
from turnwise.training.pace import LayerClock
from turnwise.training.sharded.expert_parallel import ExpertParallel
from turnwise.training.sharded.parts import ModelParts, PartsReader, unusable_parts
from turnwise.training.sharded.ranks import Mesh
from turnwise.training.sharded.tensor_parallel import TensorParallel

T = TypeVar("T")

# gathering what is divided along two dimensions is two operations, and DTensor says on each rank that one would be better
logging.getLogger("torch.distributed.tensor._redistribute").addFilter(
    lambda record: "sequential" not in str(record.msg)
)


class _Root(torch.nn.Module):
    """Runs a computation with the root's parameters gathered."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module | None) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, compute: Callable[[], Any]) -> Any:
        return compute()


class ShardedModel:
    """Divides `model` among the ranks of `mesh`, in place.

    All ranks must have the same model, on the CPU or on their device, or parameters on the meta device, which must have got their
    values before the first pass. `head` is a layer beside the model, in float32, that is divided too.

    Raises ConfigError if the model does not name its layers, if `mesh.tensor` cannot divide them, or if layers need the tokens
    that other ranks of `mesh.context` have.
    """

    def __init__(
        self,
        model: Any,
        mesh: Mesh,
        options: FsdpSection,
        *,
        head: torch.nn.Module | None = None,
    ) -> None:
        self.model = model
        self._root: Any = _Root(model, head)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._rounds = options.reduce_dtype == "bfloat16"
        self._sync_always = options.adds_up_each(4 * trained)
        arguments: dict[str, Any] = {
            "mesh": mesh.root,
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
        if mesh.context is not None:
            refuse_uncut(model.config, mesh.context.size())
        inside = {**arguments, "mesh": mesh.layers, "mp_policy": _without_output_dtype(arguments["mp_policy"])}
        tensor = None if mesh.tensor is None else TensorParallel(model, layers, mesh.tensor)
        expert = None if mesh.expert is None else ExpertParallel(model, mesh.expert)
        of_experts = {**inside, "mesh": mesh.experts, "mp_policy": _without_casts(inside["mp_policy"])}
        for layer in layers:
            if tensor is not None:
                tensor.divide(layer)
            for experts in () if expert is None else expert.divide(layer):
                fully_shard(experts, reshard_after_forward=options.reshard_after_forward, **of_experts)
            fully_shard(layer, reshard_after_forward=options.reshard_after_forward, **inside)
        self.clock = LayerClock(layers, socket.gethostname())
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

    def initialize_magnitudes(self) -> None:
        """Give new DoRA adapters their magnitudes, which need complete weights: those of one layer at a time."""
        layers = _layers(self.model)
        inside = {module for layer in layers for module in layer.modules()}
        units = [(layer, list(layer.modules())) for layer in layers]
        units.append((self._root, [module for module in self.model.modules() if module not in inside]))
        for unit, modules in units:
            unit.unshard()
            values = [(module, module.weight.detach().clone()) for module in initialize_magnitudes(modules)]
            unit.reshard()
            for module, value in values:
                with torch.no_grad():
                    module.weight.copy_(like(value, module.weight))

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


def divided_as(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part `local` of a tensor that is divided as `parameter`; it stays where it is, also on another device."""
    return DTensor(local, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else local  # pyright: ignore[reportCallIssue]


class DividedParts:
    """The `Parts` of an optimizer whose parameters are divided, perhaps on several meshes."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Parts.local`."""
        tensor = tensor.detach()
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def number(self, parameter: torch.Tensor) -> int:
        """See `Parts.number`."""
        if not isinstance(parameter, DTensor):
            return 0
        mesh, number = parameter.device_mesh, 0
        for dimension, placement in enumerate(parameter.placements):
            if not placement.is_replicate():
                number = number * mesh.size(dimension) + mesh.get_local_rank(dimension)
        return number

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `Parts.norm`. One number for each way to divide is added up over the ranks."""
        groups: dict[Any, tuple[Any, list[torch.Tensor]]] = {}
        for gradient, norm in zip(gradients, norms_of([self.local(one) for one in gradients]), strict=True):
            whole = not isinstance(gradient, DTensor)
            divided = () if whole else tuple(one.is_replicate() for one in gradient.placements)
            key = None if whole else (gradient.device_mesh, divided)
            groups.setdefault(key, (divided, []))[1].append(norm)
        totals: list[torch.Tensor] = []
        for key, (divided, norms) in groups.items():
            total = torch.stack(norms).square().sum()
            if key is not None:
                placements = [Replicate() if replicated else Partial() for replicated in divided]
                total = DTensor.from_local(total, key[0], placements, run_check=False).full_tensor()
            totals.append(total)
        return torch.stack(totals).sum().sqrt()

    def add_in_float32(self, parameter: torch.Tensor) -> None:
        """See `Parts.add_in_float32`. FSDP gives the first gradient in the type of the parameter, and adds further ones to it."""
        parameter.grad_dtype = None  # any
        parameter.register_post_accumulate_grad_hook(_widen)


def _widen(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and parameter.grad.dtype != torch.float32:
        parameter.grad = parameter.grad.float()


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


def _without_casts(policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """For a part of a layer, which receives what the layer computes."""
    return MixedPrecisionPolicy(
        param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype, cast_forward_inputs=False
    )


# Loading: each rank reads its part

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is divided among the ranks."""

    sharded: ShardedModel
    base_fingerprint: str | None
    """SHA-256 of its weights without the adapter, on rank 0; None if it has no adapter, or if the fingerprint was not asked
    for."""


def load_sharded(
    source: ModelSource,
    mesh: Mesh,
    sharding: FsdpSection,
    *,
    prepare: Callable[[Any], torch.nn.Module | None] = lambda model: None,
    fingerprint: bool = False,
) -> LoadedModel:
    """Load a model and divide it. Each rank reads its part of each weight, and no more, from safetensors files, or from the parts
    that other ranks have written.

    `prepare` receives the model before it is divided, perhaps without weights yet; it may freeze weights, and may return a layer
    beside the model (`head` of `ShardedModel`). `fingerprint` asks for the fingerprint of the weights without the adapter. The
    device of the source is not used: it is that of `mesh`.

    All ranks must ask for the same. A model that cannot be read like this is first loaded completely, into the CPU's memory of
    each rank. Raises ConfigError as `load_model`, and RunError if the parts of other ranks cannot be read.
    """
    loaded = _load(source.model_copy(update={"device": "cpu", "kernels": "none"}), mesh, sharding, prepare, fingerprint)
    if mesh.tensor is None:  # the ranks of `tensor` have layers of their own
        use_kernels(loaded.sharded.model, source.kernels, torch.device(mesh.layers.device_type))
    return loaded


def _load(
    source: ModelSource,
    mesh: Mesh,
    sharding: FsdpSection,
    prepare: Callable[[Any], torch.nn.Module | None],
    fingerprint: bool,
) -> LoadedModel:
    fingerprint = fingerprint and source.lora.rank is not None
    parts = ModelParts(Path(source.path)) if (Path(source.path) / WEIGHTS_IN_PARTS).is_file() else None
    staged = open_staged(source, None if parts is None else functools.partial(PartsReader, parts))
    if staged is None or staged.model.num_parameters() > LARGE_MODEL:
        return_freed_blocks()  # buffers of gathered weights; gloo has them in the CPU's memory
    if staged is not None:
        try:
            return _by_parts(staged, mesh, sharding, prepare, fingerprint=fingerprint)
        except IncompleteWeights:
            pass  # what is wrong with the weights is found and reported by `load_model`
    if parts is not None:
        raise unusable_parts(source.path)
    model = load_model(source)
    _log.warning("%s cannot be loaded in parts: each rank has loaded the complete model", source.path)
    base = of_model(without_adapter(model)) if fingerprint else None
    return LoadedModel(ShardedModel(model, mesh, sharding, head=prepare(model)), base)


def _by_parts(
    staged: StagedModel,
    mesh: Mesh,
    sharding: FsdpSection,
    prepare: Callable[[Any], torch.nn.Module | None],
    *,
    fingerprint: bool,
) -> LoadedModel:
    head = prepare(staged.model)
    staged.to_meta()
    sharded = ShardedModel(staged.model, mesh, sharding, head=head)
    right = True
    for part in (*_layers(staged.model), staged.model):
        try:
            staged.fill(part)
        except (
            IncompleteWeights
        ):  # perhaps in the part of this rank only: the others read on, and take part in what follows
            right = False
    if not _on_all_ranks(right, mesh):
        raise IncompleteWeights
    staged.check()
    sharded.probe(lambda: use_complete_attention(staged.model))
    if staged.new_magnitudes:
        sharded.initialize_magnitudes()
    return LoadedModel(sharded, _fingerprint(staged.base_tensors()) if fingerprint else None)


def _on_all_ranks(flag: bool, mesh: Mesh) -> bool:
    value = torch.tensor(int(flag), device=mesh.layers.device_type)
    dist.all_reduce(value, op=dist.ReduceOp.MIN)
    return bool(value)


def _fingerprint(tensors: Iterable[tuple[str, torch.Tensor]]) -> str | None:
    """See `LoadedModel.base_fingerprint`; None on other ranks than rank 0."""
    leads, lines = dist.get_rank() == 0, []
    for name, tensor in tensors:
        full = complete(tensor)  # collective, so all ranks call it for each tensor
        lines += of_tensors([(name, full)]) if leads else []
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if leads else None
