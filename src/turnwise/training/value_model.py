"""The value model of a critic: head, forward pass, loss, and the order of an update.

It is the body of a transformers model, and a linear layer from hidden states to a number. The value before a token is read
where the policy's model predicts the token: at the token before it. As for the policy (`update.py`), an update is computed in
one process or in several: `CriticBase` is the part of a critic that is the same for both.

Knows states, values and returns. Does not know how returns are estimated, nor devices or ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.local_paths import share_weights
from turnwise.models.precision import autocast
from turnwise.models.transfer import Measured
from turnwise.training.batch import MicroBatch
from turnwise.training.forward import ModelInputs
from turnwise.training.learner import CriticStats
from turnwise.training.update import StopFlag, UpdateLoop, run_cancellable
from turnwise.training.value_batch import StateBatch, StatePlaces, ValueBatch, ValueTargets

# Forward pass: values of states


class ValueForward:
    """Computes the values of the states of a micro-batch. `head` is a linear layer from hidden states [N, D] to [N, 1].

    With `autocast`, the matrix products of the body are computed in bfloat16. Those of the head are always float32.
    """

    def __init__(self, model: Any, head: torch.nn.Linear, *, autocast: bool = False) -> None:
        self._autocast = autocast
        self._body = body_of(model)
        self._head = head
        self._inputs = ModelInputs(model)

    def values(self, micro: MicroBatch[Any]) -> torch.Tensor:
        """The value [N] of each state, in float32."""
        with self._inputs.of(micro) as inputs:
            with autocast(micro.token_ids_BL.device, self._autocast):
                hidden_UD = self._body(**inputs)[0][micro.row_U, micro.column_U]
            value_U = self._head(hidden_UD.float()).squeeze(-1)
        return (value_U if micro.share is None else micro.share.joined(value_U, each=False))[micro.prediction_N]


def body_of(model: Any) -> Any:
    """The part of a model that computes hidden states: the model without its output layer.

    Raises ConfigError if there is no such part.
    """
    body = getattr(model, "model", None) or model.base_model
    if body is model or not isinstance(body, torch.nn.Module):
        raise ConfigError(
            f"{type(model).__name__} cannot be a critic: its body has no name of its own (`model.model`). Set critic.path to a "
            f"model of another family"
        )
    return body


# Head: its file, and the parameters that the critic's optimizer changes


def new_value_head(model: Any) -> torch.nn.Linear:
    """A linear layer in float32 with all weights 0, so that a new critic estimates 0 for all states."""
    head = torch.nn.Linear(model.config.get_text_config().hidden_size, 1, device=model.device, dtype=torch.float32)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    return head


HEAD_FILE = "value_head.safetensors"
"""The file with the value head, in the directory of a saved critic."""


BODY_PREFIX = "body."


def trained_parameters(model: Any, head: torch.nn.Linear) -> dict[str, torch.nn.Parameter]:
    """The parameters of a critic that its optimizer changes, by their names: those of the model's body, and the value head's."""
    body = {
        f"{BODY_PREFIX}{name}": parameter
        for name, parameter in body_of(model).named_parameters()
        if parameter.requires_grad
    }
    return {**body, **{f"head.{name}": parameter for name, parameter in head.named_parameters()}}


def save_head(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write the weights of a value head into the directory of a critic."""
    save_file({name: tensor.detach().cpu() for name, tensor in weights.items()}, folder / HEAD_FILE)
    share_weights(folder / HEAD_FILE)


def save_critic(folder: Path, *, save_body: Callable[[Path], None], head: Mapping[str, torch.Tensor]) -> None:
    """Write a critic into a directory: its model with `save_body`, and the weights `head` of its value head."""
    save_body(folder)
    save_head(head, folder)


def load_head(head: torch.nn.Linear, folder: Path) -> None:
    """Load a saved value head. Raises ConfigError if the file cannot be read, or has weights of another shape."""
    file = folder / HEAD_FILE
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


# Loss: a pure function of values and returns, and figures that say how good the values are


def value_loss(
    value_N: torch.Tensor, old_value_N: torch.Tensor, return_N: torch.Tensor, *, clip: float | None = None
) -> torch.Tensor:
    """`(V - R)^2 / 2` for each token or turn; with `clip`, the larger of it and of the same with V clipped to `old +- clip`.

    `old_value_N` are the values before the update. Value clipping: PPO's reference implementation; arXiv 2006.05990 compares it.
    """
    loss_N = (value_N - return_N).square() / 2
    if clip is None:
        return loss_N
    clipped_N = old_value_N + (value_N - old_value_N).clamp(-clip, clip)
    return torch.maximum(loss_N, (clipped_N - return_N).square() / 2)


def explained_variance(batches: Sequence[ValueBatch]) -> float | None:
    """The share of the variance of the returns that the old estimates explain: `1 - Var(R - v_old) / Var(R)`.

    1: the estimates are exact up to a constant. 0: they are as good as a constant. Below 0: they are worse. None if all returns
    are equal.
    """
    targets = [micro.targets for batch in batches for micro in batch.micro_batches]
    if not targets:
        return None
    return_S = torch.cat([target.return_N for target in targets]).double()
    error_S = return_S - torch.cat([target.old_value_N for target in targets]).double()
    variance = float(return_S.var(correction=0))
    return 1.0 - float(error_S.var(correction=0)) / variance if variance > 0 else None


def mean_value(batches: Sequence[ValueBatch]) -> float | None:
    """The mean of the old estimates; None without states."""
    values = [micro.targets.old_value_N for batch in batches for micro in batch.micro_batches]
    return float(torch.cat(values).double().mean()) if values else None


# Order: passes and optimizer steps of an update


@dataclass(frozen=True, slots=True)
class CriticSums:
    """Loss and metrics of one micro-batch, or of several added up."""

    loss: float = 0.0
    clipped: int = 0
    states: int = 0

    def __add__(self, other: CriticSums) -> CriticSums:
        return CriticSums(self.loss + other.loss, self.clipped + other.clipped, self.states + other.states)


class CriticBase(UpdateLoop[MicroBatch[ValueTargets], CriticSums]):
    """The methods of a `Critic` that run passes through its model. The passes themselves are abstract; they block."""

    @abstractmethod
    def measure(
        self, micro_batches: Sequence[MicroBatch[StatePlaces]], on_micro_batch: Callable[[], None], stop: StopFlag
    ) -> list[torch.Tensor]:
        """The values [N] of the states of each micro-batch, without gradients. The list is shorter if `stop` is set."""

    async def values(self, batch: StateBatch, *, on_micro_batch: Callable[[], None] = lambda: None) -> list[float]:
        """See `Critic.values`. Computed in a thread."""
        return await run_cancellable(
            lambda stop: batch.in_order(self.measure(batch.micro_batches, on_micro_batch, stop))
        )

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
        sums, norms = await self.take_steps(
            [batch.micro_batches for batch in batches], on_micro_batch, on_first_step, lr, epochs, cancellable
        )
        if not sums:
            return CriticStats()
        states = sum(total.states for total in sums)
        return CriticStats(
            loss=sum(total.loss for total in sums) / len(sums),
            grad_norm=sum(norms) / len(norms),
            clip_fraction=sum(total.clipped for total in sums) / max(states, 1),
        )


def critic_loss(
    forward: ValueForward, micro: MicroBatch[ValueTargets], *, clip: float | None
) -> tuple[torch.Tensor, Callable[[], Measured[CriticSums]]]:
    """The loss of a micro-batch, and a function that computes its metrics."""
    targets, value_N = micro.targets, forward.values(micro)
    loss_N = value_loss(value_N, targets.old_value_N, targets.return_N, clip=clip)
    loss = (loss_N * targets.weight_N).sum()

    def metrics() -> Measured[CriticSums]:
        unclipped_N = value_loss(value_N, targets.old_value_N, targets.return_N)
        found, states = (loss, (loss_N > unclipped_N).sum()), len(loss_N)
        return Measured(found, lambda host: CriticSums(float(host[0]), int(host[1]), states))

    return loss, metrics
