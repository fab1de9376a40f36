"""Builds the scoring of a recipe: reward functions, credit assignment, and the weights of turns in the loss.

The estimator of advantages has its options bound, so that training calls it with groups only. This module computes no reward
and no advantage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from turnwise.assembly.references import named_callable, reference_name
from turnwise.chat.renderer import Renderer
from turnwise.compat.providers.provider import environment_class
from turnwise.config.train_checks import chosen_estimator, turn_reward_source
from turnwise.engines.engine import TokenSampler
from turnwise.errors import ConfigError, Failed, boundary
from turnwise.local_paths import same_directory
from turnwise.options.algorithm import AutoCredit, OwnCredit
from turnwise.options.schema import Config, RewardUse
from turnwise.rewards.credit import Credit, credit_of
from turnwise.rewards.credit.own import try_own
from turnwise.rewards.functions import BatchReward, CallPlan, Form, GroupReward, TrajectoryReward, TurnReward, plan_call
from turnwise.rewards.judge import UsesEngine
from turnwise.rewards.scorer import Scorer
from turnwise.rewards.turn_weights import TURN_WEIGHTINGS, TurnWeighting, custom, takes_trajectory, without_cut_turns
from turnwise.rollout.chat_model import EngineChatModel
from turnwise.services.chat import ChatModel
from turnwise.types import Sampling
from turnwise.user_code.references import resolve

# reward functions and turn weights


@same_directory()
def scorer(config: Config) -> Scorer:
    """The recipe's reward functions, with the arguments that each is called with.

    `Scorer.refuse_unknown_columns` compares their parameters with the columns of the data. Raises ConfigError if a function
    cannot be imported, constructed or called.
    """
    options = config.reward
    return Scorer(
        trajectory=[
            TrajectoryReward(*_reward(config, use, "trajectory", n)) for n, use in enumerate(options.trajectory)
        ],
        turns=[TurnReward(*_reward(config, use, "turns", n)) for n, use in enumerate(options.turns)],
        groups=[GroupReward(*_reward(config, use, "group", n)) for n, use in enumerate(options.group)],
        batch=[BatchReward(*_reward(config, use, "batch", n)) for n, use in enumerate(options.batch)],
        timeout=options.timeout,
    )


def _reward(config: Config, use: RewardUse, form: Form, number: int) -> tuple[str, Callable[..., Any], float, CallPlan]:
    """A reward function: its name, the function, its weight, and the plan of its calls.

    A class is constructed here, once per run, and its instance is the function. If the instance has a `__name__`, this is the
    name of the reward function: adapters set it to the name of the wrapped function.
    """
    key = f"reward.{form}.{number}"
    target = resolve(use.use, key=key)
    if not isinstance(target, type):
        function = named_callable(use, key=key, partly=True)
        plan = plan_call(target, form, bound=use.arguments, name=f"{key}: {use.use}")
        return use.name or reference_name(use), function if use.arguments else target, use.weight, plan
    constructor = named_callable(use, key=key)
    try:
        with boundary("reward"):
            instance = constructor()
    except Failed as failed:
        raise ConfigError(f"{key}: {use.use} cannot be created: {failed.failure.message}") from failed
    plan = plan_call(instance, form, name=f"{key}: an instance of {use.use}")
    if plan.needed_columns and getattr(environment_class(config.environment.use), "returns_columns", False):
        plan = replace(plan, needed_columns=())
    return use.name or getattr(instance, "__name__", reference_name(use)), instance, use.weight, plan


def connect_engine(scorer: Scorer, engine: TokenSampler | None, renderer: Renderer) -> None:
    """Give the run's engine to the reward functions that ask it. Must be called before the first conversation ends.

    Raises ConfigError if a function asks the engine, and there is none that answers single requests.
    """

    if engine is None:
        for reward in scorer.functions:
            if isinstance(reward.function, UsesEngine) and reward.function.wants_engine:
                raise ConfigError(
                    f"the reward function {reward.name} asks the run's engine, and with rollout_server.url there is no engine in "
                    f"this process: give the judge a url, or remove rollout_server.url"
                )
        return

    def maker(name: str) -> Callable[[Sampling], ChatModel]:
        return lambda sampling: EngineChatModel(engine, renderer, sampling, name=name)

    for number, reward in enumerate(scorer.functions):
        if isinstance(reward.function, UsesEngine) and reward.function.wants_engine:
            reward.function.use_engine(maker(f"reward.{number}"))


def turn_weighting(config: Config) -> TurnWeighting:
    """The rule of `loss_mask` and `train.overlong_filter`: the weight of each turn in the loss.

    Raises ConfigError if the recipe names a function that cannot be called with a turn.
    """
    rule = _loss_mask(config)
    return without_cut_turns(rule) if config.train.overlong_filter else rule


def _loss_mask(config: Config) -> TurnWeighting:
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


# the estimator of advantages


def credit(config: Config, scorer: Scorer) -> Credit:
    """The recipe's credit assignment: from rewards to advantages. `scorer` has the reward functions with their weights.

    Raises ConfigError if an estimator of the user cannot be called, or returns something wrong for a small batch.
    """
    weights = {function.name: function.weight for function in scorer.functions}
    section = chosen_estimator(config)
    if isinstance(section, OwnCredit):
        try_own(section)
    return credit_of(section, weights=weights)


def credit_note(config: Config) -> str | None:
    """The estimator that `credit.name=auto` stands for, for the user; None if the recipe names an estimator."""
    if not isinstance(config.credit, AutoCredit):
        return None
    name, source = chosen_estimator(config).name, turn_reward_source(config)
    why = f"{source} turns rewards" if name == "turn_return" else "turns have no rewards of their own"
    return f"credit.name=auto: advantages are computed by {name}, because {why} (docs/credit.md)"
