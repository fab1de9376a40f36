"""The critic in this process: a value model on one device, and its optimizer.

Knows how packed states become values and optimizer steps. Does not know how returns are estimated, nor conversations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from turnwise.models.allocator import free_device_blocks, is_large
from turnwise.models.cpu import TorchThreads
from turnwise.models.loading import of_model, save_model, saved_weights
from turnwise.models.lora import has_adapter, without_adapter
from turnwise.models.precision import log_overflow
from turnwise.options.algorithm import OptimizationSection
from turnwise.training.batch import MicroBatch, default_micro_batch_tokens
from turnwise.training.checkpoint import copied_to_cpu
from turnwise.training.forward import shares_prefixes
from turnwise.training.learner import PackingRequirements, Writers, no_shards
from turnwise.training.micro_batch_bound import MicroBatchBound
from turnwise.training.optimizer import Optimizer
from turnwise.training.update import Gradients, StopFlag
from turnwise.training.value_batch import StatePlaces, ValueTargets
from turnwise.training.value_model import (
    CriticBase,
    CriticSums,
    ValueForward,
    critic_loss,
    load_head,
    new_value_head,
    save_critic,
    trained_parameters,
)


class LocalCritic(CriticBase):
    """A `Critic` in this process, on one device.

    `model` is a causal language model, whose body computes hidden states; its output layer is not used. `folder` is a directory
    with a saved value head, None starts with a head of zeros. `clip` is the bound of value clipping (`value_loss`).
    `share_prompts`, `threads` and `autocast` are those of `LocalLearner`.

    Raises ConfigError if the model has no body, if the value head cannot be read, or if `share_prompts` is `always` and the model
    cannot compute trees.
    """

    def __init__(
        self,
        model: Any,
        *,
        optimizer: OptimizationSection | None = None,
        clip: float | None = None,
        folder: str | Path | None = None,
        share_prompts: str = "auto",
        threads: int = 0,
        autocast: bool = False,
    ) -> None:
        shares = shares_prefixes(
            model,
            share_prompts,
            refusal=f"the critic ({type(model).__name__}) does not give its own values back with shared prefixes",
        )
        self._model = model
        self._clip = clip
        self._head = new_value_head(model)
        if folder is not None:
            load_head(self._head, Path(folder))
        self._forward = ValueForward(model, self._head, autocast=autocast)
        large = is_large(model)
        # beside a GPU, threads matter for an optimizer that is on the CPU, whose steps are long
        self._threads = TorchThreads(threads, large=large or model.device.type != "cpu")
        self._optimizer = Optimizer(
            list(trained_parameters(model, self._head).values()), optimizer or OptimizationSection()
        )
        self._gradients = Gradients(self._optimizer, self._threads, parallel=threads == 0, large=large)
        self.bound: MicroBatchBound = MicroBatchBound(model.device, free=self.free_memory)  # pyright: ignore[reportIncompatibleVariableOverride]
        self._requirements = PackingRequirements(
            share_prompts=shares,
            micro_batch_tokens=default_micro_batch_tokens(model.device, large=large),
            parallel=self._gradients.parallel,
        )

    @property
    def requirements(self) -> PackingRequirements:
        return replace(self._requirements, most_tokens=self.bound.tokens)

    def free_memory(self) -> None:
        self._optimizer.leave()
        free_device_blocks()

    def measure(
        self, micro_batches: Sequence[MicroBatch[StatePlaces]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> list[torch.Tensor]:
        """See `CriticBase.measure`."""
        device = self._model.device

        def of_micro(micro: MicroBatch[Any]) -> torch.Tensor:
            return self._forward.values(micro.to(device))

        values: list[torch.Tensor] = []
        with torch.no_grad():
            for micro in stop.until_set(micro_batches):
                with self._threads.during("measure", micro.token_ids_BL.numel()):
                    values.append(self.bound.measured(micro, of_micro))
                on_micro_batch()
        return values

    def accumulate(
        self, micro_batches: Sequence[MicroBatch[ValueTargets]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> CriticSums:
        """See `CriticBase.accumulate`."""
        sums = self._gradients.of_batch(
            micro_batches,
            lambda micro: critic_loss(self._forward, micro, clip=self._clip),
            on_micro_batch=on_micro_batch,
            stop=stop,
        )
        return sum(sums, CriticSums())

    def step(self, lr: float) -> float:
        """See `CriticBase.step`."""
        return self._optimizer.step(lr)

    def explain_overflow(self, micro_batches: Sequence[MicroBatch[ValueTargets]]) -> None:
        """See `UpdateLoop.explain_overflow`."""
        log_overflow(
            self._model, lambda: [self._forward.values(micro.to(self._model.device)) for micro in micro_batches]
        )

    def save(self, folder: Path) -> None:
        save_critic(folder, save_body=functools.partial(save_model, self._model), head=self._head.state_dict())

    def hold(self) -> Writers:
        weights, head = copied_to_cpu((dict(saved_weights(self._model)), self._head.state_dict()))
        save_body = functools.partial(save_model, self._model, weights=weights)
        return Writers(functools.partial(save_critic, save_body=save_body, head=head))

    def state(self) -> dict[str, Any]:
        return {**self._optimizer.state(), **self.bound.state()}

    def save_shards(self, folder: Path) -> Mapping[str, str]:
        return no_shards(folder)

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        self.bound.load_state(state)
        if shards is not None:
            from turnwise.training.sharded.shards import complete_state  # torch.distributed

            state = complete_state(shards, list(trained_parameters(self._model, self._head)))
        self._optimizer.load_state(state)

    def base_fingerprint(self) -> str | None:
        return of_model(without_adapter(self._model)) if has_adapter(self._model) else None
