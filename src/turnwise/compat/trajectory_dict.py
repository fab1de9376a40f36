"""Reward functions of trajectories in the form of dictionaries, as in the note on multi-turn RL (docs/rewards.md).

    trajectory = {
        "turns": [
            {"role": "user", "content": "What is 6 * 7?"},
            {"role": "assistant", "content": "<tool_call>...</tool_call>"},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "42."},
        ],
        "reward": 0.5,                            # what the environment and the tools gave
        "per_turn_rewards": [0.0, 0.5, 0.0, 0.0], # of each entry of "turns"; only turns of the model have rewards
        "prompt": "What is 6 * 7?",
        "response": "42.",
        "row": {"answer": "42"},                  # the columns of the row
    }

In a recipe::

    reward:
      trajectory:
        - {use: turnwise.compat.trajectory_dict:DictReward, arguments: {function: my.py:multiturn_reward}}
      turns:
        - {use: turnwise.compat.trajectory_dict:DictTurnReward, arguments: {function: my.py:turn_rewards}}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from turnwise.errors import ConfigError
from turnwise.types import Message, Trajectory, Turn
from turnwise.user_code.object_references import resolve

__all__ = ["DictReward", "DictTurnReward", "as_dictionary"]


def as_dictionary(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as a dictionary. Messages after the model's last turn, which the model did not read, are left out.

    The content of the model's turns is the text that the model wrote, with reasoning and tool calls.
    """
    turns = {id(turn.message): turn for turn in trajectory.turns}
    messages = list(trajectory.messages)
    while messages and id(messages[-1]) not in turns:
        messages.pop()
    entries = [_entry(message, turns.get(id(message))) for message in messages]
    rewards = [turn.reward if (turn := turns.get(id(message))) is not None else 0.0 for message in messages]
    return {
        "turns": entries,
        "reward": sum(turn.reward for turn in trajectory.turns),
        "per_turn_rewards": rewards,
        "prompt": _text(trajectory.row.messages[-1]) if trajectory.row.messages else "",
        "response": trajectory.answer,
        "row": dict(trajectory.row.fields),
    }


class DictReward:
    """A function of a dictionary that returns a number, for `reward.trajectory`. It may be async. Raises ConfigError."""

    def __init__(self, function: str | Callable[[dict[str, Any]], Any]) -> None:
        self._function = _function(function, "trajectory")
        self.__name__ = getattr(self._function, "__name__", type(self._function).__name__)

    def __call__(self, trajectory: Trajectory) -> Any:
        return self._function(as_dictionary(trajectory))


class DictTurnReward:
    """A sync function of a dictionary that returns a list of numbers, for `reward.turns`. Called once for each trajectory.

    The list has one number for each entry of `trajectory["turns"]`, as `per_turn_rewards` has, or one for each turn of the
    model. Numbers of entries that the model did not write must be 0. Raises ConfigError.
    """

    def __init__(self, function: str | Callable[[dict[str, Any]], Sequence[float]]) -> None:
        self._function = _function(function, "turns")
        self.__name__ = getattr(self._function, "__name__", type(self._function).__name__)
        self._values: dict[int, list[Any]] = {}
        """The numbers for the turns of the trajectories that are scored now, by the id of the trajectory."""

    def __call__(self, trajectory: Trajectory, turn: Turn) -> Any:
        if turn.index == 0:
            self._values[id(trajectory)] = self._turn_values(trajectory)
        values = self._values[id(trajectory)]
        if turn is trajectory.turns[-1]:
            del self._values[id(trajectory)]
        return values[turn.index]

    def _turn_values(self, trajectory: Trajectory) -> list[Any]:
        """One number for each turn of the model. Raises ValueError."""
        dictionary = as_dictionary(trajectory)
        returned = self._function(dictionary)
        try:
            values = list(returned)
        except TypeError:
            values = []
        if len(values) == len(trajectory.turns):
            return values
        entries = dictionary["turns"]
        turns = {id(turn.message) for turn in trajectory.turns}
        of_model = [id(message) in turns for message in trajectory.messages[: len(entries)]]
        if len(values) != len(entries) or sum(of_model) != len(trajectory.turns):
            raise ValueError(
                f"{self.__name__} gave {returned!r:.80}; it must give a list with one number for each of the {len(entries)} "
                f"entries of trajectory['turns'], or for each of the {len(trajectory.turns)} turns of the model"
            )
        if any(value for value, model in zip(values, of_model, strict=True) if not model):
            raise ValueError(
                f"{self.__name__} gave {values!r:.80}; an entry that the model did not write cannot have a reward: give 0"
            )
        return [value for value, model in zip(values, of_model, strict=True) if model]


def _entry(message: Message, turn: Turn | None) -> dict[str, Any]:
    return {**message, "content": _text(message) if turn is None else turn.text}


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part["text"]) for part in content if part.get("type") == "text")
    return str(content or "")


def _function(function: str | Callable[..., Any], form: str) -> Callable[..., Any]:
    key = f"reward.{form}: arguments.function"
    resolved = resolve(function, key=key) if isinstance(function, str) else function
    if not callable(resolved):
        raise ConfigError(f"{key}: {function} is a {type(resolved).__name__}; it must be a function of a dictionary")
    return resolved
