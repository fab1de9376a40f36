"""Gym environments of ms-swift: `Env`, `ContextManager`, and the scheduler that plays the model against them."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

from turnwise.compat.swift.protocol import ChatCompletionResponseChoice, Messages, RolloutInferRequest
from turnwise.compat.swift.scheduler import MultiTurnScheduler, call, multi_turns
from turnwise.errors import ConfigError, nearest
from turnwise.user_code.reward_number import reward_number

__all__ = ["ContextManager", "DummyContextManager", "Env", "GYMScheduler", "context_managers", "envs"]


class Env(ABC):
    """A game of one conversation. The methods may be sync or async."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.env_config = env_config

    @abstractmethod
    async def reset(self, config: RolloutInferRequest) -> tuple[str, dict[str, Any], str]:
        """The first observation, information about it, and a system message (or an empty text)."""

    @abstractmethod
    async def step(self, action: Messages) -> tuple[str, float, bool, dict[str, Any]]:
        """The next observation, the reward of the move, whether the game is over, information. `action` is the conversation."""

    @abstractmethod
    async def close(self) -> None:
        """Give back what was taken."""


class ContextManager(ABC):
    """Decides what of a conversation the model is shown before its next turn."""

    def __init__(self, ctx_config: dict[str, Any]) -> None:
        self.ctx_config = ctx_config

    @abstractmethod
    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        """The messages that take the place of the history."""


class DummyContextManager(ContextManager):
    """Leaves everything as it is."""

    def manage_context(self, history: Messages, trajectory_id: str) -> Messages:
        return history


envs: dict[str, type[Any]] = {}
"""The registry: a plugin adds to it; `env_config.name` of a row or `gym_env` selects from it."""

context_managers: dict[str, type[Any]] = {"dummyContextManager": DummyContextManager}
"""The registry: `ctx_config.name` of a row or `context_manager` selects from it."""


class GYMScheduler(MultiTurnScheduler):
    """Plays: the model's turn is a move, the observation after it the next user message.

    `rollout_infos` has `total_reward`, `step_rewards`, `gym_done` and, of the last move, `env_info`.
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
        # what is known of each game, by the `uuid` of its request; subclasses read and write these
        self._envs: dict[str, Any] = {}
        self._managers: dict[str, Any] = {}
        self._total_rewards: dict[str, float] = {}
        self._step_rewards: dict[str, list[float]] = {}
        self._pending_obs: dict[str, Any] = {}

    def _create_env(self, env_config: dict[str, Any]) -> Any:
        return _of(envs, env_config.get("name") or self.gym_env_name, "environment", "gym_env")(env_config)

    def _create_context_manager(self, ctx_config: dict[str, Any]) -> Any:
        name = ctx_config.get("name") or self.context_manager_name or "dummyContextManager"
        return _of(context_managers, name, "context manager", "context_manager")(ctx_config)

    async def _close_and_remove(self, uuid: str) -> None:
        """Close a game and forget it; there may be none any more."""
        for kept in (self._managers, self._total_rewards, self._step_rewards, self._pending_obs):
            kept.pop(uuid, None)
        if (env := self._envs.pop(uuid, None)) is not None:
            await call(env.close)

    async def on_trajectory_start(self, requests: list[RolloutInferRequest]) -> None:
        for request in requests:
            key = _key(request)
            self._managers[key] = await _awaited(
                self._create_context_manager(dict(request.data_dict.get("ctx_config") or {}))
            )
            env = self._envs[key] = await _awaited(self._create_env(dict(request.data_dict.get("env_config") or {})))
            self._total_rewards[key], self._step_rewards[key], self._pending_obs[key] = 0.0, [], None
            observation, _, system = await call(env.reset, request)
            head: Messages = [{"role": "system", "content": system}] if system else []
            request.messages = [*head, {"role": "user", "content": observation}]

    async def on_turn_end(
        self, infer_request: RolloutInferRequest, response_choice: ChatCompletionResponseChoice, current_turn: int
    ) -> dict[str, Any]:
        key = _key(infer_request)
        if key not in self._envs:  # closed by a subclass
            return {"done": True}
        observation, reward, done, info = await call(self._envs[key].step, list(infer_request.messages))
        infos = self._paid(key, reward_number(reward, f"{type(self._envs[key]).__name__}.step"), done=bool(done))
        self._pending_obs[key] = observation
        return {"done": bool(done), "rollout_infos": {**infos, "env_info": info}}

    def _paid(self, key: str, reward: float, *, done: bool) -> dict[str, Any]:
        """Add the reward of a move; returns the `rollout_infos` about it."""
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
    """What was made; in older versions of ms-swift it is made by coroutines."""
    return await value if inspect.isawaitable(value) else value


def _key(request: RolloutInferRequest) -> str:
    return str(request.uuid)


def _of(registry: dict[str, type[Any]], name: str | None, what: str, argument: str) -> type[Any]:
    if name is None:
        raise ConfigError(
            f"the row names no {what}, and neither does environment.arguments.{argument}; set one of them"
        )
    if name not in registry:
        have = ", ".join(sorted(registry)) or "none"
        raise ConfigError(
            f"there is no {what} {name!r}{nearest(name, registry)}; registered are: {have}. A plugin registers one, and "
            f"environment.arguments.external_plugins names the plugin"
        )
    return registry[name]
