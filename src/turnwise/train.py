"""The training loop, which reads as the algorithm.

Each step takes rows, samples a group of trajectories for each row, scores them, computes advantages, packs batches, updates
the weights, publishes them to the engine, and writes everything down. `assemble` (runs/training_run.py) builds the run from a
recipe; its state, and how it weighs turns and packs batches, are in `RunState` (runs/run_state.py). `evaluate` runs and scores
conversations without training, with the same loop, engine and rewards.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turnwise import assembly
from turnwise.engines.engine import closing
from turnwise.errors import HealthError, RolloutError
from turnwise.models.model_config import rounding_of_ratios
from turnwise.record.metrics import conversation_metrics, failures, mean, staleness_metrics, time_metrics
from turnwise.rewards.scorer import Scorer
from turnwise.rollout.context import ConversationContext
from turnwise.rollout.pipeline import TakenGroups
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.runs.health import RunProblem
from turnwise.runs.training_run import TrainedPolicy, TrainingRun, assemble, frozen_start_objects, step_timeline
from turnwise.terminal.train_report import TrainReport
from turnwise.training.batch import (
    Batch,
    divide_evenly,
    has_gradient,
    outside_of_grammar,
    set_trainer_logprobs,
    share_saved,
    stale_without_logprobs,
)
from turnwise.training.critic_step import CriticMetrics, CriticStep
from turnwise.training.kl_reward import KlRewardMetrics
from turnwise.training.learner import UpdateStats
from turnwise.training.policy_shift import PolicyShift
from turnwise.types import Group, Row, Trajectory
from turnwise.user_code.reward_number import reaches

__all__ = ["TrainingRun", "assemble", "evaluate", "train"]


# conversations without training


async def evaluate(
    rows: Sequence[Row],
    table: ConversationContext,
    scorer: Scorer,
    *,
    samples: int = 1,
    seed: int = 0,
    step: int = 0,
    pass_reward: float = 1.0,
    on_finished: Callable[[int], None] = lambda tokens: None,
) -> tuple[dict[str, Any], list[Group]]:
    """Run `samples` conversations on each row and score them. Returns the metrics and the groups.

    A conversation with a reward of at least `pass_reward` counts in the metric `pass_rate`.

    `on_finished` is called with the number of sampled tokens of each finished conversation.

    The random streams depend on `seed` only, so equal weights give equal conversations at every step.
    """
    started = time.perf_counter()
    groups = [new_group(row, size=samples, seed=seed) for row in rows]
    score = scorer.scoring_callback(groups)

    async def done(trajectory: Trajectory) -> None:
        await score(trajectory)
        on_finished(trajectory.sampled_tokens)

    await rollout_groups(groups, table, on_finished=done)
    seconds = {"seconds/rollout": round(time.perf_counter() - started, 4)}
    passed = [
        float(reaches(trajectory.reward, pass_reward))
        for group in groups
        for trajectory in group.trajectories
        if trajectory.reward is not None and not trajectory.failed
    ]
    count = sum(len(group.trajectories) for group in groups)
    metrics = {"conversations": count, **conversation_metrics(groups), "pass_rate": mean(passed)}
    return {"step": step, **metrics, **seconds}, groups


# training

_log = logging.getLogger(__name__)

_MEASURED_TOKENS = 256
"""Sampled tokens whose logits are measured, to know how far they are rounded."""


class _NothingToTrainOn(RolloutError):
    """No group of a step has enough conversations that did not fail."""

    def __init__(self, message: str, groups: Sequence[Group]) -> None:
        super().__init__(message)
        self.groups = groups


async def train(run: TrainingRun, report: TrainReport) -> None:
    """Train until `train.steps` steps are finished.

    Raises RolloutError if all conversations of a step failed, HealthError if a monitor of `health.stop` stops the run, RunError
    if the run directory cannot be written.
    """
    report.begin(run.config, done=run.step, notes=run.notes, evaluates=run.evaluation_due(run.config.eval.every))
    try:
        async with (
            contextlib.aclosing(run.environments),
            closing(run.runner),
            run.checkpoint_on_exit(),
            frozen_start_objects(),
            run.pipeline,
        ):
            await _take_steps(run, report)
    except _NothingToTrainOn as error:
        # behind the checkpoint that is written on exit: a run that goes on from it has this step once
        trajectories = [trajectory for group in error.groups for trajectory in group.trajectories]
        run.directory.write_unfinished(trajectories, step=run.step + 1)
        raise
    report.end(run.directory, run.checkpoints.newest)


async def _take_steps(run: TrainingRun, report: TrainReport) -> None:
    """The steps that are left, with the evaluations before, between and after them."""
    every = run.config.eval.every
    if run.takes_turns:
        run.free_memory()
    for policy in run.policies:
        await policy.publisher.begin(run.step)
    while run.step < run.steps:
        if run.evaluation_due(every):
            await _evaluate(run, report)
        started = time.perf_counter()
        taken = await _take(run)
        update_started = time.perf_counter()
        _weigh(run, taken.groups)
        result = await _learn(run, taken.trained)
        seconds = {
            "rollout": taken.seconds,
            "waiting": taken.taken - taken.asked,
            "train": time.perf_counter() - update_started,
        }
        _finish_step(run, report, taken, result, seconds=seconds, started=started)
    if run.evaluation_due(every):
        await _evaluate(run, report)


async def _take(run: TrainingRun) -> TakenGroups:
    """The scored groups of the next step.

    Raises RolloutError if no group has enough finished conversations to train on.
    """
    options = run.config.train
    run.activity.step(run.step + 1)
    run.pipeline.on_finished = run.activity.part(run.step + 1, "conversations", options.batch_size * options.group_size)
    taken = await run.pipeline.take()
    if not taken.trained:
        run.log_conversation([trajectory for group in taken.groups for trajectory in group.trajectories])
        raise _nothing_to_train_on(run, taken.groups)
    return taken


def _nothing_to_train_on(run: TrainingRun, groups: Sequence[Group]) -> _NothingToTrainOn:
    least, step = run.config.train.min_group_size, run.step + 1
    if any(not trajectory.failed for group in groups for trajectory in group.trajectories):
        reason = f"no group of step {step} has train.min_group_size={least} conversations that did not fail"
    else:
        reason = f"all conversations of step {step} failed"
    problems = "\n  ".join(failures(groups)[:5])
    shown = f"turnwise show {run.directory.shown} --failed --last 1"
    return _NothingToTrainOn(f"{reason}, so there is nothing to train on:\n  {problems}\nRead one: {shown}", groups)


def _weigh(run: TrainingRun, groups: Sequence[Group]) -> None:
    """Set the weights of turns. Before credit: a trajectory that fails here must be in no statistics of its group."""
    main, masks = run.learner.requirements.logprob_kinds, run.inputs.renderer.masks
    kinds = {policy.name: policy.learner.requirements.logprob_kinds for policy in run.policies}
    for group in groups:
        for trajectory in group.trajectories:
            run.weigh_turns(trajectory)
            for each in (trajectory, *trajectory.agents):
                # without log-probabilities of the weights that sampled them, old tokens have no importance ratio
                known = kinds.get(each.policy, main)
                problem = stale_without_logprobs(each, kinds=known, version=run.step) or outside_of_grammar(each, masks)
                if problem is not None and not each.failed:
                    each.fail(problem)


def pack_groups(run: TrainingRun, policy: TrainedPolicy, groups: Sequence[Group]) -> list[Batch]:
    """Pack one batch for each optimizer step of a policy: `train.minibatches` parts whose sizes differ by at most one trajectory.
    The trajectories of a group stay together as far as the numbers allow. No batch if nothing of the policy can be trained on.
    """
    options = run.config.train
    trajectories = [t for group in policy.own(groups) for t in group.trajectories if t.advantages]
    if not trajectories:
        return []
    trajectories = [t for t in trajectories if any(turn.weight for turn in t.turns)] or trajectories
    # all advantages are 0: one group is computed all the same, with a gradient of 0, to compare engine and trainer
    no_gradient = not any(has_gradient(trajectory) for trajectory in trajectories)
    compared = {trajectory.id for trajectory in trajectories[: options.group_size]} if no_gradient else set()
    if len(trajectories) < options.minibatches:
        _log.warning(
            "step %d: train.minibatches=%d, and only %d conversations%s can be trained on: %d optimizer steps",
            run.step + 1,
            options.minibatches,
            len(trajectories),
            f" of the policy {policy.name!r}" if policy.name else "",
            len(trajectories),
        )
    own = {"learner": policy.learner, "loss": policy.recipe.loss}
    return [run.pack(part, compared=compared, **own) for part in divide_evenly(trajectories, options.minibatches)]


@dataclass(frozen=True, slots=True)
class _StepResult:
    """What a step has changed."""

    updates: Mapping[str, UpdateStats]
    """By the names of policies. Empty if only the critic was trained."""
    critic: CriticMetrics | None
    """None without a critic."""
    kl_reward: KlRewardMetrics | None
    """None without a KL divergence in the reward."""
    saved: float
    """The share of the policies' tokens that were not computed."""


async def _learn(run: TrainingRun, groups: Sequence[Group]) -> _StepResult:
    """Compute advantages, update the weights and publish them."""
    critic_step, main = run.critic_step, run.policies[0].own(groups)
    for policy in run.policies:
        await policy.publisher.before_update()
    if critic_step is not None:
        await critic_step.set_values(main)
    kl_reward = None if run.kl_reward is None else await run.kl_reward.set_penalties(groups)
    if run.teacher_step is not None:
        await run.teacher_step.set_scores(groups)
    for policy in run.policies:
        policy.credit(policy.own(groups))
    if run.teacher_step is not None:
        await run.teacher_step.add_advantages(groups)
    packed = {policy.name: pack_groups(run, policy, groups) for policy in run.policies}
    batches = [batch for of_policy in packed.values() for batch in of_policy]
    if not batches:
        raise _nothing_to_train_on(run, groups)
    updates, critic, mixed = dict[str, UpdateStats](), None, False
    if critic_step is None or critic_step.trains_policy(run.step):
        updates = await _update(run, packed, groups)
        if run.config.record.trainer_logprobs:
            for policy in run.policies:
                if (update := updates.get(policy.name)) is not None:
                    own = [t for group in policy.own(groups) for t in group.trajectories]
                    set_trainer_logprobs(own, packed[policy.name], update.logprobs)
        reference = run.config.reference
        mixed = reference.sync_every is not None and (run.step + 1) % reference.sync_every == 0
        if mixed:
            run.learner.mix_reference(reference.sync_weight)
    for of_agents in run.context.policies.values():
        # a resumed run has no prefixes of earlier steps, and a recurrent state that is continued has other last bits
        if (mixed and of_agents.is_reference) or (run.config.deterministic and not of_agents.trained):
            await of_agents.weights_changed()
    if run.takes_turns or any(policy.publisher.asleep for policy in run.policies):
        if critic_step is not None:
            critic = await _update_critic(run, critic_step, main, cancellable=not updates)
        # servers take their memory of the device while they are given weights, and die where it is not free
        run.free_memory()
    # at once, so that no further token is sampled from the old weights
    for policy in run.policies:
        await policy.publisher.publish(run.step + 1)
    run.pipeline.publish(run.step + 1)
    if critic_step is not None and critic is None:
        critic = await _update_critic(run, critic_step, main, cancellable=not updates)
    return _StepResult(updates, critic, kl_reward, share_saved(batches))


async def _update_critic(
    run: TrainingRun, critic_step: CriticStep, groups: Sequence[Group], *, cancellable: bool
) -> CriticMetrics:
    return await critic_step.update(groups, cancellable=cancellable, on_first_step=run.begin_update)


async def _update(
    run: TrainingRun, packed: Mapping[str, Sequence[Batch]], groups: Sequence[Group]
) -> dict[str, UpdateStats]:
    """Update the weights of all policies that have batches, one after the other. `packed` are the batches of each. Values of rows
    learn how far that has moved the policy.

    The model of the section `model` is the last one: where all of its weights are trained, those of the others are adapters on
    them, and have sampled with the weights before its update.

    A cancellation after the first optimizer step takes effect after the last one of all policies: no checkpoint could hold a
    step in which only some of them have changed.
    """
    epochs = run.config.train.ppo_epochs
    micro_batches = epochs * sum(len(batch.micro_batches) for of_policy in packed.values() for batch in of_policy)
    on_micro_batch = run.activity.part(run.step + 1, "training, micro-batches", micro_batches)
    shifts = {policy.name: await _begin_shift(run, policy, groups) for policy in run.policies if packed[policy.name]}
    updates: dict[str, UpdateStats] = {}
    main, *others = run.policies
    for policy in (*others, main):
        if packed[policy.name]:
            updates[policy.name] = await policy.learner.update(
                packed[policy.name],
                lr=run.learning_rate_of(policy),
                epochs=epochs,
                cancellable=not updates,
                on_micro_batch=on_micro_batch,
                on_first_step=run.begin_update,
            )
    for policy in run.policies:
        tracker, shift = policy.credit.tracker, shifts.get(policy.name)
        if tracker is not None and shift is not None:
            tracker.move(await shift.end())
    return updates


async def _begin_shift(run: TrainingRun, policy: TrainedPolicy, groups: Sequence[Group]) -> PolicyShift | None:
    """Measure the policy before the update, if its estimator has values of rows."""
    if policy.credit.tracker is None:
        return None
    trained = [one for group in policy.own(groups) for one in group.trajectories if one.advantages]
    return await PolicyShift.begin(policy.learner, trained, run.config.train.micro_batch_tokens)


def _finish_step(
    run: TrainingRun,
    report: TrainReport,
    taken: TakenGroups,
    result: _StepResult,
    *,
    seconds: dict[str, float],
    started: float,
) -> None:
    """Write down the step, and warn of what keeps the run from learning."""
    groups, update = taken.groups, result.updates.get("")
    options = run.config.train
    used = run.pipeline.state
    metrics: dict[str, Any] = {
        "epoch": round((used.position - len(used.unfinished)) / len(run.rows), 4),
        **conversation_metrics(groups),
        **staleness_metrics(taken.trained, run.step),
        **time_metrics(groups),
        **run.runner.metrics(),
        "groups/too_small": sum(active.too_small for active in taken.active),
        **_learnt(update),
        **_shift(run.policies[0], update),
        **_metrics_of_policies(run, result.updates),
        "tokens/prefix_saved": result.saved,
        **(result.critic.named() if result.critic else {}),
        **(result.kl_reward.named() if result.kl_reward else {}),
    }
    if options.dynamic_sampling or options.replace_failed:
        metrics["groups/replaced"] = sum(active.replaced for active in taken.active)
    if options.group_timeout is not None:
        metrics["groups/timed_out"] = sum(active.timed_out for active in taken.active)
    if run.pipeline.source.curriculum is not None:
        metrics["rows/skipped"] = taken.skipped
    for policy in run.policies:
        _warn_of_disagreement(run, policy, result.updates.get(policy.name), groups)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    trajectories += [group.baseline for group in groups if group.baseline is not None]
    run.directory.write_timeline(step_timeline(taken, step=run.step + 1, trained=time.time()))
    line = run.finish_step(metrics, trajectories, seconds=seconds, started=started)
    slowest = update.slowest if update is not None else None
    problems = run.watch.problems(line, groups, slowest.place if slowest is not None else "")
    for problem in problems:
        run.warn(run.step, problem.name, problem.text)
    report.step(line, failures(groups))
    _stop_if_asked(run, problems)


def _learnt(update: UpdateStats | None) -> dict[str, float | None]:
    """The metrics of a policy's update; None: the step had none."""
    if update is None:
        names = ("loss", "kl", "grad_norm", "ratio/max_deviation", "ratio/clip_fraction")
        return {**dict.fromkeys(names), "tokens/trained": 0}
    return {
        "loss": update.loss,
        "kl": update.kl,
        "grad_norm": update.grad_norm,
        "ratio/max_deviation": update.max_deviation,
        "ratio/clip_fraction": update.clip_fraction,
        "tokens/trained": update.tokens,
        **update.correction,
        **update.selection,
        **update.experts,
        **update.memory_metrics,
        **update.rank_metrics,
        **update.teacher,
    }


def _shift(policy: TrainedPolicy, update: UpdateStats | None) -> dict[str, float]:
    """How far the update of the step has moved a policy, if its estimator needs that."""
    tracker = policy.credit.tracker
    return {"policy_shift": tracker.step_moved} if tracker is not None and update is not None else {}


def _metrics_of_policies(run: TrainingRun, updates: Mapping[str, UpdateStats]) -> dict[str, float | None]:
    """What the step has learnt for the policies beside that of the section `model`."""
    return {
        f"policies/{policy.name}/{name}": value
        for policy in run.policies[1:]
        if (update := updates.get(policy.name)) is not None
        for name, value in {
            **_learnt(update),
            **_shift(policy, update),
            "lr": run.learning_rate_of(policy),
        }.items()
    }


def _warn_of_disagreement(
    run: TrainingRun, policy: TrainedPolicy, update: UpdateStats | None, groups: Sequence[Group]
) -> None:
    """Warn if the probabilities of engine and trainer differ by more than rounding explains, where both have the same weights."""
    tolerance = 0.01 if run.config.exact else 0.5
    # a quantized engine differs by more, of which `training_warnings` has told and for which there is rollout correction
    if update is None or update.fresh_deviation <= tolerance or run.config.engine.quantization is not None:
        return
    if not run.config.exact:
        conversations = [each for group in groups for one in group.trajectories for each in (one, *one.agents)]
        turns = [turn for one in conversations if one.policy == policy.name for turn in one.turns]
        sampled = max((turn.completion.token_ids for turn in turns if turn.completion is not None), key=len)
        temperature = policy.recipe.sampling.temperature or 1.0
        largest = policy.learner.largest_logit(sampled[:_MEASURED_TOKENS]) / temperature
        tolerance = max(tolerance, rounding_of_ratios(largest))
    if update.fresh_deviation > tolerance:
        run.warn(
            run.step + 1,
            "disagreement",
            f"trainer and engine disagree: before the first optimizer step the probability ratio of a token differs from 1 by "
            f"{update.fresh_deviation:.3g}, in a turn that the present weights sampled (up to {tolerance:.2g} is rounding; see "
            f"ratio/max_deviation). The tokens that are trained on are not those that were sampled: please report it",
        )


def _stop_if_asked(run: TrainingRun, problems: Sequence[RunProblem]) -> None:
    """Stop the run if `health.stop` contains one of the problems. The checkpoint is written when the run ends.

    Raises HealthError.
    """
    stopping = [problem for problem in problems if problem.name in run.config.health.stop]
    if stopping and run.step < run.steps:
        name = stopping[0].name
        raise HealthError(
            f"health.stop={name} stopped the run after step {run.step}: {stopping[0].text}\nThe checkpoint of step {run.step} is "
            f"in {run.checkpoints.newest}. To go on from it: resume=auto, with a changed recipe (resume_changes names what "
            f"changes the training), or without {name} in health.stop"
        )


async def _evaluate(run: TrainingRun, report: TrainReport) -> None:
    """Run conversations on the held-out rows, and write down their metrics."""
    samples = run.config.eval.samples_per_row
    finished = run.activity.part(run.step, "evaluation, conversations", len(run.held_out) * samples)
    summary, groups = await evaluate(
        run.held_out,
        replace(run.context, sampling=assembly.evaluation_sampling(run.config)),
        run.scorer,
        samples=samples,
        seed=run.config.seed,
        step=run.step,
        pass_reward=run.config.eval.pass_reward,
        on_finished=finished,
    )
    run.write_evaluation(summary, (trajectory for group in groups for trajectory in group.trajectories))
    report.evaluated(summary, groups)
