"""Builds the scoring of a recipe: reward functions, credit assignment, and the weights of turns in the loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from turnwise.build.references import named_callable, reference_name
from turnwise.config.schema import Config, RewardUse
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.rewards.credit import Credit, grpo
from turnwise.rewards.reward import GroupReward, Scorer, TrajectoryReward, TurnReward
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, TurnWeighting, custom, takes_trajectory
from turnwise.user_code.object_references import resolve

__all__ = ["credit", "scorer", "turn_weighting"]


def scorer(config: Config) -> Scorer:
    """The recipe's reward functions.

    Raises ConfigError if a function cannot be imported, constructed, or called with the arguments that it will get.
    """

    def named(use: RewardUse, place: str, given: Sequence[Any]) -> tuple[str, Callable[..., Any], float]:
        function, name = _reward(use, key=f"reward.{place}", given=given)
        return use.name or name, function, use.weight

    options = config.reward
    return Scorer(
        trajectory=[
            TrajectoryReward(*named(use, f"trajectory.{n}", (None,))) for n, use in enumerate(options.trajectory)
        ],
        turns=[TurnReward(*named(use, f"turns.{n}", (None, None))) for n, use in enumerate(options.turns)],
        groups=[GroupReward(*named(use, f"group.{n}", ((),))) for n, use in enumerate(options.group)],
        timeout=options.timeout,
    )


def _reward(use: RewardUse, *, key: str, given: Sequence[Any]) -> tuple[Callable[..., Any], str]:
    """A reward function and its name.

    A class is constructed here, once per run, and its instance is the function. If the instance has a `__name__`, this is the
    name of the reward function: adapters set it to the name of the wrapped function.
    """
    function = named_callable(use, key=key, given=() if isinstance(resolve(use.use, key=key), type) else given)
    if not isinstance(function.func, type):
        return function, reference_name(use)
    try:
        with boundary("reward"):
            instance = function()
    except Failed as failed:
        raise ConfigError(f"{key}: {use.use} cannot be made: {failed.failure.message}") from failed
    try:
        inspect.signature(instance).bind(*given)
    except (TypeError, ValueError) as error:  # an instance that cannot be called has no signature
        raise ConfigError(f"{key}: an instance of {use.use} cannot be called as a reward function: {error}") from None
    return instance, getattr(instance, "__name__", reference_name(use))


def credit(config: Config) -> Credit:
    """The recipe's credit assignment: from rewards to advantages."""
    return Credit("grpo", functools.partial(grpo, scale=config.credit.scale))


def turn_weighting(config: Config) -> TurnWeighting:
    """The rule of `loss_mask`: the weight of each turn in the loss.

    Raises ConfigError if the recipe names a function that cannot be called with a turn.
    """
    use = config.loss_mask
    if use.use in TURN_WEIGHTINGS:
        return TURN_WEIGHTINGS[use.use]
    target = resolve(use.use, key="loss_mask")
    if inspect.iscoroutinefunction(target):
        raise ConfigError(
            f"loss_mask: {use.use} is async; a loss mask waits for nothing: write def instead of async def"
        )
    both = callable(target) and takes_trajectory(target)
    function = named_callable(use, key="loss_mask", given=(None, None) if both else (None,))
    return custom(function, name=reference_name(use))
