"""verl's reward functions as rewards of trajectories: a user's `compute_score`, and the one that `data_source` selects.

They are handed what the model said and nothing else, turn by turn, a line each: a tool that echoes the answer earns nothing.
(verl hands over the decoded response, tools' words included.)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnwise.compat.verl.calls import call
from turnwise.compat.verl.names import verl_names
from turnwise.compat.verl.reward_score import GRADED, compute_score
from turnwise.errors import ConfigError
from turnwise.references import resolve
from turnwise.types import Trajectory

__all__ = ["custom_score", "data_source_score"]


def data_source_score(trajectory: Trajectory) -> float:
    """What verl's own graders give for the row's `data_source`: GSM8K's, strictly, is the one there is."""
    row = trajectory.row
    source = row["data_source"]
    if source not in GRADED:
        raise ValueError(
            f"row {row.id!r} has the data_source {source!r}, for which turnwise has no grader of verl's (it has: "
            f"{', '.join(GRADED)}): write one, and name it in custom_reward_function.path"
        )
    return compute_score("\n".join(trajectory.said), _truth(trajectory))


async def custom_score(
    trajectory: Trajectory, *, path: str, name: str = "compute_score", arguments: Mapping[str, Any] | None = None
) -> float:
    """What `compute_score(data_source, solution_str, ground_truth, extra_info, **arguments)` in a user's file gives.

    It may be async, and may return a number or a mapping with `score`.
    """
    with verl_names():
        function = resolve(f"{path}:{name}", key="custom_reward_function")
    if not callable(function):
        raise ConfigError(f"custom_reward_function: {path}:{name} cannot be called")
    row = trajectory.row
    score = await call(
        function,
        keywords={
            "data_source": row.fields.get("data_source"),
            "solution_str": "\n".join(trajectory.said),
            "ground_truth": _truth(trajectory),
            "extra_info": dict(row.fields.get("extra_info") or {}),
            **(arguments or {}),
        },
        name=name,
        kind="reward",
    )
    if isinstance(score, Mapping):
        if "score" not in score:
            raise ValueError(f"{name} returned a mapping without `score`: {sorted(score)}")
        score = score["score"]
    return float(score)


def _truth(trajectory: Trajectory) -> Any:
    model = trajectory.row.fields.get("reward_model")
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise ValueError(f"row {trajectory.row.id!r} has no reward_model.ground_truth")
    return model["ground_truth"]
