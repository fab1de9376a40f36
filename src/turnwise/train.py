"""The algorithm: take rows, hold conversations, score, assign credit, pack, learn, publish, write down.

`Run` is everything that it needs, assembled from a recipe; `train` is the loop.
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
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.config.schema import Config
from turnwise.config.train_checks import refuse_without_effect, refuse_without_reward
from turnwise.data.rows import Order
from turnwise.doctor.preflight import preflight
from turnwise.engines.publisher import SharedWeights, WeightPublisher
from turnwise.errors import RolloutError
from turnwise.record.metrics import conversation_metrics, failures
from turnwise.rewards.credit import Credit
from turnwise.rewards.reward import Scorer
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.runs.evaluate import evaluate
from turnwise.runs.learning_watch import LearningWatch
from turnwise.runs.resuming import open_run
from turnwise.runs.run_state import RunState
from turnwise.terminal.train_report import TrainReport
from turnwise.training.batch import Batch, pack, stale_without_logprobs
from turnwise.training.learner import UpdateStats
from turnwise.types import Group, Row, Trajectory

__all__ = ["Run", "assemble", "train"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Run(RunState):
    """A training run, ready to go on after `step` steps."""

    config: Config
    rows: Sequence[Row]
    held_out: Sequence[Row]
    order: Order
    table: RolloutContext
    environments: build.Environments
    scorer: Scorer
    mask: TurnWeighting
    credit: Credit
    publisher: WeightPublisher
    watch: LearningWatch
    position: int = 0
    """Rows that those steps have used."""

    def data_position(self) -> dict[str, int]:
        return {**RunState.data_position(self), "position": self.position}

    def advance_data(self) -> None:
        self.position += self.config.train.batch_size


async def train(run: Run, show: TrainReport) -> None:
    """Train until `train.steps` steps are finished.

    Raises RolloutError if all conversations of a step broke, RunError if the run directory cannot be written.
    """
    config, options = run.config, run.config.train
    show.begin(run.config, done=run.step, notes=run.notes)
    async with contextlib.aclosing(run.environments), run.checkpoint_on_exit():
        waiting: asyncio.Task[_Rollouts] | None = None
        while run.step < options.steps:
            if run.step == 0 or (config.eval.every and run.step % config.eval.every == 0):
                await _evaluate(run, show)
            began = time.perf_counter()
            run.activity.step(run.step + 1)
            rollouts = await (waiting or _hold(run, run.step))
            if options.overlap and run.step + 1 < options.steps:
                waiting = asyncio.create_task(_hold(run, run.step + 1))
            for group in rollouts.groups:
                for one in group.trajectories:  # before credit: what breaks in it is in no statistics
                    run.mask(one)
                    _refuse_stale(run, one)
            run.credit(rollouts.groups)
            started = time.perf_counter()
            batches = _pack(run, rollouts.groups)
            pieces = options.ppo_epochs * sum(len(batch.micro_batches) for batch in batches)
            advance = run.activity.part(run.step + 1, "training, micro-batches", pieces)
            update = await run.learner.update(
                batches,
                lr=_learning_rate(run),
                epochs=options.ppo_epochs,
                on_micro_batch=advance,
                on_first_step=run.begin_update,
            )
            # at once: what is sampled from here on is the new policy's
            await run.publisher.publish(run.step + 1)
            seconds = {"rollout": rollouts.seconds, "train": time.perf_counter() - started}
            _finish_step(run, show, rollouts.groups, update, seconds, began=began)
        await _evaluate(run, show)
    show.end(run.directory, run.checkpoints.newest)


@dataclass(frozen=True, slots=True)
class _Rollouts:
    groups: Sequence[Group]
    seconds: float


async def _hold(run: Run, step: int) -> _Rollouts:
    """The conversations of one step, scored."""
    started = time.perf_counter()
    options = run.config.train
    places = run.order.take(run.position + (step - run.step) * options.batch_size, options.batch_size)
    groups = [
        new_group(run.rows[index], size=options.group_size, seed=run.config.seed, prefix=f"{step + 1}.{place}:")
        for place, (_, index) in enumerate(places)
    ]
    advance = run.activity.part(step + 1, "conversations", sum(len(group.trajectories) for group in groups))

    score = run.scorer.scoring_callback(groups)

    async def done(trajectory: Trajectory) -> None:
        advance()
        await score(trajectory)

    await rollout_groups(groups, run.table, on_finished=done)
    return _Rollouts(groups, time.perf_counter() - started)


def _refuse_stale(run: Run, trajectory: Trajectory) -> None:
    """Break a trajectory whose importance correction would be made up."""
    problem = stale_without_logprobs(trajectory, kinds=run.learner.requirements.logprob_kinds, version=run.step)
    if problem is not None and not trajectory.failed:
        trajectory.fail(problem)


def _pack(run: Run, groups: Sequence[Group]) -> list[Batch]:
    """One batch for each optimizer step. All trajectories of a group stay together as far as the numbers allow."""
    options = run.config.train
    trajectories = [one for group in groups for one in group.trajectories if one.advantages]
    if not trajectories:
        problems = "\n  ".join(failures(groups)[:5])
        raise RolloutError(
            f"all conversations of step {run.step + 1} broke, so there is nothing to learn from:\n  {problems}"
        )
    weighed = [one for one in trajectories if any(turn.weight for turn in one.turns)]
    trajectories = weighed or trajectories
    idle = not any(turn.weight and one.has_advantage(turn.index) for one in trajectories for turn in one.turns)
    required = run.learner.requirements
    if idle and not required.keep_zero:
        # some are computed all the same, with a gradient of zero, so that engine and trainer are still compared; with a
        # divergence or an entropy in the loss, all of them have a gradient
        trajectories = trajectories[: options.group_size]
    size = -(-len(trajectories) // options.minibatches)
    return [
        pack(
            trajectories[start : start + size],
            average=options.loss_average,
            micro_batch_tokens=options.micro_batch_tokens or required.micro_batch_tokens,
            share_prompts=required.share_prompts,
            keep_zero=required.keep_zero or idle,
            kinds=required.logprob_kinds,
        )
        for start in range(0, len(trajectories), size)
    ]


def _finish_step(
    run: Run,
    show: TrainReport,
    groups: Sequence[Group],
    update: UpdateStats,
    seconds: dict[str, float],
    *,
    began: float,
) -> None:
    """Write down what the step did."""
    lr = _learning_rate(run)
    step = run.step + 1
    metrics: dict[str, Any] = {
        "step": step,
        **conversation_metrics(groups),
        "loss": update.loss,
        "kl": update.kl,
        "grad_norm": update.grad_norm,
        "ratio/max_deviation": update.max_deviation,
        "ratio/clip_fraction": update.clip_fraction,
        "tokens/trained": update.tokens,
        "lr": lr,
        **{f"seconds/{name}": round(value, 4) for name, value in seconds.items()},
    }
    tolerance = 0.01 if run.config.model.dtype == "float32" else 0.5
    if not run.config.train.overlap and update.max_deviation > tolerance:
        _log.warning(
            "step %d: trainer and engine disagree: a probability ratio is off by %.3g before the first optimizer step "
            "(ratio/max_deviation; at most %g is rounding). What is learnt is not what was sampled: please report it",
            step,
            update.max_deviation,
            tolerance,
        )
    every = [one for group in groups for one in group.trajectories]
    run.warn_template_mismatch(every)
    for problem in run.watch.problems(metrics, groups):
        _log.warning("step %d: %s", step, problem)
    run.finish_step(metrics, every, began=began, last=step == run.config.train.steps)
    show.step(metrics, failures(groups))


def _learning_rate(run: Run) -> float:
    options = run.config.train
    return build.learning_rate(options, run.step, steps=options.steps)


async def _evaluate(run: Run, show: TrainReport) -> None:
    if not run.held_out or run.evaluated == run.step:
        return
    options = run.config.eval
    run.activity.part(run.step, "evaluation")
    table = replace(run.table, sampling=build.evaluation_sampling(run.config))
    summary, groups = await evaluate(
        run.held_out, table, run.scorer, samples=options.samples_per_row, seed=run.config.seed, step=run.step
    )
    run.directory.write_evaluation(summary, (one for group in groups for one in group.trajectories))
    run.evaluated = run.step
    show.evaluated(summary, groups)


def assemble(config: Config) -> Run:
    """Everything that a recipe names, checked and loaded; a former run is gone on with where the recipe says so.

    Raises TurnwiseError with what is wrong before anything is computed.
    """
    refuse_without_effect(config)
    refuse_without_reward(config)
    opened = open_run(config, "train")
    rows = build.rows(config)
    held_out = build.rows(config, held_out=True, limit=config.eval.max_rows) if config.data.eval is not None else []
    opened.compare_rows(rows)
    scorer, credit = build.scorer(config), build.credit(config)
    mask = build.turn_weighting(config)
    renderer = Renderer.from_pretrained(
        opened.source, sanity=config.tokenization_sanity_check, tool_format=config.tool_format
    )
    opened.compare_tokenizer(renderer)
    findings = preflight(config, renderer)
    rows, left_out = build.drop_long_prompts(config, rows, renderer)
    held_out, held_out_left_out = build.drop_long_prompts(config, held_out, renderer)
    findings += [*left_out, *(f"held-out rows: {note}" for note in held_out_left_out)]
    environments = build.environment_factory(config, encode=renderer.encode)
    every = process_row_media([*rows, *held_out], renderer.vision, wanted=config.data.return_multi_modal_inputs)
    rows, held_out = every[: len(rows)], every[len(rows) :]
    learner = build.learner(config, opened.source, reference=opened.reference)
    opened.compare_model(learner)
    limits = build.limits(config, longest=learner.context_length)
    engine = build.engine(config, renderer, learner.model, version=opened.step)
    table = RolloutContext(
        engine=engine,
        renderer=renderer,
        make_environment=environments,
        sampling=build.sampling(config),
        limits=limits,
        thinking=config.thinking,
        max_concurrent=config.max_concurrent,
        lockstep=config.deterministic,
    )
    opened.begin(learner)
    return Run(
        config=config,
        opened=opened,
        renderer=renderer,
        rows=rows,
        held_out=held_out,
        order=Order(len(rows), seed=config.seed, shuffle=config.data.shuffle),
        table=table,
        environments=environments,
        scorer=scorer,
        mask=mask,
        credit=credit,
        watch=LearningWatch(config),
        learner=learner,
        publisher=SharedWeights(engine),
        step=opened.step,
        position=opened.number("position"),
        evaluated=opened.number("evaluated", -1),
        saved=opened.step,
        notes=[*findings, *opened.notes],
    )
