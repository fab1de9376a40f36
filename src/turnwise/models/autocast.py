"""Mixed precision: matrix products in bfloat16, with parameters in float32 (torch.autocast).

Norms, the residual stream, the output layer and the softmax of the output stay in float32, and gradients of parameters are
float32. The output layer does, because bfloat16 has steps of 0.25 between 32 and 64: engine and trainer would round the logits of
a pretrained model to log-probabilities that differ by more than an update changes them. Knows models and their linear layers.
Does not know the trainer or the engine, which both use it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from turnwise.models.allocator import long_lived

__all__ = ["Bfloat16Linears", "autocast", "output_layer_in_float32", "parameter_state", "product_dtype"]


def autocast(device: torch.device, enabled: bool) -> AbstractContextManager[Any]:
    """The context for a forward pass with matrix products in bfloat16; without effect if not `enabled`.

    torch's cache of converted weights is off: all threads share it, and a weight that a pass without gradients has converted
    would get no gradient in the training pass of another thread.
    """
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False) if enabled else nullcontext()


def output_layer_in_float32(model: Any) -> None:
    """Let the output layer of a model compute in float32 also under `autocast`, in place. A second call changes nothing."""
    head: Any = model.get_output_embeddings()
    if head is not None and not getattr(head, "turnwise_float32", False):
        head.turnwise_float32 = True
        # an attribute of the layer: a copy of the model gets layers of its own
        head.forward = functools.partial(_without_autocast, head.forward)


def _without_autocast(forward: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    with torch.autocast(values.device.type, enabled=False):
        return forward(values.float())


def product_dtype(values: torch.Tensor) -> torch.dtype:
    """The dtype in which a matrix product of these values is computed on a CPU: that of autocast, or their own."""
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else values.dtype


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
