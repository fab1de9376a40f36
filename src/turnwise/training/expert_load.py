"""How the tokens of a batch are distributed over the experts of a model: metrics, and the auxiliary loss that balances them.

The loss of a layer is that of Switch Transformers (arXiv 2101.03961, equations 4 to 6) for several experts of a token, as in
transformers' `load_balancing_loss_func`: `E * sum over the experts e of f_e * P_e`. `f_e` is how many of a token's experts are
`e`, on average over the tokens, and has no gradient; `P_e` is the mean probability of `e` in the router. If all experts get the
same number of tokens, it is the number of experts of a token. The loss of the model is the mean over the layers.

`f` and `P` are means over the tokens of all sequences of a batch (arXiv 2501.11873), each up to the token before its last target:
those whose outputs the policy loss reads. A token that several sequences share counts once for each of them, and padding does not
count, so the division into micro-batches, packing and ranks do not change the result. The gradient of the loss is a sum over
tokens once `f` is known. `f` is therefore found first: from the recorded experts with router replay, else in a pass without
gradients, unless the batch is one micro-batch.

Knows the columns of a micro-batch, and what a router chose. Does not know models or optimizers. Axis suffixes: T tokens of a
pass, padding included, L layers with experts, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from turnwise.errors import ConfigError
from turnwise.models.experts import Choice, Routers
from turnwise.models.transfer import Measured, numbers
from turnwise.training.batch import MicroBatch
from turnwise.training.losses import Loss


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """What the experts of some passes have computed. Adds up over micro-batches and ranks."""

    count_LE: np.ndarray
    """Tokens of each expert."""
    tokens: float
    """Tokens, each of which has K experts in each layer."""
    rerouted: float = 0.0
    """Tokens whose experts were prescribed (router replay), and would have been others in one of the layers or several."""
    replayed: float = 0.0
    """Tokens whose experts were prescribed."""
    loss: float = 0.0
    """The auxiliary loss, without its coefficient; 0 without it."""

    @classmethod
    def none(cls, routers: Routers) -> ExpertLoad:
        """That of no tokens."""
        return cls(np.zeros((routers.layers, routers.experts)), 0.0)

    def __add__(self, other: ExpertLoad) -> ExpertLoad:
        return ExpertLoad(
            self.count_LE + other.count_LE,
            self.tokens + other.tokens,
            self.rerouted + other.rerouted,
            self.replayed + other.replayed,
            self.loss + other.loss,
        )

    @property
    def fraction(self) -> np.ndarray:
        """`f` of the auxiliary loss, [L, E]: how many of a token's experts are this one, on average."""
        return self.count_LE / max(self.tokens, 1.0)

    def metrics(self, *, balances: bool) -> dict[str, float]:
        """The metrics of the experts by name. `balances`: there is an auxiliary loss."""
        if not self.tokens:
            return {}
        share_LE = self.count_LE / self.count_LE.sum(axis=1, keepdims=True)
        entropy_L = -(share_LE * np.log(np.maximum(share_LE, 1e-30))).sum(axis=1)
        metrics = {
            "experts/max_share": float(share_LE.max(axis=1).mean()),
            "experts/min_share": float(share_LE.min(axis=1).mean()),
            "experts/entropy": float(entropy_L.mean() / np.log(max(share_LE.shape[1], 2))),
        }
        if balances:
            metrics["experts/aux_loss"] = self.loss
        if self.replayed:
            metrics["experts/rerouted"] = self.rerouted / self.replayed
        return metrics


@dataclass(frozen=True, slots=True)
class Balance:
    """What the auxiliary loss of a micro-batch must know of its batch."""

    coefficient: float
    tokens: float
    """Tokens of the batch."""
    fraction: np.ndarray | None
    """`ExpertLoad.fraction` of the batch; None if the micro-batch is the whole batch."""


class LoadCounter:
    """Collects the choices of a forward pass over a micro-batch: give `note` to the pass."""

    def __init__(self, micro: MicroBatch[Any], routers: Routers, balance: Balance | None = None) -> None:
        self._count_T, self._routers, self._balance = micro.count_T, routers, balance
        self._counts: dict[int, torch.Tensor] = {}
        self._choices: list[Choice] = []
        self._differs_T: torch.Tensor | None = None
        self._total = (lambda values: values) if micro.share is None else micro.share.total
        self._prescribed_T = None if micro.routes_TLK is None else (micro.routes_TLK[:, 0, 0] >= 0)

    @torch.no_grad()
    def note(self, choice: Choice) -> None:
        """Take the experts of a layer. Computes nothing with a gradient: with gradient checkpointing, a layer must do the same
        when it is computed again."""
        weight_T = self._count_T
        weight_TK = weight_T.unsqueeze(-1).expand(choice.index_TK.shape)
        count_E = torch.zeros(self._routers.experts, dtype=torch.float64, device=weight_T.device)
        self._counts[choice.layer] = count_E.index_add_(0, choice.index_TK.flatten(), weight_TK.flatten().double())
        if self._balance is not None:
            self._choices.append(choice)
        if choice.own_TK is not choice.index_TK:
            differs_T = (choice.own_TK.sort(dim=-1).values != choice.index_TK.sort(dim=-1).values).any(dim=-1)
            self._differs_T = differs_T if self._differs_T is None else self._differs_T | differs_T

    def loss(self) -> torch.Tensor | None:
        """The share of the micro-batch in the auxiliary loss of its batch; None without one."""
        balance = self._balance
        if balance is None or not balance.tokens:
            return None
        terms: list[torch.Tensor] = []
        for choice in self._choices:
            total_E = (choice.probabilities() * self._count_T.unsqueeze(-1)).sum(dim=0)
            part_E = (
                self._counts[choice.layer] / balance.tokens
                if balance.fraction is None
                else torch.from_numpy(balance.fraction[choice.layer]).to(total_E.device)
            )
            terms.append(self._routers.experts * (part_E.to(total_E.dtype) * total_E).sum() / balance.tokens)
        return self._total(torch.stack(terms).mean())

    def load(self, loss: torch.Tensor | None) -> Measured[ExpertLoad]:
        """What has been counted. `loss` is that of `loss()`."""
        count_LE = torch.stack([self._counts[layer] for layer in sorted(self._counts)])
        nothing = self._count_T.new_zeros(())
        rerouted = replayed = nothing
        if self._differs_T is not None and self._prescribed_T is not None:
            replayed = (self._count_T * self._prescribed_T).sum()
            rerouted = (self._count_T * (self._prescribed_T & self._differs_T)).sum()
        counted = (self._count_T.sum(), rerouted, replayed)
        numbers_X = self._total(torch.cat([count_LE.flatten(), torch.stack(counted).double()]))
        counted, count_LE = numbers_X[-len(counted) :], numbers_X[: -len(counted)].view(count_LE.shape)
        found = (count_LE, *counted, nothing if loss is None else loss)
        return Measured(found, lambda host: ExpertLoad(host[0].numpy(), *numbers(host[1:])))


def recorded_load(micro_batches: Sequence[MicroBatch[Any]], routers: Routers) -> ExpertLoad | None:
    """The load of a batch by its recorded experts; None if those of a token that counts are not known."""
    total = ExpertLoad.none(routers)
    for micro in micro_batches:
        counted_T = micro.count_T > 0
        if micro.routes_TLK is None or bool((micro.routes_TLK[counted_T] < 0).any()):
            return None
        weight_TK = micro.count_T[counted_T].double()[:, None].expand(-1, routers.top_k).flatten()
        count_LE = torch.zeros((routers.layers, routers.experts), dtype=torch.float64, device=weight_TK.device)
        for layer in range(routers.layers):
            count_LE[layer].index_add_(0, micro.routes_TLK[counted_T, layer].long().flatten(), weight_TK)
        total += ExpertLoad(count_LE.cpu().numpy(), float(micro.count_T.sum()))
    return total


def balance_of(
    coefficient: float,
    routers: Routers,
    micro_batches: Sequence[MicroBatch[Any]],
    *,
    replays: bool,
    measure: Callable[[], ExpertLoad],
) -> Balance | None:
    """What the auxiliary loss of a batch in one process must know; None if `coefficient` is 0. `replays`: with the recorded
    experts. `measure` computes the load in passes without gradients."""
    if not coefficient:
        return None
    tokens = float(sum(float(micro.count_T.sum()) for micro in micro_batches))
    if len(micro_batches) == 1:
        return Balance(coefficient, tokens, None)
    load = (recorded_load(micro_batches, routers) if replays else None) or measure()
    return Balance(coefficient, tokens, load.fraction)


def load_metrics(load: ExpertLoad | None, coefficient: float, steps: int) -> Mapping[str, float]:
    """The metrics of several optimizer steps, whose loads are added up; empty for a model without experts."""
    if load is None:
        return {}
    metrics = load.metrics(balances=coefficient > 0)
    return {name: value / steps if name == "experts/aux_loss" else value for name, value in metrics.items()}


def refuse_aux_loss_without_experts(loss: Loss, model: Any) -> None:
    """Raise ConfigError if the loss balances experts, and the model has none, or none whose router can be read."""
    if loss.options.router_aux_loss_coef > 0 and Routers.of(model) is None:
        raise ConfigError(
            f"loss.router_aux_loss_coef={loss.options.router_aux_loss_coef:g}: {type(model).__name__} is no mixture of experts, "
            f"so there is nothing to balance. Remove loss.router_aux_loss_coef"
        )
