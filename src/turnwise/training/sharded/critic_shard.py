"""The part of a sharded critic that each rank has: its share of the value model and of the optimizer.

The methods are collective, as those of `ModelShard`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from turnwise.models.lora import adapter_weights, has_adapter
from turnwise.training.background import StopFlag
from turnwise.training.critic_update import CriticSums, critic_loss
from turnwise.training.forward import shares_prefixes
from turnwise.training.learner import PackingRequirements
from turnwise.training.optimizer import Optimizer
from turnwise.training.packing import MicroBatch, default_micro_batch_tokens
from turnwise.training.sharded.loading import load_sharded
from turnwise.training.sharded.options import CriticOptions
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.rounds import accumulate_rounds, measure_rounds
from turnwise.training.sharded.sharded_model import ShardedModel, complete
from turnwise.training.value_batch import StatePlaces, ValueTargets
from turnwise.training.value_forward import ValueForward, body_of, new_value_head
from turnwise.training.value_head import load_head, trained_parameters

__all__ = ["HEAD_PREFIX", "CriticShard", "ShardedValueForward"]

HEAD_PREFIX = "value_head."
"""What the names of the value head begin with in `CriticShard.state_tensors`."""


class ShardedValueForward(ValueForward):
    """`ValueForward` on a sharded model."""

    def __init__(self, sharded: ShardedModel, head: torch.nn.Linear, *, autocast: bool) -> None:
        super().__init__(sharded.model, head, autocast=autocast)
        self._sharded = sharded

    def values(self, micro: MicroBatch[Any]) -> torch.Tensor:
        return self._sharded.run(lambda: super(ShardedValueForward, self).values(micro))


class CriticShard:
    """See the module. Raises ConfigError if the value model cannot be loaded, or cannot be trained by several ranks."""

    def __init__(self, options: CriticOptions, ranks: Ranks) -> None:
        self.ranks = ranks
        self._clip = options.clip
        heads: list[torch.nn.Linear] = []

        def prepare(model: Any) -> torch.nn.Module:
            # the output layer is not used, unless it is the embedding too
            trained = {id(parameter) for parameter in body_of(model).parameters() if parameter.requires_grad}
            for parameter in model.parameters():
                parameter.requires_grad_(id(parameter) in trained)
            heads.append(new_value_head(model))
            if options.head is not None:
                load_head(heads[-1], options.head)
            return heads[-1]

        loaded = load_sharded(options.model, ranks.mesh, options.sharding, prepare=prepare, fingerprint=ranks.leads)
        self._sharded, self.base_fingerprint = loaded.sharded, loaded.base_fingerprint
        self.model: Any = self._sharded.model
        self._head = heads[-1]
        shares = self._sharded.probe(
            lambda: shares_prefixes(
                self.model,
                options.share_prompts,
                refusal=f"the critic ({type(self.model).__name__}) does not give its own values back with shared prefixes",
            )
        )
        self.trains_adapter = has_adapter(self.model)
        self._forward = ShardedValueForward(self._sharded, self._head, autocast=options.autocast)
        self.parameters = trained_parameters(self.model, self._head)
        self.optimizer = Optimizer(list(self.parameters.values()), options.optimizer, complete=complete)
        self.reference = None
        self.requirements = PackingRequirements(
            share_prompts=shares,
            micro_batch_tokens=default_micro_batch_tokens(ranks.device),
            parallel=ranks.size,
        )

    def measure(
        self, mine: Sequence[MicroBatch[StatePlaces]], rounds: int, stop: StopFlag, on_round: Callable[[], None]
    ) -> list[torch.Tensor]:
        """The values [N] of this rank's micro-batches, on the CPU; fewer if rank 0 has set its flag."""
        return measure_rounds(self.ranks, mine, rounds, stop, self._forward.values, on_round)

    def accumulate(
        self, mine: Sequence[MicroBatch[ValueTargets]], rounds: int, stop: StopFlag, on_round: Callable[[], None]
    ) -> CriticSums:
        """Replace the gradients by those of a batch, of which this rank computes `mine`. Returns the sums over `mine`."""
        self.optimizer.zero_grad()
        sums = accumulate_rounds(
            self.ranks,
            mine,
            rounds,
            stop,
            sharded=self._sharded,
            compute=self._forward.values,
            loss_of=lambda number, micro: critic_loss(self._forward, micro, clip=self._clip),
            on_round=on_round,
        )
        return sum(sums, CriticSums())

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """The weights as in `ModelShard.state_tensors`, and those of the value head; divided."""
        weights = adapter_weights(self.model) if self.trains_adapter else self.model.state_dict()
        return {**weights, **{f"{HEAD_PREFIX}{name}": tensor for name, tensor in self._head.state_dict().items()}}
