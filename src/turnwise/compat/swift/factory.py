"""`turnwise.compat.swift:scheduler`: makes the environment of a scheduler from the arguments of a recipe."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.compat.swift.builtin import ThinkingModelTipsScheduler
from turnwise.compat.swift.engine import InferEngine
from turnwise.compat.swift.gym import GYMScheduler, context_managers, envs, registered
from turnwise.compat.swift.plugins import load_plugins, select
from turnwise.compat.swift.run_environment import RunEnvironment
from turnwise.compat.swift.scheduler import MultiTurnScheduler, RolloutScheduler, multi_turns
from turnwise.compat.swift.step_environment import StepEnvironment
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError

__all__ = ["named_scheduler", "scheduler"]

_numbers = itertools.count()
"""Numbers the environments; the number is part of each conversation's uuid."""
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = weakref.WeakKeyDictionary()
"""For each event loop: the schedulers that all conversations share, by the arguments that they were made with."""


def scheduler(
    name: str | None = None,
    *,
    external_plugins: Sequence[str] = (),
    max_turns: int | None = None,
    tokenizer: str | None = None,
    use_gym_env: bool | None = None,
    gym_weight: float = 1.0,
    gym_env: str | None = None,
    context_manager: str | None = None,
    shared: bool = False,
    arguments: Mapping[str, Any] | None = None,
) -> Environment:
    """Make the environment of a scheduler, for one conversation.

    Args:
        name: A name that ms-swift or a plugin registers in `multi_turns`, or `file.py:Class`. Without a name, a conversation
            has one turn.
        external_plugins: Plugin files, which are loaded once.
        max_turns: The maximum number of turns.
        tokenizer: The directory of the model, for schedulers that use a tokenizer.
        use_gym_env: Whether the reward of a turn is the increase of `rollout_infos["total_reward"]`. The default is true for
            gym schedulers.
        gym_weight: The factor of that reward.
        gym_env: The name of the gym environment, for rows without `env_config.name`.
        context_manager: The name of the context manager, for rows without `ctx_config.name`.
        shared: Whether all conversations of a run share one scheduler, as in ms-swift. Its sync methods are then called one
            at a time. Otherwise each conversation has its own scheduler.
        arguments: Further arguments of the scheduler's constructor.

    Raises ConfigError.
    """
    kind = named_scheduler(name, external_plugins, gym_env=gym_env, context_manager=context_manager)
    if name is None:
        name, max_turns = "one turn", max_turns or 1
        if max_turns > 1:
            raise ConfigError(
                f"environment.arguments.max_turns={max_turns} has no effect without a scheduler: set name"
            )
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"environment.arguments.max_turns={max_turns}; it must be at least 1")
    given = {"gym_env": gym_env, "context_manager_name": context_manager, **(arguments or {})}
    given = {key: value for key, value in given.items() if value is not None}

    def make() -> Any:
        return _instance(kind, name, InferEngine(tokenizer), max_turns, given)

    made_from = json.dumps([name, max_turns, tokenizer, given], default=str, sort_keys=True)
    instance, lock = _shared_instance(made_from, make) if shared else (make(), None)
    weight = _gym_weight(kind, name, use_gym_env, gym_weight)
    number = str(next(_numbers))
    if kind.run is not MultiTurnScheduler.run:
        return RunEnvironment(instance, name=number, gym_weight=weight)
    return StepEnvironment(instance, name=number, gym_weight=weight, lock=lock)


def named_scheduler(
    name: str | None, external_plugins: Sequence[str], *, gym_env: str | None, context_manager: str | None
) -> type[RolloutScheduler]:
    """The class of a scheduler. Loads the plugins, and checks the names that are given. Raises ConfigError."""
    load_plugins(external_plugins)
    kind = MultiTurnScheduler
    if name is not None:
        kind = _scheduler_class(select(multi_turns, name, what="scheduler", key="environment.arguments.name"), name)
    for key, value, registry, what in (
        ("gym_env", gym_env, envs, "environment"),
        ("context_manager", context_manager, context_managers, "context manager"),
    ):
        if value is None:
            continue
        if not issubclass(kind, GYMScheduler):
            raise ConfigError(
                f"environment.arguments.{key} has no effect on {name or 'one turn'}, which is not a gym scheduler: remove it"
            )
        if kind._create_env is GYMScheduler._create_env:  # a scheduler may make its environments itself
            registered(registry, value, what, key)
    return kind


def _scheduler_class(candidate: Any, name: str) -> type[RolloutScheduler]:
    """`candidate` as a subclass of our base classes. A plugin may bring ms-swift's base classes: missing methods are ours then.

    Raises ConfigError if it is not a scheduler, or not a scheduler of single conversations.
    """
    if isinstance(candidate, type) and issubclass(candidate, RolloutScheduler):
        kind = candidate
    elif isinstance(candidate, type) and any(callable(getattr(candidate, method, None)) for method in ("step", "run")):
        kind = types.new_class(candidate.__name__, (candidate, MultiTurnScheduler))
    else:
        raise ConfigError(
            f"environment.arguments.name: {name} is {candidate!r:.80}; a scheduler is a subclass of MultiTurnScheduler, or a "
            f"class with its methods step or run"
        )
    owner = _defining_class(kind, "async_infer")
    if owner is not RolloutScheduler and owner.__name__ != "RolloutScheduler":
        raise ConfigError(
            f"environment.arguments.name: {name} overrides async_infer, which takes a batch of conversations; here each "
            f"conversation runs alone: override run, or step and check_finished"
        )
    return kind


def _gym_weight(kind: type[RolloutScheduler], name: str, use_gym_env: bool | None, gym_weight: float) -> float | None:
    """The factor of `total_reward`; None if it is not the reward. Raises ConfigError for arguments without effect."""
    gym = issubclass(kind, GYMScheduler) if use_gym_env is None else use_gym_env
    if gym and _defining_class(kind, "run") is ThinkingModelTipsScheduler:
        raise ConfigError(
            f"environment.arguments.use_gym_env has no effect on {name}, whose run returns no total_reward"
        )
    if gym_weight != 1.0 and not gym:
        raise ConfigError(f"environment.arguments.gym_weight has no effect on {name} without use_gym_env: remove it")
    return gym_weight if gym else None


def _defining_class(kind: type[Any], method: str) -> type[Any]:
    """The class that defines the method which `kind` uses."""
    return next(base for base in kind.__mro__ if method in vars(base))


def _instance(kind: type[Any], name: str, engine: InferEngine, max_turns: int | None, given: Mapping[str, Any]) -> Any:
    """A scheduler, made with the arguments of ms-swift that its constructor accepts, and those of the recipe."""
    parameters = inspect.signature(kind.__init__).parameters
    accepts_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    offered: dict[str, Any] = {"infer_engine": engine, "max_turns": max_turns}
    if "tokenizer" in parameters:
        offered["tokenizer"] = engine.tokenizer
    accepted = {key: value for key, value in offered.items() if accepts_all or key in parameters}
    try:
        instance = kind(**accepted, **given)
    except TypeError as error:
        raise ConfigError(f"environment.arguments: {name} cannot be created: {error}") from error
    instance.infer_engine = engine
    if instance.max_turns is None:
        instance.max_turns = max_turns
    return instance


def _shared_instance(made_from: str, make: Callable[[], Any]) -> tuple[Any, asyncio.Lock | None]:
    """The scheduler that all conversations of this event loop share, and the lock of its sync methods."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # the recipe is being checked, and no conversation has started
        return make(), None
    instances = _shared.setdefault(loop, {})
    if made_from not in instances:
        instances[made_from] = (make(), asyncio.Lock())
    return instances[made_from]
