"""The protocols of learner and critic: the parts of a run that own the weights and change them.

`Learner` is what training, fine-tuning and checkpoints use, `Critic` the same for the value model. Their callers know nothing
else of the models: no parameters, no optimizer, no device. `LocalLearner` and `LocalCritic` compute in this process,
`ShardedLearner` and `ShardedCritic` on several ranks. This module imports no torch, so that commands without a model start
quickly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from turnwise.training.pace import SlowestRank
from turnwise.types import LogprobKind

if TYPE_CHECKING:
    from torch import Tensor

    from turnwise.training.batch import Batch
    from turnwise.training.value_batch import StateBatch, ValueBatch


def no_shards(folder: Path) -> Mapping[str, str]:
    """`save_shards` of one process, which writes nothing."""
    return {}


@dataclass(frozen=True, slots=True)
class Writers:
    """The functions that write a learner or a critic into a checkpoint: `save`, then `save_shards`, each once."""

    save: Callable[[Path], None]
    save_shards: Callable[[Path], Mapping[str, str]] = no_shards


# Learner: the weights of the policy


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingRequirements:
    """How sequences must be packed for the forward pass of a learner or a critic."""

    share_prompts: bool
    """Whether the model can compute a prefix that sequences share once (tree attention)."""
    micro_batch_tokens: int
    """Tokens of a forward pass where the recipe gives no number: the default of the model's device."""
    most_tokens: int | None = None
    """The most tokens of a micro-batch that fit into the memory of the GPU; None as long as it has not run out."""
    parallel: int = 1
    """How many micro-batches are computed at the same time."""

    def tokens(self, asked: int | None) -> int:
        """Tokens of a forward pass, where the recipe has the number `asked`."""
        tokens = asked or self.micro_batch_tokens
        return tokens if self.most_tokens is None else min(tokens, self.most_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRequirements(PackingRequirements):
    """What a learner requires of the batches that it receives: arguments of `batch.pack`."""

    logprob_kinds: frozenset[LogprobKind]
    """The kinds of reported log-probability that the loss can use. The learner computes the others itself."""
    keep_zero: bool
    """Whether tokens with advantage 0 have a gradient, from a divergence or an entropy term."""
    measure_zero: bool
    """Whether the log-probabilities of tokens with advantage 0 are needed, by rollout correction or to select tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateStats:
    """Statistics of one call of `Learner.update`. `loss`, `kl` and `grad_norm` are means over the optimizer steps."""

    loss: float = 0.0
    kl: float = 0.0
    """KL divergence from the reference model if there is one, else from the policy that sampled; averaged as the loss is."""
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    max_deviation: float = 0.0
    """Largest `|ratio - 1|` of trainer to engine before the first optimizer step."""
    fresh_deviation: float = 0.0
    """The same over the turns that the present weights sampled completely. If it is larger than rounding, something is wrong."""
    clip_fraction: float = 0.0
    """Share of the trained tokens whose probability ratio is outside the clip bounds."""
    tokens: int = 0
    """Targets that were in a forward pass, counted once for each epoch."""
    steps: int = 0
    """Optimizer steps."""
    out_of_memory: int = 0
    """How often the memory of the GPU ran out, and the sequences were divided among smaller micro-batches."""
    correction: Mapping[str, float] = field(default_factory=dict)
    """The metrics of rollout correction, by their names; empty without correction."""
    experts: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the experts of a mixture of experts, by their names; empty for other models."""
    selection: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the selection of tokens, by their names; empty if none are selected."""
    teacher: Mapping[str, float] = field(default_factory=dict)
    """The metrics of student and teacher, by their names; empty without a teacher."""
    logprobs: Sequence[Mapping[int, np.ndarray]] = ()
    """For each batch, the log-probabilities of the targets of each sequence (`Targets.sequence_N`, float32, in the order of the
    tokens), in the first forward pass of the batch. Empty if the learner does not report them."""

    slowest: SlowestRank | None = None
    """The rank that the others wait for; None in one process."""

    @property
    def rank_metrics(self) -> Mapping[str, float]:
        """The metrics of the slowest rank; empty in one process."""
        slowest = self.slowest
        return {} if slowest is None else {"ranks/slowest": slowest.times, "ranks/slowest_rank": slowest.rank}

    @property
    def memory_metrics(self) -> Mapping[str, float]:
        """The metric of a step in which memory ran out; else empty."""
        return {"micro_batches/out_of_memory": self.out_of_memory} if self.out_of_memory else {}


def _nothing() -> None:
    pass


class Learner(Protocol):
    """Owns the model's weights and changes them. Its methods are called from one event loop, one at a time."""

    @property
    def requirements(self) -> BatchRequirements:
        """What batches must look like. Nothing but `most_tokens` changes during a run."""
        ...

    @property
    def context_length(self) -> int | None:
        """The most tokens of a sequence that the model allows; None if its configuration does not say."""
        ...

    async def update(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        epochs: int = 1,
        cancellable: bool = True,
        on_micro_batch: Callable[[], None] = _nothing,
        on_first_step: Callable[[], None] = _nothing,
    ) -> UpdateStats:
        """Take one optimizer step for each batch, `epochs` times over.

        `on_micro_batch` is called after each micro-batch, possibly in another thread; `on_first_step` once, before the first
        optimizer step changes the weights.

        If `cancellable` is true and the call is cancelled before the first optimizer step, the weights are unchanged. Otherwise
        a cancellation takes effect after the last optimizer step.
        """
        ...

    @property
    def trains_adapter(self) -> bool:
        """Whether an adapter on frozen weights is trained; `save` then writes the adapter only."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The present weights by the names of the checkpoint files of Hugging Face, on the learner's device, without copies.

        Tied weights have one name. With an adapter: only the adapter's weights, by peft's names. The next `update` changes
        the tensors in place. Several ranks give all weights as `StreamedWeights`.
        """
        ...

    def trains(self, model: Any) -> bool:
        """Whether the parameters of `model` are those that the learner changes."""
        ...

    def copy_weights(self, model: Any) -> None:
        """Give another model in this process, with the same parameters, the present weights."""
        ...

    def token_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """`log_softmax(logits)` of each of the tokens after the first, given the tokens before it. Changes nothing."""
        ...

    def largest_logit(self, token_ids: Sequence[int]) -> float:
        """The largest absolute logit after each of the tokens. Changes nothing."""
        ...

    async def evaluate_loss(self, batch: Batch) -> float:
        """The negative log-likelihood of a batch, averaged by its weights. Changes nothing."""
        ...

    async def logprobs(self, batch: StateBatch, *, reference: bool = False, cancellable: bool = True) -> list[float]:
        """The log-probability of each token of the batch: of the token after each of its states, under the present weights, or
        under the reference model. Changes nothing. Unless `cancellable`, a cancellation takes effect after the end. Raises
        ValueError if there is no reference model."""
        ...

    async def scores(self, batch: StateBatch, *, teacher: str | None, top_k: int) -> Tensor:
        """For each state of the batch, the log-probability of the token after it, the `top_k` most likely tokens, and their
        log-probabilities: float64, [S, 1 + 2 top_k]. By the local teacher with this name; None: by the present weights. Changes
        nothing."""
        ...

    def mix_reference(self, share: float) -> None:
        """Move the weights of the reference model towards the present weights: `share` times the present weights plus
        `1 - share` times its own. Raises ValueError if there is no reference model."""
        ...

    def save(self, folder: Path) -> None:
        """Write the model into a model directory, or only its adapter if it has one. Tokenizer and processor are the
        caller's. Several ranks write all weights with `save_shards`, and here only where they are (`checkpoint.py`)."""
        ...

    def free_memory(self) -> None:
        """Give back the memory of devices that nothing needs before the next update: gradients, freed blocks that are kept, and
        with `optimizer.offload=sampling` what only optimizer steps need. For an engine on the same device."""
        ...

    def state(self) -> dict[str, Any]:
        """What must be saved besides the model to resume exactly: the state of the optimizer, and the weights of a reference
        model that has changed."""
        ...

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        """Resume from what `state` returned, or from the directory that `save_shards` of any number of ranks has written. The
        weights are loaded with the model; options are the learner's own."""
        ...

    def hold(self) -> Writers:
        """Copy to the CPU's memory what `save` and `save_shards` write. The result writes the copies, in any thread, while other
        methods change the weights."""
        ...

    def save_shards(self, folder: Path) -> Mapping[str, str]:
        """Write what `state` leaves out, because it is divided among several ranks: each rank writes its own files into the
        directory, and flushes them to disk. Returns the SHA-256 of each file by its name; a learner in one process writes
        nothing."""
        ...

    def close(self) -> None:
        """End what the learner has started besides this process. Called once, at the end of the run."""
        ...

    def fingerprint(self) -> str:
        """SHA-256 of the weights: equal for equal names, shapes, types and values."""
        ...

    def base_fingerprint(self) -> str | None:
        """The same of the frozen weights of a model with an adapter; None if all weights are trained."""
        ...

    def reference_fingerprint(self) -> str | None:
        """The same of the reference model; None if there is none."""
        ...

    def teacher_fingerprints(self) -> Mapping[str, str]:
        """The same of each local teacher, by its name."""
        ...


# Critic: the weights of the value model


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticStats:
    """Statistics of one call of `Critic.update`. `loss` and `grad_norm` are means over the optimizer steps."""

    loss: float = 0.0
    grad_norm: float = 0.0
    """Norm of the gradient before clipping."""
    clip_fraction: float = 0.0
    """Share of the states whose loss is larger by value clipping, over all optimizer steps."""


class Critic(Protocol):
    """Owns the weights of the value model and changes them. Its methods are called from one event loop, one at a time."""

    @property
    def requirements(self) -> PackingRequirements:
        """What batches must look like. Nothing but `most_tokens` changes during a run."""
        ...

    async def values(self, batch: StateBatch, *, on_micro_batch: Callable[[], None] = _nothing) -> list[float]:
        """The value of each state of the batch: the expected sum of the later rewards. Changes nothing."""
        ...

    async def update(
        self,
        batches: Sequence[ValueBatch],
        *,
        lr: float,
        epochs: int = 1,
        cancellable: bool = True,
        on_micro_batch: Callable[[], None] = _nothing,
        on_first_step: Callable[[], None] = _nothing,
    ) -> CriticStats:
        """Take one optimizer step for each batch, `epochs` times over.

        If `cancellable` is true and the call is cancelled before the first optimizer step, the weights are unchanged. Otherwise
        a cancellation takes effect after the last optimizer step. The callbacks are those of `Learner.update`.
        """
        ...

    def free_memory(self) -> None:
        """See `Learner.free_memory`."""
        ...

    def save(self, folder: Path) -> None:
        """Write the value model into a directory: the model, or only its adapter if it has one, and the value head. Weights of
        several ranks as in `Learner.save`."""
        ...

    def state(self) -> dict[str, Any]:
        """What must be saved besides the model to resume exactly: the state of the optimizer."""
        ...

    def load_state(self, state: Mapping[str, Any], shards: Path | None = None) -> None:
        """Resume from what `state` returned, or from the directory that `save_shards` of any number of ranks has written. The
        weights are loaded with the model."""
        ...

    def hold(self) -> Writers:
        """See `Learner.hold`."""
        ...

    def save_shards(self, folder: Path) -> Mapping[str, str]:
        """See `Learner.save_shards`."""
        ...

    def base_fingerprint(self) -> str | None:
        """SHA-256 of the frozen weights of a value model with an adapter; None if all its weights are trained."""
        ...
