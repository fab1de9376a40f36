"""The selective scan of Mamba (Gu and Dao, 2023), continued from a state: Mamba, Falcon-Mamba, Jamba and Zamba.

The scan of transformers, and the kernel of mamba-ssm, begin with zeros: a layer that gets the state after a prefix ignores it if
more than one token follows. With the step sizes d, the matrices A and C, and the state h before the first token, what is missing
is linear in h, whatever the tokens are::

    output of token t:  C_t exp(A (d_1 + ... + d_t)) h        last state of T tokens:  exp(A (d_1 + ... + d_T)) h

It is added to what the function returns, with gradients. Changes classes of transformers, not single models. Does not know
sequences or whose state it is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

_SCAN = "mamba_selective_scan"
_MARK = "_turnwise_continues"
_before: ContextVar[Iterator[torch.Tensor] | None] = ContextVar("before", default=None)
"""The states [N, C, S] before the first token, one for each scan of the layer that is computed."""


def continue_selective_scans(model: nn.Module) -> None:
    """From now on, layers of the classes in `model` continue from a state. Does nothing for classes without such a scan."""
    for kind in {type(module) for module in model.modules()}:
        own = vars(kind).get("forward")
        names = getattr(inspect.unwrap(own), "__globals__", {}) if callable(own) else {}
        if _SCAN not in names or _SCAN not in inspect.unwrap(own).__code__.co_names:  # type: ignore[arg-type]
            continue
        if not hasattr(names[_SCAN], _MARK):
            names[_SCAN] = _scan(names[_SCAN])
        if not hasattr(own, _MARK):
            kind.forward = _forward(own)  # type: ignore[attr-defined]


def _forward(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`forward` of a layer, which says to the scan where it begins."""

    @functools.wraps(own)
    def forward(self: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        # the name is `cache` since transformers 5.24
        cache = arguments[0] if arguments else options.get("cache", options.get("cache_params"))
        several = hidden_states.shape[1] > 1
        if not several or cache is None or not cache.has_previous_state(self.layer_idx):
            return own(self, hidden_states, *arguments, **options)
        state = cache.layers[self.layer_idx].recurrent_states[0]
        token = _before.set(iter([state] if state.dim() == 3 else state.unbind(1)))  # Zamba scans head by head
        try:
            return own(self, hidden_states, *arguments, **options)
        finally:
            _before.reset(token)

    setattr(forward, _MARK, True)
    return forward


def _scan(own: Callable[..., Any]) -> Callable[..., Any]:
    """The scan, which begins with the state of the layer.

    Axes as in transformers: values and step sizes [N, C, T], A [C, S], B and C [N, S, T]; N sequences, C channels, S numbers of
    the state of a channel.
    """

    @functools.wraps(own)
    def scan(values: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, **options: Any):
        result = own(values, dt, A, B, C, **options)
        if (states := _before.get()) is None:
            return result
        state_NCS, bias, gate = next(states), options.get("delta_bias"), options.get("z")
        step_NCT = dt if bias is None else dt + bias.to(dt.dtype).unsqueeze(-1)
        if options.get("delta_softplus"):
            step_NCT = F.softplus(step_NCT)
        decay_NCTS = (step_NCT.float().cumsum(-1).unsqueeze(-1) * A.unsqueeze(1)).exp()
        left_NCTS = decay_NCTS * state_NCS.unsqueeze(2)
        added_NCT = torch.einsum("ncts,nst->nct", left_NCTS, C.float())
        if gate is not None:
            added_NCT = added_NCT * F.silu(gate)
        if not options.get("return_last_state"):
            return result + added_NCT.to(result.dtype)
        output, last = result
        return output + added_NCT.to(output.dtype), last + left_NCTS[:, :, -1].to(last.dtype)

    setattr(scan, _MARK, True)
    return scan
