"""The reward of `--model 135m`, for both sides: plain Python without imports of either system, as task.py."""

from __future__ import annotations

from typing import Any

__all__ = ["digits", "reward"]


def digits(text: str) -> float:
    """The share of digits in a text: a reward that differs between the samples of a model with random weights."""
    return sum(character.isdigit() for character in text) / max(len(text), 1)


def reward(trajectory: Any) -> float:
    """The same as a reward function of turnwise, for the last message of the model."""
    return digits(trajectory.answer)
