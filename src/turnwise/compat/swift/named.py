"""What a recipe names: the environment of a scheduler, and a reward function."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from turnwise.compat.swift.args import Args, made
from turnwise.compat.swift.builtin import ThinkingModelTipsScheduler
from turnwise.compat.swift.conversation import Run, Steps
from turnwise.compat.swift.engine import InferEngine
from turnwise.compat.swift.gym import GYMScheduler
from turnwise.compat.swift.plugins import load, select
from turnwise.compat.swift.rewards import ask, ask_all, orms
from turnwise.compat.swift.scheduler import MultiTurnScheduler, RolloutScheduler, multi_turns
from turnwise.environments.environment import Environment
from turnwise.errors import ConfigError
from turnwise.types import Trajectory

__all__ = ["Reward", "reward", "scheduler"]

_functions: dict[str, tuple[Any, Any]] = {}
"""The reward functions that `reward` has made, with what they were made of."""
_numbers = itertools.count()
_shared: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = weakref.WeakKeyDictionary()
"""The schedulers that all conversations of a run have in common, by what they were made of."""


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
    """The environment of a scheduler for one conversation.

    `name` is registered in `multi_turns`, by ms-swift or by one of the plugins, or is `file.py:Class`; without one there is
    one turn. `tokenizer` is the model's directory, for schedulers that ask for one. `use_gym_env` pays turns what
    `rollout_infos["total_reward"]` grows by, times `gym_weight`; it is on for gym schedulers. `arguments` are further ones of
    the scheduler's own.

    Each conversation has a scheduler of its own; with `shared` all conversations of a run have one, as in ms-swift, and its
    sync methods are called one at a time.

    Raises ConfigError.
    """
    for file in [external_plugins] if isinstance(external_plugins, str) else external_plugins:
        load(file)
    if name is None:
        kind, name, max_turns = MultiTurnScheduler, "one turn", max_turns or 1
        if max_turns > 1:
            raise ConfigError(
                f"environment.arguments.max_turns={max_turns} has no effect without a scheduler: give its name"
            )
    else:
        kind = select(multi_turns, name, what="scheduler", key="environment.arguments.name")
    kind = _ours(kind, name)
    if (holder := _defines(kind, "async_infer")) is not RolloutScheduler and holder.__name__ != "RolloutScheduler":
        raise ConfigError(
            f"environment.arguments.name: {name} overrides async_infer, which holds a whole batch of conversations at once; here "
            f"each conversation is held by itself: override run, or step and check_finished"
        )
    if max_turns is not None and max_turns < 1:
        raise ConfigError(f"environment.arguments.max_turns={max_turns}; it must be at least 1")
    gym = issubclass(kind, GYMScheduler)
    for key, value in (("gym_env", gym_env), ("context_manager", context_manager)):
        if value is not None and not gym:
            raise ConfigError(
                f"environment.arguments.{key} has no effect on {name}, which is no gym scheduler: remove it"
            )
    given = {"gym_env": gym_env, "context_manager_name": context_manager, **(arguments or {})}
    given = {key: value for key, value in given.items() if value is not None}

    def make() -> Any:
        return _made(kind, name, InferEngine(tokenizer), max_turns, given)

    of = json.dumps([name, max_turns, tokenizer, given], default=str, sort_keys=True)
    chosen, lock = _common(of, make) if shared else (make(), None)
    number = str(next(_numbers))
    pays = gym if use_gym_env is None else use_gym_env
    if pays and _defines(kind, "run") is ThinkingModelTipsScheduler:
        raise ConfigError(
            f"environment.arguments.use_gym_env has no effect on {name}, which has a run of its own without a total_reward"
        )
    if gym_weight != 1.0 and not pays:
        raise ConfigError(f"environment.arguments.gym_weight has no effect on {name}, whose turns are not paid")
    if kind.run is not MultiTurnScheduler.run:
        return Run(chosen, name=number, gym=gym_weight if pays else None)
    return Steps(chosen, name=number, gym=gym_weight if pays else None, lock=lock)


class Reward:
    """A reward function of ms-swift for `reward.group`: asked once about all conversations of a row.

    `use` is registered in `orms`, by ms-swift or by one of the plugins, or is `file.py:name`. A class is made once, with
    `arguments`, and with `args` if it asks for them: an object whose attributes are ms-swift's arguments, those of its own reward
    functions by its defaults. Calls are given `completions`, every column as a list with an item for each conversation, and
    `trainer_state` with `global_step` and `max_steps`.

    Raises ConfigError.
    """

    def __init__(
        self,
        use: str,
        *,
        external_plugins: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        self.__name__ = use.rpartition(":")[2]
        self._use = use
        self._args = Args(args)
        self._function = _reward_function(use, external_plugins, arguments, self._args)

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | None]:
        return await ask_all(self._function, trajectories, self._use, args=self._args) if trajectories else []


async def reward(
    trajectory: Trajectory,
    *,
    use: str,
    external_plugins: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
) -> float:
    """The same as `Reward` for `reward.trajectory`: called for each trajectory, with one completion. Raises ConfigError."""
    key = json.dumps([use, list(external_plugins), dict(arguments or {})], sort_keys=True)
    for file in [external_plugins] if isinstance(external_plugins, str) else external_plugins:
        load(file)
    found = select(orms, use, what="reward function", key="reward.trajectory.arguments.use")
    made_of = _functions.get(key)
    if made_of is None or made_of[0] is not found:  # else it was registered anew by the same name
        made_of = _functions[key] = (found, _reward_function(use, external_plugins, arguments, Args()))
    return await ask(made_of[1], trajectory, use)


def _reward_function(use: str, plugins: Sequence[str], arguments: Mapping[str, Any] | None, args: Args) -> Any:
    for file in [plugins] if isinstance(plugins, str) else plugins:
        load(file)
    function = select(orms, use, what="reward function", key="reward.group.arguments.use")
    if isinstance(function, type):
        try:
            return made(function, dict(arguments or {}), args)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"reward.group.arguments: {use} cannot be made: {error}") from error
    if arguments:
        raise ConfigError(f"reward.group.arguments.arguments: {use} is no class and is made of nothing; remove them")
    return function


def _ours(kind: Any, name: str) -> type[RolloutScheduler]:
    """The class as a subclass of ours. A plugin may bring ms-swift's base classes with it: what they lack, ours have.

    Raises ConfigError if it is no scheduler.
    """
    if isinstance(kind, type) and issubclass(kind, RolloutScheduler):
        return kind
    if not isinstance(kind, type) or not any(callable(getattr(kind, method, None)) for method in ("step", "run")):
        raise ConfigError(
            f"environment.arguments.name: {name} is {kind!r:.80}; a scheduler is a subclass of MultiTurnScheduler, or a class "
            f"with its methods step or run"
        )
    return types.new_class(kind.__name__, (kind, MultiTurnScheduler))


def _defines(kind: type[Any], method: str) -> type[Any]:
    """The class that a method comes from."""
    return next(one for one in kind.__mro__ if method in vars(one))


def _made(kind: type[Any], name: str, engine: InferEngine, max_turns: int | None, given: Mapping[str, Any]) -> Any:
    """A scheduler, with as much of what ms-swift hands to its constructor as that takes."""
    parameters = inspect.signature(kind.__init__).parameters
    everything = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    offered: dict[str, Any] = {"infer_engine": engine, "max_turns": max_turns}
    if "tokenizer" in parameters:
        offered["tokenizer"] = engine.tokenizer
    taken = {key: value for key, value in offered.items() if everything or key in parameters}
    try:
        made = kind(**taken, **given)
    except TypeError as error:
        raise ConfigError(f"environment.arguments: {name} cannot be made: {error}") from error
    made.infer_engine = engine
    if made.max_turns is None:
        made.max_turns = max_turns
    return made


def _common(of: str, make: Callable[[], Any]) -> tuple[Any, asyncio.Lock | None]:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:  # made to see whether it can be, before there are conversations
        return make(), None
    kept = _shared.setdefault(loop, {})
    if of not in kept:
        kept[of] = (make(), asyncio.Lock())
    return kept[of]
