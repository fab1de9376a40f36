"""`turnwise eval`: conversations of several models on the same held-out rows, with the loop of training, and their statistics."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from turnwise import build
from turnwise.config.schema import Config
from turnwise.errors import ConfigError, DataError
from turnwise.evaluation.results import EvaluationResult, ModelResult, compare, summarize
from turnwise.record.metrics import conversation_metrics, cut_answers, failures, mean
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.runs.collect import assign_scripts
from turnwise.runs.evaluated_models import EvaluatedModel
from turnwise.runs.evaluation_directory import EvaluationDirectory, ModelDirectory
from turnwise.runs.sampling_only import SamplingRun, conversation_context, prepare
from turnwise.terminal.progress import progress
from turnwise.terminal.story import log_conversation
from turnwise.training import fingerprint
from turnwise.types import Group, Row, Trajectory
from turnwise.user_code.reward_number import reaches

__all__ = ["evaluate_models"]


async def evaluate_models(
    config: Config, models: Sequence[EvaluatedModel], out: Path, console: Console
) -> EvaluationResult:
    """Run the conversations of all models, one model after the other, and write everything to `out`.

    All models answer the same rows with the same seeds. Raises TurnwiseError.
    """
    if config.data.eval is None:
        raise ConfigError(
            "turnwise eval needs held-out rows: set data.eval. To evaluate on the rows of training: data.eval=<data.train>"
        )
    prepared = [prepare(model.config, build.evaluation_sampling(model.config)) for model in models]
    _print(console, [note for conversations in prepared for note in conversations.notes])
    rows = _common_rows(config, prepared, console)
    directory = EvaluationDirectory(out, config)
    _print(console, directory.notes)
    try:
        about_rows = {"count": len(rows), "sha256": fingerprint.of_rows(rows)}
        results: list[ModelResult] = []
        for model, conversations in zip(models, prepared, strict=True):
            place = directory.model(model.name, model.config, about_rows)
            await _run_model(model, conversations, rows, place, console)
            results.append(_result(model, rows, place))
        result = _evaluation(config, rows, models, results)
        directory.write_results(json.dumps(dataclasses.asdict(result), indent=1) + "\n")
    finally:
        directory.release()
    return result


def _common_rows(config: Config, prepared: Sequence[SamplingRun], console: Console) -> list[Row]:
    """The held-out rows that no model leaves out because of their length."""
    rows = build.rows(config, held_out=True, limit=config.eval.max_rows)
    kept = rows
    for conversations in prepared:
        of_model, notes = conversations.keep_rows(rows)
        _print(console, notes)
        ids = {row.id for row in of_model}
        kept = [row for row in kept if row.id in ids]
    if not kept:
        raise DataError("each held-out row is too long for one of the models: raise data.max_prompt_tokens")
    return kept


async def _run_model(
    model: EvaluatedModel, conversations: SamplingRun, rows: Sequence[Row], place: ModelDirectory, console: Console
) -> None:
    """Run and score the conversations of a model that are not finished yet."""
    config, scorer = model.config, conversations.scorer
    started = time.perf_counter()
    groups = [new_group(row, size=config.eval.samples_per_row, seed=config.seed) for row in conversations.process(rows)]
    groups, scripts = assign_scripts(config, groups, samples="eval.samples_per_row")
    order = [trajectory.id for group in groups for trajectory in group.trajectories]
    kept = place.keep(_scored_together(conversations, groups))
    total = len(order)
    pending = [
        dataclasses.replace(group, trajectories=[t for t in group.trajectories if t.id not in kept]) for group in groups
    ]
    pending = [group for group in pending if group.trajectories]
    if kept:
        _print(console, [f"{model.name}: {len(kept)} of {total} conversations are finished already"])
    if pending:
        async with conversation_context(conversations, scripts=scripts) as context:
            score = scorer.scoring_callback(pending)
            with progress(console, total, done=len(kept), label=model.name) as advance:

                async def done(trajectory: Trajectory) -> None:
                    advance(trajectory.sampled_tokens)
                    place.add(await score(trajectory))

                await rollout_groups(pending, context, on_finished=done)
    recorded = _groups(place.read(), rows)
    renderer = conversations.renderer
    by_id = {trajectory.id: trajectory for group in recorded for trajectory in group.trajectories}
    log_conversation([by_id[id] for id in order if id in by_id], decode=None if renderer is None else renderer.decode)
    metrics = {
        "step": 0,
        "conversations": total,
        **conversation_metrics(recorded),
        "pass_rate": mean(
            [
                float(reaches(t.reward, config.eval.pass_reward))
                for g in recorded
                for t in g.trajectories
                if t.reward is not None
            ]
        ),
        "seconds/rollout": round(time.perf_counter() - started, 4) if not kept else None,
    }
    place.finish(order, metrics)
    if (warning := cut_answers([t for group in recorded for t in group.trajectories], config.limits)) is not None:
        console.print(f"{model.name}: {warning}", style="yellow", highlight=False, markup=False, soft_wrap=True)
    for line in failures(recorded)[:5]:
        console.print(f"{model.name}: {line}", style="red", highlight=False, markup=False, soft_wrap=True)


def _scored_together(conversations: SamplingRun, groups: Sequence[Group]) -> list[list[str]]:
    """The ids of the conversations that the reward functions score together."""
    scorer = conversations.scorer
    of_groups = [[trajectory.id for trajectory in group.trajectories] for group in groups]
    if scorer.batch:
        return [[id for ids in of_groups for id in ids]]
    if scorer.groups or any(reward.plan.needs_group for reward in (*scorer.trajectory, *scorer.turns)):
        return of_groups
    return [[id] for ids in of_groups for id in ids]


def _groups(trajectories: Sequence[Trajectory], rows: Sequence[Row]) -> list[Group]:
    """Recorded conversations by row, with the rows as they were read: the record does not have the data source."""
    by_id = {row.id: row for row in rows}
    groups: dict[str, Group] = {}
    for trajectory in trajectories:
        trajectory.row = by_id.get(trajectory.row.id, trajectory.row)
        group = groups.setdefault(trajectory.group, Group(id=trajectory.group, row=trajectory.row, trajectories=[]))
        group.trajectories.append(trajectory)
    return list(groups.values())


def _result(model: EvaluatedModel, rows: Sequence[Row], place: ModelDirectory) -> ModelResult:
    return summarize(
        place.read(),
        name=model.name,
        model=model.model,
        engine=model.config.engine.name,
        single_turn=model.single_turn,
        samples=model.config.eval.samples_per_row,
        pass_reward=model.config.eval.pass_reward,
        source_of={row.id: row.source for row in rows},
    )


def _evaluation(
    config: Config, rows: Sequence[Row], models: Sequence[EvaluatedModel], results: Sequence[ModelResult]
) -> EvaluationResult:
    """All results, with the comparisons: each further model with the first; several turns with one turn of the same model."""
    several = [result for result in results if not result.single_turn]
    pairs = [(other, several[0]) for other in several[1:]]
    pairs += [
        (results[place - 1], result) for place, result in enumerate(results) if result.single_turn
    ]  # `evaluated_models` puts the single turn of a model behind the model
    data = config.data.eval
    return EvaluationResult(
        data=data if isinstance(data, str) else ", ".join(data or ()),
        rows=len(rows),
        samples_per_row=config.eval.samples_per_row,
        seed=config.seed,
        pass_reward=config.eval.pass_reward,
        models=list(results),
        comparisons=[compare(first, second) for first, second in pairs],
    )


def _print(console: Console, lines: Sequence[str]) -> None:
    for line in dict.fromkeys(lines):
        console.print(line, style="dim", highlight=False, markup=False, soft_wrap=True)
