"""The part of a sharded learner that each rank has: its share of the model, of the reference model and of the optimizer.

The methods are collective: all ranks call the same method at the same time, as `commands` (commands.py) makes sure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from turnwise.models.deterministic import use_deterministic_algorithms
from turnwise.models.lora import adapter_weights, has_adapter
from turnwise.models.model_config import context_length
from turnwise.models.published_weights import largest_logit, token_logprobs
from turnwise.training.background import StopFlag
from turnwise.training.forward import Forward, shares_prefixes
from turnwise.training.learner import BatchRequirements
from turnwise.training.loss import make_loss
from turnwise.training.model_fingerprint import of_tensors
from turnwise.training.optimizer import Optimizer
from turnwise.training.packing import MicroBatch, default_micro_batch_tokens
from turnwise.training.policy_update import policy_loss
from turnwise.training.reference import reference_model
from turnwise.training.sharded.loading import load_sharded
from turnwise.training.sharded.options import ShardOptions
from turnwise.training.sharded.ranks import Ranks
from turnwise.training.sharded.rounds import accumulate_rounds, measure_rounds
from turnwise.training.sharded.sharded_model import ShardedModel, complete
from turnwise.training.targets import Targets
from turnwise.training.update_sums import UpdateSums
from turnwise.types import Sampling

__all__ = ["ModelShard", "ShardReport"]


class ShardedForward(Forward):
    """`Forward` on a sharded model."""

    def __init__(self, sharded: ShardedModel, sampling: Sampling, *, autocast: bool) -> None:
        self._sharded = sharded
        sharded.probe(lambda: super(ShardedForward, self).__init__(sharded.model, sampling, autocast=autocast))

    def logprobs(self, micro: MicroBatch[Any], *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self._sharded.run(lambda: super(ShardedForward, self).logprobs(micro, entropy=entropy))


class ShardedReference:
    """The reference model of a sharded learner: a model of its own, or the trained model without its adapter (`model` None)."""

    def __init__(self, forward: ShardedForward, policy: Any, model: ShardedModel | None) -> None:
        self._forward = forward
        self._policy = policy
        self.model = model
        self.mixed = False

    @torch.no_grad()
    def logprobs(self, micro: MicroBatch[Any]) -> torch.Tensor:
        """Log-probabilities [N] of the targets of a micro-batch."""
        if self.model is not None:
            return self._forward.logprobs(micro)[0]
        with _adapter_off(self._policy):
            return self._forward.logprobs(micro)[0]

    @torch.no_grad()
    def mix(self, policy: Any, share: float) -> None:
        """See `Reference.mix`."""
        assert self.model is not None  # reference.sync_every needs a copy
        trained = dict(policy.named_parameters())
        for name, parameter in self.model.model.named_parameters():
            parameter.lerp_(trained[name].detach().to(parameter.dtype), share)
        self.mixed = True


class ShardReport:
    """What rank 0 must know of the learner that was built."""

    def __init__(self, shard: ModelShard) -> None:
        self.requirements = shard.requirements
        self.context_length = context_length(shard.model.config.to_dict())
        self.trains_adapter = shard.trains_adapter


class ModelShard:
    """See the module. Raises ConfigError if the model cannot be loaded, or cannot be trained by several ranks."""

    def __init__(self, options: ShardOptions, ranks: Ranks) -> None:
        if options.deterministic:
            use_deterministic_algorithms()
        self.ranks = ranks
        self._loss = make_loss(options.loss)
        loaded = load_sharded(options.model, ranks.mesh, options.sharding, fingerprint=ranks.leads)
        self._sharded, self.base_fingerprint = loaded.sharded, loaded.base_fingerprint
        self.model: Any = self._sharded.model
        shares = self._sharded.probe(
            lambda: shares_prefixes(
                self.model,
                options.share_prompts,
                refusal=f"{type(self.model).__name__} does not give its own log-probabilities back with shared prefixes",
            )
        )
        self.trains_adapter = has_adapter(self.model)
        self._forward = ShardedForward(self._sharded, options.sampling, autocast=options.autocast)
        self.reference = self._make_reference(options, shares)
        self.parameters = {name: tensor for name, tensor in self.model.named_parameters() if tensor.requires_grad}
        self.optimizer = Optimizer(list(self.parameters.values()), options.optimizer, complete=complete)
        self.requirements = BatchRequirements(
            share_prompts=shares,
            logprob_kinds=options.sampling.exact_kinds,
            keep_zero=self._loss.needs_zero_advantages,
            measure_zero=self._loss.correction is not None,
            micro_batch_tokens=default_micro_batch_tokens(ranks.device),
            parallel=ranks.size,
        )

    def _make_reference(self, options: ShardOptions, shares: bool) -> ShardedReference | None:
        """The reference model, divided among the ranks."""
        config = options.reference
        if not self._loss.needs_reference and config is None:
            return None
        path = None if config is None else config.path
        separate = config is not None and config.separate
        if self.trains_adapter and path is None and not separate:
            return ShardedReference(self._forward, self.model, None)
        # without a path, the files that the trained model was loaded from: its weights before training
        source = replace(options.model, lora=None, adapter=None, gradient_checkpointing=False)
        source = replace(source, path=path or source.path)
        sharded = load_sharded(source, self.ranks.mesh, options.sharding, prepare=_freeze).sharded
        sharded.probe(lambda: reference_model(self.model, sharded.model, shares=shares, separate=separate))
        return ShardedReference(
            ShardedForward(sharded, options.sampling, autocast=options.autocast), self.model, sharded
        )

    def target_logprobs(
        self, mine: Sequence[MicroBatch[Any]], rounds: int, stop: StopFlag, *, reference: bool
    ) -> list[torch.Tensor]:
        """The log-probabilities [N] of this rank's micro-batches, on the CPU; fewer if rank 0 has set its flag."""
        if reference and self.reference is None:
            raise ValueError("this learner has no reference model: give it a ReferenceConfig")
        compute = self.reference.logprobs if reference and self.reference is not None else self._logprobs
        return measure_rounds(self.ranks, mine, rounds, stop, compute)

    def _logprobs(self, micro: MicroBatch[Any]) -> torch.Tensor:
        return self._forward.logprobs(micro)[0]

    def accumulate(
        self, mine: Sequence[MicroBatch[Targets]], rounds: int, stop: StopFlag, on_round: Callable[[], None]
    ) -> UpdateSums:
        """Replace the gradients by those of a batch, of which this rank computes `mine`. Returns the sums over `mine`."""
        self.optimizer.zero_grad()
        references: list[torch.Tensor] = []
        if self._loss.needs_reference:
            # before the passes with gradients, which may use the same layers
            references = self.target_logprobs(mine, rounds, stop, reference=True)

        def loss_of(number: int, micro: MicroBatch[Targets]) -> tuple[torch.Tensor, Callable[[], UpdateSums]]:
            reference_N = references[number].to(self.ranks.device) if references else None
            return policy_loss(self._forward, self._loss, micro, reference_N)

        sums = accumulate_rounds(
            self.ranks,
            mine,
            rounds,
            stop,
            sharded=self._sharded,
            compute=self._logprobs,
            loss_of=loss_of,
            on_round=on_round,
        )
        return sum(sums, UpdateSums())

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """See `Learner.token_logprobs`."""
        with torch.no_grad():
            return self._sharded.run(lambda: token_logprobs(self.model, token_ids, device=self.ranks.device))

    def largest_logit(self, token_ids: Sequence[int]) -> float:
        """See `Learner.largest_logit`."""
        with torch.no_grad():
            return self._sharded.run(lambda: largest_logit(self.model, token_ids, device=self.ranks.device))

    def mix_reference(self, share: float) -> None:
        """See `Learner.mix_reference`."""
        if self.reference is None:
            raise ValueError("this learner has no reference model: give it a ReferenceConfig")
        self.reference.mix(self.model, share)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """All weights by the names of the state dict, or those of the adapter by peft's names; divided."""
        return adapter_weights(self.model) if self.trains_adapter else self.model.state_dict()

    def named_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers of the model by their names in it; divided."""
        return self.model.state_dict()

    def fingerprint(self) -> str | None:
        """See `Learner.fingerprint`; on rank 0."""
        return self._fingerprint_of(self.model)

    def reference_fingerprint(self) -> str | None:
        """See `Learner.reference_fingerprint`; on rank 0."""
        if self.reference is None:
            return None
        return (
            self.base_fingerprint if self.reference.model is None else self._fingerprint_of(self.reference.model.model)
        )

    def _fingerprint_of(self, model: Any) -> str | None:
        state = model.state_dict()
        lines = of_tensors((name, complete(state[name])) for name in sorted(state))
        return hashlib.sha256("\n".join(lines).encode()).hexdigest() if self.ranks.leads else None


def _freeze(model: Any) -> None:
    model.requires_grad_(False)


@contextmanager
def _adapter_off(model: Any) -> Iterator[None]:
    """The model without its adapter. Only one thread uses the model of a rank."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters(False)` would also freeze the adapter's weights
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
