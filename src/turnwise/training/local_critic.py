"""The critic in this process: a value model on one device, and its optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.models.lora import has_adapter, save_adapter, without_adapter
from turnwise.models.torch_threads import TorchThreads
from turnwise.training.background import StopFlag, run_cancellable, run_to_completion
from turnwise.training.critic import CriticStats
from turnwise.training.forward import shares_prefixes
from turnwise.training.gradients import Gradients
from turnwise.training.learner import PackingRequirements
from turnwise.training.model_fingerprint import of_model
from turnwise.training.optimizer import Optimizer
from turnwise.training.options import OptimizerConfig
from turnwise.training.packing import MicroBatch, default_micro_batch_tokens
from turnwise.training.value_batch import StateBatch, StatePlaces, ValueBatch, ValueTargets
from turnwise.training.value_forward import ValueForward, body_of, new_value_head
from turnwise.training.value_loss import value_loss

__all__ = ["HEAD_FILE", "LocalCritic"]

HEAD_FILE = "value_head.safetensors"
"""The file with the value head, in the directory of a saved critic."""


@dataclass(frozen=True, slots=True)
class _Sums:
    """Loss and metrics of one micro-batch, or of several added up."""

    loss: float = 0.0
    clipped: int = 0
    states: int = 0

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(self.loss + other.loss, self.clipped + other.clipped, self.states + other.states)


class LocalCritic:
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
        optimizer: OptimizerConfig | None = None,
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
            _load_head(self._head, Path(folder) / HEAD_FILE)
        self._forward = ValueForward(model, self._head, autocast=autocast)
        self._threads = TorchThreads(threads)
        body = [parameter for parameter in body_of(model).parameters() if parameter.requires_grad]
        self._optimizer = Optimizer([*body, *self._head.parameters()], optimizer or OptimizerConfig())
        self._gradients = Gradients(self._optimizer, self._threads, parallel=threads == 0)
        self._requirements = PackingRequirements(
            share_prompts=shares,
            micro_batch_tokens=default_micro_batch_tokens(model.device),
            parallel=self._gradients.parallel,
        )

    @property
    def requirements(self) -> PackingRequirements:
        return self._requirements

    async def values(self, batch: StateBatch, *, on_micro_batch: Callable[[], None] = lambda: None) -> list[float]:
        """See `Critic.values`. Computed in a thread."""
        return await run_cancellable(lambda stop: self._values(batch, on_micro_batch, stop))

    def _values(self, batch: StateBatch, on_micro_batch: Callable[[], None], stop: StopFlag) -> list[float]:
        value_S = torch.zeros(batch.states)
        with torch.no_grad():
            for micro in stop.until_set(batch.micro_batches):
                with self._threads.during("measure", micro.token_ids_BL.numel()):
                    value_S[micro.targets.place_N] = self._values_of(micro).cpu()
                on_micro_batch()
        return value_S.tolist()

    def _values_of(self, micro: MicroBatch[StatePlaces]) -> torch.Tensor:
        return self._forward.values(micro.to(self._model.device))

    async def update(
        self,
        batches: Sequence[ValueBatch],
        *,
        lr: float,
        epochs: int = 1,
        cancellable: bool = True,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> CriticStats:
        """See `Critic.update`. Gradients are computed in a thread; the weights change in the event loop's own thread."""
        sums: list[_Sums] = []
        norms: list[float] = []
        for _ in range(epochs):
            for batch in batches:
                in_thread = run_cancellable if cancellable and not sums else run_to_completion
                total = await in_thread(lambda stop, batch=batch: self._accumulate(batch, on_micro_batch, stop))
                if not sums:
                    on_first_step()
                norms.append(self._optimizer.step(lr))
                sums.append(total)
        if not sums:
            return CriticStats()
        states = sum(total.states for total in sums)
        return CriticStats(
            loss=sum(total.loss for total in sums) / len(sums),
            grad_norm=sum(norms) / len(norms),
            clip_fraction=sum(total.clipped for total in sums) / max(states, 1),
        )

    def _accumulate(self, batch: ValueBatch, on_micro_batch: Callable[[], None], stop: StopFlag) -> _Sums:
        """Add up the gradients of a batch in the parameters' `grad`, and its loss and metrics."""
        sums = self._gradients.of_batch(batch.micro_batches, self._loss_of, on_micro_batch=on_micro_batch, stop=stop)
        return sum(sums, _Sums())

    def _loss_of(self, micro: MicroBatch[ValueTargets]) -> tuple[torch.Tensor, Callable[[], _Sums]]:
        """The loss of a micro-batch, and a function that computes its metrics."""
        targets, value_N = micro.targets, self._forward.values(micro)
        loss_N = value_loss(value_N, targets.old_value_N, targets.return_N, clip=self._clip)
        loss = (loss_N * targets.weight_N).sum()

        def metrics() -> _Sums:
            unclipped_N = value_loss(value_N, targets.old_value_N, targets.return_N)
            return _Sums(float(loss), int((loss_N > unclipped_N).sum()), len(loss_N))

        return loss, metrics

    def save(self, folder: Path) -> None:
        if has_adapter(self._model):
            save_adapter(self._model, folder)
        else:
            self._model.save_pretrained(folder)
        save_file({name: tensor.detach().cpu() for name, tensor in self._head.state_dict().items()}, folder / HEAD_FILE)

    def state(self) -> dict[str, Any]:
        return self._optimizer.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state(state)

    def base_fingerprint(self) -> str | None:
        return of_model(without_adapter(self._model)) if has_adapter(self._model) else None


def _load_head(head: torch.nn.Linear, file: Path) -> None:
    """Load a saved value head. Raises ConfigError if the file cannot be read, or has weights of another shape."""
    try:
        with boundary("model"):
            saved = load_file(file)
    except Failed as failed:
        raise ConfigError(f"the value head {file} cannot be read: {failed.failure.message}") from failed
    shapes = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    own = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    if shapes != own:
        raise ConfigError(f"the value head {file} has weights of the shapes {shapes}; the model needs {own}")
    head.load_state_dict(saved)
