"""The `args` that reward classes of ms-swift are made with, and the `trainer_state` that their calls get."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from turnwise.types import Trajectory

__all__ = ["REWARD_DEFAULTS", "RewardArgs", "TrainerState", "make_reward", "trainer_state"]

REWARD_DEFAULTS: Mapping[str, Any] = {
    "max_completion_length": 512,
    "cosine_min_len_value_wrong": -0.5,
    "cosine_max_len_value_wrong": 0.0,
    "cosine_min_len_value_correct": 1.0,
    "cosine_max_len_value_correct": 0.5,
    "cosine_max_len": None,
    "repetition_n_grams": 3,
    "repetition_max_penalty": -1.0,
    "soft_max_length": None,
    "soft_cache_length": None,
}
"""The defaults of the arguments of ms-swift's own reward functions. A length of None means `max_completion_length`."""


class RewardArgs(SimpleNamespace):
    """ms-swift's arguments as attributes: its defaults for rewards, and the values of the recipe."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        values = {**REWARD_DEFAULTS, **(given or {})}
        for name in ("cosine_max_len", "soft_max_length"):
            values[name] = values["max_completion_length"] if values[name] is None else values[name]
        super().__init__(**values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r} here; set it in the recipe, at the reward function: arguments: {{args: {{{name}: ...}}}}",
            name=name,
            obj=self,
        )


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The fields of transformers' `TrainerState` that are known here."""

    global_step: int
    """The number of weight updates before the conversations were sampled."""
    max_steps: int
    """`max_steps` of `args`, or -1."""


def trainer_state(trajectories: Sequence[Trajectory], args: RewardArgs) -> TrainerState:
    """The state of the trainer when these trajectories were sampled."""
    versions = [max(segment.version) for trajectory in trajectories for segment in trajectory.segments if len(segment)]
    return TrainerState(max([0, *versions]), int(vars(args).get("max_steps", -1)))


def make_reward(kind: type[Any], arguments: Mapping[str, Any], args: RewardArgs) -> Any:
    """Make an object of a reward class, with `arguments`, and with `args` or single values of it if it has such parameters.

    Raises the exceptions of the class.
    """
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:  # a builtin may have no signature
        return kind(**arguments)
    known = {"args": args, **vars(args)}
    offered = {name: known[name] for name in parameters if name in known}
    if (
        any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        and "args" not in offered
        and parameters
    ):
        offered["args"] = args
    return kind(**{**offered, **arguments})
