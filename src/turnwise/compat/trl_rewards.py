"""TRL's reward functions (`reward_funcs` of its GRPOTrainer), unchanged.

    reward:
      batch:
        - {use: turnwise.compat.trl_rewards:TrlReward, arguments: {function: my_rewards.py:reward_from_env}}

For a function that returns a reward function, give its arguments:

        - use: turnwise.compat.trl_rewards:TrlReward
          arguments:
            function: trl.rewards:get_soft_overlong_punishment
            arguments: {max_completion_len: 1024, soft_punish_cache: 256}

A reward function takes `prompts`, `completions`, `completion_ids`, the columns of the data and `environments`, each a list with
an item per conversation, and returns a list of numbers. It may be sync or async. In `reward.batch`, it is called once for all
conversations of a step, as in TRL; in `reward.group`, once for all conversations of a row. The behaviour is that of TRL 1.16.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from turnwise.errors import ConfigError, Failed, boundary
from turnwise.types import Message, Trajectory
from turnwise.user_code.object_references import resolve
from turnwise.user_code.reward_number import number_or_none, reward_number

__all__ = ["TrlReward"]

_Rewards = list[float | TypeError | None]
"""One item for each trajectory. None: the function does not apply. An error fails its trajectory."""
_KEY = "reward.batch.arguments.function"
_GIVEN = {"prompts", "completions", "completion_ids", "environments"}
_NOT_COLUMNS = ("prompt", "completion", "completion_ids")


class TrlReward:
    """Converts a TRL reward function to a reward function of the batch or of a group.

    None and NaN mean that the function does not apply to a conversation. Values that it logs with `log_extra` are recorded in
    the `info` of the last turn of each trajectory; those that it logs with `log_metric` are metrics of the trajectories.
    """

    def __init__(self, function: str | Callable[..., Any], *, arguments: Mapping[str, Any] | None = None) -> None:
        """`function` is a function or a reference to a function. If `arguments` are given, it is called with them and must
        return the reward function.

        Raises ConfigError if the reward function cannot be called as TRL calls it, or needs the state of TRL's trainer.
        """
        reward = resolve(function, key=_KEY) if isinstance(function, str) else function
        if arguments is not None:
            reward = _constructed(reward, arguments)
        self.__name__ = getattr(reward, "__name__", type(reward).__name__)
        if not callable(reward):
            raise ConfigError(
                f"{_KEY}: {function} is a {type(reward).__name__}; it must be a function of prompts, completions and columns"
            )
        parameters = inspect.signature(reward).parameters.values()
        self._all_columns = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self._names = {parameter.name for parameter in parameters}
        if not self._all_columns and not self._names & _GIVEN:
            raise ConfigError(
                f"{_KEY}: {self.__name__}({', '.join(parameter.name for parameter in parameters)}) has none of the parameters "
                f"{', '.join(sorted(_GIVEN))}, so it is not a reward function of TRL. If it returns a reward function, give its "
                f"arguments: arguments: {{function: ..., arguments: {{...}}}}"
            )
        self._needs_environments = any(
            parameter.name == "environments" and parameter.default is parameter.empty for parameter in parameters
        )
        if "trainer_state" in self._names:
            raise ConfigError(
                f"{_KEY}: {self.__name__} has the parameter trainer_state, the state of TRL's trainer, which "
                f"turnwise does not have: remove the parameter"
            )
        self._function = reward

    def __call__(self, trajectories: Sequence[Trajectory]) -> _Rewards | Awaitable[_Rewards]:
        arguments = self._arguments(trajectories)
        values = self._function(
            **{name: value for name, value in arguments.items() if self._all_columns or name in self._names}
        )
        return self._awaited(values) if inspect.isawaitable(values) else self._numbers(values)

    async def _awaited(self, values: Awaitable[Any]) -> _Rewards:
        return self._numbers(await values)

    def _numbers(self, values: Any) -> _Rewards:
        who = f"the reward function {self.__name__}"
        if isinstance(values, str | bytes) or not isinstance(values, Iterable):
            raise TypeError(
                f"{who} gave {values!r:.80}; it must return a list with a number, or None, for each conversation"
            )
        return [number_or_none(value, who) for value in values]

    def _arguments(self, trajectories: Sequence[Trajectory]) -> dict[str, Any]:
        def log_extra(column: str, values: Iterable[Any]) -> None:
            for trajectory, value in zip(trajectories, values, strict=True):
                _last_info(trajectory)[column] = value

        def log_metric(name: str, value: float) -> None:
            for trajectory in trajectories:
                trajectory.metrics[name] = reward_number(value, f"log_metric({name!r})")

        prompts, completions = zip(*(_parted(trajectory) for trajectory in trajectories), strict=True)
        names = dict.fromkeys(
            name for trajectory in trajectories for name in trajectory.row.fields if name not in _NOT_COLUMNS
        )
        arguments: dict[str, Any] = {
            name: [trajectory.row.fields.get(name) for trajectory in trajectories] for name in names
        }
        returned = [_returned_fields(trajectory) for trajectory in trajectories]
        for name in dict.fromkeys(name for fields in returned for name in fields):
            arguments[name] = [fields.get(name) for fields in returned]
        arguments |= {
            "prompts": list(prompts),
            "completions": list(completions),
            "completion_ids": [_completion_ids(trajectory) for trajectory in trajectories],
            "log_extra": log_extra,
            "log_metric": log_metric,
        }
        handles = [trajectory.environment for trajectory in trajectories]
        if all(handle is not None for handle in handles):
            arguments["environments"] = [handle.instance for handle in handles if handle is not None]
        elif self._needs_environments:
            raise TypeError(
                f"{self.__name__} needs `environments`, and the recipe's environment provides none; use "
                f"turnwise.compat.trl:TrlEnvironments"
            )
        return arguments


def _returned_fields(trajectory: Trajectory) -> Mapping[str, Any]:
    """The further fields that a `rollout_func` returned (`turnwise.compat.trl_rollout`)."""
    info = trajectory.turns[-1].info if trajectory.turns else {}
    return info.get("agent", {}).get("fields", {})


def _constructed(factory: Any, arguments: Mapping[str, Any]) -> Any:
    """The reward function that `factory` returns for the arguments. Raises ConfigError if it raises an exception."""
    name = getattr(factory, "__name__", type(factory).__name__)
    try:
        with boundary("reward"):
            return factory(**arguments)
    except Failed as failed:
        raise ConfigError(f"{_KEY}: {name} with the arguments {dict(arguments)}: {failed.failure.message}") from failed


def _parted(trajectory: Trajectory) -> tuple[list[Message], list[Message]]:
    """The prompt and the completion: the messages before the model's first turn, and the messages from that turn on.

    As in TRL, the model's texts are complete (reasoning included) without tools, and parsed with tools.
    """
    turns = {id(turn.message): turn for turn in trajectory.turns}
    messages = trajectory.messages
    first = next((n for n, message in enumerate(messages) if id(message) in turns), len(messages))
    completion = [dict(message) for message in messages[first:]]
    if not trajectory.tools:
        for message, copy in zip(messages[first:], completion, strict=True):
            if (turn := turns.get(id(message))) is not None:
                copy["content"] = turn.text
    return [dict(message) for message in messages[:first]], completion


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """The tokens of the last segment, from the first sampled token on."""
    if not trajectory.segments:
        return []
    segment = trajectory.segments[-1]
    first = next((n for n, turn in enumerate(segment.turn) if turn >= 0), len(segment))
    return list(segment.token_ids[first:])


def _last_info(trajectory: Trajectory) -> dict[str, Any]:
    return trajectory.turns[-1].info if trajectory.turns else {}
