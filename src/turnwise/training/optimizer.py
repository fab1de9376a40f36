"""The optimizer: changes parameters from their gradients. Knows nothing of models, batches or losses.

The arithmetic is float32. Parameters of lower precision would lose small steps by rounding, so by default each has a float32 copy
(master weights). `optimizer.master_weights` has ways that need less memory. Gradients have the type of their parameters, in which
a sum of many micro-batches is rounded as often; with `optimizer.grad_accum_dtype` they are added up in float32.

With `optimizer.offload=sampling`, what only steps need is on the GPU between the first step of an update and its end: `leave`
moves it to the host, and the next step takes it back (`come_back`).

Parameters may be divided among ranks. A step then changes the parts of this rank only, which are ordinary tensors
(`Parts.local`): what changes each value by itself (AdamW, rounding, copies on the CPU) does the same with parts.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import _foreach_copy_, _foreach_mul_, _foreach_norm  # pyright: ignore[reportPrivateImportUsage]

from turnwise.errors import ConfigError, RunError
from turnwise.library_messages import silence_libraries
from turnwise.models.allocator import long_lived, no_gradient
from turnwise.models.transfer import HostMemory, copied, to_host
from turnwise.options.algorithm import OptimizationSection, OptimizerSection

__all__ = ["MOMENTS", "Optimizer", "Parts", "moments_of", "norms_of"]

_log = logging.getLogger(__name__)

MOMENTS = ("exp_avg", "exp_avg_sq")
"""The names of the moving averages of AdamW's gradients and of their squares."""

_MOST_ROUNDED = 256
"""Gradients of about the same size whose sum in bfloat16, with 8 bits, still changes with each."""


class Parts(Protocol):
    """How parameters are divided among ranks."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter or gradient, as an ordinary tensor that shares its memory."""
        ...

    def number(self, parameter: torch.Tensor) -> int:
        """The number of this rank's part of a parameter: ranks with the same part have the same number."""
        ...

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of all complete gradients together, computed in float32; the same number on all ranks."""
        ...

    def add_in_float32(self, parameter: torch.Tensor) -> None:
        """Let the backward passes add the gradients of a parameter up in float32."""
        ...


class _Undivided:
    """Parameters that are not divided."""

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def number(self, parameter: torch.Tensor) -> int:
        return 0

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.linalg.vector_norm(torch.stack(norms_of(gradients)))

    def add_in_float32(self, parameter: torch.Tensor) -> None:
        parameter.grad_dtype = torch.float32


def norms_of(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The norm of each gradient, computed in float32."""
    if gradients[0].device.type != "cpu":
        return list(_foreach_norm(list(gradients), 2, dtype=torch.float32))
    return [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]


class Optimizer:
    """Changes `parameters` from the gradients that are accumulated in their `grad`. `parts` says how they are divided.

    Raises ConfigError if the optimizer's package is not installed, or if an option has no effect on these parameters.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        options: OptimizationSection,
        *,
        parts: Parts | None = None,
    ) -> None:
        _refuse_without_effect(parameters, options.optimizer)
        self.parameters = list(parameters)
        self._parts = parts or _Undivided()
        if options.optimizer.grad_accum_dtype == "float32":
            for parameter in self.parameters:
                self._parts.add_in_float32(parameter)
        self._own = [self._parts.local(parameter) for parameter in self.parameters]
        self.masters = _masters(self._own, options)
        """The float32 tensors that the steps change: the parameters (or this rank's parts of them) themselves, or copies. Without
        permanent copies, a tensor is empty except while its parameter is changed."""
        self.numel = sum(parameter.numel() for parameter in self.parameters)
        """The number of values that a step changes, on all ranks together."""
        self._options = options
        # torch's operations on lists of tensors save a CPU nothing
        self._groups = _groups(self._own, together=self._own[0].device.type != "cpu")
        self._steps = 0
        self._told = False
        """Whether it was logged that sums of gradients are rounded often."""
        self._optimizer = _torch_optimizer(self.masters, options)
        self.errors = (
            [torch.zeros_like(own) for own in self._own] if options.optimizer.master_weights == "kahan" else []
        )
        """What `kahan` remembers of the rounding of each parameter; empty otherwise."""
        self._host = HostMemory()
        self.away = False
        """Whether what only steps need has left the device."""

    @property
    def steps(self) -> int:
        """Steps that were taken."""
        return self._steps

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for tensor in (*self.masters, *self._own, *self.parameters):
            tensor.grad = None

    def leave(self) -> None:
        """Forget the gradients, and with `optimizer.offload=sampling` move to the host what only steps need: the state of the
        optimizer, copies of parameters, and what `kahan` remembers. What is saved and computed stays the same.

        Raises RunError if the host has not so much memory.
        """
        self.zero_grad()
        if self.away or self._options.optimizer.offload != "sampling":
            return
        try:
            self._move(self._host.store)
        except RuntimeError as error:
            raise RunError(
                f"optimizer.offload=sampling: the machine has no pinned memory for the optimizer's state and the master weights "
                f"of {self.numel:,} parameters ({error}): remove it, or set optimizer.name=adamw_8bit or model.lora.rank"
            ) from error
        self.away = True

    def come_back(self) -> None:
        """Take back what has left."""
        if self.away:
            device = self._own[0].device
            self._move(lambda tensors: [tensor.to(device, non_blocking=True) for tensor in tensors])
            self.away = False

    def _move(self, move: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]) -> None:
        """Replace what only steps need by what `move` makes of it. Single numbers stay where they are."""
        states = [self._optimizer.state.pop(master, {}) for master in self.masters]
        found = [*(self.masters if self.keeps_copies else ()), *self.errors]
        found += [one for state in states for one in state.values() if isinstance(one, torch.Tensor) and one.dim()]
        distinct = list({id(one): one for one in found}.values())  # parameters share the codes of 8 bits
        moved = dict(zip(map(id, distinct), move(distinct), strict=True))
        self.masters = [moved.get(id(master), master) for master in self.masters]
        self.errors = [moved[id(error)] for error in self.errors]
        self._optimizer.param_groups[0]["params"] = list(self.masters)
        for master, state in zip(self.masters, states, strict=True):
            if state:
                self._optimizer.state[master] = {name: moved.get(id(one), one) for name, one in state.items()}

    def tell_rounded_sums(self, micro_batches: int) -> None:
        """Log, once, that a sum of so many gradients loses much in the type of the parameters."""
        rounded = [parameter.dtype for parameter in self.parameters if parameter.grad_dtype != torch.float32]
        if self._told or micro_batches <= _MOST_ROUNDED or not rounded:
            return
        self._told = True
        _log.warning(
            "the gradients of %d micro-batches are added up in %s, which loses small ones: set optimizer.grad_accum_dtype="
            "float32, or larger micro_batch_tokens",
            micro_batches,
            str(rounded[0]).removeprefix("torch."),
        )

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
                parameter.grad = no_gradient(parameter)
        norm = self._parts.norm([parameter.grad for parameter in self.parameters if parameter.grad is not None])
        (norm_here,) = to_host([norm])
        number = float(norm_here)
        if not math.isfinite(number):
            _log.warning(
                "the gradient norm is %s: this optimizer step is skipped, the weights stay as they are", number
            )
            self.zero_grad()  # as after other steps: nothing else uses them, and an engine may need their memory
            return number
        self._steps += 1
        self.come_back()
        # the first step allocates the optimizer's state
        with long_lived() if self._steps == 1 else contextlib.nullcontext():
            self._step(norm_here if self.masters[0].device.type == "cpu" else norm)
        return number

    @property
    def keeps_copies(self) -> bool:
        """Whether the master weights are permanent float32 copies."""
        return self._options.optimizer.master_weights == "float32" and self.masters[0] is not self._own[0]

    def _step(self, norm: torch.Tensor) -> None:
        """Change the parameters. `norm`: of all gradients, on the device of the masters."""
        scale = (self._options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        if self.masters[0] is self._own[0]:
            gradients = [
                self._parts.local(parameter.grad) for parameter in self.parameters if parameter.grad is not None
            ]
            _foreach_mul_(gradients, scale)
            for own, gradient in zip(self._own, gradients, strict=True):
                own.grad = gradient
            self._optimizer.step()
            return
        for indexes in self._groups:
            self._step_copies(indexes, scale)

    def _seed(self, index: int) -> int:
        """Of the random numbers of a parameter in this step. Ranks with the same part round it alike, others do not."""
        # the seeds of parts are far apart; a CPU's generator has seeds of 32 bits
        part = self._parts.number(self.parameters[index]) * 0x9E3779B1
        return (self._steps * len(self.parameters) + index + part) % 2**32

    def _take_gradients(self, indexes: Sequence[int]) -> list[torch.Tensor]:
        """This rank's parts of the gradients of some parameters, which have none afterwards."""
        found: list[torch.Tensor] = []
        for parameter in (self.parameters[index] for index in indexes):
            assert parameter.grad is not None
            found.append(self._parts.local(parameter.grad))
            parameter.grad = None
        return found

    @torch.no_grad()
    def _step_copies(self, indexes: Sequence[int], scale: torch.Tensor) -> None:
        """Change some parameters through their float32 copies: not all, so that float32 gradients are never all in memory."""
        parameters, masters = ([tensors[index] for index in indexes] for tensors in (self._own, self.masters))
        kind = self._options.optimizer.master_weights
        if kind != "float32":
            for master, parameter in zip(masters, parameters, strict=True):
                master.data = parameter.float()
        if kind == "kahan":
            for master, index in zip(masters, indexes, strict=True):
                master.data += self.errors[index].float()
        for master, gradient in zip(masters, _scaled(self._take_gradients(indexes), masters, scale), strict=True):
            master.grad = gradient
        _step_only(self._optimizer, masters)
        for master in masters:
            master.grad = None
        if kind == "stochastic_rounding":
            for index, parameter, master in zip(indexes, parameters, masters, strict=True):
                parameter.copy_(_rounded_at_random(master, seed=self._seed(index)))
        else:
            _copy_back(masters, parameters)
        if kind == "kahan":
            for index, parameter, master in zip(indexes, parameters, masters, strict=True):
                self.errors[index].copy_(master - parameter.float())
        if kind != "float32":
            for master in masters:
                master.data = master.data.new_empty(0)

    def moments(self) -> list[dict[str, torch.Tensor]]:
        """Of each parameter, what AdamW knows of this rank's part: `step` and the float32 `MOMENTS`; zeros before the first step.
        Of AdamW in 32 bits the tensors themselves, of 8 bits copies."""
        present = self._optimizer.state_dict()["state"]
        return [
            moments_of(present[index])
            if index in present
            else {
                "step": torch.zeros(()),
                **{name: torch.zeros_like(own, dtype=torch.float32, device=master.device) for name in MOMENTS},
            }
            for index, (own, master) in enumerate(zip(self._own, self.masters, strict=True))
        ]

    def state(self) -> dict[str, Any]:
        """The state of the optimizer, and of the master weights where they are not the parameters themselves."""
        return {
            "optimizer": self._optimizer.state_dict(),
            "masters": [master.detach() for master in self.masters] if self.keeps_copies else [],
            "errors": self.errors,
            "steps": self._steps,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, with this optimizer's own configuration. With 8 bits, the state of a parameter may
        also be that of `moments`."""
        self.come_back()
        # The groups of the state with the own options, which loading would replace. It also asks them where AdamW's number of
        # steps belongs: on the GPU if the step is fused. A state of a CPU, or of several ranks, does not say so.
        saved = state["optimizer"]
        groups = [
            {**own, "params": group["params"]}
            for own, group in zip(self._optimizer.param_groups, saved["param_groups"], strict=True)
        ]
        packed = self._options.optimizer.name == "adamw_8bit"
        of_moments = {index: one for index, one in saved["state"].items() if packed and MOMENTS[0] in one}
        state_by_index = {index: one for index, one in saved["state"].items() if index not in of_moments}
        with long_lived():
            self._optimizer.load_state_dict({**saved, "state": state_by_index, "param_groups": groups})
            for index, one in of_moments.items():
                self._optimizer.state[self.masters[index]] = _in_eight_bits(self._optimizer, one, self.masters[index])
        self._steps = state.get("steps", 0)
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"] or self.masters, strict=True):
                if master is not saved:
                    master.copy_(saved)
            for error, saved in zip(self.errors, state.get("errors", ()), strict=True):
                error.copy_(saved)


def _refuse_without_effect(parameters: Sequence[torch.nn.Parameter], optimizer: OptimizerSection) -> None:
    """Raise ConfigError if an option of the optimizer has no effect on these parameters."""
    if optimizer.master_weights != "float32" and all(parameter.dtype == torch.float32 for parameter in parameters):
        raise ConfigError(
            f"optimizer.master_weights={optimizer.master_weights} has no effect, because all trained weights are float32: remove "
            f"it, or set model.dtype=bfloat16 and train all weights"
        )
    if optimizer.grad_accum_dtype is not None and all(parameter.dtype == torch.float32 for parameter in parameters):
        raise ConfigError(
            f"optimizer.grad_accum_dtype={optimizer.grad_accum_dtype} has no effect, because all trained weights are float32: "
            f"remove it"
        )
    if optimizer.offload != "none" and parameters[0].device.type == "cpu":
        raise ConfigError(
            f"optimizer.offload={optimizer.offload} has no effect, because the model is on the CPU: remove it"
        )
    if optimizer.offload == "cpu" and optimizer.master_weights != "float32":
        raise ConfigError(
            f"optimizer.offload=cpu keeps float32 master weights in the CPU's memory, and the recipe has "
            f"master_weights={optimizer.master_weights}: remove one of them"
        )


def _masters(parameters: Sequence[torch.Tensor], options: OptimizationSection) -> list[torch.Tensor]:
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
        silence_libraries()
        try:
            from bitsandbytes.optim.adamw import AdamW8bit
        except ImportError:
            raise ConfigError("optimizer.name=adamw_8bit needs bitsandbytes: pip install 'turnwise[8bit]'") from None
        return AdamW8bit(masters, lr=0.0, betas=options.betas, weight_decay=options.weight_decay)
    # fused: each value is read and written once; on a CPU, a step takes a sixth of the time
    fused = masters[0].device.type in ("cuda", "cpu") or None
    return torch.optim.AdamW(masters, lr=0.0, betas=options.betas, weight_decay=options.weight_decay, fused=fused)


def _groups(parameters: Sequence[torch.Tensor], *, together: bool) -> list[list[int]]:
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


_PACKED = ("1", "2")
"""How the names of bitsandbytes end that belong to the two moments."""
_FEWEST_PACKED, _BLOCK = 4096, 256
"""Of bitsandbytes: tensors with fewer values keep 32 bits; values of a block have one scale."""


def moments_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The `step` and the float32 `MOMENTS` of one parameter in the state of AdamW, which may be in 8 bits (bitsandbytes)."""
    state = {
        **state,
        **state.get("__bnb_optimizer_quant_state__", {}),
    }  # where bitsandbytes puts its own in `state_dict`
    step = torch.as_tensor(state["step"], dtype=torch.float32)
    if MOMENTS[0] in state:
        return {"step": step, **{name: state[name] for name in MOMENTS}}
    moments: dict[str, torch.Tensor] = {"step": step}
    for name, end in zip(MOMENTS, _PACKED, strict=True):
        packed = state[f"state{end}"]
        moments[name] = packed
        if packed.dtype == torch.uint8:
            values = state[f"qmap{end}"][packed.flatten().long()]
            scales = state[f"absmax{end}"].repeat_interleave(_BLOCK)[: len(values)]
            moments[name] = (values * scales).view(packed.shape)
    return moments


def _in_eight_bits(optimizer: Any, moments: Mapping[str, torch.Tensor], master: torch.Tensor) -> dict[str, Any]:
    """The state of bitsandbytes for one parameter. Moments that come from 8 bits with the same blocks get the same codes, and the
    same scales up to the last bit.

    bitsandbytes divides a block by its largest absolute value. Codes reach 1 above 0, but less than that below: if a block's
    largest value is below 0, its code was the lowest one.
    """
    state: dict[str, Any] = {"step": int(moments["step"])}
    for name, end in zip(MOMENTS, _PACKED, strict=True):
        values = moments[name].to(master.device, torch.float32)
        if values.numel() < _FEWEST_PACKED:
            state[f"state{end}"] = values
            continue
        if "dynamic" not in optimizer.name2qmap:
            optimizer.fill_qmap()
        codes = optimizer.name2qmap["dynamic" if end == "1" else "udynamic"].to(master.device)
        flat = values.flatten()
        blocks = torch.nn.functional.pad(flat, (0, -len(flat) % _BLOCK)).view(-1, _BLOCK)
        high, low = blocks.amax(dim=1), -blocks.amin(dim=1)
        lowest = -codes[0] if codes[0] < 0 else codes[-1]
        scales = torch.where(high >= low, high, low / lowest)
        bounds = (codes[1:] + codes[:-1]) / 2
        scaled = blocks / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
        state[f"state{end}"] = torch.bucketize(scaled, bounds).flatten()[: len(flat)].to(torch.uint8).view(values.shape)
        state[f"qmap{end}"], state[f"absmax{end}"] = codes, scales
    return state


def _rounded_at_random(values: torch.Tensor, *, seed: int) -> torch.Tensor:
    """float32 values rounded to bfloat16, up or down at random, so that the expected value is the value.

    Stochastic rounding (Gupta et al., 2015, arXiv 1502.02551): the lower 16 bits decide by their size.
    """
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(0, 1 << 16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    bits = values.view(torch.int32).add(noise).bitwise_and_(-1 << 16)
    return bits.view(torch.float32).to(torch.bfloat16)
