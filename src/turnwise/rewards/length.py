"""A reward for short conversations, compared within the group of a row.

    reward:
      trajectory:
        - right.py:right
      group:
        - use: turnwise.rewards.length:GroupLength
          arguments: {correct: "right.py:right"}
          weight: 0.5

It is added to the other rewards, and only makes a difference between conversations of one row. It does not know credit or losses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.types import Trajectory
from turnwise.user_code.references import resolve
from turnwise.user_code.reward_number import reaches, reward_number

__all__ = ["GroupLength"]


class GroupLength:
    """The length reward of Kimi k1.5 (arXiv 2501.12599), in `reward.group`.

    With the numbers of sampled tokens `n` of a row's conversations, `l = 0.5 - (n - min) / (max - min)`. A correct conversation
    gets `l`, and another one `min(0, l)`: short wrong answers are not rewarded. Where all have the same length, all get 0.

    `correct` is a reference to a function of the trajectory, such as the reward function that says whether it is right; None:
    the sum of the rewards that the environment and the tools gave. A conversation is correct if this number is at least
    `pass_reward`.

    Example: 10, 20 and 30 tokens, of which only the first two are correct: 0.5, 0 and -0.5. If the first is wrong, it gets 0.

    Raises ConfigError if `correct` is no sync function, and what this function raises.
    """

    def __init__(self, *, correct: str | Callable[[Trajectory], Any] | None = None, pass_reward: float = 1.0) -> None:
        found = resolve(correct, key="reward.group: correct") if isinstance(correct, str) else correct
        if found is not None and (not callable(found) or inspect.iscoroutinefunction(found)):
            raise ConfigError(
                f"reward.group: correct={correct!r:.80} is no sync function: name one that takes a trajectory and returns a "
                f"number, such as your reward function"
            )
        self._correct = found
        self._pass_reward = pass_reward

    def __call__(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """A number in [-0.5, 0.5] for each conversation of a group."""
        lengths = [trajectory.sampled_tokens for trajectory in trajectories]
        least, most = min(lengths), max(lengths)
        if least == most:
            return [0.0] * len(lengths)
        rewards: list[float] = []
        for trajectory, length in zip(trajectories, lengths, strict=True):
            value = 0.5 - (length - least) / (most - least)
            rewards.append(value if self._is_correct(trajectory) else min(0.0, value))
        return rewards

    def _is_correct(self, trajectory: Trajectory) -> bool:
        if self._correct is None:
            number = sum(turn.reward for turn in trajectory.turns)
        else:
            number = reward_number(self._correct(trajectory), "correct")
        return reaches(number, self._pass_reward)
