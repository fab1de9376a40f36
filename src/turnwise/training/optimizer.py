"""AdamW on float32 master weights. Knows parameters and their gradients, and nothing of models, batches or losses."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from turnwise.training.options import OptimizerConfig

__all__ = ["Optimizer"]

_log = logging.getLogger(__name__)


class Optimizer:
    """Changes `parameters` by AdamW, from the gradients that are accumulated in their `grad`.

    Parameters of lower precision have float32 copies (master weights), because small steps would be lost in them.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], config: OptimizerConfig) -> None:
        self.parameters = list(parameters)
        self.masters = _masters(self.parameters)
        self._config = config
        # the learning rate is set before each step
        self._adamw = torch.optim.AdamW(self.masters, lr=0.0, betas=config.betas, weight_decay=config.weight_decay)

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
        """Clip the gradients, take one step, and copy the master weights to the parameters.

        Returns the norm before clipping. If it is not finite, the step is skipped and the weights stay as they are.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            # AdamW skips parameters whose gradient is None, so pass zeros: momentum must move them all the same
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            master.grad = gradient if master is parameter else gradient.float()
        norm = float(torch.nn.utils.clip_grad_norm_(self.masters, self._config.max_grad_norm))
        if math.isfinite(norm):
            self._adamw.step()
        else:
            _log.warning("the gradient norm is %s: this optimizer step is skipped, the weights stay as they are", norm)
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return norm

    def state(self) -> dict[str, Any]:
        """The state of AdamW, and the master weights where they are not the parameters themselves."""
        copies = [master.detach() for master in self.masters] if self.masters[0] is not self.parameters[0] else []
        return {"optimizer": self._adamw.state_dict(), "masters": copies}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, with this optimizer's own configuration."""
        self._adamw.load_state_dict(state["optimizer"])
        for group in self._adamw.param_groups:  # loading has replaced them by those of the state
            group["betas"], group["weight_decay"] = self._config.betas, self._config.weight_decay
        with torch.no_grad():
            for master, saved in zip(self.masters, state["masters"] or self.masters, strict=True):
                if master is not saved:
                    master.copy_(saved)


def _masters(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """float32 copies of parameters of lower precision. float32 parameters are their own master weights."""
    if all(parameter.dtype == torch.float32 for parameter in parameters):
        return list(parameters)
    return [parameter.detach().float().clone() for parameter in parameters]
