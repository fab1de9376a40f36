"""An update of the policy: gradients of micro-batches, the order of passes and optimizer steps, and their sums.

The passes are computed in one process, or in several: `LearnerBase` is the part of a learner that is the same for both. A
learner in one process computes all micro-batches itself; a sharded learner shares them out among its ranks. Small models
compute several micro-batches at a time. Long computations run in a thread, so that the event loop can run conversations and
react to signals.

In one process, an update passes through `LearnerBase.update` here, `LocalLearner.accumulate`, `Gradients` here,
`LocalLearner._loss_of`, and `policy_loss` here: the order of passes, the threads and the sums are in this file, and the model in
the other.

Invariant: if the asyncio task that waits is cancelled before the first optimizer step, the thread ends after its present
micro-batch, and the weights are those of the last finished training step; later, the training step is finished first. Knows
losses, targets and the parameters of an optimizer. Does not know models, devices or ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from turnwise.models.allocator import LARGE_MODEL, gradients_first, trim_kept
from turnwise.models.cpu import TorchThreads
from turnwise.models.transfer import Measured, numbers, read, to_host
from turnwise.options.algorithm import Nll
from turnwise.training.batch import Batch, Columns, MicroBatch
from turnwise.training.correction import Corrected, CorrectionSums, correct
from turnwise.training.divergence import Compared, Rows
from turnwise.training.expert_load import Balance, ExpertLoad, LoadCounter, load_metrics
from turnwise.training.forward import Forward
from turnwise.training.learner import UpdateStats
from turnwise.training.losses import Loss, LossTerms, Targets, fresh_tokens, groups_of, nll, with_own_ratios
from turnwise.training.micro_batch_bound import MicroBatchBound
from turnwise.training.optimizer import Optimizer
from turnwise.training.pace import Pace, SlowestRank
from turnwise.training.selection import MeasuredTokens, select_tokens
from turnwise.training.value_batch import StateBatch

# Sums: loss and metrics of optimizer steps, added up over micro-batches

A = TypeVar("A", "ExpertLoad", "TeacherSums")


@dataclass(frozen=True, slots=True)
class UpdateSums:
    """Loss and metrics of one micro-batch, or of several added up."""

    loss: float = 0.0
    kl: float = 0.0
    tokens: int = 0
    counted: float = 0.0
    """The tokens by `Targets.counts`, of which `clipped` are outside the bounds."""
    clipped: float = 0.0
    max_deviation: float = 0.0
    fresh_deviation: float = 0.0
    logprobs: tuple[TargetLogprobs, ...] = ()
    """The log-probabilities of each micro-batch."""
    experts: ExpertLoad | None = None
    """What the experts of the model have computed; None if it has none."""
    teacher: TeacherSums | None = None
    """What a comparison with the teacher has found; None without one."""
    paces: tuple[Pace, ...] = ()
    """What each rank has computed; empty in one process."""

    def __add__(self, other: UpdateSums) -> UpdateSums:
        return UpdateSums(
            loss=self.loss + other.loss,
            kl=self.kl + other.kl,
            tokens=self.tokens + other.tokens,
            counted=self.counted + other.counted,
            clipped=self.clipped + other.clipped,
            max_deviation=max(self.max_deviation, other.max_deviation),
            fresh_deviation=max(self.fresh_deviation, other.fresh_deviation),
            logprobs=self.logprobs + other.logprobs,
            experts=_added(self.experts, other.experts),
            teacher=_added(self.teacher, other.teacher),
            paces=self.paces or other.paces,
        )


def _added(first: A | None, second: A | None) -> A | None:
    return first + second if first is not None and second is not None else first or second


@dataclass(frozen=True, slots=True)
class TeacherSums:
    """How student and teacher differ at the targets of a micro-batch, or of several added up. Equal segments count each."""

    tokens: float
    turns: float
    log_ratio: float
    """The student's log-probability of the sampled token minus the teacher's."""
    agrees: float
    """The tokens at which both find the same token most likely."""
    divergence: float | None = None
    """The divergence that is in the loss; None where there is none."""

    def __add__(self, other: TeacherSums) -> TeacherSums:
        both = self.divergence is not None and other.divergence is not None
        return TeacherSums(
            tokens=self.tokens + other.tokens,
            turns=self.turns + other.turns,
            log_ratio=self.log_ratio + other.log_ratio,
            agrees=self.agrees + other.agrees,
            divergence=(self.divergence or 0.0) + (other.divergence or 0.0) if both else None,
        )

    @classmethod
    def of(cls, compared: Compared, logprob_N: torch.Tensor, targets: Targets) -> Measured[TeacherSums] | None:
        """Of one micro-batch; None without a teacher."""
        teacher_N, agrees_N, divergence_N = compared.teacher_logprob_N, compared.agrees_N, compared.divergence_N
        if teacher_N is None or agrees_N is None:
            return None
        counts_N = targets.counts
        turn_N = groups_of(targets, "turn")
        length_G = torch.zeros_like(turn_N).index_add_(0, turn_N, torch.ones_like(turn_N))
        found = [
            counts_N.sum(),
            (counts_N / length_G[turn_N]).sum(),
            (counts_N * (logprob_N.detach() - teacher_N)).sum(),
            (counts_N * agrees_N).sum(),
            *([] if divergence_N is None else [(counts_N * divergence_N.detach()).sum()]),
        ]
        return Measured(found, lambda host: cls(*numbers(host)))

    def metrics(self) -> dict[str, float]:
        """The metrics by their names in metrics.jsonl."""
        named = {
            "teacher/divergence": self.log_ratio / self.tokens,
            "teacher/divergence_turn": self.log_ratio / self.turns,
            "teacher/agreement": self.agrees / self.tokens,
        }
        return named if self.divergence is None else {**named, "teacher/loss": self.divergence / self.tokens}


@dataclass(frozen=True, slots=True)
class TargetLogprobs:
    """The log-probabilities of the targets of a micro-batch, on the CPU."""

    sequence_N: np.ndarray
    """`Targets.sequence_N`."""
    logprob_N: np.ndarray

    def by_sequence(self) -> Iterator[tuple[int, np.ndarray]]:
        """The number of each sequence, and the log-probabilities of its targets, which follow one another."""
        ends = [*(np.flatnonzero(np.diff(self.sequence_N)) + 1).tolist(), len(self.sequence_N)]
        start = 0
        for end in ends:
            if end > start:
                yield int(self.sequence_N[start]), self.logprob_N[start:end]
            start = end


def fresh_deviation(logprob_N: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Largest `|ratio - 1|` of the tokens of turns that the present weights sampled completely, []; 0 without such turns."""
    fresh_N = targets.known_N & fresh_tokens(targets)
    difference_N = logprob_N.detach() - targets.behaviour_logprob_N
    return torch.where(fresh_N, (difference_N.exp() - 1.0).abs().nan_to_num(nan=torch.inf), 0.0).amax()


def update_stats(
    sums: Sequence[UpdateSums],
    norms: Sequence[float],
    correction: CorrectionSums,
    logprobs: Sequence[Sequence[TargetLogprobs]],
    router_aux_loss_coef: float = 0.0,
) -> UpdateStats:
    """Statistics of several optimizer steps: one entry in `sums` and `norms` for each, and one in `logprobs` for each batch."""
    if not sums:
        return UpdateStats()
    counted = sum(step.counted for step in sums)
    loads = [step.experts for step in sums if step.experts is not None]
    return UpdateStats(
        loss=sum(step.loss for step in sums) / len(sums),
        kl=sum(step.kl for step in sums) / len(sums),
        grad_norm=sum(norms) / len(norms),
        max_deviation=sums[0].max_deviation,
        fresh_deviation=sums[0].fresh_deviation,
        clip_fraction=sum(step.clipped for step in sums) / max(counted, 1),
        tokens=sum(step.tokens for step in sums),
        steps=len(sums),
        correction=correction.metrics(),
        experts=load_metrics(sum(loads[1:], loads[0]) if loads else None, router_aux_loss_coef, len(sums)),
        logprobs=[dict(itertools.chain.from_iterable(part.by_sequence() for part in batch)) for batch in logprobs],
        teacher={}
        if (compared := functools.reduce(_added, [one.teacher for one in sums])) is None
        else compared.metrics(),
        slowest=SlowestRank.of(step.paces for step in sums),
    )


# Threads: computations that stop early if the task that waits for them is cancelled

M = TypeVar("M", bound=MicroBatch[Any])
S = TypeVar("S")
T = TypeVar("T")
Report = Callable[[], None]


class StopFlag(threading.Event):
    """Whether a computation is to stop early. Set by the event loop, read by the thread."""

    def until_set(self, items: Iterable[T]) -> Iterator[T]:
        """The items, until the flag is set. After that, no further item is taken from the iterable."""
        if self.is_set():
            return
        for item in items:
            yield item
            if self.is_set():
                return


def _in_thread(work: Callable[[StopFlag], T], stop: StopFlag) -> asyncio.Future[T]:
    # a thread that ends with the work: while there are more OpenMP threads than cores, those that decode sleep in between
    executor, context = ThreadPoolExecutor(1, "passes"), contextvars.copy_context()
    result = asyncio.get_running_loop().run_in_executor(executor, lambda: context.run(work, stop))
    executor.shutdown(wait=False)
    return result


async def run_cancellable(work: Callable[[StopFlag], T]) -> T:
    """Run `work` in a thread. If the caller is cancelled, CancelledError is raised at once and the flag is set.

    The result of work that was stopped early is discarded.
    """
    stop = StopFlag()
    try:
        return await _in_thread(work, stop)
    except asyncio.CancelledError:
        stop.set()
        raise


async def run_to_completion(work: Callable[[StopFlag], T]) -> T:
    """Run `work` in a thread to its end. A cancellation in between is raised at the next `await` of the task after the end."""
    running = _in_thread(work, StopFlag())
    cancelled = False
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled and (task := asyncio.current_task()) is not None:
        task.cancel()
    return running.result()


# Order: passes and optimizer steps of an update


class UpdateLoop(ABC, Generic[M, S]):
    """What a learner and a critic have in common: gradients of batches, and optimizer steps. Both methods block."""

    bound: MicroBatchBound | None = None
    """What divides micro-batches for which memory does not suffice; None on several ranks, which start again."""

    @abstractmethod
    def accumulate(self, micro_batches: Sequence[M], on_micro_batch: Report, stop: StopFlag) -> S:
        """Replace the gradients by those of a batch. Returns its loss and metrics."""

    @abstractmethod
    def step(self, lr: float) -> float:
        """Take an optimizer step. Returns the norm of the gradient before clipping."""

    def explain_overflow(self, micro_batches: Sequence[M]) -> None:
        """Log where values of this batch stop being finite, after its gradient was not. Nothing where no process can say it."""

    async def take_steps(
        self, batches: list[list[M]], report: Report, on_first: Report, lr: float, epochs: int, cancellable: bool
    ) -> tuple[list[S], list[float]]:
        """Take one optimizer step for each batch, `epochs` times over. Returns the sums and the norm of the gradient of each.

        `report` is called after each micro-batch, and `on_first` before the first step. Gradients are computed in a thread. The
        weights change in the event loop's thread, never in the middle of an engine's step. If cancelled before the first step and
        `cancellable`, CancelledError is raised at once, and the thread ends after its micro-batch; else, after the last step.
        """
        sums: list[S] = []
        norms: list[float] = []
        for batch in batches * epochs:
            in_thread = run_cancellable if cancellable and not sums else run_to_completion
            computed, total = await in_thread(lambda stop, batch=batch: self._gradients_of(batch, report, stop))
            if not sums:
                on_first()
            norms.append(self.step(lr))
            if not math.isfinite(norms[-1]):
                self.explain_overflow(computed)
            sums.append(total)
        return sums, norms

    def _gradients_of(self, batch: Sequence[M], report: Report, stop: StopFlag) -> tuple[Sequence[M], S]:
        """`accumulate`, in smaller micro-batches where memory does not suffice; and the micro-batches that were computed."""
        if self.bound is None:
            return batch, self.accumulate(batch, report, stop)
        return self.bound.of_batch(batch, lambda parts, on_part: self.accumulate(parts, on_part, stop), report)


class LearnerBase(UpdateLoop[MicroBatch[Targets], UpdateSums]):
    """The methods of a `Learner` that run passes through its model. The passes themselves are abstract; they block."""

    loss: Loss

    @abstractmethod
    def target_logprobs(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, reference: bool = False
    ) -> list[torch.Tensor]:
        """The log-probabilities [N] of the targets of each micro-batch, under the present weights or under the reference model.

        Without gradients. The list is shorter if `stop` is set. Raises ValueError if there is no reference model.
        """

    @abstractmethod
    def target_entropies(self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag) -> list[torch.Tensor]:
        """The log-probabilities and the entropies [N, 2] of the targets of each micro-batch, under the present weights.

        Without gradients. The list is shorter if `stop` is set.
        """

    async def update(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        epochs: int = 1,
        cancellable: bool = True,
        on_micro_batch: Callable[[], None] = lambda: None,
        on_first_step: Callable[[], None] = lambda: None,
    ) -> UpdateStats:
        """See `Learner.update` and `UpdateLoop.take_steps`."""
        exceeded = self.bound.exceeded if self.bound is not None else 0
        # before the first step: afterwards the weights are no longer those that sampled
        in_thread = run_cancellable if cancellable else run_to_completion
        prepared, selection = await in_thread(lambda stop: prepare_all(self, batches, stop))
        if not prepared:
            return UpdateStats()
        first, *others = [of_batch.batch.micro_batches for of_batch in prepared]
        own_ratios = not self.loss.corrects and self.loss.needs_behaviour_logprobs
        # The first step has the weights before the update, so its pass gives the `old_logprob` of tokens that they sampled:
        # their ratios are exactly 1. Later epochs compare with the log-probabilities of that pass, not with those of the engine,
        # which rounds in another way.
        opening = _before_first_step(first) if own_ratios else first
        sums, norms = await self.take_steps([opening], on_micro_batch, on_first_step, lr, 1, cancellable)
        if own_ratios and epochs > 1:
            first = _with_first_logprobs(first, sums)
        later = [*others, *([first, *others] * (epochs - 1))]
        later_sums, later_norms = await self.take_steps(later, on_micro_batch, lambda: None, lr, 1, False)
        sums, norms = sums + later_sums, norms + later_norms
        logprobs = [of_batch.logprobs or first.logprobs for of_batch, first in zip(prepared, sums, strict=False)]
        correction = sum((of_batch.correction for of_batch in prepared), CorrectionSums())
        stats = update_stats(sums, norms, correction, logprobs, self.loss.options.router_aux_loss_coef)
        stats = replace(stats, selection=selection)
        return stats if self.bound is None else replace(stats, out_of_memory=self.bound.exceeded - exceeded)

    async def evaluate_loss(self, batch: Batch) -> float:
        """See `Learner.evaluate_loss`. Computed in a thread."""

        def evaluate(stop: StopFlag) -> float:
            logprobs = to_host(self.target_logprobs(batch.micro_batches, stop))
            return sum(
                float((nll(logprob_N, micro.targets, Nll()).loss_N * micro.targets.weight_N).sum())
                for micro, logprob_N in zip(batch.micro_batches, logprobs, strict=False)
            )

        return await run_cancellable(evaluate)

    async def logprobs(self, batch: StateBatch, *, reference: bool = False, cancellable: bool = True) -> list[float]:
        """See `Learner.logprobs`. Computed in a thread."""
        in_thread = run_cancellable if cancellable else run_to_completion
        return await in_thread(
            lambda stop: batch.in_order(self.target_logprobs(batch.micro_batches, stop, reference=reference))
        )

    @abstractmethod
    def target_scores(
        self, micro_batches: Sequence[MicroBatch[Any]], stop: StopFlag, *, teacher: str | None, top_k: int
    ) -> list[torch.Tensor]:
        """The scores of the targets of each micro-batch (`Forward.scores`), by a teacher or by the present weights. The list is
        shorter if `stop` is set."""

    async def scores(self, batch: StateBatch, *, teacher: str | None, top_k: int) -> torch.Tensor:
        """See `Learner.scores`. Computed in a thread."""
        return await run_cancellable(
            lambda stop: batch.rows_in_order(
                self.target_scores(batch.micro_batches, stop, teacher=teacher, top_k=top_k), 1 + 2 * top_k
            )
        )


@dataclass(frozen=True, slots=True)
class PreparedBatch:
    """A batch before the first optimizer step."""

    batch: Batch
    correction: CorrectionSums = field(default_factory=CorrectionSums)
    """The metrics of rollout correction."""
    logprobs: tuple[TargetLogprobs, ...] = ()
    """The learner's own log-probabilities of all targets, where they were computed."""
    measured: Sequence[MeasuredTokens] = ()
    """The targets that remain, first those of `Batch.micro_batches`, where tokens are to be selected."""


def prepare(learner: LearnerBase, batch: Batch, stop: StopFlag) -> PreparedBatch:
    """The batch with all log-probabilities that the loss needs, and with rollout correction if the loss has it.

    The learner computes log-probabilities of tokens for which the engine reported none that the loss can use. Rollout correction
    and selection need those of all tokens, also of trajectories that have no gradient: rejection, means, thresholds and metrics
    are of the complete batch.
    """
    loss = learner.loss
    needed = [micro for micro in batch.micro_batches if loss.measures_all or not bool(micro.targets.known_N.all())]
    if loss.measures_all:
        needed += batch.without_gradient
    if not loss.needs_behaviour_logprobs or not needed:
        return PreparedBatch(batch)
    own = {id(micro): value for micro, value in zip(needed, to_host(_own_values(learner, needed, stop)), strict=False)}
    micro_batches, without_gradient = (
        [_with_own_logprobs(micro, own[id(micro)][:, 0], loss) if id(micro) in own else micro for micro in part]
        for part in (batch.micro_batches, batch.without_gradient)
    )
    if not loss.measures_all or len(own) < len(needed):  # stopped: the result is discarded
        return PreparedBatch(replace(batch, micro_batches=micro_batches))
    targets = [micro.targets for micro in (*micro_batches, *without_gradient)]
    # `targets` begin with the micro-batches of the loss; those without gradient are behind them, and are only measured
    corrected = Corrected(targets, [torch.ones_like(one.known_N) for one in targets], CorrectionSums())
    if loss.corrects:
        corrected = correct(targets, loss.correction, rescale=loss.options.normalizer != "constant")
    kept = [
        replace(micro, targets=targets.select(keep_N), prediction_N=micro.prediction_N[keep_N], kept_N=keep_N)
        for micro, targets, keep_N in zip(micro_batches, corrected.targets, corrected.kept, strict=False)
        if bool(keep_N.any())
    ]
    measured = [
        MeasuredTokens(targets=targets.select(keep_N), value_NK=own[id(micro)][keep_N], sources=batch.sources)
        for micro, targets, keep_N in zip(needed, corrected.targets, corrected.kept, strict=True)
        if bool(keep_N.any())
    ]
    return PreparedBatch(
        replace(batch, micro_batches=kept),
        corrected.sums,
        tuple(
            TargetLogprobs(micro.targets.sequence_N.numpy(), own[id(micro)][:, 0].float().numpy()) for micro in needed
        ),
        measured,
    )


def _own_values(
    learner: LearnerBase, micro_batches: Sequence[MicroBatch[Targets]], stop: StopFlag
) -> Sequence[torch.Tensor]:
    """The learner's own log-probabilities of the targets of each micro-batch, and their entropies if these are needed, [N, K]."""
    if learner.loss.options.top_entropy_quantile < 1.0:
        return learner.target_entropies(micro_batches, stop)
    return [logprob_N.unsqueeze(-1) for logprob_N in learner.target_logprobs(micro_batches, stop)]


def prepare_all(
    learner: LearnerBase, batches: Sequence[Batch], stop: StopFlag
) -> tuple[list[PreparedBatch], Mapping[str, float]]:
    """All batches of an update before its first optimizer step, and the metrics of the selection of tokens."""
    prepared = [prepare(learner, batch, stop) for batch in batches]
    parts = [part for of_batch in prepared for part in of_batch.measured]
    if not learner.loss.selects or not parts or stop.is_set():
        return prepared, {}
    selected = select_tokens(parts, learner.loss.options)
    left = iter(selected.targets)
    of_batches = [list(itertools.islice(left, len(of_batch.measured))) for of_batch in prepared]
    return [
        replace(
            of_batch,
            batch=replace(
                of_batch.batch,
                micro_batches=[
                    replace(micro, targets=targets)
                    for micro, targets in zip(of_batch.batch.micro_batches, chosen, strict=False)
                ],
            ),
        )
        for of_batch, chosen in zip(prepared, of_batches, strict=True)
    ], selected.metrics


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
    own_N = logprob_N.to(reported_N.dtype)
    filled = replace(targets, behaviour_logprob_N=torch.where(targets.known_N, reported_N, own_N))
    if loss.corrects:
        filled = replace(filled, proximal_logprob_N=own_N, old_is_proximal=loss.correction.decoupled)
    return replace(micro, targets=filled)


def policy_loss(
    forward: Forward,
    loss: Loss,
    micro: MicroBatch[Targets],
    reference_logprob_N: torch.Tensor | None,
    balance: Balance | None = None,
    teachers: Sequence[Rows] = (),
) -> tuple[torch.Tensor, Callable[[], Measured[UpdateSums]]]:
    """The loss of a micro-batch, and a function that computes its metrics. `balance`: with an auxiliary loss of the experts.
    `teachers`: the distributions of local teachers that have not scored the tokens before."""
    targets = micro.targets
    counter = None if forward.routers is None else LoadCounter(micro, forward.routers, balance)
    found = forward.values(
        micro,
        entropy=loss.needs_entropy,
        on_choice=None if counter is None else counter.note,
        comparison=loss.comparison(targets, teachers),
    )
    logprob_N, compared = found.logprob_N, found.compared
    if targets.first_step:
        targets = with_own_ratios(targets, logprob_N)
    terms = loss(
        logprob_N,
        targets,
        reference_logprob_N=reference_logprob_N,
        entropy_N=found.entropy_N,
        divergence_N=compared.divergence_N,
    )
    total = (terms.loss_N * targets.weight_N).sum()
    auxiliary = None if counter is None else counter.loss()
    if auxiliary is not None and balance is not None:
        total = total + balance.coefficient * auxiliary
    return total, lambda: _measured(
        targets,
        logprob_N,
        terms,
        total,
        experts=None if counter is None else counter.load(auxiliary),
        teacher=TeacherSums.of(compared, logprob_N, targets),
    )


def _measured(
    targets: Targets,
    logprob_N: torch.Tensor,
    terms: LossTerms,
    total: torch.Tensor,
    *,
    experts: Measured[ExpertLoad] | None,
    teacher: Measured[TeacherSums] | None,
) -> Measured[UpdateSums]:
    """The metrics of a pass whose loss is `total`, in the order of the fields of `UpdateSums`."""
    found = {
        "loss": total,
        "kl": (terms.kl_N * targets.weight_N).sum(),
        "counted": targets.counts.sum(),
        "clipped": terms.clipped,
        "max_deviation": terms.max_deviation,
        "fresh_deviation": fresh_deviation(logprob_N, targets),
    }
    columns = (targets.sequence_N, logprob_N.float())
    parts = [part.tensors if part is not None else () for part in (experts, teacher)]
    # `make` must hold no tensor of the pass
    names, sizes, tokens = tuple(found), [len(part) for part in parts], len(logprob_N)

    def make(host: Sequence[torch.Tensor]) -> UpdateSums:
        given = iter(host)
        sums = {name: float(next(given)) for name in names}
        logprobs = TargetLogprobs(next(given).numpy(), next(given).numpy())
        of_experts, of_teacher = (list(itertools.islice(given, size)) for size in sizes)
        return UpdateSums(
            **sums,
            tokens=tokens,
            paces=(),
            logprobs=(logprobs,),
            experts=None if experts is None else experts.make(of_experts),
            teacher=None if teacher is None else teacher.make(of_teacher),
        )

    return Measured((*found.values(), *columns, *parts[0], *parts[1]), make)


def measure_load(forward: Forward, micro_batches: Sequence[MicroBatch[Any]]) -> ExpertLoad:
    """The load of the experts in passes without gradients, over the micro-batches of a model that has `routers`."""
    with torch.no_grad():
        loads = read([load_of(forward, micro)[1] for micro in micro_batches])
    return sum(loads[1:], loads[0])


def load_of(forward: Forward, micro: MicroBatch[Any]) -> tuple[torch.Tensor, Measured[ExpertLoad]]:
    """The log-probabilities [N] of the targets, and the load of the experts in the pass that computes them."""
    assert forward.routers is not None
    counter = LoadCounter(micro, forward.routers)
    logprob_N, _ = forward.logprobs(micro, on_choice=counter.note)
    return logprob_N, counter.load(None)


# Gradients of micro-batches, added up over a batch


class Gradients:
    """Computes the gradients of micro-batches, and adds them up in the `grad` of the optimizer's parameters.

    `parallel` allows several micro-batches at a time, where that is faster. `large`: the model is large and on a CPU.
    """

    def __init__(self, optimizer: Optimizer, threads: TorchThreads, *, parallel: bool, large: bool) -> None:
        self._optimizer, self._threads = optimizer, threads
        self._around = gradients_first if large else contextlib.nullcontext
        self.parallel = _parallel(optimizer.parameters) if parallel else 1
        """How many micro-batches are computed at the same time."""
        self._workers = None
        if self.parallel > 1:
            self._workers = ThreadPoolExecutor(self.parallel, "learn", initializer=_use_one_thread)

    def of_batch(
        self,
        micro_batches: Sequence[MicroBatch[Columns]],
        loss: Callable[[MicroBatch[Columns]], tuple[torch.Tensor, Callable[[], Measured[S]]]],
        *,
        on_micro_batch: Callable[[], None],
        stop: StopFlag,
    ) -> list[S]:
        """Replace the gradients by those of a batch. Returns the metrics of each micro-batch.

        `loss` returns the loss of a micro-batch, and a function that computes metrics, which is called after the backward pass.
        """
        self._optimizer.zero_grad()
        self._optimizer.tell_rounded_sums(len(micro_batches))
        metrics: list[Measured[S]] = []
        # gradients of micro-batches that are computed in parallel are added up here, not by the backward pass
        accumulated = self._optimizer.parameters if self._workers is None else ()
        # when the generator is closed early, it computes no further micro-batch
        with self._around(accumulated), contextlib.closing(self._results(micro_batches, loss)) as results:
            for metrics_of_one, gradients in stop.until_set(results):
                if gradients is not None:
                    self._optimizer.add_gradients(gradients)
                metrics.append(metrics_of_one)
                on_micro_batch()
        trim_kept()
        return read(metrics)

    def _results(
        self,
        micro_batches: Sequence[MicroBatch[Any]],
        loss: Callable[..., tuple[torch.Tensor, Callable[[], Measured[S]]]],
    ) -> Generator[tuple[Measured[S], _OfParameters | None]]:
        """The result of each micro-batch, in order. The gradients are returned if several are computed at a time."""
        if self._workers is not None and len(micro_batches) > 1:
            yield from self._workers.map(lambda micro: self._backward(micro, loss, separate=True), micro_batches)
            return
        device = self._optimizer.parameters[0].device
        for micro in micro_batches:
            with self._threads.during("learn", micro.token_ids_BL.numel()):
                result = self._backward(micro.to(device), loss, separate=False)
            yield result

    def _backward(
        self,
        micro: MicroBatch[Any],
        loss: Callable[..., tuple[torch.Tensor, Callable[[], Measured[S]]]],
        *,
        separate: bool,
    ) -> tuple[Measured[S], _OfParameters | None]:
        """Metrics and gradients of a micro-batch. The gradients are added to the parameters' `grad`, or returned (`separate`)."""
        total, metrics = loss(micro)
        gradients = None
        if separate:  # two threads must not add to the same `grad` at once
            gradients = torch.autograd.grad(total, self._optimizer.parameters, allow_unused=True)
        else:
            total.backward()
        with torch.no_grad():
            return metrics(), gradients


_OfParameters = Sequence[torch.Tensor | None]
"""A gradient for each parameter; None where the loss does not depend on it."""


def _use_one_thread() -> None:
    torch.get_num_threads()  # torch sets up the thread here; if it did so later, it would replace the number
    torch.set_num_threads(1)


def _parallel(parameters: Sequence[torch.nn.Parameter]) -> int:
    """How many micro-batches are computed at the same time: one for each core, where this is the fastest use of the cores.

    It is faster for small models on a CPU: their operations end before a second torch thread has started. Each worker needs
    its own copy of the gradients, so large models and models on other devices compute one micro-batch at a time.
    """
    cores, size = torch.get_num_threads(), sum(parameter.numel() for parameter in parameters)
    return 1 if size > LARGE_MODEL or parameters[0].device.type != "cpu" else min(cores, 8)
