"""The policy: a transformers model and the optimizer that changes it.

Knows how to turn packed batches into an optimizer step. It knows nothing of conversations, and nothing of where batches
come from.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from turnwise.errors import ConfigError
from turnwise.models.torch_threads import TorchThreads
from turnwise.training.background import Halt, halted_if_cancelled, to_the_end
from turnwise.training.batch import Batch, MicroBatch
from turnwise.training.forward import Forward, try_tree_attention
from turnwise.training.loss import kl_k3, nll, ppo_clip
from turnwise.types import LogprobKind, Sampling

__all__ = ["OptimizerConfig", "Policy", "UpdateStats", "lr_at"]

_log = logging.getLogger(__name__)

_SMALL = 20_000_000
"""Parameters of a model whose micro-batches are computed side by side on a CPU."""

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """How the weights are changed."""

    lr: float
    loss: Literal["policy_gradient", "likelihood"] = "policy_gradient"
    """What is minimised: the clipped surrogate of the advantages, or the negative log-likelihood, whatever they are."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_coef: float = 0.0
    entropy_coef: float = 0.0


@dataclass(slots=True)
class UpdateStats:
    """What one or several optimizer steps did."""

    loss: float = 0.0
    kl: float = 0.0
    """From the reference where there is one, else from the policy that sampled; averaged as the loss is."""
    grad_norm: float = 0.0
    max_deviation: float = 0.0
    """Largest `|ratio - 1|` of trainer to engine before the first step."""
    clipped: float = 0.0
    """Share of the trained tokens whose ratio is outside the clip bounds."""
    tokens: int = 0
    """Tokens that were in a forward pass as targets."""
    steps: int = 0
    """Optimizer steps."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one micro-batch gives."""

    gradients: Sequence[torch.Tensor | None] | None
    """One for each parameter; None where they were added to the parameters' own."""
    loss: float
    tokens: int
    kl: float = 0.0
    max_deviation: float = 0.0
    clipped: float = 0.0


class Policy:
    """A model, an optional frozen reference, and AdamW. `threads=0` finds out how many torch threads pay off.

    The `reference` is the model before training, where `kl_coef` needs one; None takes a copy of `model`.
    """

    def __init__(
        self,
        model: Any,
        *,
        sampling: Sampling,
        options: OptimizerConfig,
        reference: Any | None = None,
        share_prompts: str = "auto",
        threads: int = 0,
    ) -> None:
        able = share_prompts != "never" and try_tree_attention(model)
        if share_prompts == "always" and not able:
            raise ConfigError(
                f"train.share_prompts=always: {type(model).__name__} does not give its own log-probabilities back with "
                f"shared prompts (sliding windows and recurrent layers do not); use auto or never"
            )
        self.shares_prompts = able
        self.model = model
        self._options = options
        self._sampling = sampling
        self._threads = TorchThreads(threads)
        self._forward = Forward(model, sampling)
        self._reference = None
        if options.kl_coef > 0:
            frozen = _frozen(model) if reference is None else reference.requires_grad_(False)
            if able and reference is not None:  # batches are packed for the attention that the model has now
                try_tree_attention(frozen)
            self._reference = Forward(frozen, sampling)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._workers = _workers(self._parameters) if threads == 0 else None
        self._masters = _masters(self._parameters)
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
        )

    @property
    def usable_logprob_kinds(self) -> frozenset[LogprobKind]:
        """The kinds of log-probability that it can use as the engine reports them."""
        return self._sampling.exact_kinds

    @property
    def needs_zero_advantages(self) -> bool:
        """Whether tokens without advantage matter to the loss."""
        return self._reference is not None or self._options.entropy_coef != 0.0

    async def update(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        epochs: int = 1,
        done: Callable[[], None] = lambda: None,
        changing: Callable[[], None] = lambda: None,
    ) -> UpdateStats:
        """One optimizer step for each batch, `epochs` times over.

        `done` is called after each micro-batch, in a thread; `changing` once, before the first optimizer step.

        Gradients are computed in a thread, so that the event loop can hold conversations and notice signals meanwhile. The
        weights themselves change in the event loop's own thread, and so never in the middle of an engine's step.

        A cancellation before the first optimizer step is raised at once; the thread ends after its current micro-batch, and the
        weights are unchanged. A later one takes effect after the last optimizer step, when the weights are those of a whole step.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        update = UpdateStats()
        # before the first step: afterwards the weights are no longer those that sampled
        batches = await halted_if_cancelled(lambda halt: [self._completed(batch, halt) for batch in batches])
        for _ in range(epochs):
            for batch in batches:
                in_thread = to_the_end if update.steps else halted_if_cancelled
                loss, kl = await in_thread(lambda halt, batch=batch: self._accumulate(batch, update, done, halt))
                if update.steps == 0:
                    changing()
                norm = self._apply()
                update.steps += 1
                update.loss, update.kl, update.grad_norm = update.loss + loss, update.kl + kl, update.grad_norm + norm
        steps = max(update.steps, 1)
        update.loss, update.kl, update.grad_norm = update.loss / steps, update.kl / steps, update.grad_norm / steps
        update.clipped /= max(update.tokens, 1)
        return update

    def _completed(self, batch: Batch, halt: Halt) -> Batch:
        """The batch with log-probabilities of the weights as they are, where the engine reported none that can be used."""
        if self._options.loss != "policy_gradient" or all(bool(one.known_N.all()) for one in batch.micro_batches):
            return batch
        return replace(batch, micro_batches=[self._with_logprobs(micro) for micro in halt.until(batch.micro_batches)])

    def _with_logprobs(self, micro: MicroBatch) -> MicroBatch:
        if bool(micro.known_N.all()):
            return micro
        with torch.no_grad(), self._threads.during("measure", micro.token_ids_BL.numel()):
            logprob_N = self._forward.logprobs(micro.to(self.model.device))[0].to(micro.old_logprob_N.device)
        return replace(micro, old_logprob_N=torch.where(micro.known_N, micro.old_logprob_N, logprob_N))

    def _accumulate(
        self, batch: Batch, update: UpdateStats, done: Callable[[], None], halt: Halt
    ) -> tuple[float, float]:
        """Gradients of a batch, from its micro-batches. Returns its loss and its divergence."""
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._parameters:
            parameter.grad = None
        loss = kl = 0.0
        with contextlib.closing(self._parts(batch.micro_batches)) as parts:  # closed early, it computes no more of them
            for part in halt.until(parts):
                if part.gradients is not None:
                    self._add(part.gradients)
                loss, kl = loss + part.loss, kl + part.kl
                if update.steps == 0:
                    update.max_deviation = max(update.max_deviation, part.max_deviation)
                update.clipped += part.clipped
                update.tokens += part.tokens
                done()
        return loss, kl

    def _parts(self, micro_batches: Sequence[MicroBatch]) -> Generator[_Part]:
        """What each micro-batch gives, in their order; small models compute several at a time."""
        if self._workers is not None and len(micro_batches) > 1:
            yield from self._workers.map(lambda micro: self._part(micro, apart=True), micro_batches)
            return
        for micro in micro_batches:
            with self._threads.during("learn", micro.token_ids_BL.numel()):
                part = self._part(micro.to(self.model.device), apart=False)
            yield part

    def _part(self, micro: MicroBatch, *, apart: bool) -> _Part:
        """Loss and gradients of a micro-batch; the gradients `apart` from the parameters, or added to theirs."""
        options = self._options
        logprob_N, entropy_N = self._forward.logprobs(micro, entropy=options.entropy_coef != 0.0)
        sampled = options.loss == "policy_gradient"  # else somebody else has written the tokens, with no probability
        if sampled:
            loss_N = ppo_clip(
                logprob_N,
                micro.old_logprob_N,
                micro.advantage_N,
                clip_low=options.clip_low,
                clip_high=options.clip_high,
            )
        else:
            loss_N = nll(logprob_N)
        kl_N = torch.zeros_like(loss_N)
        if self._reference is not None:
            with torch.no_grad():
                reference_N, _ = self._reference.logprobs(micro)
            kl_N = kl_k3(logprob_N, reference_N)
            loss_N = loss_N + options.kl_coef * kl_N
        elif sampled:
            kl_N = kl_k3(logprob_N, micro.old_logprob_N)
        if entropy_N is not None:
            loss_N = loss_N - options.entropy_coef * entropy_N
        loss = (loss_N * micro.weight_N).sum()
        gradients = None
        if apart:  # two threads must not add to one parameter at once
            gradients = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        else:
            loss.backward()
        with torch.no_grad():
            part = _Part(
                gradients=gradients, loss=float(loss), tokens=len(loss_N), kl=float((kl_N * micro.weight_N).sum())
            )
            if not sampled:
                return part
            ratio_N = (logprob_N - micro.old_logprob_N).exp()
            outside_N = (ratio_N < 1.0 - options.clip_low) | (ratio_N > 1.0 + options.clip_high)
            # `max` of Python passes over a NaN: what is no number is as far from 1 as can be
            deviation_N = (ratio_N - 1.0).abs().nan_to_num(nan=torch.inf)[micro.known_N]
            return replace(
                part,
                max_deviation=float(deviation_N.max()) if len(deviation_N) else 0.0,
                clipped=float(outside_N.sum()),
            )

    async def evaluate_loss(self, batch: Batch) -> float:
        """The batch's negative log-likelihood, averaged by its weights; nothing is changed. Computed in a thread."""
        return await halted_if_cancelled(lambda halt: self._measure(batch, halt))

    def _measure(self, batch: Batch, halt: Halt) -> float:
        total = 0.0
        with torch.no_grad():
            for micro in halt.until(batch.micro_batches):
                with self._threads.during("measure", micro.token_ids_BL.numel()):
                    here = micro.to(self.model.device)
                    total += float((nll(self._forward.logprobs(here)[0]) * here.weight_N).sum())
        return total

    def _add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                continue
            if parameter.grad is None:
                parameter.grad = gradient
            else:
                parameter.grad.add_(gradient)

    def _apply(self) -> float:
        """Clip, step, and hand the result from the master weights to the model. Returns the norm before clipping."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            # without a gradient AdamW would skip the parameter, although its momentum moves it: a zero is not a nothing
            gradient = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            master.grad = gradient if master is parameter else gradient.float()
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._options.max_grad_norm))
        if math.isfinite(norm):
            self._optimizer.step()
        else:
            _log.warning(
                "the gradient's norm is %s: this optimizer step is left out, the weights stay as they are", norm
            )
        with torch.no_grad():
            for parameter, master in zip(self._parameters, self._masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        return norm

    def state(self) -> dict[str, Any]:
        """What must be saved besides the model to go on exactly."""
        masters = [master.detach() for master in self._masters] if self._masters[0] is not self._parameters[0] else []
        return {"optimizer": self._optimizer.state_dict(), "masters": masters}

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave, with this policy's own options. The model's weights are loaded with the model."""
        self._optimizer.load_state_dict(state["optimizer"])
        for group in self._optimizer.param_groups:  # they would be those of the state
            group["betas"], group["weight_decay"] = self._options.betas, self._options.weight_decay
        with torch.no_grad():
            for master, saved in zip(self._masters, state["masters"] or self._masters, strict=True):
                if master is not saved:
                    master.copy_(saved)


def lr_at(step: int, *, lr: float, schedule: Schedule, warmup_steps: int, steps: int) -> float:
    """The learning rate of a step, counted from 0: linear warm-up, then constant, or to zero linearly or as a cosine."""
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(steps - warmup_steps, 1)
    if schedule == "linear":
        return lr * (1.0 - done)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * done))
    return lr


def _workers(parameters: Sequence[torch.nn.Parameter]) -> ThreadPoolExecutor | None:
    """A thread for each core, each with one torch thread, where that beats all cores on one operation.

    So it is for small models on a CPU, whose operations are over before a second torch thread has woken up. It costs each
    thread a copy of the gradients, which is why large models, and devices with a memory of their own, do without.
    """
    cores, size = torch.get_num_threads(), sum(parameter.numel() for parameter in parameters)
    if cores < 2 or size > _SMALL or parameters[0].device.type != "cpu":
        return None
    return ThreadPoolExecutor(min(cores, 8), "learn", initializer=torch.set_num_threads, initargs=(1,))


def _frozen(model: Any) -> Any:
    return copy.deepcopy(model).requires_grad_(False)


def _masters(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """float32 copies of parameters of lower precision, which would lose small steps; others are their own masters."""
    if all(parameter.dtype == torch.float32 for parameter in parameters):
        return list(parameters)
    return [parameter.detach().float().clone() for parameter in parameters]
