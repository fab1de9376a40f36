"""`turnwise rollout`: conversations without training, against any engine, written down as they end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

from turnwise import build
from turnwise.chat.renderer import Renderer
from turnwise.chat.row_media import process_row_media
from turnwise.config.schema import Config, ScriptedEngine
from turnwise.doctor.preflight import preflight
from turnwise.errors import DataError, RolloutError
from turnwise.models.model_config import context_length
from turnwise.record.run_lock import RunLock
from turnwise.record.writer import refuse_run_directory, write_config, write_trajectories, writing
from turnwise.rollout.rollout import RolloutContext, new_group, rollout_groups
from turnwise.runs.metrics import conversation_metrics, failures, template_mismatches
from turnwise.terminal.activity import Activity, Heartbeat
from turnwise.types import Group, Trajectory

__all__ = ["collect"]


async def collect(config: Config, out: Path, console: Console) -> dict[str, Any]:
    """Hold conversations on the recipe's rows, score them, and write them to `out` in the order of the rows.

    Returns the summary, which is also the one line of `out/metrics.jsonl`. Raises TurnwiseError: a RolloutError, when all is
    written, if all conversations broke.
    """
    renderer = Renderer.from_pretrained(
        config.model.path, sanity=config.tokenization_sanity_check, tool_format=config.tool_format
    )
    for note in preflight(config, renderer):
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    async with contextlib.aclosing(build.environment_factory(config, encode=renderer.encode)) as environments:
        return await _collect(config, environments, renderer, out, console)


async def _collect(
    config: Config, environments: build.Environments, renderer: Renderer, out: Path, console: Console
) -> dict[str, Any]:
    rows, notes = build.drop_long_prompts(config, build.rows(config, limit=config.rollout.max_rows), renderer)
    for note in notes:
        console.print(note, style="dim", highlight=False, markup=False, soft_wrap=True)
    scorer, mask = build.scorer(config), build.turn_weighting(config)
    rows = process_row_media(rows, renderer.vision, wanted=config.data.return_multi_modal_inputs)
    groups = [new_group(row, size=config.rollout.samples_per_row, seed=config.seed) for row in rows]
    groups, scripts = _assign_scripts(config, groups)
    model = build.engine_model(config)
    engine = build.engine(config, renderer, model, scripts=scripts)
    longest = context_length(model.config.to_dict()) if model is not None else None
    table = RolloutContext(
        engine=engine,
        renderer=renderer,
        make_environment=environments,
        sampling=build.sampling(config),
        limits=build.limits(config, longest=longest),
        thinking=config.thinking,
        max_concurrent=config.max_concurrent,
        lockstep=config.deterministic,
    )
    started = time.perf_counter()
    writer = _Writer(out, [one for group in groups for one in group.trajectories])
    activity = Activity(what="conversations", total=writer.total)
    score = scorer.score_when_finished(groups)
    with (
        Heartbeat(activity, console),
        Progress(
            *Progress.get_default_columns()[:2],
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        ) as progress,
    ):
        task = progress.add_task("conversations", total=writer.total)

        async def done(trajectory: Trajectory) -> None:
            activity.advance()
            progress.advance(task)
            for one in await score(trajectory):
                mask(one)  # nothing is learnt here, but the record shows what would be
                writer.add(one)

        await rollout_groups(groups, table, on_finished=done)
    await engine.close()
    if (told := template_mismatches([one for group in groups for one in group.trajectories])) is not None:
        console.print(told, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for problem in failures(groups)[:5]:
        console.print(problem, style="red", highlight=False, markup=False, soft_wrap=True)
    summary = {
        "step": 0,
        "conversations": writer.total,
        **conversation_metrics(groups),
        "seconds/rollout": round(time.perf_counter() - started, 4),
    }
    writer.finish(config, summary)
    if summary["failed"] == 1.0:
        raise RolloutError(f"all {writer.total} conversations broke; they are in {out}, with their errors")
    return summary


def _assign_scripts(config: Config, groups: Sequence[Group]) -> tuple[list[Group], build.Scripts | None]:
    """The groups of the recipe's scripts, and the script of each trajectory, for the scripted engine; else all groups and None.

    The scripts say how many conversations there are: trajectories without a script are dropped. Raises DataError if there are
    more scripts than trajectories.
    """
    if not isinstance(config.engine, ScriptedEngine):
        return list(groups), None
    scripts = build.read_scripts(config.engine.script)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if len(scripts) > len(trajectories):
        raise DataError(
            f"{config.engine.script} has {len(scripts)} scripts, and {len(groups)} rows with rollout.samples_per_row="
            f"{config.rollout.samples_per_row} make {len(trajectories)} conversations; there must be a row for each script"
        )
    by_id = {trajectory.id: script for trajectory, script in zip(trajectories, scripts, strict=False)}
    for group in groups:
        group.trajectories = [trajectory for trajectory in group.trajectories if trajectory.id in by_id]
    return [group for group in groups if group.trajectories], by_id


class _Writer:
    """Writes trajectories as they end, in their order: each as soon as those before it are there."""

    def __init__(self, out: Path, trajectories: Sequence[Trajectory]) -> None:
        self._out = out
        self._path = out / "trajectories.jsonl"
        self._ended: set[str] = set()
        self._waiting = list(reversed(trajectories))
        self.total = len(trajectories)
        refuse_run_directory(out)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(out)
            self._keep_former()

    def add(self, trajectory: Trajectory) -> None:
        self._ended.add(trajectory.id)
        ready: list[Trajectory] = []
        while self._waiting and self._waiting[-1].id in self._ended:
            ready.append(self._waiting.pop())
        with writing(self._out):
            write_trajectories(self._path, ready)

    def finish(self, config: Config, summary: dict[str, Any]) -> None:
        with writing(self._out):
            (self._out / "metrics.jsonl").write_text(json.dumps(summary) + "\n", encoding="utf-8")
            write_config(self._out / "config.yaml", config)
        self._lock.release()

    def _keep_former(self) -> None:
        """What an earlier call has left is put aside, not overwritten."""
        if self._path.exists():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(self._path.stat().st_mtime))
            self._path.rename(self._path.with_name(f"trajectories-{stamp}-{time.time_ns() % 10**6}.jsonl"))
