"""The reward of `composite_reward.yaml`: correctness, efficiency and tool quality, as three functions with weights."""

from __future__ import annotations

from collections.abc import Sequence

from turnwise import Trajectory, Turn
from turnwise.data.numeric_answers import final_answer, same_number


def correctness(trajectory: Trajectory, answer: object) -> float:
    """1 if the model's last answer is right, else 0."""
    return float(same_number(final_answer(trajectory.answer), str(answer)))


def efficiency(turns: Sequence[Turn], cost: float = 0.1) -> float:
    """1 minus `cost` for each turn of the model, at least 0."""
    return max(0.0, 1.0 - cost * len(turns))


def tool_quality(turns: Sequence[Turn]) -> float | None:
    """The share of tool calls that worked. None (does not apply) in a conversation without tool calls."""
    outcomes = [outcome for turn in turns for outcome in turn.outcomes]
    if not outcomes:
        return None
    return sum(outcome.error is None for outcome in outcomes) / len(outcomes)
