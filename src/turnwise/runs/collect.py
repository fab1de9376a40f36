"""Conversations without training: sampled on a recipe's rows with any engine, scored, and written down as they end."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from turnwise import build
from turnwise.config.schema import Config, ScriptedEngineSection
from turnwise.errors import DataError, RolloutError
from turnwise.record.compression import SUFFIX, existing_file, is_compressed
from turnwise.record.metrics import conversation_metrics, cut_answers, failures, template_mismatches
from turnwise.record.run_directory import refuse_run_directory
from turnwise.record.run_lock import RunLock
from turnwise.record.writer import write_config, write_trajectories, writing
from turnwise.rollout.rollout import new_group, rollout_groups
from turnwise.runs.sampling_only import conversation_context, prepare
from turnwise.terminal.progress import progress
from turnwise.terminal.story import log_conversation
from turnwise.types import Group, Trajectory

__all__ = ["assign_scripts", "collect"]


async def collect(config: Config, out: Path, console: Console) -> dict[str, Any]:
    """Run conversations on the recipe's rows, score them, and write them to `out` in the order of the rows.

    Returns the summary, which is also the only line of `out/metrics.jsonl`. Raises TurnwiseError. If all conversations failed,
    everything is written, and then RolloutError is raised.
    """
    conversations = prepare(config, build.sampling(config))
    _print(console, conversations.notes, style="dim")
    rows, notes = conversations.keep_rows(build.rows(config, limit=config.rollout.max_rows))
    _print(console, notes, style="dim")
    rows, weigh_turns = conversations.process(rows), build.turn_weighting(config)
    groups = [new_group(row, size=config.rollout.samples_per_row, seed=config.seed) for row in rows]
    groups, scripts = assign_scripts(config, groups, samples="rollout.samples_per_row")
    async with conversation_context(conversations, scripts=scripts) as context:
        started = time.perf_counter()
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        writer = _OrderedWriter(out, trajectories, compressed=config.record.compression == "gzip")
        score = conversations.scorer.scoring_callback(groups)
        with progress(console, len(trajectories)) as advance:

            async def done(trajectory: Trajectory) -> None:
                advance(trajectory.sampled_tokens)
                for scored in await score(trajectory):
                    weigh_turns(scored)  # nothing is trained; the record shows what training would use
                    writer.add(scored)

            await rollout_groups(groups, context, on_finished=done)
    renderer = conversations.renderer
    log_conversation(trajectories, decode=None if renderer is None else renderer.decode)
    warnings = (template_mismatches(trajectories), cut_answers(trajectories, config.limits))
    _print(console, [warning for warning in warnings if warning is not None], style="yellow")
    _print(console, failures(groups)[:5], style="red")
    summary = {
        "step": 0,
        "conversations": len(trajectories),
        **conversation_metrics(groups),
        "seconds/rollout": round(time.perf_counter() - started, 4),
    }
    writer.finish(config, summary)
    if summary["failed"] == 1.0:
        raise RolloutError(f"all {len(trajectories)} conversations failed; they are in {out}, with their errors")
    return summary


def assign_scripts(
    config: Config, groups: Sequence[Group], *, samples: str
) -> tuple[list[Group], build.Scripts | None]:
    """For the scripted engine: the groups that have scripts, and the script of each trajectory. Else all groups, and None.

    The scripts say how many conversations there are: trajectories without a script are dropped. `samples` is the option for the
    number of conversations on each row. Raises DataError if there are more scripts than trajectories.
    """
    if not isinstance(config.engine, ScriptedEngineSection):
        return list(groups), None
    scripts = build.read_scripts(config.engine.script)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if len(scripts) > len(trajectories):
        raise DataError(
            f"{config.engine.script} has {len(scripts)} scripts, and {len(groups)} rows with "
            f"{samples}={len(groups[0].trajectories)} make {len(trajectories)} conversations; the number of "
            f"scripts and the number of conversations must be equal"
        )
    by_id = {trajectory.id: script for trajectory, script in zip(trajectories, scripts, strict=False)}
    for group in groups:
        group.trajectories = [trajectory for trajectory in group.trajectories if trajectory.id in by_id]
    return [group for group in groups if group.trajectories], by_id


def _print(console: Console, lines: Sequence[str], *, style: str) -> None:
    for line in lines:
        console.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


class _OrderedWriter:
    """Writes trajectories in a given order: each as soon as it and all before it have ended."""

    def __init__(self, out: Path, trajectories: Sequence[Trajectory], *, compressed: bool) -> None:
        self._out = out
        self._path = out / f"trajectories.jsonl{SUFFIX if compressed else ''}"
        self._ended: set[str] = set()
        self._waiting = list(reversed(trajectories))
        refuse_run_directory(out)
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
            self._lock = RunLock(out)
            self._keep_previous()

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

    def _keep_previous(self) -> None:
        """Rename the trajectories of an earlier call instead of overwriting them."""
        path = existing_file(self._out / "trajectories.jsonl")
        if path.exists():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            suffix = SUFFIX if is_compressed(path) else ""
            path.rename(path.with_name(f"trajectories-{stamp}-{time.time_ns() % 10**6}.jsonl{suffix}"))
