"""The learner in this process: a transformers model, its reference model, and the optimizer.

Knows how packed batches become optimizer steps. Knows nothing of conversations, and nothing of where batches come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnwise.models.allocator import return_freed_blocks
from turnwise.models.loading import ModelOptions, load_model
from turnwise.models.lora import has_adapter, save_adapter, without_adapter
from turnwise.models.model_config import context_length
from turnwise.models.torch_threads import TorchThreads
from turnwise.training.background import StopFlag, run_cancellable, run_to_completion
from turnwise.training.batch import Batch
from turnwise.training.correction import CorrectionSums, correct
from turnwise.training.forward import Forward, shares_prefixes
from turnwise.training.gradients import Gradients
from turnwise.training.learner import BatchRequirements, UpdateStats
from turnwise.training.loss import Loss, make_loss
from turnwise.training.model_fingerprint import of_model
from turnwise.training.optimizer import Optimizer
from turnwise.training.options import OptimizerConfig, PpoClip, ReferenceConfig
from turnwise.training.packing import MicroBatch, default_micro_batch_tokens
from turnwise.training.policy_losses import nll
from turnwise.training.published_weights import published_weights, token_logprobs
from turnwise.training.reference import Reference
from turnwise.training.targets import Targets
from turnwise.training.update_sums import UpdateSums, fresh_deviation, update_stats
from turnwise.training.value_batch import StateBatch
from turnwise.types import Sampling

__all__ = ["LocalLearner"]


_LARGE = 20_000_000
"""On a CPU, models with more parameters return freed memory to the system at once."""


class LocalLearner:
    """A `Learner` in this process, on one device.

    There is a reference model if the loss has a KL term, or if `reference` is given (`Reference`); `reference_model` is its
    model, None the model before training. `share_prompts` is `auto`, `always` or `never`. `threads` is the number of torch
    threads; 0 measures which number is faster. `autocast` computes matrix products in bfloat16; parameters, gradients and
    log-probabilities are float32.

    Raises ConfigError if `share_prompts` is `always` and the model cannot compute trees.
    """

    def __init__(
        self,
        model: Any,
        *,
        sampling: Sampling,
        loss: Loss | None = None,
        optimizer: OptimizerConfig | None = None,
        reference: ReferenceConfig | None = None,
        reference_model: Any | None = None,
        share_prompts: str = "auto",
        threads: int = 0,
        autocast: bool = False,
    ) -> None:
        shares = shares_prefixes(
            model,
            share_prompts,
            refusal=f"{type(model).__name__} does not give its own log-probabilities back with shared prefixes (recurrent layers "
            f"and attention with soft caps or sinks do not)",
        )
        self._model = model
        self._loss = loss or make_loss(PpoClip())
        self._threads = TorchThreads(threads)
        self._forward = Forward(model, sampling, autocast=autocast)
        self._reference = None
        if self._loss.needs_reference or reference is not None:
            separate = reference is not None and reference.separate
            self._reference = Reference(
                model, sampling, shares=shares, model=reference_model, separate=separate, autocast=autocast
            )
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if model.device.type == "cpu" and model.num_parameters() > _LARGE:
            return_freed_blocks()
        self._optimizer = Optimizer(parameters, optimizer or OptimizerConfig())
        self._gradients = Gradients(self._optimizer, self._threads, parallel=threads == 0)
        self._requirements = BatchRequirements(
            share_prompts=shares,
            logprob_kinds=sampling.exact_kinds,
            keep_zero=self._loss.needs_zero_advantages,
            micro_batch_tokens=default_micro_batch_tokens(model.device),
            parallel=self._gradients.parallel,
        )

    @classmethod
    def from_pretrained(
        cls,
        options: ModelOptions,
        *,
        sampling: Sampling,
        loss: Loss,
        optimizer: OptimizerConfig,
        reference: ReferenceConfig | None = None,
        share_prompts: str = "auto",
        threads: int = 0,
        autocast: bool = False,
    ) -> LocalLearner:
        """Load the model, and the reference model of `reference.path` with the same options, except the adapter.

        Raises ConfigError if a model cannot be loaded or used as asked for.
        """
        model, path = load_model(options), None if reference is None else reference.path
        frozen = {"lora": None, "adapter": None, "gradient_checkpointing": False, "device": str(model.device)}
        return cls(
            model,
            sampling=sampling,
            loss=loss,
            optimizer=optimizer,
            reference=reference,
            reference_model=None if path is None else load_model(replace(options, path=path, **frozen)),
            share_prompts=share_prompts,
            threads=threads,
            autocast=autocast,
        )

    @property
    def model(self) -> Any:
        """The transformers model, for an engine that samples on the same parameters (`build.engine`), and for nothing else."""
        return self._model

    @property
    def requirements(self) -> BatchRequirements:
        return self._requirements

    @property
    def context_length(self) -> int | None:
        return context_length(self._model.config.to_dict())

    async def update(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        epochs: int = 1,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> UpdateStats:
        """See `Learner.update`.

        Gradients are computed in a thread, so that the event loop can serve rollouts and signals meanwhile. The weights change
        in the event loop's own thread, and therefore never in the middle of an engine's step.

        If the call is cancelled before the first optimizer step, CancelledError is raised at once; the thread ends after its
        current micro-batch.
        """
        # before the first step: afterwards the weights are no longer those that sampled
        prepared = await run_cancellable(lambda stop: [self._prepared(batch, stop) for batch in batches])
        batches = [batch for batch, _ in prepared]
        sums: list[UpdateSums] = []
        norms: list[float] = []
        for _ in range(epochs):
            for batch in batches:
                in_thread = run_to_completion if sums else run_cancellable
                total = await in_thread(lambda stop, batch=batch: self._accumulate(batch, on_micro_batch, stop))
                if not sums:
                    on_first_step()
                norms.append(self._optimizer.step(lr))
                sums.append(total)
        return update_stats(sums, norms, sum((correction for _, correction in prepared), CorrectionSums()))

    def _prepared(self, batch: Batch, stop: StopFlag) -> tuple[Batch, CorrectionSums]:
        """The batch with all log-probabilities that the loss needs, and with rollout correction if the loss has it.

        The learner computes log-probabilities of tokens for which the engine reported none that the loss can use.
        """
        correction = self._loss.correction
        known = all(bool(micro.targets.known_N.all()) for micro in batch.micro_batches)
        if not self._loss.needs_behaviour_logprobs or (known and correction is None):
            return batch, CorrectionSums()
        own = [self._with_own_logprobs(micro) for micro in stop.until_set(batch.micro_batches)]
        if correction is None or not own:
            return replace(batch, micro_batches=own), CorrectionSums()
        corrected = correct([micro.targets for micro in own], correction)
        kept = [
            replace(micro, targets=targets.select(keep_N), prediction_N=micro.prediction_N[keep_N])
            for micro, targets, keep_N in zip(own, corrected.targets, corrected.kept, strict=True)
            if bool(keep_N.any())
        ]
        return replace(batch, micro_batches=kept), corrected.sums

    def _with_own_logprobs(self, micro: MicroBatch[Targets]) -> MicroBatch[Targets]:
        targets, correction = micro.targets, self._loss.correction
        if correction is None and bool(targets.known_N.all()):
            return micro
        with torch.no_grad(), self._threads.during("measure", micro.token_ids_BL.numel()):
            logprob_N = self._forward.logprobs(micro.to(self._model.device))[0]
        reported_N = targets.behaviour_logprob_N
        own_N = logprob_N.to(reported_N.device, reported_N.dtype)
        filled = replace(targets, behaviour_logprob_N=torch.where(targets.known_N, reported_N, own_N))
        if correction is not None:
            filled = replace(filled, proximal_logprob_N=own_N, decoupled=correction.decoupled)
        return replace(micro, targets=filled)

    def _accumulate(self, batch: Batch, on_micro_batch: Callable[[], None], stop: StopFlag) -> UpdateSums:
        """Add up the gradients of a batch in the parameters' `grad`, and its loss and metrics."""
        sums = self._gradients.of_batch(batch.micro_batches, self._loss_of, on_micro_batch=on_micro_batch, stop=stop)
        return sum(sums, UpdateSums())

    def _loss_of(self, micro: MicroBatch[Targets]) -> tuple[torch.Tensor, Callable[[], UpdateSums]]:
        """The loss of a micro-batch, and a function that computes its metrics."""
        targets = micro.targets
        logprob_N, entropy_N = self._forward.logprobs(micro, entropy=self._loss.needs_entropy)
        reference_logprob_N = None
        if self._reference is not None and self._loss.needs_reference:
            reference_logprob_N = self._reference.logprobs(micro)
        terms = self._loss(logprob_N, targets, reference_logprob_N=reference_logprob_N, entropy_N=entropy_N)
        loss = (terms.loss_N * targets.weight_N).sum()
        return loss, lambda: UpdateSums(
            loss=float(loss),
            kl=float((terms.kl_N * targets.weight_N).sum()),
            tokens=len(terms.loss_N),
            clipped=float(terms.clipped),
            max_deviation=float(terms.max_deviation),
            fresh_deviation=fresh_deviation(logprob_N, targets),
        )

    async def evaluate_loss(self, batch: Batch) -> float:
        """See `Learner.evaluate_loss`. Computed in a thread."""
        return await run_cancellable(lambda stop: self._evaluate_loss(batch, stop))

    def _evaluate_loss(self, batch: Batch, stop: StopFlag) -> float:
        total = 0.0
        with torch.no_grad():
            for micro in stop.until_set(batch.micro_batches):
                with self._threads.during("measure", micro.token_ids_BL.numel()):
                    here = micro.to(self._model.device)
                    loss_N = nll(self._forward.logprobs(here)[0], here.targets).loss_N
                    total += float((loss_N * here.targets.weight_N).sum())
        return total

    @property
    def trains_adapter(self) -> bool:
        return has_adapter(self._model)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return published_weights(self._model)

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return token_logprobs(self._model, token_ids)

    async def logprobs(self, batch: StateBatch, *, reference: bool = False) -> list[float]:
        """See `Learner.logprobs`. Computed in a thread."""
        return await run_cancellable(lambda stop: self._logprobs(batch, reference, stop))

    def _logprobs(self, batch: StateBatch, reference: bool, stop: StopFlag) -> list[float]:
        logprob_S = torch.zeros(batch.states, dtype=torch.float64)
        with torch.no_grad():
            for micro in stop.until_set(batch.micro_batches):
                with self._threads.during("measure", micro.token_ids_BL.numel()):
                    here = micro.to(self._model.device)
                    logprob_N = self._present_reference.logprobs(here) if reference else self._forward.logprobs(here)[0]
                    logprob_S[micro.targets.place_N] = logprob_N.double().cpu()
        return logprob_S.tolist()

    def mix_reference(self, share: float) -> None:
        self._present_reference.mix(self._model, share)

    @property
    def _present_reference(self) -> Reference:
        if self._reference is None:
            raise ValueError("this learner has no reference model: give it a ReferenceConfig")
        return self._reference

    def save(self, folder: Path) -> None:
        if has_adapter(self._model):
            save_adapter(self._model, folder)
        else:
            self._model.save_pretrained(folder)

    def state(self) -> dict[str, Any]:
        return {**self._optimizer.state(), "reference": {} if self._reference is None else self._reference.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state(state)
        if self._reference is not None:
            self._reference.load_state(state.get("reference", {}))

    def fingerprint(self) -> str:
        return of_model(self._model)

    def base_fingerprint(self) -> str | None:
        return of_model(without_adapter(self._model)) if has_adapter(self._model) else None

    def reference_fingerprint(self) -> str | None:
        return None if self._reference is None else self._reference.fingerprint()
