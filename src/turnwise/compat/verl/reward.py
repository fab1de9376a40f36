"""verl's reward functions as rewards of trajectories: a user's `compute_score`, and the grader of the row's `data_source`.

They receive the texts of the model's turns, joined by line breaks, so a tool that echoes the answer earns no reward.
(verl passes the decoded response, which includes the results of tools.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

from turnwise.compat.object_factory import plain
from turnwise.compat.verl.calls import call, takes
from turnwise.compat.verl.names import verl_names
from turnwise.compat.verl.reward_score import GRADED, compute_score
from turnwise.errors import ConfigError
from turnwise.types import Stop, Trajectory
from turnwise.user_code.object_references import resolve
from turnwise.user_code.reward_number import reward_number

__all__ = ["CustomScore", "data_source_score", "num_turns"]

_HANDED = ("data_source", "solution_str", "ground_truth", "extra_info")


def data_source_score(trajectory: Trajectory) -> float:
    """The score of verl's grader for the row's `data_source`. Only the strict GSM8K grader exists. Raises ValueError."""
    row = trajectory.row
    source = row["data_source"]
    if source not in GRADED:
        raise ValueError(
            f"row {row.id!r} has the data_source {source!r}, for which turnwise has no grader (it has graders for: "
            f"{', '.join(GRADED)}): write a grader, and name its file in custom_reward_function.path"
        )
    return compute_score("\n".join(trajectory.assistant_texts), _truth(trajectory))


class CustomScore:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **arguments)` in a user's file, as a reward function.

    The function may be sync or async, and returns a number or a mapping with `score`. The mapping's other numbers are metrics of
    the trajectory. Its other values are recorded in the info of the last turn, under the function's name.

    The constructor raises ConfigError if the file cannot be imported, or the function does not take these arguments.
    """

    def __init__(self, path: str, name: str = "compute_score", arguments: Mapping[str, Any] | None = None) -> None:
        with verl_names():
            self._function = resolve(f"{path}:{name}", key="custom_reward_function")
        if not callable(self._function):
            raise ConfigError(f"custom_reward_function: {path}:{name} cannot be called")
        for given in (*_HANDED, *(arguments or {})):
            if not takes(self._function, given, anything=True):
                raise ConfigError(
                    f"custom_reward_function: {path}:{name} takes no argument {given!r}; it is called with "
                    f"{', '.join((*_HANDED, *(arguments or {})))}, by name"
                )
        self._arguments = dict(arguments or {})
        self.__name__ = name

    async def __call__(self, trajectory: Trajectory) -> float:
        row = trajectory.row
        score = await call(
            self._function,
            keywords={
                "data_source": row.fields.get("data_source"),
                "solution_str": "\n".join(trajectory.assistant_texts),
                "ground_truth": _truth(trajectory),
                "extra_info": {**(row.fields.get("extra_info") or {}), **_rollout_info(trajectory)},
                **self._arguments,
            },
            name=self.__name__,
            kind="reward",
        )
        if isinstance(score, Mapping):
            if "score" not in score:
                raise ValueError(f"{self.__name__} returned a mapping without `score`: {sorted(score)}")
            self._keep(trajectory, {name: value for name, value in score.items() if name != "score"})
            score = score["score"]
        return reward_number(score, f"the reward function {self.__name__!r}")

    def _keep(self, trajectory: Trajectory, more: Mapping[str, Any]) -> None:
        """Add numbers to the trajectory's metrics, and other values to the last turn's info."""
        numbers = {
            str(name): float(value) for name, value in more.items() if isinstance(value, Real) and math.isfinite(value)
        }
        trajectory.metrics.update(numbers)
        rest = {str(name): value for name, value in more.items() if str(name) not in numbers}
        if rest and trajectory.turns:
            trajectory.turns[-1].info[self.__name__] = plain(rest)


def num_turns(trajectory: Trajectory) -> int:
    """verl's `num_turns`: the prompt, the model's turns, and the answers to them that the model could read."""
    first = next(
        (
            n
            for n, message in enumerate(trajectory.messages)
            if trajectory.turns and message is trajectory.turns[0].message
        ),
        0,
    )
    answers, among = 0, True  # `among`: consecutive messages of one answer count once
    for message in trajectory.messages[first:]:
        model = message.get("role") == "assistant"
        answers += not model and not among
        among = not model
    if not trajectory.turns:
        return 1
    unread = among and trajectory.stop is not Stop.DONE  # the conversation ended before the model read the last answer
    return 1 + len(trajectory.turns) + max(0, answers - unread)


def _rollout_info(trajectory: Trajectory) -> dict[str, Any]:
    """The fields that verl adds to the row's `extra_info`."""
    infos = [turn.info for turn in trajectory.turns]
    scores = [info["turn_score"] for info in infos if "turn_score" in info]
    outcomes = [outcome for turn in trajectory.turns for outcome in turn.outcomes]
    of_tools = infos[-1].get("calc_reward", {}) if infos else {}
    return {
        "num_turns": num_turns(trajectory),
        "turn_scores": scores,
        "tool_rewards": [outcome.reward for outcome in outcomes],
        "rollout_reward_scores": {**of_tools, **({"user_turn_rewards": scores} if scores else {})},
        "raw_prompt": [dict(message) for message in trajectory.row.messages],
    }


def _truth(trajectory: Trajectory) -> Any:
    model = trajectory.row.fields.get("reward_model")
    if not isinstance(model, Mapping) or model.get("ground_truth") is None:
        raise ValueError(f"row {trajectory.row.id!r} has no reward_model.ground_truth")
    return model["ground_truth"]
