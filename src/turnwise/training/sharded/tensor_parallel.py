"""Tensor parallelism: the matrices of each layer, divided among ranks that compute the same micro-batch together.

Which matrices are divided, and how, is transformers' plan of the model (`base_model_tp_plan`): a column-wise layer gives each
rank some of the heads or of the features, the row-wise layer after it adds the results up (Megatron-LM, arXiv 1909.08053). Here
are what the plan leaves open, and what it says otherwise:

- Experts: each rank has some of them, complete, and not a part of each. So the part of a rank is one range of rows, which a
  checkpoint can describe.
- A layer that is whole on each rank but sees only the rank's heads (`q_norm`): its gradient is added up where it is computed.
  The plan's own way adds up `.grad`, which counts earlier micro-batches again.
- Adapters: of a column-wise layer, the second matrix is divided, of a row-wise layer the first.
- Layers whose input and output are complete in the plan stay whole.

Invariant: inside of the decoder's layers, hidden states and their gradients are complete and equal on all ranks. Outside
(embedding, last norm, output layer), gradients are parts, whose sum over the ranks is the gradient; there the weights are divided
among these ranks as among all others. The output layer computes some targets on each rank (`together.py`); the gradient of what
all ranks compute is divided by their number.

Knows modules and one dimension of a mesh. Does not know FSDP, batches or losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from turnwise.errors import ConfigError
from turnwise.models.cpu import without_fast_layers
from turnwise.models.model_config import DIVIDED_STYLES, planned_styles, refuse_indivisible, tensor_plan

_PARTIAL = "replicated_with_grad_allreduce"
_EXPERTS = "moe_tp_experts"
_WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "rowwise_split_input",
    "rowwise_rep",
    "packed_colwise",
    "packed_rowwise",
)
"""Layers that stay whole, and the matrices of experts, which are divided with their module."""
_ADDED = "deepstack_visual_embeds"
"""The argument of a decoder with what is added to the results of its first layers."""

# The plan of a model, and whether its sizes can be divided


def _plan(model: Any) -> dict[str, str]:
    # what is not in a layer (embedding, output layer) is divided as among all ranks
    plan = {name: style for name, style in tensor_plan(model).items() if ".layers.*." in name and style not in _WHOLE}
    unknown = set(plan.values()) - {*DIVIDED_STYLES, _PARTIAL}
    if unknown or not plan:
        raise ConfigError(
            f"cluster.mesh.tensor: {type(model).__name__} has {', '.join(sorted(unknown)) or 'no plan'}, which is not known"
        )
    return plan


# Dividing


class TensorParallel:
    """Divides the layers of `model` among the ranks of `mesh`, which has one dimension. `layers` are those of the decoder, in
    their order. Raises ConfigError if the model cannot be divided among them."""

    def __init__(self, model: Any, layers: Sequence[torch.nn.Module], mesh: DeviceMesh) -> None:
        refuse_indivisible(model.config, mesh.size())
        self._mesh = mesh
        self._styles = planned_styles(model, _plan(model))
        group = mesh.get_group()
        layers[0].register_forward_pre_hook(lambda layer, args: (_Part.apply(args[0], mesh.size()), *args[1:]))
        layers[-1].register_forward_hook(lambda layer, args, output: _sum_gradient_of(output, group))
        model.get_decoder().register_forward_pre_hook(self._enter, with_kwargs=True)

    def _enter(self, decoder: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """What is added between layers, where gradients are complete: features of the vision part (Qwen3-VL)."""
        if (features := options.get(_ADDED)) is not None:
            options = {**options, _ADDED: [_Part.apply(feature, self._mesh.size()) for feature in features]}
        return arguments, options

    def divide(self, layer: torch.nn.Module) -> None:
        """Divide the parameters of a layer, which may be on the meta device, and let its modules compute with their parts."""
        without_fast_layers(layer)  # they compute with complete weights
        for module in list(layer.modules()):
            style = self._styles.get(module)
            if style == _PARTIAL:
                _sum_gradients(module, self._mesh)
            elif style == _EXPERTS:
                _divide_experts(module, self._mesh)
            elif style is not None:
                for part, own_style in _parts(module, style):
                    _divide_linear(part, own_style, self._mesh)


def _parts(module: Any, style: str) -> Iterator[tuple[Any, str]]:
    """The linear layers at a place of the plan: the layer, or with an adapter the layer below it and one of its matrices."""
    base = getattr(module, "base_layer", None)
    if base is None:
        yield module, style
        return
    yield base, style
    for factor in (module.lora_B if style == "colwise" else module.lora_A).values():
        yield factor, style


def _divide_linear(module: Any, style: str, mesh: DeviceMesh) -> None:
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    if type(module) is not torch.nn.Linear:
        raise ConfigError(
            f"cluster.mesh.tensor: a {type(module).__name__} cannot be divided; train the model without quantization"
        )
    size = module.weight.shape[0 if style == "colwise" else 1]
    if size % mesh.size():
        raise ConfigError(
            f"cluster.mesh.tensor={mesh.size()}: a matrix of the model has {size} features, which {mesh.size()} ranks cannot "
            f"divide; use a divisor of {size}"
        )
    way: Any = ALL_PARALLEL_STYLES[style]
    for name in list(module._parameters):
        way.shard_param(module, name, mesh)
    way.install_forward(module, mesh)


def _sum_gradients(module: Any, mesh: DeviceMesh) -> None:
    """A module whose weights are whole, and whose inputs are this rank's heads."""
    forward, group = module.forward, mesh.get_group()

    def with_summed(*args: Any, **kwargs: Any) -> Any:
        own = dict(module._parameters)
        module._parameters.update(
            {name: _Summed.apply(weight, group) for name, weight in own.items() if weight is not None}
        )
        try:
            return forward(*args, **kwargs)
        finally:
            module._parameters.update(own)

    module.forward = with_summed


def _divide_experts(module: Any, mesh: DeviceMesh) -> None:
    """Give each rank some of the experts. A token's other experts have the number after the last one, which transformers' experts
    skip, and the weight 0."""
    from transformers.distributed.tensor_parallel import _use_local_dtensor_params

    count = module.num_experts // mesh.size()
    first, group = count * mesh.get_local_rank(), mesh.get_group()
    for name, weight in list(module._parameters.items()):
        whole = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[name] = torch.nn.Parameter(whole, requires_grad=weight.requires_grad)
    module.num_experts, module._is_expert_parallel = count, True
    forward = module.forward

    def of_own(hidden_TD: torch.Tensor, index_TK: torch.Tensor, weight_TK: torch.Tensor) -> torch.Tensor:
        hidden_TD, weight_TK = _Summed.apply(hidden_TD, group), _Summed.apply(weight_TK, group)
        other_TK = (index_TK < first) | (index_TK >= first + count)
        index_TK = torch.where(other_TK, count, index_TK - first)
        with _use_local_dtensor_params(module):
            output_TD = forward(hidden_TD, index_TK, weight_TK.masked_fill(other_TK, 0.0))
        return _Sum.apply(output_TD, group, hidden_TD, weight_TK)

    module.forward = of_own


# Between complete gradients and parts of them


def _total(values: torch.Tensor, group: Any) -> torch.Tensor:
    """The sum over the ranks of a group."""
    total = values.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


class _Sum(torch.autograd.Function):
    """The sum over the ranks, each of which gets the complete gradient.

    `inputs` are what the values were computed from: on a rank whose values do not depend on them, such as one whose experts get
    no token, the backward pass goes on to them all the same, because their gradients are added up over the ranks.
    """

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any, *inputs: torch.Tensor) -> torch.Tensor:
        ctx.inputs = len(inputs)
        return _total(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradients[0], None, *(None for _ in range(ctx.inputs))


class _Summed(torch.autograd.Function):
    """The values themselves, whose gradients on the ranks are parts: their sum is the gradient on each."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _total(gradients[0], ctx.group), None


class _Part(torch.autograd.Function):
    """The values themselves, with a gradient that all ranks have, divided by their number: their sum is the gradient."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] / ctx.ranks, None


def _sum_gradient_of(output: Any, group: Any) -> None:
    """Add up the gradient of the last layer's output, which comes in parts. The output stays what it is: FSDP warns of views."""
    hidden = output if isinstance(output, torch.Tensor) else output[0]
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: _total(gradient, group))
