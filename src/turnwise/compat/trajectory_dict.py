"""Reward functions of trajectories in the form of dictionaries, as in the note on multi-turn RL (docs/rewards.md).

A function that only reads `trajectory["turns"]` and the other keys below can be named in `reward.trajectory` directly
(`Trajectory.__getitem__`). `DictReward` is for functions that need a real dictionary, and `DictTurnReward` for functions that
return the rewards of all turns.

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
from turnwise.types import Trajectory, Turn
from turnwise.user_code.references import resolve

__all__ = ["DictReward", "DictTurnReward", "as_dictionary"]


def as_dictionary(trajectory: Trajectory) -> dict[str, Any]:
    """The trajectory as a dictionary, with the keys of `turnwise.types.DICTIONARY_KEYS`."""
    return {key: trajectory[key] for key in trajectory.keys()}  # noqa: SIM118 (iterating it is not defined)


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
        written = {id(turn.message) for turn in trajectory.turns}
        of_model = [id(message) in written for message in trajectory.messages[: len(entries)]]
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


def _function(function: str | Callable[..., Any], form: str) -> Callable[..., Any]:
    key = f"reward.{form}: arguments.function"
    resolved = resolve(function, key=key) if isinstance(function, str) else function
    if not callable(resolved):
        raise ConfigError(f"{key}: {function} is a {type(resolved).__name__}; it must be a function of a dictionary")
    return resolved
