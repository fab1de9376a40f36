"""verl's reward functions as rewards of trajectories: a user's `compute_score`, and the grader of the row's `data_source`.

They receive the texts of the model's turns, joined by line breaks, so a tool that echoes the answer earns no reward.
(verl passes the decoded response, which includes the results of tools.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from turnwise.compat.object_factory import plain
from turnwise.compat.verl.base import call, takes
from turnwise.compat.verl.helpers import GRADED, compute_score
from turnwise.compat.verl.names import verl_names
from turnwise.errors import ConfigError
from turnwise.types import Stop, Trajectory
from turnwise.user_code.copies import copy_containers
from turnwise.user_code.references import resolve
from turnwise.user_code.reward_number import reward_number

_SINGULAR = ("data_source", "solution_str", "ground_truth", "extra_info")
_PLURAL = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_NEEDED = ("reward_model",)
"""The column with the ground truth."""


def data_source_score(trajectory: Trajectory, data_source: str, reward_model: Mapping[str, Any] | None) -> float:
    """The score of verl's grader for the row's `data_source`. Only the strict GSM8K grader exists. Raises ValueError.

    Both columns are parameters, so that data without them are refused before the first step.
    """
    if data_source not in GRADED:
        raise ValueError(
            f"row {trajectory.row.id!r} has the data_source {data_source!r}, for which turnwise has no grader (it has graders "
            f"for: {', '.join(GRADED)}): write a grader, and name its file in custom_reward_function.path"
        )
    return compute_score("\n".join(trajectory.assistant_texts), _truth(trajectory))


class CustomScore:
    """`compute_score(data_source, solution_str, ground_truth, extra_info, **arguments)` in a user's file, as a reward function.

    The function may be sync or async, and returns a number or a mapping with `score`. The mapping's other numbers are metrics of
    the trajectory. Its other values are recorded in the info of the last turn, under the function's name.

    The constructor raises ConfigError if the file cannot be imported, or the function does not take these arguments.
    """

    def __init__(self, path: str, name: str = "compute_score", arguments: Mapping[str, Any] | None = None) -> None:
        self._function = _score_function(path, name, (*_SINGULAR, *(arguments or {})))
        self._arguments = dict(arguments or {})
        self.__name__ = name

    needed_columns = _NEEDED

    async def __call__(self, trajectory: Trajectory) -> float:
        keywords = {**_inputs(trajectory), **copy_containers(self._arguments)}
        score = await call(self._function, keywords=keywords, name=self.__name__, kind="reward")
        return _score(trajectory, score, self.__name__)


class CustomBatchScore:
    """`compute_score(data_sources, solution_strs, ground_truths, extra_infos, **arguments)` of verl's reward manager `batch`.

    For `reward.batch`: the function is called once for all trajectories of a step, with lists, and returns a list of numbers
    or of mappings with `score`. An item that is neither, and a row without ground truth, fails its trajectory.

    The constructor raises ConfigError if the file cannot be imported, or the function does not take these arguments.
    """

    def __init__(self, path: str, name: str = "compute_score", arguments: Mapping[str, Any] | None = None) -> None:
        self._function = _score_function(path, name, (*_PLURAL, *(arguments or {})))
        self._arguments = dict(arguments or {})
        self.__name__ = name

    needed_columns = _NEEDED

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | Exception]:
        inputs: list[dict[str, Any] | ValueError] = []
        for trajectory in trajectories:
            try:
                inputs.append(_inputs(trajectory))
            except ValueError as error:
                inputs.append(error)
        complete = [item for item in inputs if isinstance(item, dict)]
        scores: list[Any] = []
        if complete:
            lists = {plural: [item[name] for item in complete] for name, plural in zip(_SINGULAR, _PLURAL, strict=True)}
            keywords = {**lists, **copy_containers(self._arguments)}
            returned = await call(self._function, keywords=keywords, name=self.__name__, kind="reward")
            scores = _listed(returned, len(complete), self.__name__)
        received = iter(scores)
        return [
            self._item(trajectory, next(received)) if isinstance(item, dict) else item
            for trajectory, item in zip(trajectories, inputs, strict=True)
        ]

    def _item(self, trajectory: Trajectory, score: Any) -> float | Exception:
        try:
            return _score(trajectory, score, self.__name__)
        except (ValueError, TypeError) as error:
            return error


def _score_function(path: str, name: str, parameters: Sequence[str]) -> Callable[..., Any]:
    """The function `name` of a user's file. Raises ConfigError if it does not take these parameters by name."""
    with verl_names():
        function = resolve(f"{path}:{name}", key="custom_reward_function")
    if not callable(function):
        raise ConfigError(f"custom_reward_function: {path}:{name} cannot be called")
    for parameter in parameters:
        if not takes(function, parameter, anything=True):
            raise ConfigError(
                f"custom_reward_function: {path}:{name} takes no argument {parameter!r}; it is called with "
                f"{', '.join(parameters)}, by name"
            )
    return function


def _inputs(trajectory: Trajectory) -> dict[str, Any]:
    """The arguments of `compute_score` for one trajectory. Raises ValueError if the row has no ground truth."""
    row = trajectory.row
    return {
        "data_source": row.fields.get("data_source"),
        "solution_str": "\n".join(trajectory.assistant_texts),
        "ground_truth": _truth(trajectory),
        "extra_info": {**(row.fields.get("extra_info") or {}), **_rollout_info(trajectory)},
    }


def _listed(returned: Any, count: int, name: str) -> list[Any]:
    if not isinstance(returned, str | bytes | Mapping) and isinstance(returned, Iterable):
        scores = list(returned)
        if len(scores) == count:
            return scores
    raise ValueError(
        f"{name} returned {returned!r:.80} for {count} trajectories; it must return a list with a number, or a mapping with "
        f"`score`, for each"
    )


def _score(trajectory: Trajectory, score: Any, name: str) -> float:
    """The number of a result of `compute_score`. Other numbers of a mapping become metrics of the trajectory.

    Raises ValueError or TypeError.
    """
    if isinstance(score, Mapping):
        if "score" not in score:
            raise ValueError(f"{name} returned a mapping without `score`: {sorted(score)}")
        _record(trajectory, {key: value for key, value in score.items() if key != "score"}, name)
        score = score["score"]
    return reward_number(score, f"the reward function {name!r}")


def _record(trajectory: Trajectory, values: Mapping[str, Any], name: str) -> None:
    """Add numbers to the trajectory's metrics, and other values to the last turn's info, under `name`."""
    numbers = {
        str(key): float(value) for key, value in values.items() if isinstance(value, Real) and math.isfinite(value)
    }
    trajectory.metrics.update(numbers)
    rest = {str(key): value for key, value in values.items() if str(key) not in numbers}
    if rest and trajectory.turns:
        trajectory.turns[-1].info[name] = plain(rest)


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


def ground_truth(fields: Mapping[str, Any]) -> Any:
    """The right answer in a row's columns; None if they have none."""
    model = fields.get("reward_model")
    return model.get("ground_truth") if isinstance(model, Mapping) else None


def _truth(trajectory: Trajectory) -> Any:
    if (truth := ground_truth(trajectory.row.fields)) is None:
        raise ValueError(f"row {trajectory.row.id!r} has no reward_model.ground_truth")
    return truth
