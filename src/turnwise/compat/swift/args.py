"""What a reward class of ms-swift is made with (`args`), and what its calls are told of the trainer (`trainer_state`)."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from turnwise.types import Trajectory

__all__ = ["REWARD_DEFAULTS", "Args", "TrainerState", "made", "trainer_state"]

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
"""ms-swift's arguments of its own reward functions; the lengths that are None are `max_completion_length`."""


class Args(SimpleNamespace):
    """ms-swift's arguments as attributes: its defaults for rewards, and what the recipe gives."""

    def __init__(self, given: Mapping[str, Any] | None = None) -> None:
        values = {**REWARD_DEFAULTS, **(given or {})}
        for name in ("cosine_max_len", "soft_max_length"):
            values[name] = values["max_completion_length"] if values[name] is None else values[name]
        super().__init__(**values)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"args has no {name!r} here; give it to the reward function in the recipe: arguments: {{args: {{{name}: ...}}}}",
            name=name,
            obj=self,
        )


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What of transformers' `TrainerState` is known here."""

    global_step: int
    """How many times the weights had been updated when the conversations were held."""
    max_steps: int
    """`max_steps` of `args`, or -1."""


def trainer_state(trajectories: Sequence[Trajectory], args: Args) -> TrainerState:
    """The state of the trainer when these trajectories were sampled."""
    versions = [max(segment.version) for one in trajectories for segment in one.segments if len(segment)]
    return TrainerState(max([0, *versions]), int(vars(args).get("max_steps", -1)))


def made(kind: type[Any], arguments: Mapping[str, Any], args: Args) -> Any:
    """An object of a reward class. Beside the recipe's `arguments` it is given what it asks for by name: `args`, or one of them.

    Raises whatever the class raises.
    """
    try:
        parameters = inspect.signature(kind).parameters
    except ValueError:  # a builtin may have no signature
        return kind(**arguments)
    known = {"args": args, **vars(args)}
    offered = {name: known[name] for name in parameters if name in known}
    if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and "args" not in offered and parameters:
        offered["args"] = args
    return kind(**{**offered, **arguments})
