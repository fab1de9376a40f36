"""An update of the policy: the order of passes and optimizer steps. The passes may be computed in one process or in several.

`PassLearner` is the part of a learner that is the same for both. A learner in one process computes all micro-batches itself; a
sharded learner shares them out among its ranks. Knows nothing of models, devices or ranks.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from turnwise.training.background import Passes, StopFlag, run_cancellable
from turnwise.training.batch import Batch
from turnwise.training.correction import CorrectionSums, correct
from turnwise.training.forward import Forward
from turnwise.training.learner import UpdateStats
from turnwise.training.loss import Loss
from turnwise.training.packing import MicroBatch
from turnwise.training.policy_losses import nll, with_own_ratios
from turnwise.training.targets import Targets
from turnwise.training.update_sums import TargetLogprobs, UpdateSums, fresh_deviation, update_stats
from turnwise.training.value_batch import StateBatch

__all__ = ["PassLearner", "PreparedBatch", "policy_loss", "prepare"]


class PassLearner(Passes[MicroBatch[Targets], UpdateSums]):
    """The methods of a `Learner` that run passes through its model. The passes themselves are abstract; they block."""

    loss: Loss

    @abstractmethod
    def target_logprobs(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, reference: bool = False
    ) -> list[torch.Tensor]:
        """The log-probabilities [N] of the targets of each micro-batch, under the present weights or under the reference model.

        Without gradients. The list is shorter if `stop` is set. Raises ValueError if there is no reference model.
        """

    async def update(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        epochs: int = 1,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> UpdateStats:
        """See `Learner.update` and `Passes.take_steps`."""
        # before the first step: afterwards the weights are no longer those that sampled
        prepared = await run_cancellable(lambda stop: [prepare(self, batch, stop) for batch in batches])
        if not prepared:
            return UpdateStats()
        first, *others = [of_batch.batch.micro_batches for of_batch in prepared]
        own_ratios = self.loss.correction is None and self.loss.needs_behaviour_logprobs
        opening = _before_first_step(first) if own_ratios else first
        sums, norms = await self.take_steps([opening], on_micro_batch, on_first_step, lr, 1, True)
        if own_ratios and epochs > 1:
            first = _with_first_logprobs(first, sums)
        later = [*others, *([first, *others] * (epochs - 1))]
        later_sums, later_norms = await self.take_steps(later, on_micro_batch, lambda: None, lr, 1, False)
        sums, norms = sums + later_sums, norms + later_norms
        logprobs = [of_batch.logprobs or first.logprobs for of_batch, first in zip(prepared, sums, strict=False)]
        return update_stats(
            sums, norms, sum((of_batch.correction for of_batch in prepared), CorrectionSums()), logprobs
        )

    async def evaluate_loss(self, batch: Batch) -> float:
        """See `Learner.evaluate_loss`. Computed in a thread."""

        def evaluate(stop: StopFlag) -> float:
            logprobs = self.target_logprobs(batch.micro_batches, stop)
            return sum(
                float((nll(logprob_N.cpu(), micro.targets).loss_N * micro.targets.weight_N).sum())
                for micro, logprob_N in zip(batch.micro_batches, logprobs, strict=False)
            )

        return await run_cancellable(evaluate)

    async def logprobs(self, batch: StateBatch, *, reference: bool = False) -> list[float]:
        """See `Learner.logprobs`. Computed in a thread."""
        return await run_cancellable(
            lambda stop: batch.in_order(self.target_logprobs(batch.micro_batches, stop, reference=reference))
        )


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch before the first optimizer step."""

    batch: Batch
    correction: CorrectionSums = field(default_factory=CorrectionSums)
    """The metrics of rollout correction."""
    logprobs: tuple[TargetLogprobs, ...] = ()
    """The learner's own log-probabilities of all targets, where correction needs them."""


def prepare(learner: PassLearner, batch: Batch, stop: StopFlag) -> PreparedBatch:
    """The batch with all log-probabilities that the loss needs, and with rollout correction if the loss has it.

    The learner computes log-probabilities of tokens for which the engine reported none that the loss can use. Rollout correction
    needs those of all tokens, also of trajectories that have no gradient: rejection, means and metrics are of the whole batch.
    """
    loss, correction = learner.loss, learner.loss.correction
    needed = [micro for micro in batch.micro_batches if correction is not None or not bool(micro.targets.known_N.all())]
    if correction is not None:
        needed += batch.without_gradient
    if not loss.needs_behaviour_logprobs or not needed:
        return PreparedBatch(batch)
    own_N = {
        id(micro): logprob_N for micro, logprob_N in zip(needed, learner.target_logprobs(needed, stop), strict=False)
    }
    micro_batches, without_gradient = (
        [_with_own_logprobs(micro, own_N[id(micro)], loss) if id(micro) in own_N else micro for micro in part]
        for part in (batch.micro_batches, batch.without_gradient)
    )
    if correction is None or len(own_N) < len(needed):  # stopped: the result is discarded
        return PreparedBatch(replace(batch, micro_batches=micro_batches))
    corrected = correct([micro.targets for micro in (*micro_batches, *without_gradient)], correction)
    kept = [
        replace(micro, targets=targets.select(keep_N), prediction_N=micro.prediction_N[keep_N])
        for micro, targets, keep_N in zip(micro_batches, corrected.targets, corrected.kept, strict=False)
        if bool(keep_N.any())
    ]
    logprobs = tuple(TargetLogprobs.of(micro.targets, own_N[id(micro)]) for micro in needed)
    return PreparedBatch(replace(batch, micro_batches=kept), corrected.sums, logprobs)


def _before_first_step(micro_batches: Sequence[MicroBatch[Targets]]) -> list[MicroBatch[Targets]]:
    return [replace(micro, targets=replace(micro.targets, first_step=True)) for micro in micro_batches]


def _with_first_logprobs(
    micro_batches: Sequence[MicroBatch[Targets]], sums: Sequence[UpdateSums]
) -> list[MicroBatch[Targets]]:
    """The micro-batches of the first optimizer step for further epochs: their ratios are to the log-probabilities of its pass."""
    known = dict(itertools.chain.from_iterable(part.by_sequence() for total in sums for part in total.logprobs))

    def own(targets: Targets) -> torch.Tensor:
        numbers = targets.sequence_N.unique_consecutive().tolist()
        return torch.from_numpy(np.concatenate([known[number] for number in numbers])).to(targets.weight_N.device)

    return [replace(micro, targets=with_own_ratios(micro.targets, own(micro.targets))) for micro in micro_batches]


def _with_own_logprobs(micro: MicroBatch[Targets], logprob_N: torch.Tensor, loss: Loss) -> MicroBatch[Targets]:
    targets = micro.targets
    reported_N = targets.behaviour_logprob_N
    own_N = logprob_N.to(reported_N.device, reported_N.dtype)
    filled = replace(targets, behaviour_logprob_N=torch.where(targets.known_N, reported_N, own_N))
    if loss.correction is not None:
        filled = replace(filled, proximal_logprob_N=own_N, decoupled=loss.correction.decoupled)
    return replace(micro, targets=filled)


def policy_loss(
    forward: Forward, loss: Loss, micro: MicroBatch[Targets], reference_logprob_N: torch.Tensor | None
) -> tuple[torch.Tensor, Callable[[], UpdateSums]]:
    """The loss of a micro-batch, and a function that computes its metrics."""
    targets = micro.targets
    logprob_N, entropy_N = forward.logprobs(micro, entropy=loss.needs_entropy)
    if targets.first_step:
        targets = with_own_ratios(targets, logprob_N)
    terms = loss(logprob_N, targets, reference_logprob_N=reference_logprob_N, entropy_N=entropy_N)
    total = (terms.loss_N * targets.weight_N).sum()
    return total, lambda: UpdateSums(
        loss=float(total),
        kl=float((terms.kl_N * targets.weight_N).sum()),
        tokens=len(terms.loss_N),
        counted=float(targets.counts.sum()),
        clipped=float(terms.clipped),
        max_deviation=float(terms.max_deviation),
        fresh_deviation=fresh_deviation(logprob_N, targets),
        logprobs=(TargetLogprobs.of(targets, logprob_N),),
    )
