"""The learner in this process: a transformers model, its reference model, and the optimizer.

Knows how packed batches become optimizer steps. Knows nothing of conversations, and nothing of where batches come from.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnwise.models.allocator import free_device_blocks, is_large, keep_freed_blocks
from turnwise.models.cpu import TorchThreads
from turnwise.models.loading import (
    ModelSource,
    largest_logit,
    load_model,
    of_model,
    published_weights,
    save_model,
    saved_weights,
    token_logprobs,
)
from turnwise.models.lora import has_adapter, without_adapter
from turnwise.models.model_config import context_length
from turnwise.models.precision import log_overflow
from turnwise.models.transfer import Measured
from turnwise.options.algorithm import OptimizationSection, PpoClip, ReferenceSection
from turnwise.training.batch import MicroBatch, default_micro_batch_tokens
from turnwise.training.checkpoint import copied_to_cpu
from turnwise.training.expert_load import Balance, balance_of, refuse_aux_loss_without_experts
from turnwise.training.forward import Forward, shares_prefixes
from turnwise.training.learner import BatchRequirements, Writers, no_shards
from turnwise.training.losses import Loss, Targets, make_loss
from turnwise.training.micro_batch_bound import MicroBatchBound
from turnwise.training.optimizer import Optimizer
from turnwise.training.reference import Reference
from turnwise.training.update import Gradients, LearnerBase, StopFlag, UpdateSums, measure_load, policy_loss
from turnwise.types import Sampling

__all__ = ["LocalLearner"]


class LocalLearner(LearnerBase):
    """A `Learner` in this process, on one device.

    There is a reference model if the loss has a KL term, or if `reference` is given (`Reference`); `reference_model` is its
    model, None the model before training. `teachers` are local teachers by their names (None: the trained model without its
    adapter). `share_prompts` is `auto`, `always` or `never`. `threads` is the number of torch
    threads; 0 measures which number is faster. `autocast` computes matrix products in bfloat16; parameters, gradients and
    log-probabilities are float32. With `router_replay`, the policy's passes use the experts that were recorded while sampling.

    Raises ConfigError if the loss or `router_replay` concern experts and the model has none, and if `share_prompts` is `always`
    and the model cannot compute trees.
    """

    def __init__(
        self,
        model: Any,
        *,
        sampling: Sampling,
        loss: Loss | None = None,
        optimizer: OptimizationSection | None = None,
        reference: ReferenceSection | None = None,
        reference_model: Any | None = None,
        teachers: Mapping[str, Any | None] | None = None,
        share_prompts: str = "auto",
        threads: int = 0,
        autocast: bool = False,
        router_replay: bool = False,
    ) -> None:
        shares = shares_prefixes(
            model,
            share_prompts,
            refusal=f"{type(model).__name__} does not give its own log-probabilities back with shared prefixes "
            f"(docs/models.md has the models that do)",
        )
        self._model = model
        self.loss = loss or make_loss(PpoClip())
        large = is_large(model)
        # beside a GPU, threads matter for an optimizer that is on the CPU, whose steps are long
        self._threads = TorchThreads(threads, large=large or model.device.type != "cpu")
        self._forward = Forward(model, sampling, autocast=autocast, router_replay=router_replay)
        refuse_aux_loss_without_experts(self.loss, model)
        self._reference = None
        if self.loss.needs_reference or reference is not None:
            separate = reference is not None and reference.source == "copy"
            self._reference = Reference(
                model, sampling, shares=shares, model=reference_model, separate=separate, autocast=autocast
            )
        self._teachers = {
            name: Reference(
                model,
                sampling,
                shares=shares,
                model=teacher,
                autocast=autocast and (teacher is None or teacher.dtype == torch.float32),
                option="teacher.path",
                padded=True,
            )
            for name, teacher in (teachers or {}).items()
        }
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if large:
            keep_freed_blocks()
        self._optimizer = Optimizer(parameters, optimizer or OptimizationSection())
        self._gradients = Gradients(self._optimizer, self._threads, parallel=threads == 0, large=large)
        self.bound: MicroBatchBound = MicroBatchBound(model.device, free=self.free_memory)  # pyright: ignore[reportIncompatibleVariableOverride]
        self._requirements = BatchRequirements(
            share_prompts=shares,
            logprob_kinds=sampling.exact_kinds,
            keep_zero=self.loss.needs_zero_advantages,
            measure_zero=self.loss.measures_all,
            micro_batch_tokens=default_micro_batch_tokens(model.device, large=large),
            parallel=self._gradients.parallel,
        )

    @classmethod
    def from_pretrained(
        cls,
        source: ModelSource,
        *,
        sampling: Sampling,
        loss: Loss,
        optimizer: OptimizationSection,
        reference: ReferenceSection | None = None,
        teachers: Mapping[str, ModelSource | None] | None = None,
        share_prompts: str = "auto",
        threads: int = 0,
        autocast: bool = False,
        router_replay: bool = False,
    ) -> LocalLearner:
        """Load the model, the reference model of `reference.path` with the same options, except the adapter, and the teachers.

        Raises ConfigError if a model cannot be loaded or used as asked for.
        """
        model, path = load_model(source), None if reference is None else reference.path
        beside = {"device": str(model.device)}
        return cls(
            model,
            sampling=sampling,
            loss=loss,
            optimizer=optimizer,
            reference=reference,
            reference_model=None if path is None else load_model(source.of_base(path).model_copy(update=beside)),
            teachers={
                name: None if teacher is None else load_model(teacher.model_copy(update=beside))
                for name, teacher in (teachers or {}).items()
            },
            share_prompts=share_prompts,
            threads=threads,
            autocast=autocast,
            router_replay=router_replay,
        )

    @property
    def model(self) -> Any:
        """The transformers model, for an engine that samples on the same parameters (`assembly.engine`), and for nothing else."""
        return self._model

    @property
    def reference_model(self) -> Any:
        """The reference model, for the engine of a frozen policy that is this model, and for nothing else."""
        return self._present_reference.model

    @property
    def requirements(self) -> BatchRequirements:
        return replace(self._requirements, most_tokens=self.bound.tokens)

    @property
    def context_length(self) -> int | None:
        return context_length(self._model.config.to_dict())

    def target_logprobs(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, reference: bool = False
    ) -> list[torch.Tensor]:
        """See `LearnerBase.target_logprobs`."""
        device = self._model.device

        def of_policy(micro: MicroBatch[Any]) -> torch.Tensor:
            return self._forward.logprobs(micro.to(device))[0]

        def of_reference(micro: MicroBatch[Any]) -> torch.Tensor:
            return self._present_reference.logprobs(micro.to(device))

        return self._measured(micro_batches, stop, of_reference if reference else of_policy)

    def target_entropies(self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag) -> list[torch.Tensor]:
        """See `LearnerBase.target_entropies`."""
        device = self._model.device
        return self._measured(micro_batches, stop, lambda micro: self._forward.entropies(micro.to(device)))

    def target_scores(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, teacher: str | None, top_k: int
    ) -> list[torch.Tensor]:
        """See `LearnerBase.target_scores`."""
        scoring = self._forward if teacher is None else self._teachers[teacher]
        device = self._model.device

        def of_micro_batch(micro: MicroBatch[Any]) -> torch.Tensor:
            return scoring.scores(micro.to(device), top_k)

        return self._measured(micro_batches, stop, of_micro_batch)

    def _measured(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        stop: StopFlag,
        compute: Callable[[MicroBatch[Any]], torch.Tensor],
    ) -> list[torch.Tensor]:
        """The result of each micro-batch, without gradients."""
        results: list[torch.Tensor] = []
        with torch.no_grad():
            for micro in stop.until_set(micro_batches):
                with self._threads.during("measure", micro.token_ids_BL.numel()):
                    results.append(self.bound.measured(micro, compute))
        return results

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[Targets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> UpdateSums:
        """See `LearnerBase.accumulate`."""
        loss_of = functools.partial(self._loss_of, balance=self._balance(micro_batches, stop))
        sums = self._gradients.of_batch(micro_batches, loss_of, on_micro_batch=on_micro_batch, stop=stop)
        return sum(sums, UpdateSums())

    def step(self, lr: float) -> float:
        """See `LearnerBase.step`."""
        with self._threads.during("optimizer", self._optimizer.numel):
            return self._optimizer.step(lr)

    def explain_overflow(self, micro_batches: Sequence[MicroBatch[Targets]]) -> None:
        """See `UpdateLoop.explain_overflow`."""
        log_overflow(
            self._model, lambda: [self._forward.logprobs(micro.to(self._model.device)) for micro in micro_batches]
        )

    def _balance(self, micro_batches: Sequence[MicroBatch[Targets]], stop: StopFlag) -> Balance | None:
        """What the auxiliary loss of the experts must know of a batch; None without such a loss."""
        forward = self._forward
        if forward.routers is None:
            return None
        return balance_of(
            self.loss.options.router_aux_loss_coef,
            forward.routers,
            micro_batches,
            replays=forward.router_replay,
            measure=lambda: measure_load(
                forward, [micro.to(self._model.device) for micro in stop.until_set(micro_batches)]
            ),
        )

    def _loss_of(
        self, micro: MicroBatch[Targets], balance: Balance | None
    ) -> tuple[torch.Tensor, Callable[[], Measured[UpdateSums]]]:
        reference_logprob_N = None
        if self._reference is not None and self.loss.needs_reference:
            reference_logprob_N = self._reference.logprobs(micro)
        compares = self.loss.teacher.on and not self.loss.teacher.scores
        rows = [teacher.distributions(micro) for teacher in self._teachers.values()] if compares else []
        return policy_loss(self._forward, self.loss, micro, reference_logprob_N, balance, rows)

    @property
    def trains_adapter(self) -> bool:
        return has_adapter(self._model)

    def weights(self) -> Mapping[str, torch.Tensor]:
        return published_weights(self._model)

    def trains(self, model: Any) -> bool:
        return model is self._model

    @torch.no_grad()
    def copy_weights(self, model: Any) -> None:
        model.load_state_dict(self._model.state_dict())

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return token_logprobs(self._model, token_ids)

    @torch.no_grad()
    def largest_logit(self, token_ids: Sequence[int]) -> float:
        return largest_logit(self._model, token_ids)

    def mix_reference(self, share: float) -> None:
        self._present_reference.mix(self._model, share)

    @property
    def _present_reference(self) -> Reference:
        if self._reference is None:
            raise ValueError("this learner has no reference model: give it a ReferenceSection")
        return self._reference

    def save(self, folder: Path) -> None:
        save_model(self._model, folder)

    def hold(self) -> Writers:
        return Writers(functools.partial(save_model, self._model, weights=copied_to_cpu(saved_weights(self._model))))

    def free_memory(self) -> None:
        self._optimizer.leave()
        free_device_blocks()

    def state(self) -> dict[str, Any]:
        reference = {} if self._reference is None else self._reference.state()
        return {**self._optimizer.state(), "reference": reference, **self.bound.state()}

    def save_shards(self, folder: Path) -> Mapping[str, str]:
        return no_shards(folder)

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        self.bound.load_state(state)
        if shards is not None:
            from turnwise.training.sharded.shards import complete_state  # torch.distributed

            names = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]
            state = complete_state(shards, names)
        self._optimizer.load_state(state)
        if self._reference is not None:
            self._reference.load_state(state.get("reference", {}))

    def close(self) -> None:
        pass

    def fingerprint(self) -> str:
        return of_model(self._model)

    def base_fingerprint(self) -> str | None:
        return of_model(without_adapter(self._model)) if has_adapter(self._model) else None

    def reference_fingerprint(self) -> str | None:
        return None if self._reference is None else self._reference.fingerprint()

    def teacher_fingerprints(self) -> Mapping[str, str]:
        return {name: teacher.fingerprint() for name, teacher in self._teachers.items()}
