"""Fine-tuning on conversations that are there already, with the tokens and masks of reinforcement learning (`replay`).

`SftRun` is everything that it needs, assembled from a recipe; `fine_tune` is the loop: take rows, hold them again, pack,
learn, write down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnwise import build
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.config.schema import Config, EnvironmentUse
from turnwise.config.sft_checks import refuse_sft_without_effect
from turnwise.data.conversations import read_conversations
from turnwise.data.rows import Order
from turnwise.doctor.preflight import preflight
from turnwise.errors import ConfigError, Failed, RolloutError, boundary
from turnwise.rewards.turn_weights import TurnWeighting
from turnwise.runs.resuming import open_run
from turnwise.runs.run_state import RunState
from turnwise.sft.replay import problems, replay, weigh
from turnwise.terminal.sft_report import SftReport
from turnwise.training.batch import Batch, pack
from turnwise.training.learner import UpdateStats
from turnwise.types import Row, ToolSchema, Trajectory

__all__ = ["SftRun", "assemble", "fine_tune"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class SftRun(RunState):
    """A fine-tuning run, ready to go on after `step` steps."""

    config: Config
    rows: Sequence[Row]
    held_out: Sequence[Row]
    order: Order
    tools: Sequence[ToolSchema]
    context: int | None
    """The most tokens of a conversation."""
    mask: TurnWeighting
    steps: int
    """How many there are to be."""
    recorded: int = 0
    """Conversations that are in the record."""
    idle: int = 0
    """Rows in a row, so to speak, of which none could be learnt from."""
    evaluation: tuple[Batch, Sequence[Trajectory]] | None = None
    """The held-out conversations: they are the same each time."""

    def data_position(self) -> dict[str, int]:
        return {**RunState.data_position(self), "recorded": self.recorded}


async def fine_tune(run: SftRun, show: SftReport) -> None:
    """Learn until `run.steps` steps are finished.

    Raises RolloutError if no row can be learnt from, RunError if the run directory cannot be written.
    """
    options = run.config.sft
    show.begin(run.config, rows=len(run.rows), steps=run.steps, done=run.step, notes=run.notes)
    async with run.checkpoint_on_exit():
        while run.step < run.steps:
            if run.step == 0 or (options.eval_every and run.step % options.eval_every == 0):
                await _evaluate(run, show)
            began = time.perf_counter()
            run.activity.step(run.step + 1)
            places = run.order.take(run.step * options.batch_size, options.batch_size)
            every = await _replay(run, [run.rows[index] for _, index in places], prefix=f"{run.step + 1}.")
            started = time.perf_counter()
            batch = _pack(run, every)
            _refuse_nothing(run, every)
            advance = run.activity.part(run.step + 1, "training, micro-batches", len(batch.micro_batches))
            update = UpdateStats()
            if batch.micro_batches:  # without anything to learn from, momentum would move the weights all the same
                update = await run.learner.update(
                    [batch], lr=_learning_rate(run), on_micro_batch=advance, on_first_step=run.begin_update
                )
            seconds = {"replay": started - began, "train": time.perf_counter() - started}
            _finish_step(run, show, every, batch, update, seconds, began=began)
        await _evaluate(run, show)
    show.end(run.directory, run.checkpoints.newest)


async def _replay(run: SftRun, rows: Sequence[Row], *, prefix: str) -> list[Trajectory]:
    return await replay(
        rows,
        run.renderer,
        thinking=run.config.thinking,
        context=run.context,
        tools=run.tools,
        prefix=prefix,
        concurrent=run.config.max_concurrent,
    )


def _pack(run: SftRun, every: Sequence[Trajectory]) -> Batch:
    options, required = run.config.sft, run.learner.requirements
    return pack(
        [one for one in every if weigh(one, run.mask, cut=options.too_long == "cut")],
        average=options.loss_average,
        micro_batch_tokens=options.micro_batch_tokens or required.micro_batch_tokens,
        share_prompts=required.share_prompts,
    )


def _refuse_nothing(run: SftRun, every: Sequence[Trajectory]) -> None:
    """Some rows may be left out, and a small step may have hit upon these only; but not as many as there are."""
    if any(one.advantages for one in every):
        run.idle = 0
        return
    run.idle += len(every)
    if run.idle >= len(run.rows):
        reasons = "\n  ".join(problems(every, context=run.context)[:5])
        raise RolloutError(f"no conversation of the data can be learnt from:\n  {reasons}")


def _learning_rate(run: SftRun) -> float:
    return build.learning_rate(run.config.sft, run.step, steps=run.steps)


def _finish_step(
    run: SftRun,
    show: SftReport,
    every: Sequence[Trajectory],
    batch: Batch,
    update: UpdateStats,
    seconds: dict[str, float],
    *,
    began: float,
) -> None:
    """Write down what the step did."""
    lr = _learning_rate(run)
    step = run.step + 1
    learnt = [one for one in every if one.advantages]
    metrics: dict[str, Any] = {
        "step": step,
        "epoch": round(step * run.config.sft.batch_size / len(run.rows), 4),
        "loss": update.loss if batch.tokens else None,
        "grad_norm": update.grad_norm,
        "lr": lr,
        "turns/mean": sum(len(one.turns) for one in learnt) / len(learnt) if learnt else None,
        "tokens/trained": batch.tokens,
        "tokens/all": sum(len(segment) for one in learnt for segment in one.segments),
        "left_out": sum(not one.failed and not one.advantages for one in every) / len(every),
        "failed": sum(one.failed for one in every) / len(every),
        "template_mismatch": sum(one.template_mismatch is not None for one in every) / len(every),
        **{f"seconds/{name}": round(value, 4) for name, value in seconds.items()},
    }
    if learnt and not batch.tokens:
        rule = run.config.loss_mask.use
        _log.warning("step %d: loss_mask=%s and the rows' own weights leave nothing to learn from", step, rule)
    run.warn_template_mismatch(every)
    shown = every[: max(run.config.sft.max_recorded_rows - run.recorded, 0)]
    run.recorded += len(shown)
    run.finish_step(metrics, shown, began=began, last=step == run.steps)
    show.step(metrics, problems(every, context=run.context))


async def _evaluate(run: SftRun, show: SftReport) -> None:
    """The loss on the held-out rows: of all their tokens together, whatever the batches."""
    if not run.held_out or run.evaluated == run.step:
        return
    run.activity.part(run.step, "evaluation")
    first = run.evaluation is None
    if run.evaluation is None:
        every = await _replay(run, run.held_out, prefix="eval.")
        run.evaluation = _pack(run, every), every
    batch, every = run.evaluation
    reasons = problems(every, context=run.context)
    if not batch.tokens:
        why = reasons or [f"loss_mask={run.config.loss_mask.use} and the rows' own weights leave nothing"]
        raise RolloutError(f"no held-out conversation (data.eval) can be measured:\n  {why[0]}")
    summary = {
        "step": run.step,
        "loss": await run.learner.evaluate_loss(batch),
        "tokens/trained": batch.tokens,
        "conversations": sum(bool(one.advantages) for one in every),
        "left_out": sum(not one.failed and not one.advantages for one in every) / len(every),
        "failed": sum(one.failed for one in every) / len(every),
    }
    run.directory.write_evaluation(summary, every[: run.config.sft.max_recorded_rows] if run.step == 0 else ())
    run.evaluated = run.step
    show.evaluated(summary, reasons if first else ())


def assemble(config: Config) -> SftRun:
    """Everything that a recipe names, checked and loaded; a former run is gone on with where the recipe says so.

    Raises TurnwiseError with what is wrong before anything is computed.
    """
    refuse_sft_without_effect(config)
    opened = open_run(config, "sft")
    rows = _conversations(config)
    held_out = _conversations(config, held_out=True) if config.data.eval is not None else []
    opened.compare_rows(rows)
    mask = build.turn_weighting(config)
    renderer = Renderer.from_pretrained(
        opened.source, sanity=config.tokenization_sanity_check, tool_format=config.tool_format
    )
    opened.compare_tokenizer(renderer)
    found = preflight(config, renderer, tools=any(row.fields.get("tools") for row in [*rows, *held_out]))
    every = process_row_media([*rows, *held_out], renderer.vision, wanted=config.data.return_multi_modal_inputs)
    rows, held_out = every[: len(rows)], every[len(rows) :]
    learner = build.sft_learner(config, opened.source)
    opened.compare_model(learner)
    limits = build.limits(config, longest=learner.context_length)
    tools = asyncio.run(_recipe_tools(config, renderer))
    if tools and all("tools" in row.fields for row in every):
        raise ConfigError(
            "tools and mcp are for rows without a column of tools, and all rows have one: remove them from the recipe, or "
            "the column from the data"
        )
    opened.begin(learner)
    options = config.sft
    return SftRun(
        config=config,
        opened=opened,
        rows=rows,
        held_out=held_out,
        order=Order(len(rows), seed=config.seed, shuffle=config.data.shuffle),
        renderer=renderer,
        tools=tools,
        context=limits.context,
        mask=mask,
        learner=learner,
        steps=options.steps or math.ceil(options.epochs * len(rows) / options.batch_size),
        step=opened.step,
        recorded=opened.number("recorded"),
        evaluated=opened.number("evaluated", -1),
        saved=opened.step,
        notes=[*found, *opened.notes],
    )


def _conversations(config: Config, *, held_out: bool = False) -> list[Row]:
    data = config.data
    bounds = [bound for bound in (config.sft.max_eval_rows if held_out else None, data.max_rows) if bound is not None]
    return read_conversations(
        data.eval if held_out and data.eval is not None else data.train,
        columns=data.columns,
        split=data.eval_split if held_out else data.split,
        subset=data.subset,
        system=data.system_prompt,
        limit=min(bounds, default=None),
    )


async def _recipe_tools(config: Config, renderer: Renderer) -> Sequence[ToolSchema]:
    """What the recipe's tools look like to the model, for rows that name none: as in training on the same recipe."""
    if not config.tools and config.mcp.servers is None:
        return ()
    alone = config.model_copy(
        update={"environment": EnvironmentUse(use="turnwise.environments.environment:SingleTurn")}
    )
    async with contextlib.aclosing(build.environment_factory(alone, encode=renderer.encode)) as environments:
        environment = environments()
        try:
            with boundary("environment"):
                question = Row(id="tools", messages=[{"role": "user", "content": "What can you do?"}])
                return tuple((await environment.begin(question)).tools)
        except Failed as failed:
            raise RolloutError(f"the recipe's tools could not be made: {failed.failure.message}") from failed
        finally:
            await environment.close()
