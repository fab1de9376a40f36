"""`turnwise.compat.swift:Reward` and `:reward`: ms-swift's reward functions in a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from turnwise.compat.swift.plugins import load_plugins, select
from turnwise.compat.swift.reward_args import RewardArgs, make_reward
from turnwise.compat.swift.rewards import call_reward, call_reward_once, orms
from turnwise.errors import ConfigError
from turnwise.types import Trajectory

__all__ = ["Reward", "registered_reward", "reward"]

_functions: dict[str, tuple[Any, Any]] = {}
"""Cache of `reward`: by its arguments, the registered object and the function that was made from it."""


class Reward:
    """A reward function of ms-swift for `reward.batch`: called once for all conversations of a step, as in ms-swift.

    In `reward.group`, it is called once for all conversations of a row.

    A call gets `completions`, each column of the data as a list with one item per conversation, and `trainer_state` with
    `global_step` and `max_steps`.
    """

    def __init__(
        self,
        use: str,
        *,
        external_plugins: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        """Load the function. A class is made once.

        Args:
            use: A name that ms-swift or a plugin registers in `orms`, or `file.py:name`.
            external_plugins: Plugin files, which are loaded once.
            arguments: The arguments of the class.
            args: ms-swift's arguments, for classes with a parameter `args`. The arguments of ms-swift's own reward functions
                have its defaults.

        Raises ConfigError.
        """
        self.__name__ = use.rpartition(":")[2]
        self._use = use
        self._args = RewardArgs(args)
        self._function = _reward_function(use, external_plugins, arguments, self._args)

    async def __call__(self, trajectories: Sequence[Trajectory]) -> list[float | TypeError | None]:
        if not trajectories:
            return []
        return await call_reward(self._function, trajectories, self._use, args=self._args)


async def reward(
    trajectory: Trajectory,
    *,
    use: str,
    external_plugins: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
) -> float:
    """Like `Reward`, for `reward.trajectory`: called for each trajectory, with one completion. Raises ConfigError."""
    key = json.dumps([use, list(external_plugins), dict(arguments or {})], sort_keys=True)
    load_plugins(external_plugins)
    registered = select(orms, use, what="reward function", key="reward.trajectory.arguments.use")
    cached = _functions.get(key)
    if cached is None or cached[0] is not registered:  # the name may have been registered again
        cached = _functions[key] = (registered, _reward_function(use, external_plugins, arguments, RewardArgs()))
    return await call_reward_once(cached[1], trajectory, use)


def registered_reward(use: str, plugins: Sequence[str]) -> Any:
    """The function or class that `use` names, after the plugins were loaded. Raises ConfigError."""
    load_plugins(plugins)
    return select(orms, use, what="reward function", key="reward.batch.arguments.use")


def _reward_function(use: str, plugins: Sequence[str], arguments: Mapping[str, Any] | None, args: RewardArgs) -> Any:
    function = registered_reward(use, plugins)
    if isinstance(function, type):
        try:
            return make_reward(function, dict(arguments or {}), args)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"reward.batch.arguments: {use} cannot be created: {error}") from error
    if arguments:
        raise ConfigError(
            f"reward.batch.arguments.arguments: {use} is a function, not a class, so arguments have no effect: remove them"
        )
    return function
