"""The timeline of a training step: when its groups ran, what their conversations waited for, and how long the trainer waited
for the groups (docs/record.md)."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from turnwise.rollout.pipeline import ActiveGroup, TakenGroups
from turnwise.types import NOT_SAMPLED, Trajectory

__all__ = ["MAX_GROUPS", "step_timeline"]

MAX_GROUPS = 256
"""The largest number of groups in the timeline of a step, so that its size is bounded."""


def step_timeline(taken: TakenGroups, *, step: int, trained: float) -> dict[str, Any]:
    """The line of `timeline.jsonl` for a step, counted from 1. `trained` is when the new weights were published, in Unix seconds.

    Of a step with more than `MAX_GROUPS` groups, the groups that ended last are kept.
    """
    groups = sorted(taken.active, key=lambda active: active.ended or 0.0)[-MAX_GROUPS:]
    return {
        "step": step,
        "version": step - 1,
        "asked": round(taken.asked, 3),
        "taken": round(taken.taken, 3),
        "trained": round(trained, 3),
        "waited_for": taken.waited_for,
        "running": taken.running,
        "seconds": {
            "trainer_waiting": round(taken.taken - taken.asked, 3),
            "training": round(trained - taken.taken, 3),
            **_waits(trajectory for group in taken.groups for trajectory in group.trajectories),
        },
        "omitted": len(taken.active) - len(groups),
        "groups": [_of_group(active) for active in groups],
    }


def _of_group(active: ActiveGroup) -> dict[str, Any]:
    columns = [segment.version for trajectory in active.group.trajectories for segment in trajectory.segments]
    newest = max((max(column, default=NOT_SAMPLED) for column in columns), default=NOT_SAMPLED)
    return {
        "id": active.group.id,
        "position": active.row.position,
        "started": None if active.started is None else round(active.started, 3),
        "ended": None if active.ended is None else round(active.ended, 3),
        "version": active.version,
        "newest": None if newest == NOT_SAMPLED else newest,
        "use": "replaced" if active.replaced else "too_small" if active.too_small else "trained",
        "timed_out": active.timed_out,
        "seconds": _waits(active.group.trajectories),
    }


def _waits(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """What a conversation waited for, in seconds, as means over the conversations: the engine, tools, the environment without its
    tools, and other things, such as other conversations in the event loop."""
    parts: dict[str, list[float]] = {"engine": [], "tools": [], "environment": [], "other": []}
    for trajectory in trajectories:
        engine = sum(turn.seconds_engine for turn in trajectory.turns)
        replies = sum(turn.seconds_environment for turn in trajectory.turns)
        # the calls of a turn may run at the same time
        tools = sum(
            min(sum(outcome.seconds for outcome in turn.outcomes), turn.seconds_environment)
            for turn in trajectory.turns
        )
        rest = max(0.0, trajectory.seconds - engine - replies)
        for values, seconds in zip(parts.values(), (engine, tools, replies - tools, rest), strict=True):
            values.append(seconds)
    return {name: round(fmean(values), 3) if values else 0.0 for name, values in parts.items()}
