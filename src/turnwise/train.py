"""Reinforcement learning over multi-turn conversations: the training loop.

Each step takes rows, samples a group of trajectories for each row, scores them, computes advantages, packs batches, updates the
weights, publishes them to the engine, and writes everything down. `assemble` (runs/training_run.py) builds the run from a recipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise import build
from turnwise.errors import RolloutError
from turnwise.record.metrics import conversation_metrics, failures
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.runs.evaluate import evaluate
from turnwise.runs.training_run import TrainingRun, assemble
from turnwise.terminal.train_report import TrainReport
from turnwise.training.batch import Batch, share_saved, stale_without_logprobs
from turnwise.training.learner import UpdateStats
from turnwise.types import Group, Trajectory

__all__ = ["TrainingRun", "assemble", "train"]

_log = logging.getLogger(__name__)


async def train(run: TrainingRun, report: TrainReport) -> None:
    """Train until `train.steps` steps are finished.

    Raises RolloutError if all conversations of a step failed, RunError if the run directory cannot be written.
    """
    config, options = run.config, run.config.train
    report.begin(config, done=run.step, notes=run.notes)
    async with contextlib.aclosing(run.environments), run.checkpoint_on_exit():
        next_rollouts: asyncio.Task[_Rollouts] | None = None
        while run.step < run.steps:
            if run.evaluation_due(config.eval.every):
                await _evaluate(run, report)
            started = time.perf_counter()
            run.activity.step(run.step + 1)
            rollouts = await (next_rollouts or roll_out(run, run.step))
            if options.overlap and run.step + 1 < run.steps:
                next_rollouts = asyncio.create_task(roll_out(run, run.step + 1))
            groups, update_started = rollouts.groups, time.perf_counter()
            _weigh(run, groups)
            run.credit(groups)
            batches = pack_groups(run, groups)
            update = await _update(run, batches)
            # at once, so that no further token is sampled from the old weights
            await run.publisher.publish(run.step + 1)
            seconds = {"rollout": rollouts.seconds, "train": time.perf_counter() - update_started}
            _finish_step(run, report, groups, update, saved=share_saved(batches), seconds=seconds, started=started)
        if run.evaluation_due(config.eval.every):
            await _evaluate(run, report)
    report.end(run.directory, run.checkpoints.newest)


@dataclass(frozen=True, slots=True)
class _Rollouts:
    groups: Sequence[Group]
    seconds: float


async def roll_out(run: TrainingRun, step: int) -> _Rollouts:
    """Sample and score the trajectories of a step, counted from 0."""
    started = time.perf_counter()
    options = run.config.train
    places = run.order.take(run.position + (step - run.step) * options.batch_size, options.batch_size)
    groups = [
        new_group(run.rows[index], size=options.group_size, seed=run.config.seed, prefix=f"{step + 1}.{place}:")
        for place, (_, index) in enumerate(places)
    ]
    advance = run.activity.part(step + 1, "conversations", sum(len(group.trajectories) for group in groups))
    score = run.scorer.scoring_callback(groups)

    async def on_finished(trajectory: Trajectory) -> None:
        advance()
        await score(trajectory)

    await rollout_groups(groups, run.context, on_finished=on_finished)
    return _Rollouts(groups, time.perf_counter() - started)


def _weigh(run: TrainingRun, groups: Sequence[Group]) -> None:
    """Set the weights of turns. Before credit: a trajectory that fails here must be in no statistics of its group."""
    kinds = run.learner.requirements.logprob_kinds
    for group in groups:
        for trajectory in group.trajectories:
            run.weigh_turns(trajectory)
            # without log-probabilities of the weights that sampled them, old tokens have no importance ratio
            problem = stale_without_logprobs(trajectory, kinds=kinds, version=run.step)
            if problem is not None and not trajectory.failed:
                trajectory.fail(problem)


def pack_groups(run: TrainingRun, groups: Sequence[Group]) -> list[Batch]:
    """Pack one batch for each optimizer step. The trajectories of a group stay together as far as the numbers allow.

    Raises RolloutError if all trajectories failed.
    """
    options = run.config.train
    trajectories = [t for group in groups for t in group.trajectories if t.advantages]
    if not trajectories:
        problems = "\n  ".join(failures(groups)[:5])
        raise RolloutError(
            f"all conversations of step {run.step + 1} failed, so there is nothing to train on:\n  {problems}"
        )
    trajectories = [t for t in trajectories if any(turn.weight for turn in t.turns)] or trajectories
    no_gradient = not any(turn.weight and t.has_advantage(turn.index) for t in trajectories for turn in t.turns)
    if no_gradient and not run.learner.requirements.keep_zero:
        # all advantages are 0: one group is computed all the same, with a gradient of 0, to compare engine and trainer. Losses
        # with a divergence or an entropy term have a gradient from all trajectories
        trajectories = trajectories[: options.group_size]
    size = -(-len(trajectories) // options.minibatches)
    return [
        run.pack(trajectories[start : start + size], keep_zero=no_gradient)
        for start in range(0, len(trajectories), size)
    ]


async def _update(run: TrainingRun, batches: Sequence[Batch]) -> UpdateStats:
    epochs = run.config.train.ppo_epochs
    micro_batches = epochs * sum(len(batch.micro_batches) for batch in batches)
    return await run.learner.update(
        batches,
        lr=run.learning_rate,
        epochs=epochs,
        on_micro_batch=run.activity.part(run.step + 1, "training, micro-batches", micro_batches),
        on_first_step=run.begin_update,
    )


def _finish_step(
    run: TrainingRun,
    report: TrainReport,
    groups: Sequence[Group],
    update: UpdateStats,
    *,
    saved: float,
    seconds: dict[str, float],
    started: float,
) -> None:
    """Write down the step, and warn of what keeps the run from learning. `saved` is the share of tokens not computed."""
    metrics: dict[str, Any] = {
        **conversation_metrics(groups),
        "loss": update.loss,
        "kl": update.kl,
        "grad_norm": update.grad_norm,
        "ratio/max_deviation": update.max_deviation,
        "ratio/clip_fraction": update.clip_fraction,
        "tokens/trained": update.tokens,
        "tokens/prefix_saved": saved,
    }
    tolerance = 0.01 if run.config.model.dtype == "float32" else 0.5
    if not run.config.train.overlap and update.max_deviation > tolerance:
        _log.warning(
            "step %d: trainer and engine disagree: before the first optimizer step a probability ratio differs from 1 by %.3g "
            "(ratio/max_deviation; up to %g is rounding). The tokens that are trained on are not those that were sampled: please "
            "report it",
            run.step + 1,
            update.max_deviation,
            tolerance,
        )
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    line = run.finish_step(metrics, trajectories, seconds=seconds, started=started)
    for problem in run.watch.problems(line, groups):
        _log.warning("step %d: %s", run.step, problem)
    report.step(line, failures(groups))


async def _evaluate(run: TrainingRun, report: TrainReport) -> None:
    """Run conversations on the held-out rows, and write down their metrics."""
    run.activity.part(run.step, "evaluation")
    summary, groups = await evaluate(
        run.held_out,
        replace(run.context, sampling=build.evaluation_sampling(run.config)),
        run.scorer,
        samples=run.config.eval.samples_per_row,
        seed=run.config.seed,
        step=run.step,
    )
    run.write_evaluation(summary, (trajectory for group in groups for trajectory in group.trajectories))
    report.evaluated(summary, groups)
