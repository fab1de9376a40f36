"""Supervised fine-tuning on given conversations, with the tokens and loss masks of reinforcement learning.

Each step takes rows, replays their conversations (`replay`), packs a batch, updates the weights, and records the step.
`assemble` builds the run from a recipe. `conversation_tokens` gives the lengths of a recipe's conversations for `turnwise
plan`; it loads the tokenizer, and no weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise import assembly
from turnwise.chat.renderer import Renderer
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.config.train_checks import short_run_notes
from turnwise.errors import ConfigError, Failed, RolloutError, boundary
from turnwise.options.algorithm import Nll, steps_of_epochs
from turnwise.options.schema import Config, EnvironmentUse
from turnwise.planning.placement import ConversationTokens
from turnwise.record.metrics import mean, share
from turnwise.runs.run_state import RunState, fitted_to_ranks, loggers, read_inputs
from turnwise.sft.replay import problems, replay, weigh
from turnwise.terminal.train_report import SftReport
from turnwise.training.batch import Batch, share_saved
from turnwise.training.learner import UpdateStats
from turnwise.types import Row, ToolSchema, Trajectory

# the assembly


@dataclass(slots=True, kw_only=True)
class SftRun(RunState):
    """A fine-tuning run, ready to continue after `step` steps."""

    tools: Sequence[ToolSchema]
    """The recipe's tools, for rows without a column of tools."""
    max_tokens: int | None
    """Maximum number of tokens of a conversation; None: no limit."""
    recorded: int
    """The number of conversations in trajectories.jsonl."""
    without_targets: int = 0
    """The number of rows since the last trained row, counted per step: a step with a trained row sets it to 0."""
    evaluation: tuple[Batch, Sequence[Trajectory]] | None = None
    """The held-out conversations as a packed batch, and their trajectories. Built once: they are the same in each evaluation."""

    def data_position(self) -> dict[str, Any]:
        return {**RunState.data_position(self), "recorded": self.recorded}


def assemble(config: Config) -> SftRun:
    """Check a recipe, load the model and the data, and build the run. A run in `output` is resumed if the recipe says so.

    Raises TurnwiseError before the first training step.
    """
    refuse_sft_without_effect(config)
    weigh_turns = assembly.turn_weighting(config)
    inputs = read_inputs(config, "sft", lambda config, held_out: assembly.conversations(config, held_out=held_out))
    opened = inputs.opened
    learner = assembly.sft_learner(config, opened.source)
    opened.compare_model(learner)
    inputs = fitted_to_ranks(inputs, learner, "sft")
    config, options = inputs.config, inputs.config.sft
    limits = assembly.limits(config, longest=learner.context_length)
    tools = asyncio.run(recipe_tools(config, inputs.renderer))
    if tools and all("tools" in row.fields for row in [*inputs.rows, *inputs.held_out]):
        raise ConfigError(
            "tools and mcp are for rows without a column `tools`, and all rows have this column: remove them from the recipe, "
            "or the column from the data"
        )
    opened.begin(learner)
    steps = options.steps or steps_of_epochs(options.epochs, len(inputs.rows), options.batch_size)
    inputs.notes.extend(short_run_notes(config, "sft", steps))
    return SftRun(
        inputs=inputs,
        learner=learner,
        options=options,
        steps=steps,
        weigh_turns=weigh_turns,
        loggers=loggers(config, step=opened.step),
        loss=Nll(normalizer=config.sft.normalizer),
        tools=tools,
        max_tokens=limits.context,
        recorded=opened.number("recorded"),
    )


async def recipe_tools(config: Config, renderer: Renderer) -> Sequence[ToolSchema]:
    """The schemas of the recipe's tools, as in training on the same recipe, for rows without a column of tools."""
    if not config.tools and config.mcp.servers is None:
        return ()
    with_tools_only = config.model_copy(
        update={"environment": EnvironmentUse(use="turnwise.environments.environment:SingleTurn")}
    )
    async with contextlib.aclosing(
        assembly.environment_factory(with_tools_only, encode=renderer.encode)
    ) as environments:
        environment = environments()
        try:
            with boundary("environment"):
                question = Row(id="tools", messages=[{"role": "user", "content": "What can you do?"}])
                return tuple((await environment.begin(question)).tools)
        except Failed as failed:
            raise RolloutError(f"the recipe's tools cannot be created: {failed.failure.message}") from failed
        finally:
            await environment.close()


# the loop


async def fine_tune(run: SftRun, report: SftReport) -> None:
    """Train until `run.steps` steps are finished.

    Raises RolloutError if no row can be trained on, RunError if the run directory cannot be written.
    """
    options = run.config.sft
    evaluates = run.evaluation_due(options.eval_every)
    report.begin(run.config, rows=len(run.rows), steps=run.steps, done=run.step, notes=run.notes, evaluates=evaluates)
    async with run.checkpoint_on_exit():
        while run.step < run.steps:
            if run.evaluation_due(options.eval_every):
                await _evaluate(run, report)
            started = time.perf_counter()
            run.activity.step(run.step + 1)
            places = run.order.take(run.step * options.batch_size, options.batch_size)
            trajectories = await _replay(run, [run.rows[index] for _, index in places], prefix=f"{run.step + 1}.")
            update_started = time.perf_counter()
            batch = _pack(run, trajectories)
            _refuse_without_targets(run, trajectories)
            update = UpdateStats()
            if batch.micro_batches:  # without targets, the optimizer's momentum would still change the weights
                update = await run.learner.update(
                    [batch],
                    lr=run.learning_rate,
                    on_micro_batch=run.activity.part(run.step + 1, "training, micro-batches", len(batch.micro_batches)),
                    on_first_step=run.begin_update,
                )
            seconds = {"replay": update_started - started, "train": time.perf_counter() - update_started}
            _finish_step(run, report, trajectories, batch, update, seconds=seconds, started=started)
        if run.evaluation_due(options.eval_every):
            await _evaluate(run, report)
    report.end(run.directory, run.checkpoints.newest)


async def _replay(run: SftRun, rows: Sequence[Row], *, prefix: str) -> list[Trajectory]:
    return await replay(
        rows,
        run.inputs.renderer,
        thinking=run.config.thinking,
        context=run.max_tokens,
        tools=run.tools,
        prefix=prefix,
        concurrent=run.config.max_concurrent,
    )


def _pack(run: SftRun, trajectories: Sequence[Trajectory]) -> Batch:
    cut = run.config.sft.too_long == "cut"
    return run.pack([trajectory for trajectory in trajectories if weigh(trajectory, run.weigh_turns, cut=cut)])


def _refuse_without_targets(run: SftRun, trajectories: Sequence[Trajectory]) -> None:
    """Raise RolloutError if no row was trained on for as many successive rows as the data set has.

    A single step without targets is allowed: rows may be left out, and a small batch may have only such rows.
    """
    if any(trajectory.advantages for trajectory in trajectories):
        run.without_targets = 0
        return
    run.without_targets += len(trajectories)
    if run.without_targets >= len(run.rows):
        reasons = "\n  ".join(problems(trajectories, context=run.max_tokens)[:5])
        raise RolloutError(f"no conversation of the data can be trained on:\n  {reasons}")


def _finish_step(
    run: SftRun,
    report: SftReport,
    trajectories: Sequence[Trajectory],
    batch: Batch,
    update: UpdateStats,
    *,
    seconds: dict[str, float],
    started: float,
) -> None:
    """Compute the metrics of the step, record the step, and report it."""
    trained = [trajectory for trajectory in trajectories if trajectory.advantages]
    metrics: dict[str, Any] = {
        "epoch": round((run.step + 1) * run.config.sft.batch_size / len(run.rows), 4),
        "loss": update.loss if batch.tokens else None,
        "grad_norm": update.grad_norm,
        "turns/mean": mean([len(trajectory.turns) for trajectory in trained]),
        "tokens/trained": batch.tokens,
        "tokens/prefix_saved": share_saved([batch]),
        **update.memory_metrics,
        **update.rank_metrics,
        "tokens/all": sum(len(segment) for trajectory in trained for segment in trajectory.segments),
        **_shares(trajectories),
        "template_mismatch": share([trajectory.template_mismatch is not None for trajectory in trajectories]),
    }
    if trained and not batch.tokens:
        rule = run.config.loss_mask.use
        run.warn(run.step + 1, "loss_mask", f"loss_mask={rule} and the weights in the rows leave no turn to train on")
    recorded = trajectories[: max(run.config.sft.max_recorded_rows - run.recorded, 0)]
    run.recorded += len(recorded)
    line = run.finish_step(metrics, trajectories, recorded=recorded, seconds=seconds, started=started)
    report.step(line, problems(trajectories, context=run.max_tokens))


async def _evaluate(run: SftRun, report: SftReport) -> None:
    """Compute the loss on the held-out rows: the mean over all their trained tokens.

    Raises RolloutError if no held-out row has a trained token.
    """
    run.activity.part(run.step, "evaluation")
    first = run.evaluation is None
    if run.evaluation is None:
        trajectories = await _replay(run, run.held_out, prefix="eval.")
        run.evaluation = _pack(run, trajectories), trajectories
    batch, trajectories = run.evaluation
    reasons = problems(trajectories, context=run.max_tokens)
    if not batch.tokens:
        reason = [*reasons, f"loss_mask={run.config.loss_mask.use} and the weights in the rows leave no turn"][0]
        raise RolloutError(f"the loss of no held-out conversation (data.eval) can be computed:\n  {reason}")
    summary = {
        "step": run.step,
        "loss": await run.learner.evaluate_loss(batch),
        "tokens/trained": batch.tokens,
        "conversations": sum(bool(trajectory.advantages) for trajectory in trajectories),
        **_shares(trajectories),
    }
    run.write_evaluation(summary, trajectories[: run.config.sft.max_recorded_rows] if run.step == 0 else ())
    report.evaluated(summary, reasons if first else ())


def _shares(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The fractions of the conversations, from 0 to 1, that are left out and that failed."""
    return {
        "left_out": share([not trajectory.failed and not trajectory.advantages for trajectory in trajectories]),
        "failed": share([trajectory.failed for trajectory in trajectories]),
    }


# lengths


def conversation_tokens(config: Config, rows: Sequence[Row]) -> list[ConversationTokens]:
    """The tokens of each conversation, as `turnwise sft` would write and weigh them. A conversation that the chat template cannot
    write is left out. Raises TurnwiseError if there is no tokenizer."""
    renderer = assembly.renderer(config, config.model.path)
    weigh_turns = assembly.turn_weighting(config)
    replayed = asyncio.run(_replay_rows(config, rows, renderer))
    return [
        _tokens(trajectory, weigh(trajectory, weigh_turns, cut=True))
        for trajectory in replayed
        if not trajectory.failed
    ]


async def _replay_rows(config: Config, rows: Sequence[Row], renderer: Renderer) -> list[Trajectory]:
    tools = await recipe_tools(config, renderer)
    return await replay(rows, renderer, thinking=config.thinking, tools=tools, concurrent=config.max_concurrent)


def _tokens(trajectory: Trajectory, counts: bool) -> ConversationTokens:
    trained = (
        len(turn.completion.token_ids) for turn in trajectory.turns if turn.completion is not None and turn.weight > 0
    )
    longest = max(len(segment.token_ids) for segment in trajectory.segments)
    return ConversationTokens(longest, sum(trained) if counts else 0)
