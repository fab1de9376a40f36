"""ms-swift's gym environments: `Env`, `ContextManager`, and the scheduler that connects them with the model."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from turnwise.compat.swift.protocol import ChatCompletionResponseChoice, Messages, RolloutInferRequest
from turnwise.compat.swift.scheduler import MultiTurnScheduler, call_hook, multi_turns
from turnwise.errors import ConfigError, nearest
from turnwise.user_code.reward_number import reward_number

__all__ = [
    "ContextManager",
    "DummyContextManager",
    "Env",
    "GYMScheduler",
    "context_managers",
    "envs",
    "registered",
]


class Env(ABC):
    """An environment of one conversation. The methods may be sync or async."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """Returns the first observation, a dictionary of information, and a system message (or an empty text)."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """Returns the next observation, the reward, whether the episode has ended, and a dictionary of information.

        `action` is the list of all messages so far.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources."""


class ContextManager(ABC):
    """Decides which messages the model sees before its next turn."""

    def __init__(self, ctx_config: dict[str, Any]) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """Returns the messages that replace the history."""


class DummyContextManager(ContextManager):
    """Changes nothing."""

    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        return history


envs: dict[str, type[Any]] = {}
"""The registry of environments. Plugins add to it; `env_config.name` of a row, or `gym_env`, selects from it."""

context_managers: dict[str, type[Any]] = {"dummyContextManager": DummyContextManager}
"""The registry of context managers. `ctx_config.name` of a row, or `context_manager`, selects from it."""


class GYMScheduler(MultiTurnScheduler):
    """Passes each turn of the model to an environment as an action; the observation is the next user message.

    `rollout_infos` has `total_reward`, `step_rewards`, `gym_done` and the `env_info` of the last step.
    """

    def __init__(
        self,
        infer_engine: Any = None,
        max_turns: int | None = None,
        use_gym_env: bool = True,
        gym_env: str | None = None,
        context_manager_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(infer_engine, max_turns, **kwargs)
        self.gym_env_name = gym_env
        self.context_manager_name = context_manager_name
        # the state of each episode, by the `uuid` of its request; subclasses read and write these dictionaries
        self._envs: dict[str, Any] = {}
        self._managers: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._pending_obs: dict[str, Any] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return registered(envs, env_config.get("name") or self.gym_env_name, "environment", "gym_env")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> Any:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return registered(context_managers, name, "context manager", "context_manager")(ctx_config)

    async def _close_and_remove(self, uuid: str) -> None:
        """Close a game and forget it; there may be none any more."""
        for kept in (self._managers, self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if (env := self._envs.pop(uuid, None)) is not None:
            await call_hook(env.close)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            key = _key(request)
            self._managers[key] = await _awaited(
                self._create_context_manager(dict(request.data_dict.get("ctx_config") or {}))
            )
            env = self._envs[key] = await _awaited(self._create_env(dict(request.data_dict.get("env_config") or {})))
            self._total_rewards[key], self._step_rewards[key], self._pending_obs[key] = 0.0, [], None
            observation, _, system = await call_hook(env.reset, request)
            head: Messages = [{"role": "system", "content": system}] if system else []
            request.messages = [*head, {"role": "user", "content": observation}]

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = _key(infer_request)
        if key not in self._envs:  # closed by a subclass
            return {"done": True}
        observation, reward, done, info = await call_hook(self._envs[key].step, list(infer_request.messages))
        infos = self._paid(key, reward_number(reward, f"{type(self._envs[key]).__name__}.step"), done=bool(done))
        self._pending_obs[key] = observation
        return {"done": bool(done), "rollout_infos": {**infos, "env_info": info}}

    def _paid(self, key: str, reward: float, *, done: bool) -> dict[str, Any]:
        """Add the reward of a step. Returns the `rollout_infos` of the step."""
        self._total_rewards[key] = self._total_rewards.get(key, 0.0) + reward
        rewards = self._step_rewards.setdefault(key, [])
        rewards.append(reward)
        return {"total_reward": self._total_rewards[key], "step_rewards": list(rewards), "gym_done": done}

    def step(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = _key(infer_request)
        if (observation := self._pending_obs.pop(key, None)) is not None:
            infer_request.messages.append({"role": "user", "content": observation})
        if (manager := self._managers.get(key)) is not None:
            infer_request.messages = manager.manage_context(infer_request.messages, key)
        return {"infer_request": infer_request}

    async def on_trajectory_end(self, infer_request: RolloutInferRequest) -> None:
        await self._close_and_remove(_key(infer_request))


multi_turns["gym_scheduler"] = GYMScheduler


async def _awaited(value: Any) -> Any:
    """The value, or the result of an awaitable: older versions of ms-swift make environments in coroutines."""
    return await value if inspect.isawaitable(value) else value


def _key(request: RolloutInferRequest) -> str:
    return str(request.uuid)


def registered(registry: dict[str, type[Any]], name: str | None, what: str, argument: str) -> type[Any]:
    """The class with a name in a registry. `argument` is the argument of the recipe that names it. Raises ConfigError."""
    if name is None:
        raise ConfigError(f"neither the row nor environment.arguments.{argument} names the {what}; set one of them")
    if name not in registry:
        have = ", ".join(sorted(registry)) or "none"
        raise ConfigError(
            f"there is no {what} {name!r}{nearest(name, registry)}; registered are: {have}. A plugin registers one, and "
            f"environment.arguments.external_plugins names the plugin"
        )
    return registry[name]
