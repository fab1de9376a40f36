"""The optimizer: changes parameters from their gradients. Knows nothing of models, batches or losses.

The arithmetic is float32. Parameters of lower precision would lose small steps by rounding, so by default each has a float32 copy
(master weights). `optimizer.master_weights` has ways that need less memory.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import _foreach_copy_, _foreach_mul_, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from turnwise.errors import ConfigError
from turnwise.models.allocator import long_lived
from turnwise.options.algorithm import OptimizationSection, OptimizerSection
from turnwise.training.transfer import copied, to_host

__all__ = ["Optimizer"]

_log = logging.getLogger(__name__)


class Optimizer:
    """Changes `parameters` from the gradients that are accumulated in their `grad`.

    `complete` makes one number of a norm whose parts are on several ranks, for parameters that are divided among them; None: they
    are not.

    Raises ConfigError if the optimizer's package is not installed, or if an option has no effect on these parameters.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        options: OptimizationSection,
        *,
        complete: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        _refuse_without_effect(parameters, options.optimizer)
        self.parameters = list(parameters)
        self.masters = _masters(self.parameters, options)
        """The float32 tensors that the steps change: the parameters themselves, or copies. Without permanent copies, a tensor is
        empty except while its parameter is changed."""
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        """The number of values that a step changes."""
        self._options = options
        self._complete = complete
        # torch's operations on lists of tensors take no divided parameters, and save a CPU nothing
        self._groups = _groups(self.parameters, together=complete is None and self.parameters[0].device.type != "cpu")
        self._steps = 0
        self._optimizer = _torch_optimizer(self.masters, options)
        self._errors = (
            [torch.zeros_like(parameter) for parameter in self.parameters]
            if options.optimizer.master_weights == "kahan"
            else []
        )

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return self._steps

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.masters, *self.parameters):
            tensor.grad = None

    def add_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add gradients to those of the parameters: one for each, None where the loss does not depend on it."""
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def step(self, lr: float) -> float:
        """Clip the gradients and take one step.

        Returns the norm before clipping. If it is not finite, the step is skipped and the weights stay as they are.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        for parameter in self.parameters:
            if parameter.grad is None:
                # optimizers skip parameters whose gradient is None, so pass zeros: momentum must move them all the same
                parameter.grad = torch.zeros_like(parameter)
        if all(master is parameter for master, parameter in zip(self.masters, self.parameters, strict=True)):
            norm = torch.nn.utils.clip_grad_norm_(self.masters, self._options.max_grad_norm)
        else:
            norm = _norm(self.parameters, together=len(self._groups) < len(self.parameters))
        norm = norm if self._complete is None else self._complete(norm)
        (norm_here,) = to_host([norm])
        number = float(norm_here)
        if not math.isfinite(number):
            _log.warning(
                "the gradient norm is %s: this optimizer step is skipped, the weights stay as they are", number
            )
            return number
        self._steps += 1
        # the first step allocates the optimizer's state
        with long_lived() if self._steps == 1 else contextlib.nullcontext():
            self._step(norm_here if self.masters[0].device.type == "cpu" else norm)
        return number

    def _step(self, norm: torch.Tensor) -> None:
        """Change the parameters. `norm`: of all gradients, on the device of the masters."""
        if self.masters[0] is self.parameters[0]:
            self._optimizer.step()
            return
        scale = (self._options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        for indexes in self._groups:
            self._step_copies(indexes, scale)

    @torch.no_grad()
    def _step_copies(self, indexes: Sequence[int], scale: torch.Tensor) -> None:
        """Change some parameters through their float32 copies: not all, so that float32 gradients are never all in memory."""
        parameters, masters = ([tensors[index] for index in indexes] for tensors in (self.parameters, self.masters))
        kind = self._options.optimizer.master_weights
        if kind != "float32":
            for master, parameter in zip(masters, parameters, strict=True):
                master.data = parameter.float()
        if kind == "kahan":
            for master, index in zip(masters, indexes, strict=True):
                master.data += self._errors[index].float()
        found = [parameter.grad for parameter in parameters if parameter.grad is not None]
        gradients = _scaled(found, masters, scale)
        for parameter, master, gradient in zip(parameters, masters, gradients, strict=True):
            parameter.grad = None
            master.grad = gradient
        _step_only(self._optimizer, masters)
        for master in masters:
            master.grad = None
        if kind == "stochastic_rounding":
            for index, parameter, master in zip(indexes, parameters, masters, strict=True):
                parameter.copy_(_rounded_at_random(master, seed=self._steps * len(self.parameters) + index))
        else:
            _copy_back(masters, parameters)
        if kind == "kahan":
            for index, parameter, master in zip(indexes, parameters, masters, strict=True):
                self._errors[index].copy_(master - parameter.float())
        if kind != "float32":
            for master in masters:
                master.data = master.data.new_empty(0)

    def state(self) -> dict[str, Any]:
        """The state of the optimizer, and of the master weights where they are not the parameters themselves."""
        kept = self._options.optimizer.master_weights == "float32" and self.masters[0] is not self.parameters[0]
        return {
            "optimizer": self._optimizer.state_dict(),
            "masters": [master.detach() for master in self.masters] if kept else [],
            "errors": self._errors,
            "steps": self._steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, with this optimizer's own configuration."""
        # The groups of the state with the own options, which loading would replace. It also asks them where AdamW's number of
        # steps belongs: on the GPU if the step is fused. A state of a CPU, or of several ranks, does not say so.
        saved = state["optimizer"]
        groups = [
            {**own, "params": group["params"]}
            for own, group in zip(self._optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        with long_lived():
            self._optimizer.load_state_dict({**saved, "param_groups": groups})
        self._steps = state.get("steps", 0)
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"] or self.masters, strict=True):
                if master is not saved:
                    master.copy_(saved)
            for error, saved in zip(self._errors, state.get("errors", ()), strict=True):
                error.copy_(saved)


def _refuse_without_effect(parameters: Sequence[torch.nn.Parameter], optimizer: OptimizerSection) -> None:
    """Raise ConfigError if an option of the optimizer has no effect on these parameters."""
    if optimizer.master_weights != "float32" and all(parameter.dtype == torch.float32 for parameter in parameters):
        raise ConfigError(
            f"optimizer.master_weights={optimizer.master_weights} has no effect, because all trained weights are float32: remove "
            f"it, or set model.dtype=bfloat16 and train all weights"
        )
    if optimizer.offload == "cpu" and parameters[0].device.type == "cpu":
        raise ConfigError("optimizer.offload=cpu has no effect, because the model is on the CPU: remove it")
    if optimizer.offload == "cpu" and optimizer.master_weights != "float32":
        raise ConfigError(
            f"optimizer.offload=cpu keeps float32 master weights in the CPU's memory, and the recipe has "
            f"master_weights={optimizer.master_weights}: remove one of them"
        )


def _masters(parameters: list[torch.nn.Parameter], options: OptimizationSection) -> list[torch.Tensor]:
    """The float32 tensors that the optimizer changes. float32 parameters are their own master weights."""
    if options.optimizer.offload == "cpu":
        return [parameter.detach().to("cpu", torch.float32, copy=True) for parameter in parameters]
    if all(parameter.dtype == torch.float32 for parameter in parameters):
        return list(parameters)
    if options.optimizer.master_weights == "float32":
        return [parameter.detach().float().clone() for parameter in parameters]
    return [torch.empty(0, dtype=torch.float32, device=parameter.device) for parameter in parameters]


def _torch_optimizer(masters: Sequence[torch.Tensor], options: OptimizationSection) -> torch.optim.Optimizer:
    """The optimizer of the configuration's name. The learning rate is set before each step."""
    if options.optimizer.name == "adafactor":
        return torch.optim.Adafactor(masters, lr=0.0, weight_decay=options.weight_decay)
    if options.optimizer.name == "adamw_8bit":
        # its 4-bit kernels, which are not used here, are missing without the package `kernels`: no message about that
        logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "4bit" not in str(record.msg))
        try:
            from bitsandbytes.optim.adamw import AdamW8bit
        except ImportError:
            raise ConfigError("optimizer.name=adamw_8bit needs bitsandbytes: pip install 'turnwise[8bit]'") from None
        return AdamW8bit(masters, lr=0.0, betas=options.betas, weight_decay=options.weight_decay)
    on_gpu = masters[0].device.type == "cuda"
    return torch.optim.AdamW(
        masters, lr=0.0, betas=options.betas, weight_decay=options.weight_decay, fused=True if on_gpu else None
    )


def _groups(parameters: Sequence[torch.nn.Parameter], *, together: bool) -> list[list[int]]:
    """The indexes of parameters that are changed at a time: each alone, or `together` as many as have no more values than the
    largest parameter, so that temporary tensors need no more memory than those of one parameter."""
    most = max(parameter.numel() for parameter in parameters) if together else 0
    groups: list[list[int]] = []
    size = 0
    for index, parameter in enumerate(parameters):
        if not groups or size + parameter.numel() > most:
            groups.append([])
            size = 0
        groups[-1].append(index)
        size += parameter.numel()
    return groups


def _scaled(
    gradients: Sequence[torch.Tensor], masters: Sequence[torch.Tensor], scale: torch.Tensor
) -> list[torch.Tensor]:
    """Gradients times a number, in float32, where their masters are."""
    if gradients[0].device != masters[0].device:
        gradients = to_host(gradients)
    if len(gradients) == 1:
        return [gradients[0].to(torch.float32, copy=True).mul_(scale)]
    copies = [torch.empty_like(gradient, dtype=torch.float32) for gradient in gradients]
    _foreach_copy_(copies, list(gradients))
    _foreach_mul_(copies, scale)
    return copies


def _copy_back(masters: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
    """Set parameters to their masters, which may be on the CPU."""
    if masters[0].device != parameters[0].device:  # fewer bytes are copied of parameters in lower precision
        rounded = [master.to(parameter.dtype) for master, parameter in zip(masters, parameters, strict=True)]
        masters = copied(rounded, parameters[0].device)
    if len(parameters) == 1:
        parameters[0].copy_(masters[0])
    else:
        _foreach_copy_(list(parameters), list(masters))


def _step_only(optimizer: torch.optim.Optimizer, masters: Sequence[torch.Tensor]) -> None:
    """A step that changes some of the optimizer's tensors only."""
    group = optimizer.param_groups[0]
    optimizer.param_groups = [{**group, "params": list(masters)}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = [group]


def _norm(parameters: Sequence[torch.nn.Parameter], *, together: bool) -> torch.Tensor:
    """The norm of all gradients together, computed in float32. `together`: those of all parameters in one operation."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if together:
        return torch.linalg.vector_norm(torch.stack(_foreach_norm(gradients, 2, dtype=torch.float32)))
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad.float()) for grad in gradients]))


def _rounded_at_random(values: torch.Tensor, *, seed: int) -> torch.Tensor:
    """float32 values rounded to bfloat16, up or down at random, so that the expected value is the value.

    Stochastic rounding (Gupta et al., 2015, arXiv 1502.02551): the lower 16 bits decide by their size.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = values.view(torch.int32).add(noise).bitwise_and_(-1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)
