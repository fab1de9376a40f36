"""A run's metrics and conversations as pandas data frames."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turnwise.errors import ConfigError
from turnwise.record.reader import read, read_lines
from turnwise.types import Trajectory

__all__ = ["evaluation_frame", "metrics_frame", "trajectories_frame"]


def metrics_frame(run: str | Path) -> Any:
    """The metrics of a run: one row for each step, one column for each metric, the step as index.

    Raises ConfigError if pandas is not installed, RunError if the file is damaged.
    """
    frame = _pandas().DataFrame(list(read_lines(Path(run) / "metrics.jsonl")))
    return frame.set_index("step") if "step" in frame else frame


def trajectories_frame(run: str | Path) -> Any:
    """The conversations of a run or of a file: one row for each.

    Columns: `id`, `group`, `step`, `row`, `reward`, `stop`, `error`, `turns`, `tool_calls`, `tool_errors`, `sampled_tokens`,
    `seconds`, `answer`, `messages`; `rewards/<name>` for the parts of the reward; `row/<name>` for the columns of the row.

    Raises ConfigError if pandas is not installed, RunError if the file is missing or damaged.
    """
    return _pandas().DataFrame([_values(trajectory) for trajectory in read(run)])


def evaluation_frame(directory: str | Path, models: Sequence[str]) -> Any:
    """The conversations of several models of an evaluation: one row for each, with the name of the model in the column `model`.

    Raises ConfigError if pandas is not installed, RunError if a file is missing or damaged.
    """
    return _pandas().DataFrame(
        [{"model": model, **_values(trajectory)} for model in models for trajectory in read(Path(directory) / model)]
    )


def _values(trajectory: Trajectory) -> dict[str, Any]:
    calls = [call for turn in trajectory.turns for call in turn.calls]
    outcomes = [outcome for turn in trajectory.turns for outcome in turn.outcomes]
    return {
        "id": trajectory.id,
        "group": trajectory.group,
        "step": trajectory.step,
        "row": trajectory.row.id,
        "reward": trajectory.reward,
        "stop": None if trajectory.stop is None else str(trajectory.stop),
        "error": None if trajectory.error is None else trajectory.error.kind,
        "turns": len(trajectory.turns),
        "tool_calls": len(calls),
        "tool_errors": sum(outcome.error is not None for outcome in outcomes),
        "sampled_tokens": trajectory.sampled_tokens,
        "seconds": trajectory.seconds,
        "answer": trajectory.answer,
        "messages": trajectory.messages,
        **{f"rewards/{name}": value for name, value in trajectory.rewards.items()},
        **{f"row/{name}": value for name, value in trajectory.row.fields.items()},
    }


def _pandas() -> Any:
    try:
        import pandas
    except ImportError:
        raise ConfigError("data frames need the `pandas` package: pip install 'turnwise[pandas]'") from None
    return pandas
